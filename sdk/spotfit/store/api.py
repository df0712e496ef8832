"""The `Store` interface. Its essential guarantee is atomic `create`, on which the journal rests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, Protocol

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
    """An object in a listing."""

    key: str
    size_bytes: int


class Store(Protocol):
    """Objects by key below one root. Keys are relative, use '/', and cannot leave the root.

    Every method may raise `TransientStoreError` once its retries are spent,
    `StorePermissionError`, and `ConfigError` for an invalid key. Errors of local files are
    `OSError`s. A store is thread-safe, can be pickled, and stays usable in a forked child.
    """

    @property
    def url(self) -> str:
        """Address of the root, for messages and `open_store`; contains no secret."""
        ...

    def get(self, key: str) -> bytes:
        """Return the object. Raises `NotFoundError`."""
        ...

    def get_range(self, key: str, start: int, length: int) -> bytes:
        """Return `length` bytes from `start`, fewer at the object's end. Raises `NotFoundError`."""
        ...

    def get_memoryview(self, key: str, scratch: memoryview) -> memoryview:
        """Return the object with as few copies as possible, possibly in `scratch`.

        The caller must not use `scratch` otherwise meanwhile. Raises `NotFoundError`.
        """
        ...

    def put(self, key: str, body: bytes | memoryview) -> None:
        """Write or replace the object. Readers see the old or the new one, never a part."""
        ...

    def create(self, key: str, body: bytes) -> None:
        """Write the object if it is absent, atomically: of concurrent callers exactly one succeeds.

        Raises `AlreadyExistsError` for the others. After a `TransientStoreError` the object may
        have been written or not: read it. Implementations must not retry.
        """
        ...

    def list(self, prefix: str = "", *, after: str = "") -> Iterator[ObjectInfo]:
        """Yield objects in the folder `prefix` ('' is the root) with keys after `after`, sorted.

        Objects written or deleted meanwhile may be included or not.
        """
        ...

    def delete(self, key: str) -> None:
        """Delete the object. Idempotent."""
        ...

    def put_file(self, key: str, path: Path) -> None:
        """Upload a file, atomically; large ones in parts."""
        ...

    def get_file(self, key: str, path: Path) -> None:
        """Download to a file, which is written atomically. Raises `NotFoundError`."""
        ...

    def subtree(self, prefix: str) -> Store:
        """Return this store rooted at `prefix`."""
        ...
