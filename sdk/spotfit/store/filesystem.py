"""A store over a file system the user brings: fsspec's or pyarrow's.

Neither is imported here; an object is known by the module of its class. Those that only wrap a
local directory are opened as one. `create` is offered only where the file system has a way to do
it in one step, and even then the probe has the last word.
"""

from __future__ import annotations

import inspect
import os
import posixpath
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from spotfit.core.errors import (
    AlreadyExistsError,
    ConfigError,
    NotFoundError,
    StoreError,
    StorePermissionError,
    TransientStoreError,
    UntrustworthyStoreError,
)
from spotfit.store.api import ObjectInfo, Store
from spotfit.store.native import bucket_behind, kinds_of
from spotfit.store.opening import open_store
from spotfit.store.parts import appearing
from spotfit.store.url import checked_key

_COPIED_AT_ONCE = 8 * 2**20
_GIVEN_TO_ALL = ("fsspec.spec", "fsspec.asyn")


def store_on(filesystem: Any, path: str) -> Store:
    """The store at `path` of `filesystem`, an `fsspec` or a `pyarrow.fs` one.

    A bucket that our own driver knows is opened by it, with the credentials of the file system.
    Raises `ConfigError` for anything else.
    """
    kinds = kinds_of(filesystem)
    if (bucket := bucket_behind(filesystem, path)) is not None:
        return open_store(bucket[0], keys=bucket[1])
    if "fsspec.implementations.arrow.ArrowFSWrapper" in kinds:
        return store_on(filesystem.fs, path)
    if "pyarrow._fs.FileSystem" in kinds:
        return _on_arrow(filesystem, path)
    if "fsspec.implementations.dirfs.DirFileSystem" in kinds:
        return store_on(filesystem.fs, posixpath.join(filesystem.path, path))
    if "fsspec.spec.AbstractFileSystem" in kinds:
        if "fsspec.implementations.local.LocalFileSystem" in kinds:
            return open_store(Path(filesystem._strip_protocol(path)))  # noqa: SLF001  # its own parser
        return FsspecStore(filesystem, filesystem._strip_protocol(path))  # noqa: SLF001
    raise ConfigError(
        f"{type(filesystem).__name__} is no file system of pyarrow or fsspec.",
        do="Give storage_path alone, or a pyarrow.fs.FileSystem or fsspec file system with it.",
    )


def _on_arrow(filesystem: Any, path: str) -> Store:
    match type(filesystem).__name__:
        case "LocalFileSystem":
            return open_store(Path(path))
        case "SubTreeFileSystem":
            return store_on(filesystem.base_fs, posixpath.join(filesystem.base_path, path))
        case "PyFileSystem" if hasattr(filesystem.handler, "fs"):
            return store_on(filesystem.handler.fs, path)
        case _:
            return ArrowStore(filesystem, path)


