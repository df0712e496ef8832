"""Opens stores by URL. Each driver is imported when the first store of its kind is opened.

Probe of a bucket before a journal is stored in it: `create` must be atomic.

Some S3-compatible servers ignore `If-None-Match`. Two agents could then both become leader, so
such a bucket must be rejected before the run starts.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import Barrier
from typing import Any

from spotfit.core.errors import (
    AlreadyExistsError,
    AtomicCreateUnsupportedError,
    ConfigError,
    NotFoundError,
    StoreError,
    TransientStoreError,
)
from spotfit.host.system import wall_ms
from spotfit.store.api import TRANSIENT_REMEDY, Store
from spotfit.store.retry import RetryPolicy, repeat_read
from spotfit.store.url import (
    RootUrl,
    StorageCredentials,
    credentials_from_environment,
    format_credentials,
)


def open_store(
    url: str | Path | RootUrl,
    retry_policy: RetryPolicy | None = None,
    *,
    credentials: StorageCredentials | None = None,
    setting: str = "The storage address",
) -> Store:
    """Return the store at that address, for example `"s3://bucket/prefix"` or a local path.

    Sends no request and reads no file; the root need not exist. `retry_policy` is the budget of
    each call of a bucket (None: `RetryPolicy()`); `credentials`, options of obstore, replace those
    of this machine's environment (None). Directories and `memory://` ignore both. Raises
    `ConfigError` for an invalid address; `setting` names its source in the message.
    """
    root = url if isinstance(url, RootUrl) else RootUrl.parse(url, setting=setting)
    match root.scheme:
        case "file":
            from spotfit.store.local import LocalStore

            return LocalStore(root)
        case "memory":
            from spotfit.store.local import MemoryStore

            return MemoryStore(root)
        case _:
            from spotfit.store.objects import ObjectStore

            return ObjectStore(root, retry_policy, credentials=credentials)


def with_bucket_region(store: Store) -> Store:
    """Return the store with the region of its S3 bucket in its URL, which machines open.

    The same store if the URL needs no region, or if it is unknown; see `resolve_region`, which
    sends a request.
    """
    if not store.url.startswith("s3://"):  # also spares the import of the bucket driver
        return store
    from spotfit.store.bucket_region import resolve_region

    root = RootUrl.parse(store.url)
    region = resolve_region(root)
    if not region:
        return store
    return open_store(replace(root, region=region), credentials=_explicit_credentials(store))


def reopen_store(store: Store) -> Store:
    """Open the store again by its address and credentials only, as a machine of the run does.

    `fit()` reads an object through the result to check that machines will find the same storage.
    Raises `ConfigError` if the address is one of a user's file system, such as `hdfs://`.
    """
    return open_store(store.url, credentials=_explicit_credentials(store))


def to_arrow_filesystem(store: Store) -> Any:
    """Return the `pyarrow.fs.FileSystem` of the store's storage, for `Checkpoint.filesystem`.

    In it, `RootUrl.parse(store.url).path` is the store's root. None if pyarrow is not installed or
    has no file system for the storage (`az://`, `memory://`, a user's file system). May look up the
    region of an S3 bucket over the network.
    """
    from spotfit.store.filesystem_bucket import open_arrow_filesystem

    try:
        root = RootUrl.parse(store.url)
    except ConfigError:  # the scheme of a user's file system, such as hdfs
        return None
    return open_arrow_filesystem(
        root, _explicit_credentials(store) or credentials_from_environment(root)
    )


def credentials_for_nodes(store: Store) -> str:
    """Return the value of SPOTFIT_STORAGE_KEYS that the machines of a run in this store need.

    It contains the explicit credentials of the store, hence is a secret. '' if the store has none:
    then machines use the credentials of their own environment.
    """
    credentials = _explicit_credentials(store)
    return format_credentials(RootUrl.parse(store.url), credentials) if credentials else ""


def _explicit_credentials(store: Store) -> StorageCredentials:
    if "://" not in store.url:  # a local directory: spares the import of the bucket driver
        return {}
    from spotfit.store.objects import ObjectStore

    plain = getattr(store, "plain_store", store)  # of an `AuthenticatedStore`
    return plain.credentials if isinstance(plain, ObjectStore) else {}


# --- Probe of a bucket before a journal is stored in it -------------------------------------------


# Servers that check and then write let several of four concurrent writers win in nearly every
# race; three races make it certain enough, and take less than a second.
KEY_COUNT = 3
WRITER_COUNT = 4
PROBE_FOLDER = ".spotfit-probe"
# Far longer than a probe and than clocks of two machines differ: an older one was interrupted.
_MAX_PROBE_AGE_S = 86_400
_PROBE_OBJECT = re.compile(re.escape(PROBE_FOLDER) + r"/(\d{10})-[0-9a-f]+/\d+")
# Longer than a request may take. Only a bug or a stopped process leaves a thread alone here.
_BARRIER_TIMEOUT_S = 120.0


def new_probe_folder() -> str:
    """Return a unique folder for probe objects with integer names, which its caller deletes.

    Its name has the time, by which a later `probe_create` recognizes those of a killed process.
    """
    return f"{PROBE_FOLDER}/{wall_ms() // 1000:010d}-{uuid.uuid4().hex}"


def probe_create(store: Store) -> None:
    """Check that the store creates objects atomically, and can read, list and delete them.

    Races threads for the same new objects below `.spotfit-probe/`, which it deletes again, with
    those that a process left a day ago because it was killed during its probe. Called before a run
    starts and by `spotfit doctor --storage`. Raises `AtomicCreateUnsupportedError` if a race has no
    winner or several, an existing object is created again, or reads and listings do not show what
    was written; `StorePermissionError` if the credentials are insufficient; another `StoreError` if
    the bucket is missing or fails.
    """
    folder = new_probe_folder()
    keys = tuple(f"{folder}/{n}" for n in range(KEY_COUNT))
    try:
        _check_creates(store, folder, keys)
    except BaseException:  # also of Ctrl-C, so that no object stays
        # Best effort: the error that is raised here is the one to report.
        with suppress(StoreError):
            for key in keys:
                store.delete(key)
        raise
    # Outside of the block above: a failed delete would only be repeated there.
    for key in keys:
        store.delete(key)
    with suppress(NotFoundError):
        store.get(keys[0])
        raise _unsupported_error(store, "a deleted object was still found")


def _check_creates(store: Store, folder: str, keys: Sequence[str]) -> None:
    with ThreadPoolExecutor(WRITER_COUNT, "spotfit-probe") as executor:
        for key in keys:
            _race_create(store, key, executor)
    found = [info.key for info in store.list(PROBE_FOLDER)]
    listed = tuple(key for key in found if key.startswith(f"{folder}/"))
    if listed != keys:
        raise _unsupported_error(
            store, f"a listing after writing {len(keys)} objects showed {len(listed)}"
        )
    for key in found:
        if _is_abandoned_probe(key):
            store.delete(key)


def _is_abandoned_probe(key: str) -> bool:
    match = _PROBE_OBJECT.fullmatch(key)
    return match is not None and int(match[1]) < wall_ms() // 1000 - _MAX_PROBE_AGE_S


def _race_create(store: Store, key: str, executor: ThreadPoolExecutor) -> None:
    start = Barrier(WRITER_COUNT)
    bodies = tuple(f"writer {n}".encode() for n in range(WRITER_COUNT))

    def try_create(body: bytes) -> bool | None:
        """Return whether the create succeeded; None if a failure left that unknown."""
        start.wait(_BARRIER_TIMEOUT_S)  # all writers start at once, which makes the race likely
        try:
            store.create(key, body)
        except AlreadyExistsError:
            return False
        except TransientStoreError:
            return None
        return True

    outcomes = tuple(executor.map(try_create, bodies))
    won = [body for body, outcome in zip(bodies, outcomes, strict=True) if outcome is True]
    # A create whose response was lost may have won, so zero confirmed winners are acceptable then.
    unknown = [body for body, outcome in zip(bodies, outcomes, strict=True) if outcome is None]
    if len(won) > 1 or not (won or unknown):
        raise _unsupported_error(
            store, f"of {WRITER_COUNT} concurrent creates of one object, {len(won)} succeeded"
        )
    # A single read may have been damaged on the way.
    check = partial(_check_stored, store, key, won, unknown)
    repeat_read(check, errors=(AtomicCreateUnsupportedError,))
    with suppress(AlreadyExistsError):
        store.create(key, b"a second time")
        raise _unsupported_error(store, "an existing object was created again")


def _check_stored(store: Store, key: str, won: Sequence[bytes], unknown: Sequence[bytes]) -> None:
    try:
        stored = store.get(key)
    except NotFoundError:
        if not won:
            raise TransientStoreError(
                f"None of {WRITER_COUNT} concurrent creates of one object in {store.url} was "
                "answered with success or failure.",
                do=TRANSIENT_REMEDY,
            ) from None
        raise _unsupported_error(store, "a created object was not found") from None
    if stored not in (won or unknown):
        raise _unsupported_error(store, "an object did not hold what its only writer had written")


def _unsupported_error(store: Store, observation: str) -> AtomicCreateUnsupportedError:
    return AtomicCreateUnsupportedError(
        f"{store.url} cannot store a run, because it does not create objects atomically: "
        f"{observation}. Two leaders could be elected at once.",
        do="Use a storage that supports 'If-None-Match: *' and read-after-write consistency: S3, "
        "GCS, Azure, a recent MinIO, or a local or NFS directory.",
    )
