"""What every store promises. One promise is worth the rest: `create` has exactly one winner."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, Protocol


class ObjectInfo(NamedTuple):
    """What a listing tells of an object."""

    key: str
    size_bytes: int


class Store(Protocol):
    """Objects by key below one root. Keys are relative, with '/', and never climb out of the root.

    Every method may raise `TransientStoreError` once its own retries are spent,
    `StorePermissionError`, and `ConfigError` for a key that cannot be one. Trouble with a file of
    this machine is an `OSError`. A store may be used by several threads, pickled, and used on in
    a forked child.
    """

    @property
    def url(self) -> str:
        """Where the root lies, for people and for `open_store`; holds no secret."""
        ...

    def get(self, key: str) -> bytes:
        """The whole object. Raises `NotFoundError`."""
        ...

    def get_range(self, key: str, start: int, length: int) -> bytes:
        """`length` bytes from `start`, fewer where the object ends. Raises `NotFoundError`."""
        ...

    def view(self, key: str, spare: memoryview) -> memoryview:
        """The whole object to look at, copied as seldom as can be. Raises `NotFoundError`.

        It may lie in `spare`, memory that nobody needs meanwhile.
        """
        ...

    def put(self, key: str, body: bytes | memoryview) -> None:
        """Write the object, there or not; readers see the old or the new, never half."""
        ...

    def create(self, key: str, body: bytes) -> None:
        """Write the object if it is absent, atomically: of any number of callers one wins.

        Raises `AlreadyExistsError` for the others. After a `TransientStoreError` nobody knows
        whether the object was written: read it back. It is never retried in here.
        """
        ...

    def list(self, prefix: str = "", *, after: str = "") -> Iterator[ObjectInfo]:
        """Objects in the folder `prefix` ('' is the root) whose keys sort after `after`, in order.

        What comes and goes meanwhile may be told or not.
        """
        ...

    def delete(self, key: str) -> None:
        """Remove the object; one already gone is no error."""
        ...

    def put_file(self, key: str, path: Path) -> None:
        """Upload a file, in parts where it is big; the object appears whole or not at all."""
        ...

    def get_file(self, key: str, path: Path) -> None:
        """Download to a file, which appears whole or not at all. Raises `NotFoundError`."""
        ...

    def under(self, prefix: str) -> Store:
        """The same store, rooted deeper."""
        ...
