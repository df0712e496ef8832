"""A store in the memory of one process, for tests and simulations.

It has no lock: each operation is a single, atomic operation of a dict, so a fork cannot inherit a
locked lock.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from spotfit.core.errors import AlreadyExistsError, NotFoundError
from spotfit.store.api import ObjectInfo, Store
from spotfit.store.local import atomic_write
from spotfit.store.url import RootUrl, validate_key

ObjectsByKey = dict[str, tuple[bytes]]
"""Bodies in tuples, because `create` compares identity and equal bytes may be one object."""

_objects_by_bucket: dict[str, ObjectsByKey] = {}


class MemoryStore:
    """Objects in a dict.

    Without a root the objects are private to this store, and pickling copies them. Stores of one
    `memory://name` share their objects within a process; other processes start empty.
    """

    def __init__(self, root: RootUrl | None = None) -> None:
        self._root = root or RootUrl("memory", bucket="private")
        self._objects: ObjectsByKey = (
            {} if root is None else _objects_by_bucket.setdefault(root.bucket, {})
        )
        self._is_named = root is not None

    def __reduce__(self) -> tuple[object, ...]:
        if self._is_named:
            return (MemoryStore, (self._root,))
        return (_make_private_store, (self._root, self._objects))

    @property
    def url(self) -> str:
        return str(self._root)

    def get(self, key: str) -> bytes:
        try:
            return self._objects[self._full_key(key)][0]
        except KeyError:
            raise NotFoundError(f"{key} does not exist in {self.url}.") from None

    def get_range(self, key: str, start: int, length: int) -> bytes:
        return self.get(key)[start : start + length]

    def get_memoryview(self, key: str, scratch: memoryview) -> memoryview:
        return memoryview(self.get(key))

    def put(self, key: str, body: bytes | memoryview) -> None:
        self._objects[self._full_key(key)] = (bytes(body),)

    def create(self, key: str, body: bytes) -> None:
        entry = (bytes(body),)
        if self._objects.setdefault(self._full_key(key), entry) is not entry:
            raise AlreadyExistsError(f"{key} already exists in {self.url}.")

    def list(self, prefix: str = "", *, after: str = "") -> Iterator[ObjectInfo]:
        folder = f"{self._full_key(prefix)}/" if prefix else self._key_prefix()
        skip = len(self._key_prefix())
        # A copy of the keys first: other threads may change the dict during the iteration.
        for full_key in sorted(key for key in tuple(self._objects) if key.startswith(folder)):
            entry = self._objects.get(full_key)
            if entry is not None and full_key[skip:] > after:
                yield ObjectInfo(full_key[skip:], len(entry[0]))

    def delete(self, key: str) -> None:
        self._objects.pop(self._full_key(key), None)

    def put_file(self, key: str, path: Path) -> None:
        self.put(key, path.read_bytes())

    def get_file(self, key: str, path: Path) -> None:
        body = self.get(key)
        with atomic_write(path) as part:
            part.write_bytes(body)

    def subtree(self, prefix: str) -> Store:
        if self._is_named:
            return MemoryStore(self._root.join(prefix))
        return _make_private_store(self._root.join(prefix), self._objects)

    def _full_key(self, key: str) -> str:
        return self._key_prefix() + validate_key(key)

    def _key_prefix(self) -> str:
        return f"{self._root.prefix}/" if self._root.prefix else ""


def _make_private_store(root: RootUrl, objects: ObjectsByKey) -> MemoryStore:
    store = MemoryStore()
    store._root, store._objects = root, objects  # noqa: SLF001 - an alternative constructor
    return store
