"""The `Store` interface. Its essential guarantee is atomic `create`, on which the journal rests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, Protocol

from spotfit.core.errors import ObjectChangedError

# Remedies of the errors that all stores raise.
ALREADY_EXISTS_REMEDY = (
    "Choose another name or path. If nothing needs the existing object, delete it and try again."
)
NOT_FOUND_REMEDY = (
    "Check the address and the name: the object was deleted, or was never written there."
)
PERMISSION_REMEDY = (
    "Permit these credentials to read, write, list and delete objects at that address, or use "
    "other credentials."
)
TRANSIENT_REMEDY = (
    "Try again. If it fails again, check the network of the machine and the status of the storage "
    "service."
)


class ObjectInfo(NamedTuple):
    """An object in a listing. `key` is relative to the root of the store that was listed."""

    key: str
    size_bytes: int
    version: str
    """Changes with the content: the ETag of a bucket, the size and modification time of a file.

    Valid for `get_range` of stores at the same address; '' if the storage has none.
    """


class Store(Protocol):
    """Objects by key below one root, such as a run's directory in a bucket.

    Keys are relative to the root, use '/' and cannot leave the root, for example
    `"checkpoint_000001/model.pt"`. Methods block until the storage has answered. Every method may
    raise `TransientStoreError` once its retries are spent, `StorePermissionError`, and
    `ConfigError` for an invalid key. Errors of local files are `OSError`s. A store is thread-safe,
    can be pickled, and stays usable in a forked child.
    """

    @property
    def url(self) -> str:
        """Address of the root, for messages and `open_store`; contains no secret.

        For example `"s3://bucket/runs/my-run"`, or the absolute path of a local directory.
        `open_store` rejects the address of a file system that spotfit does not support itself, such
        as `hdfs://`.
        """
        ...

    def get(self, key: str) -> bytes:
        """Return the whole object. Raises `NotFoundError`.

        For small objects: a bucket must answer each attempt within 10 s.
        `store.transfer.download_bytes` and `get_file` transfer objects of any size.
        """
        ...

    def get_range(
        self, key: str, start: int, length: int, *, version: str = ""
    ) -> bytes | memoryview:
        """Return `length` bytes from byte offset `start`, if possible without a copy.

        Raises `NotFoundError`.

        Returns fewer bytes at the object's end, and `b""` if `start` is at the end or beyond it.
        With `version`, raises `ObjectChangedError` if the object has another one.
        """
        ...

    def head(self, key: str) -> ObjectInfo:
        """Return size and version of the object, as a listing does. Raises `NotFoundError`."""
        ...

    def get_memoryview(self, key: str, scratch: memoryview) -> memoryview:
        """Return the whole object with as few copies as possible. Raises `NotFoundError`.

        The result is either a part of `scratch`, a writable buffer of the caller, or a separate
        buffer, for example because the object is larger than `scratch`. The caller must not use
        `scratch` otherwise during the call, nor as long as it uses the result. Called when a
        checkpoint is restored.
        """
        ...

    def put(self, key: str, body: bytes | memoryview) -> None:
        """Write the object or replace it. Readers see the old or the new one, never a part.

        A store over a file system of the user, such as HDFS, may not guarantee that. Idempotent; a
        bucket's driver retries it and sends large bodies in parts.
        """
        ...

    def create(self, key: str, body: bytes) -> None:
        """Write the object if it is absent, atomically: of concurrent callers exactly one succeeds.

        Raises `AlreadyExistsError` for the others, and `AtomicCreateUnsupportedError` if the
        storage cannot do this. After a `TransientStoreError` the object may have been written or
        not: read it. Implementations must not retry. The journal relies on it.
        """
        ...

    def list(self, prefix: str = "", *, after: str = "") -> Iterator[ObjectInfo]:
        """Yield the objects in the folder `prefix` and its subfolders, sorted by key.

        `prefix` is a complete folder name without '/' at the end: `"a"` does not include `"ab/c"`;
        '' is the root. Only keys greater than `after`, a key relative to the root, are included.
        Yields nothing for a folder that does not exist. Objects written or deleted meanwhile may be
        included or not. Requests may be sent, and errors raised, while the caller iterates.
        """
        ...

    def delete(self, key: str) -> None:
        """Delete the object. Does nothing if it does not exist."""
        ...

    def put_file(self, key: str, path: Path) -> None:
        """Upload the local file `path` as the object, atomically; large ones in parts.

        Replaces an existing object. Raises `OSError` if the file cannot be read.
        """
        ...

    def get_file(self, key: str, path: Path) -> None:
        """Download the object to the local file `path`. Raises `NotFoundError`.

        The file is written atomically and replaces an existing one; its directory must exist. Large
        objects of a bucket are downloaded in parallel parts.
        """
        ...

    def subtree(self, prefix: str) -> Store:
        """Return a store for the folder `prefix` of this one: its keys are relative to that folder.

        Sends no request; the folder need not exist. Raises `ConfigError` for an invalid `prefix`.
        """
        ...


def changed_error(what: str) -> ObjectChangedError:
    """Return the error for an object that has another version than a reader asked for."""
    return ObjectChangedError(
        f"{what} was replaced while it was read.",
        do="Repeat the operation, and find out who else writes to this folder.",
    )
