"""The conformance suite must fail for incorrect stores."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from spotfit.core.errors import AlreadyExistsError, NotFoundError
from spotfit.store.api import ObjectInfo, Store
from spotfit.store.local import MemoryStore
from spotfit.testing.store_suite import StoreSuite


@pytest.fixture(autouse=True)
def _threads_take_turns_often() -> Iterator[None]:
    usual = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(usual)


class ExampleSuite(StoreSuite):
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
    ("store_type", "test"),
    [
        (IgnoresThatItExists, StoreSuite.test_create_refuses_an_existing_object),
        (ChecksThenWrites, StoreSuite.test_create_has_one_winner_among_threads),
        (ListsByBeginning, StoreSuite.test_a_prefix_matches_whole_path_components),
        (ListsInAnyOrder, StoreSuite.test_a_listing_is_sorted_and_contains_sizes),
    ],
)
def test_an_incorrect_store_fails(
    store_type: Callable[[], Store], test: Callable[[StoreSuite, Store], None]
) -> None:
    with pytest.raises(AssertionError):
        test(ExampleSuite(), store_type())


def test_a_store_that_leaves_a_partial_file_fails(tmp_path: Path) -> None:
    with pytest.raises(AssertionError):
        ExampleSuite().test_a_missing_object_raises_not_found(LeavesHalfAFile(), tmp_path)
