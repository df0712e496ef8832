"""The suite itself: stores known to be wrong must fail it."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from spotfit.core.errors import AlreadyExistsError, NotFoundError
from spotfit.store.api import ObjectInfo, Store
from spotfit.store.memory import MemoryStore
from spotfit.testing.store_suite import StoreSuite


@pytest.fixture(autouse=True)
def _threads_take_turns_often() -> Iterator[None]:
    usual = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(usual)


class MySuite(StoreSuite):
    is_shared = False


class IgnoresThatItExists(MemoryStore):
    def create(self, key: str, body: bytes) -> None:
        self.put(key, body)


class ChecksThenWrites(MemoryStore):
    def create(self, key: str, body: bytes) -> None:
        try:
            self.get(key)
        except NotFoundError:
            self._let_others_in()
            self.put(key, body)
            return
        raise AlreadyExistsError(key)

    def _let_others_in(self) -> None:
        for _ in range(20_000):
            pass


class ListsByBeginning(MemoryStore):
    def list(self, prefix: str = "", *, after: str = "") -> Iterator[ObjectInfo]:
        return (found for found in super().list(after=after) if found.key.startswith(prefix))


class ListsInAnyOrder(MemoryStore):
    def list(self, prefix: str = "", *, after: str = "") -> Iterator[ObjectInfo]:
        return reversed(list(super().list(prefix, after=after)))


class LeavesHalfAFile(MemoryStore):
    def get_file(self, key: str, path: Path) -> None:
        path.touch()
        super().get_file(key, path)


@pytest.mark.parametrize(
    ("wrong", "story"),
    [
        (IgnoresThatItExists, StoreSuite.test_what_exists_is_not_created_again),
        (ChecksThenWrites, StoreSuite.test_of_many_threads_that_create_one_wins),
        (ListsByBeginning, StoreSuite.test_a_prefix_is_a_folder_not_the_beginning_of_a_name),
        (ListsInAnyOrder, StoreSuite.test_a_listing_is_in_order_and_tells_sizes),
    ],
)
def test_a_store_that_breaks_a_promise_fails(
    wrong: Callable[[], Store], story: Callable[[StoreSuite, Store], None]
) -> None:
    with pytest.raises(AssertionError):
        story(MySuite(), wrong())


def test_a_store_that_leaves_half_a_file_fails(tmp_path: Path) -> None:
    with pytest.raises(AssertionError):
        MySuite().test_what_is_not_there_is_not_found(LeavesHalfAFile(), tmp_path)
