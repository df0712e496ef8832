from collections.abc import Iterator

import pytest

from spotfit.core.errors import (
    AlreadyExistsError,
    NotFoundError,
    StoreError,
    StorePermissionError,
    TransientStoreError,
    UntrustworthyStoreError,
)
from spotfit.store.api import ObjectInfo
from spotfit.store.memory import MemoryStore
from spotfit.store.probe import RACERS, probe_create


class AnyoneWins(MemoryStore):
    """A look-alike that ignores 'If-None-Match'."""

    def create(self, key: str, body: bytes) -> None:
        self.put(key, body)


class NobodyWins(MemoryStore):
    def create(self, key: str, body: bytes) -> None:
        raise AlreadyExistsError(key)


class FirstWriterWinsButLastIsKept(MemoryStore):
    def create(self, key: str, body: bytes) -> None:
        try:
            super().create(key, body)
        finally:
            self.put(key, b"somebody else's")


class Forgetful(MemoryStore):
    """Shows what was written only later."""

    def get(self, key: str) -> bytes:
        raise NotFoundError(key)


class Blind(MemoryStore):
    def list(self, prefix: str = "", *, after: str = "") -> Iterator[ObjectInfo]:
        return iter(())


class Undeletable(MemoryStore):
    def delete(self, key: str) -> None:
        """Say yes and do nothing."""


class AcceptsLater(MemoryStore):
    """Refuses while a race goes on, and accepts a second create once it is over."""

    def create(self, key: str, body: bytes) -> None:
        if body.startswith(b"racer"):
            super().create(key, body)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (AnyoneWins, f"{RACERS} won"),
        (NobodyWins, "0 won"),
        (FirstWriterWinsButLastIsKept, "only winner"),
        (Forgetful, "was not there"),
        (Blind, "listing"),
        (Undeletable, "still there"),
        (AcceptsLater, "a second time"),
    ],
)
def test_a_store_that_lies_is_found_out(kind: type[MemoryStore], words: str) -> None:
    with pytest.raises(UntrustworthyStoreError, match=words):
        probe_create(kind())


def test_an_honest_store_is_left_as_it_was() -> None:
    store = MemoryStore()
    store.put("mine", b"x")
    probe_create(store)
    assert [found.key for found in store.list()] == ["mine"]


def test_a_liar_is_cleaned_up_too() -> None:
    store = AnyoneWins()
    with pytest.raises(UntrustworthyStoreError):
        probe_create(store)
    assert list(store.list()) == []


class AnswersGetLost(MemoryStore):
    """Writes, and does not say so."""

    def create(self, key: str, body: bytes) -> None:
        super().create(key, body)
        if body.startswith(b"racer"):
            raise TransientStoreError(key)


def test_a_lost_answer_is_no_lie() -> None:
    probe_create(AnswersGetLost())


@pytest.mark.parametrize("kind", [StorePermissionError, StoreError])
def test_what_the_store_refuses_is_told_as_it_is(kind: type[StoreError]) -> None:
    class Refuses(MemoryStore):
        def create(self, key: str, body: bytes) -> None:
            raise kind("no")

    with pytest.raises(StoreError) as told:
        probe_create(Refuses())
    assert type(told.value) is kind
