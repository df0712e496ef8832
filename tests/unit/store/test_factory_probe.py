from collections.abc import Iterator

import pytest

from spotfit.core.errors import (
    AlreadyExistsError,
    AtomicCreateUnsupportedError,
    NotFoundError,
    StoreError,
    StorePermissionError,
    TransientStoreError,
)
from spotfit.store import factory
from spotfit.store.api import ObjectInfo
from spotfit.store.factory import WRITER_COUNT, new_probe_folder, probe_create
from spotfit.store.local import MemoryStore


class UnconditionalCreateStore(MemoryStore):
    """An S3-compatible server that ignores 'If-None-Match'."""

    def create(self, key: str, body: bytes) -> None:
        self.put(key, body)


class NoWinner(MemoryStore):
    def create(self, key: str, body: bytes) -> None:
        raise AlreadyExistsError(key)


class FirstWriterWinsButLastIsKept(MemoryStore):
    def create(self, key: str, body: bytes) -> None:
        try:
            super().create(key, body)
        finally:
            self.put(key, b"of another writer")


class InconsistentStore(MemoryStore):
    """Not consistent: a written object is not found."""

    def get(self, key: str) -> bytes:
        raise NotFoundError(key)


class IncompleteListingStore(MemoryStore):
    def list(self, prefix: str = "", *, after: str = "") -> Iterator[ObjectInfo]:
        return iter(())


class Undeletable(MemoryStore):
    def delete(self, key: str) -> None:
        """Succeed without deleting."""


class AcceptsLater(MemoryStore):
    """Atomic during the race, but accepts a later create."""

    def create(self, key: str, body: bytes) -> None:
        if body.startswith(b"writer"):
            super().create(key, body)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (UnconditionalCreateStore, f"{WRITER_COUNT} succeeded"),
        (NoWinner, "0 succeeded"),
        (FirstWriterWinsButLastIsKept, "only writer"),
        (InconsistentStore, "was not found"),
        (IncompleteListingStore, "listing"),
        (Undeletable, "still found"),
        (AcceptsLater, "created again"),
    ],
)
def test_a_store_without_the_guarantees_is_rejected(kind: type[MemoryStore], expected: str) -> None:
    with pytest.raises(AtomicCreateUnsupportedError, match=expected):
        probe_create(kind())


def test_a_correct_store_is_left_unchanged() -> None:
    store = MemoryStore()
    store.put("mine", b"x")
    probe_create(store)
    assert [found.key for found in store.list()] == ["mine"]


def test_a_rejected_store_is_cleaned_up() -> None:
    store = UnconditionalCreateStore()
    with pytest.raises(AtomicCreateUnsupportedError):
        probe_create(store)
    assert list(store.list()) == []


class RaisesOn(MemoryStore):
    """Raises `error` in `list`, or in the first `failed_creates` calls of `create`."""

    def __init__(self, error: BaseException, failed_creates: int = 0) -> None:
        super().__init__()
        self.error = error
        self.failures = iter(range(failed_creates))
        self.fails_list = not failed_creates

    def create(self, key: str, body: bytes) -> None:
        if next(self.failures, None) is not None:
            raise self.error
        super().create(key, body)

    def list(self, prefix: str = "", *, after: str = "") -> Iterator[ObjectInfo]:
        if self.fails_list:
            raise self.error
        return super().list(prefix, after=after)


def test_an_interrupted_probe_leaves_no_objects() -> None:
    store = RaisesOn(KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        probe_create(store)
    store.fails_list = False
    assert list(store.list()) == []


def test_creates_without_outcome_do_not_reject_the_store() -> None:
    """S3 may answer all of them with 409 ConditionalRequestConflict."""
    store = RaisesOn(TransientStoreError("409"), failed_creates=WRITER_COUNT)
    with pytest.raises(TransientStoreError, match="None of 4 concurrent creates"):
        probe_create(store)
    probe_create(store)


class LosesResponses(MemoryStore):
    """Writes the object, but the response is lost."""

    def create(self, key: str, body: bytes) -> None:
        super().create(key, body)
        if body.startswith(b"writer"):
            raise TransientStoreError(key)


def test_a_lost_response_is_accepted() -> None:
    probe_create(LosesResponses())


@pytest.mark.parametrize("kind", [StorePermissionError, StoreError])
def test_errors_of_the_store_are_raised_unchanged(kind: type[StoreError]) -> None:
    class Refuses(MemoryStore):
        def create(self, key: str, body: bytes) -> None:
            raise kind("no")

    with pytest.raises(StoreError) as raised:
        probe_create(Refuses())
    assert type(raised.value) is kind


def test_objects_of_a_probe_that_was_killed_are_deleted_a_day_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store, now_s = MemoryStore(), 1_700_000_000
    monkeypatch.setattr(factory, "wall_ms", lambda: 1000 * now_s)
    left, running = f"{new_probe_folder()}/0", ".spotfit-probe/1700080000-ab/0"
    for key in (left, running, ".spotfit-probe/notes"):
        store.put(key, b"")
    now_s += 86_000
    probe_create(store)
    assert left in [found.key for found in store.list()]
    now_s += 401
    probe_create(store)
    assert [found.key for found in store.list()] == [running, ".spotfit-probe/notes"]


class DamagesOneRead(MemoryStore):
    """The first read arrives with a changed byte."""

    def __init__(self) -> None:
        super().__init__()
        self.reads = 0

    def get(self, key: str) -> bytes:
        self.reads += 1
        body = super().get(key)
        return b"?" + body[1:] if self.reads == 1 else body


def test_a_read_that_was_damaged_in_transit_is_repeated() -> None:
    store = DamagesOneRead()
    probe_create(store)
    assert store.reads > 1
