"""Prove that a bucket keeps its one promise before a journal is trusted to it."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from threading import Barrier

from spotfit.core.errors import (
    AlreadyExistsError,
    NotFoundError,
    StoreError,
    TransientStoreError,
    UntrustworthyStoreError,
)
from spotfit.store.api import Store

KEYS = 3
RACERS = 4
FOLDER = ".spotfit-probe"
_PATIENCE_S = 120.0


def probe_create(store: Store) -> None:
    """Race `create`, then read, list and delete; leaves nothing behind.

    Raises `UntrustworthyStoreError` where a `create` has no winner or several, or is accepted
    twice, or what was written is not what is read or listed at once; `StorePermissionError` where
    the credentials do not suffice; another `StoreError` where the bucket is not there or fails.
    """
    folder = f"{FOLDER}/{uuid.uuid4().hex}"
    keys = tuple(f"{folder}/{n}" for n in range(KEYS))
    try:
        with ThreadPoolExecutor(RACERS, "spotfit-probe") as racers:
            for key in keys:
                _race(store, key, racers)
        _expect_listed(store, folder, keys)
    except StoreError:
        _clean_up(store, keys)
        raise
    _expect_deletable(store, keys)


def _race(store: Store, key: str, racers: ThreadPoolExecutor) -> None:
    start = Barrier(RACERS)
    bodies = tuple(f"racer {n}".encode() for n in range(RACERS))
    answers = tuple(racers.map(lambda body: _try(store, key, body, start), bodies))
    won = [body for body, answer in zip(bodies, answers, strict=True) if answer is True]
    unknown = [body for body, answer in zip(bodies, answers, strict=True) if answer is None]
    if len(won) > 1 or not (won or unknown):
        raise _lies(store, f"of {RACERS} writers that created one object at once, {len(won)} won")
    _expect_kept(store, key, won or unknown)


def _try(store: Store, key: str, body: bytes, start: Barrier) -> bool | None:
    """Whether this racer won; None where the store failed and did not say."""
    start.wait(_PATIENCE_S)
    try:
        store.create(key, body)
    except AlreadyExistsError:
        return False
    except TransientStoreError:
        return None
    return True


def _expect_kept(store: Store, key: str, writers: Sequence[bytes]) -> None:
    try:
        kept = store.get(key)
    except NotFoundError:
        raise _lies(store, "an object just created was not there") from None
    if kept not in writers:
        raise _lies(store, "an object did not hold what the only winner had written")
    with suppress(AlreadyExistsError):
        store.create(key, b"a second time")
        raise _lies(store, "an object that existed was created a second time")


def _expect_listed(store: Store, folder: str, keys: Sequence[str]) -> None:
    listed = tuple(found.key for found in store.list(folder))
    if listed != tuple(keys):
        raise _lies(
            store, f"a listing right after writing {len(keys)} objects showed {len(listed)}"
        )


def _expect_deletable(store: Store, keys: Sequence[str]) -> None:
    for key in keys:
        store.delete(key)
    with suppress(NotFoundError):
        store.get(keys[0])
        raise _lies(store, "an object just deleted was still there")


def _clean_up(store: Store, keys: Sequence[str]) -> None:
    """As far as it lets us: the error that brought us here is the one to tell."""
    with suppress(StoreError):
        for key in keys:
            store.delete(key)


def _lies(store: Store, what: str) -> UntrustworthyStoreError:
    return UntrustworthyStoreError(
        f"{store.url} cannot hold a run: {what}. Two leaders could come to power there.",
        do="Use a storage that honours 'If-None-Match: *' and reads back what was written: S3, "
        "Google, Azure, a recent MinIO, a local or NFS directory.",
    )
