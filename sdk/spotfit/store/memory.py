"""Objects in the memory of one process: for tests, simulations and tries.

Each operation is a single step of a dict, so there is no lock: none can be inherited by a fork
in the middle of something.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from spotfit.core.errors import AlreadyExistsError, NotFoundError
from spotfit.store.api import ObjectInfo, Store
from spotfit.store.parts import appearing
from spotfit.store.url import RootUrl, checked_key

Objects = dict[str, tuple[bytes]]

_named: dict[str, Objects] = {}


class MemoryStore:
    """A store nobody else sees. Without a root it is this object's own; pickled, it is copied.

    Stores of one `memory://name` share their objects within a process, and start empty in another.
    """

    def __init__(self, root: RootUrl | None = None) -> None:
        self._root = root or RootUrl("memory", bucket="private")
        self._objects: Objects = {} if root is None else _named.setdefault(root.bucket, {})
        self._is_named = root is not None

    def __reduce__(self) -> tuple[object, ...]:
        if self._is_named:
            return (MemoryStore, (self._root,))
        return (_private, (self._root, self._objects))

    @property
    def url(self) -> str:
        return str(self._root)

    def get(self, key: str) -> bytes:
        try:
            return self._objects[self._full(key)][0]
        except KeyError:
            raise NotFoundError(f"There is no {key} in {self.url}.") from None

    def get_range(self, key: str, start: int, length: int) -> bytes:
        return self.get(key)[start : start + length]

    def view(self, key: str, spare: memoryview) -> memoryview:
        return memoryview(self.get(key))

    def put(self, key: str, body: bytes | memoryview) -> None:
        self._objects[self._full(key)] = (bytes(body),)

    def create(self, key: str, body: bytes) -> None:
        mine = (bytes(body),)
        if self._objects.setdefault(self._full(key), mine) is not mine:
            raise AlreadyExistsError(f"{key} is in {self.url} already.")

    def list(self, prefix: str = "", *, after: str = "") -> Iterator[ObjectInfo]:
        folder = f"{self._full(prefix)}/" if prefix else self._below()
        skip = len(self._below())
        for full in sorted(full for full in tuple(self._objects) if full.startswith(folder)):
            held = self._objects.get(full)
            if held is not None and full[skip:] > after:
                yield ObjectInfo(full[skip:], len(held[0]))

    def delete(self, key: str) -> None:
        self._objects.pop(self._full(key), None)

    def put_file(self, key: str, path: Path) -> None:
        self.put(key, path.read_bytes())

    def get_file(self, key: str, path: Path) -> None:
        body = self.get(key)
        with appearing(path) as part:
            part.write_bytes(body)

    def under(self, prefix: str) -> Store:
        if self._is_named:
            return MemoryStore(self._root.below(prefix))
        return _private(self._root.below(prefix), self._objects)

    def _full(self, key: str) -> str:
        return self._below() + checked_key(key)

    def _below(self) -> str:
        return f"{self._root.prefix}/" if self._root.prefix else ""


def _private(root: RootUrl, objects: Objects) -> MemoryStore:
    store = MemoryStore()
    store._root, store._objects = root, objects  # noqa: SLF001  # its other constructor
    return store