class FsspecStore:
    """Objects over an fsspec file system."""

    def __init__(self, filesystem: Any, root: str) -> None:
        self._made = filesystem
        self._made_by = os.getpid()
        self._root = root.rstrip("/")

    @property
    def _fs(self) -> Any:
        """The file system; made again in a forked child, where fsspec forbids to use the first."""
        if self._made_by != os.getpid():
            remake, its_arguments = self._made.__reduce__()
            self._made, self._made_by = remake(*its_arguments), os.getpid()
        return self._made

    @property
    def url(self) -> str:
        return str(self._fs.unstrip_protocol(self._root))

    def get(self, key: str) -> bytes:
        with self._telling(key):
            return bytes(self._fs.cat_file(self._full(key)))

    def get_range(self, key: str, start: int, length: int) -> bytes:
        with self._telling(key):
            size_bytes = int(self._fs.size(self._full(key)))
            if start >= size_bytes or not length:
                return b""
            end = min(start + length, size_bytes)
            return bytes(self._fs.cat_file(self._full(key), start=start, end=end))

    def view(self, key: str, spare: memoryview) -> memoryview:
        return memoryview(self.get(key))

    def put(self, key: str, body: bytes | memoryview) -> None:
        self._write(key, lambda full: self._fs.pipe_file(full, bytes(body)))

    def create(self, key: str, body: bytes) -> None:
        if not _creates_in_one_step(self._fs):
            raise _cannot_create(self.url, type(self._fs).__name__)
        self._write(key, lambda full: self._fs.pipe_file(full, bytes(body), mode="create"))

    def list(self, prefix: str = "", *, after: str = "") -> Iterator[ObjectInfo]:
        folder = self._full(prefix) if prefix else self._root
        with self._telling(folder):
            self._fs.invalidate_cache()
            found = self._fs.find(folder, detail=True)
        yield from _in_order(
            ((path, int(told["size"] or 0)) for path, told in found.items() if path != folder),
            self._root,
            after,
        )

    def delete(self, key: str) -> None:
        try:
            with self._telling(key):
                self._fs.rm_file(self._full(key))
        except NotFoundError:
            return

    def put_file(self, key: str, path: Path) -> None:
        with path.open("rb"):  # a file that cannot be read is the caller's trouble, told as OSError
            self._write(key, lambda full: self._fs.put_file(str(path), full))

    def get_file(self, key: str, path: Path) -> None:
        with appearing(path) as part, self._telling(key):
            self._fs.get_file(self._full(key), str(part))

    def under(self, prefix: str) -> Store:
        return FsspecStore(self._fs, self._full(prefix))

    def _full(self, key: str) -> str:
        return f"{self._root}/{checked_key(key)}"

    def _write(self, key: str, write: Callable[[str], object]) -> None:
        """Make the folder only where it is missed: a bucket has none and needs none."""
        full = self._full(key)
        with self._telling(key):
            try:
                write(full)
            except FileNotFoundError:
                self._fs.makedirs(posixpath.dirname(full), exist_ok=True)
                write(full)

    @contextmanager
    def _telling(self, key: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise _ours(error, f"{key} in {self.url}") from error


class ArrowStore:
    """Objects over a file system of pyarrow. It knows no way to create in one step."""

    def __init__(self, filesystem: Any, root: str) -> None:
        self._fs = filesystem
        self._root = root.rstrip("/")

    @property
    def url(self) -> str:
        return f"{self._fs.type_name}://{self._root.lstrip('/')}"

    def get(self, key: str) -> bytes:
        with self._telling(key), self._fs.open_input_file(self._full(key)) as file:
            return bytes(file.readall())

    def get_range(self, key: str, start: int, length: int) -> bytes:
        with self._telling(key), self._fs.open_input_file(self._full(key)) as file:
            start = min(start, file.size())
            return bytes(file.read_at(min(length, file.size() - start), start))

    def view(self, key: str, spare: memoryview) -> memoryview:
        return memoryview(self.get(key))

    def put(self, key: str, body: bytes | memoryview) -> None:
        with self._telling(key):
            self._fs.create_dir(posixpath.dirname(self._full(key)), recursive=True)
            with self._fs.open_output_stream(self._full(key)) as file:
                file.write(body)

    def create(self, key: str, body: bytes) -> None:
        raise _cannot_create(self.url, f"pyarrow's {type(self._fs).__name__}")

    def list(self, prefix: str = "", *, after: str = "") -> Iterator[ObjectInfo]:
        from pyarrow.fs import FileSelector, FileType

        folder = self._full(prefix) if prefix else self._root
        with self._telling(prefix):
            found = self._fs.get_file_info(
                FileSelector(folder, recursive=True, allow_not_found=True)
            )
        files = ((told.path, int(told.size)) for told in found if told.type == FileType.File)
        yield from _in_order(files, self._root, after)

    def delete(self, key: str) -> None:
        try:
            with self._telling(key):
                self._fs.delete_file(self._full(key))
        except NotFoundError:
            return

    def put_file(self, key: str, path: Path) -> None:
        with path.open("rb") as source, self._telling(key):
            self._fs.create_dir(posixpath.dirname(self._full(key)), recursive=True)
            with self._fs.open_output_stream(self._full(key)) as sink:
                shutil.copyfileobj(source, sink, _COPIED_AT_ONCE)

    def get_file(self, key: str, path: Path) -> None:
        with (
            self._telling(key),
            self._fs.open_input_stream(self._full(key)) as source,
            appearing(path) as part,
            part.open("xb") as copy,
        ):
            shutil.copyfileobj(source, copy, _COPIED_AT_ONCE)

    def under(self, prefix: str) -> Store:
        return ArrowStore(self._fs, self._full(prefix))

    def _full(self, key: str) -> str:
        return f"{self._root}/{checked_key(key)}"

    @contextmanager
    def _telling(self, key: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise _ours(error, f"{key} in {self.url}") from error


def _creates_in_one_step(filesystem: Any) -> bool:
    """Whether its class has a `pipe_file` of its own for it; fsspec's checks, then writes."""
    kind = type(filesystem)
    own = getattr(kind, "_pipe_file", None) or kind.pipe_file
    return own.__module__ not in _GIVEN_TO_ALL and "mode" in inspect.signature(own).parameters


def _cannot_create(url: str, kind: str) -> UntrustworthyStoreError:
    return UntrustworthyStoreError(
        f"{kind} has no way to create an object so that only one writer wins, and a run in {url} "
        "could end up with two leaders.",
        do="Give the address as storage_path alone (s3://, gs://, az:// or a directory), or the "
        "file system of such a bucket from pyarrow.fs, s3fs, gcsfs or adlfs.",
    )


def _in_order(files: Iterable[tuple[str, int]], root: str, after: str) -> Iterator[ObjectInfo]:
    begin = f"{root.strip('/')}/"
    for path, size_bytes in sorted(files):
        key = path.lstrip("/").removeprefix(begin)
        if key > after:
            yield ObjectInfo(key, size_bytes)


def _ours(error: OSError, what: str) -> StoreError:
    match error:
        case FileExistsError():
            return AlreadyExistsError(f"{what} is there already.")
        case FileNotFoundError() | IsADirectoryError() | NotADirectoryError():
            return NotFoundError(f"There is no {what}.")
        case PermissionError():
            return StorePermissionError(
                f"The credentials of this file system may not do that with {what}.",
                do="Use others, or have these allowed to read, write, list and delete there.",
            )
        case ConnectionError() | TimeoutError():
            return TransientStoreError(f"The storage failed at {what}: {error}", do="Try again.")
        case _:
            return StoreError(f"The file system refused {what}: {error}")
