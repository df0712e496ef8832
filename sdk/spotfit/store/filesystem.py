"""Stores over file systems that the user passes: fsspec's and pyarrow's.

Neither library is imported here; objects are recognized by the module of their class. File systems
of local directories and of supported buckets are replaced by spotfit's own stores. `create` is
available only if the file system can create atomically, which `store.factory` then verifies.
"""

from __future__ import annotations

import inspect
import os
import posixpath
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from spotfit.core.errors import (
    AlreadyExistsError,
    AtomicCreateUnsupportedError,
    ConfigError,
    NotFoundError,
    StoreError,
    StorePermissionError,
    TransientStoreError,
)
from spotfit.store.api import (
    ALREADY_EXISTS_REMEDY,
    NOT_FOUND_REMEDY,
    PERMISSION_REMEDY,
    TRANSIENT_REMEDY,
    ObjectInfo,
    Store,
    changed_error,
)
from spotfit.store.factory import open_store
from spotfit.store.filesystem_bucket import qualified_class_names, resolve_bucket
from spotfit.store.local import atomic_write
from spotfit.store.url import validate_key

_COPY_CHUNK_BYTES = 8 * 2**20
_GENERIC_FSSPEC_MODULES = ("fsspec.spec", "fsspec.asyn")


def open_filesystem_store(filesystem: Any, path: str) -> Store:
    """Return the store at `path` of a file system object of fsspec or pyarrow. Sends no request.

    `path` is within the file system, for example `"bucket/folder"`. For the user's
    `RunConfig(storage_filesystem=...)`, and for checkpoints and results opened with a file system.
    S3, GCS and Azure buckets and local directories are opened with spotfit's own drivers and the
    credentials of the file system (0021); other file systems, such as HDFS, are used through the
    object. Raises `ConfigError` if it is not a file system of fsspec or pyarrow, for an invalid
    path, and for credentials that cannot be passed to machines, such as those of a profile.
    """
    # The order matters: wrappers are unwrapped before the generic base classes are matched.
    kinds = qualified_class_names(filesystem)
    if (bucket := resolve_bucket(filesystem, path)) is not None:
        return open_store(bucket[0], credentials=bucket[1])
    if "fsspec.implementations.arrow.ArrowFSWrapper" in kinds:
        return open_filesystem_store(filesystem.fs, path)
    if "pyarrow._fs.FileSystem" in kinds:
        return _open_arrow_store(filesystem, path)
    if "fsspec.implementations.dirfs.DirFileSystem" in kinds:
        return open_filesystem_store(filesystem.fs, posixpath.join(filesystem.path, path))
    if "fsspec.spec.AbstractFileSystem" in kinds:
        if "fsspec.implementations.local.LocalFileSystem" in kinds:
            return open_store(Path(filesystem._strip_protocol(path)))  # noqa: SLF001 - its own parser
        return FsspecStore(filesystem, filesystem._strip_protocol(path))  # noqa: SLF001
    raise ConfigError(
        f"The file system (storage_filesystem= of RunConfig, filesystem= of Checkpoint) is a "
        f"{type(filesystem).__name__}, not a file system of pyarrow or fsspec.",
        do="Pass a pyarrow.fs.FileSystem or an fsspec file system, or only a path or URL.",
    )


def _open_arrow_store(filesystem: Any, path: str) -> Store:
    match type(filesystem).__name__:
        case "LocalFileSystem":
            return open_store(Path(path))
        case "SubTreeFileSystem":
            return open_filesystem_store(
                filesystem.base_fs, posixpath.join(filesystem.base_path, path)
            )
        case "PyFileSystem" if hasattr(filesystem.handler, "fs"):
            return open_filesystem_store(filesystem.handler.fs, path)
        case _:
            return ArrowStore(filesystem, path)


class FsspecStore:
    """Objects over an fsspec file system of the user.

    In a forked child the file system is created again.
    """

    def __init__(self, filesystem: Any, root: str) -> None:
        self._filesystem = filesystem
        self._owner_pid = os.getpid()
        self._root = root.rstrip("/")

    @property
    def _fs(self) -> Any:
        # fsspec's asynchronous file systems raise an error in a forked child, because the thread of
        # their event loop exists in the parent only.
        if self._owner_pid != os.getpid():
            create, arguments = self._filesystem.__reduce__()
            self._filesystem, self._owner_pid = create(*arguments), os.getpid()
        return self._filesystem

    @property
    def url(self) -> str:
        """The address of the root as fsspec writes it, for example `"sftp:///folder/runs"`."""
        return str(self._fs.unstrip_protocol(self._root))

    def get(self, key: str) -> bytes:
        with _translate_errors(self, key):
            return bytes(self._fs.cat_file(self._full_key(key)))

    def get_range(self, key: str, start: int, length: int, *, version: str = "") -> bytes:
        """Return a part of the object; see `Store.get_range`.

        The version is compared before the read: most file systems have no conditional reads.
        """
        found = self._read_attributes(key)
        if version and _version(found, version) != version:
            raise changed_error(f"{key} in {self.url}")
        # Servers reject a range that starts at the end or beyond it (HTTP status 416).
        size_bytes = int(found["size"])
        if start >= size_bytes or not length:
            return b""
        end = min(start + length, size_bytes)
        with _translate_errors(self, key):
            return bytes(self._fs.cat_file(self._full_key(key), start=start, end=end))

    def head(self, key: str) -> ObjectInfo:
        """Return size and version of the object; see `Store.head`."""
        found = self._read_attributes(key)
        return ObjectInfo(key, int(found["size"]), _version(found))

    def _read_attributes(self, key: str) -> Mapping[str, Any]:
        full_key = self._full_key(key)
        with _translate_errors(self, key):
            self._fs.invalidate_cache(posixpath.dirname(full_key))
            found: Mapping[str, Any] = self._fs.info(full_key)
            if found["type"] != "file":
                raise FileNotFoundError(full_key)
            return found

    def get_memoryview(self, key: str, scratch: memoryview) -> memoryview:
        """Return a read-only view of a new buffer; `scratch` is not used."""
        return memoryview(self.get(key))

    def put(self, key: str, body: bytes | memoryview) -> None:
        """Write or replace the object, and create missing directories.

        Readers may see a part of it unless the file system writes atomically.
        """
        self._write(key, lambda full: self._fs.pipe_file(full, bytes(body)))

    def create(self, key: str, body: bytes) -> None:
        """Write the object if it is absent, atomically; see `Store.create`.

        Raises `AtomicCreateUnsupportedError` without a request if the file system does not
        implement `pipe_file(mode="create")` itself.
        """
        # It must implement mode="create" itself: the generic implementation of fsspec checks for
        # existence and then writes, which is not atomic.
        kind = type(self._fs)
        own = getattr(kind, "_pipe_file", None) or kind.pipe_file
        is_generic = own.__module__ in _GENERIC_FSSPEC_MODULES
        if is_generic or "mode" not in inspect.signature(own).parameters:
            raise _no_atomic_create_error(self.url, kind.__name__)
        self._write(key, lambda full: self._fs.pipe_file(full, bytes(body), mode="create"))

    def list(self, prefix: str = "", *, after: str = "") -> Iterator[ObjectInfo]:
        """Yield the objects of a folder, sorted by key; see `Store.list`.

        The cached listings of the file system are dropped first, because other machines write as
        well.
        """
        folder = self._full_key(prefix) if prefix else self._root
        with _translate_errors(self, folder):
            self._fs.invalidate_cache()  # fsspec caches listings; other machines write as well
            found = self._fs.find(folder, detail=True)
        yield from _sorted_objects(
            (
                ObjectInfo(path, int(info["size"] or 0), _version(info))
                for path, info in found.items()
                if path != folder
            ),
            self._root,
            after,
        )

    def delete(self, key: str) -> None:
        with suppress(NotFoundError), _translate_errors(self, key):
            self._fs.rm_file(self._full_key(key))

    def put_file(self, key: str, path: Path) -> None:
        # An unreadable source raises OSError here, and not an error of the store.
        with path.open("rb"):
            self._write(key, lambda full: self._fs.put_file(str(path), full))

    def get_file(self, key: str, path: Path) -> None:
        with atomic_write(path) as part, _translate_errors(self, key):
            self._fs.get_file(self._full_key(key), str(part))

    def subtree(self, prefix: str) -> Store:
        return FsspecStore(self._fs, self._full_key(prefix))

    def _full_key(self, key: str) -> str:
        return f"{self._root}/{validate_key(key)}"

    def _write(self, key: str, write: Callable[[str], object]) -> None:
        full_key = self._full_key(key)
        with _translate_errors(self, key):
            try:
                write(full_key)
            # Directories are created only if they are missed: a bucket has none, and s3fs would
            # spend a request on each call.
            except FileNotFoundError:
                self._fs.makedirs(posixpath.dirname(full_key), exist_ok=True)
                write(full_key)


class ArrowStore:
    """Objects over a pyarrow file system of the user, which has no atomic create."""

    def __init__(self, filesystem: Any, root: str) -> None:
        self._fs = filesystem
        self._root = root.rstrip("/")

    @property
    def url(self) -> str:
        """The type of the file system and the path of the root, such as `"hdfs://folder/runs"`."""
        return f"{self._fs.type_name}://{self._root.lstrip('/')}"

    def get(self, key: str) -> bytes:
        with _translate_errors(self, key), self._fs.open_input_file(self._full_key(key)) as file:
            return bytes(file.readall())

    def get_range(self, key: str, start: int, length: int, *, version: str = "") -> bytes:
        """Return a part of the object; see `Store.get_range`.

        The version is compared before the read: pyarrow has no conditional reads.
        """
        if version and self.head(key).version != version:
            raise changed_error(f"{key} in {self.url}")
        with _translate_errors(self, key), self._fs.open_input_file(self._full_key(key)) as file:
            start = min(start, file.size())
            return bytes(file.read_at(min(length, file.size() - start), start))

    def head(self, key: str) -> ObjectInfo:
        """Return size and version of the object; see `Store.head`."""
        with _translate_errors(self, key):
            found = self._fs.get_file_info(self._full_key(key))
            if not found.is_file:
                raise FileNotFoundError(found.path)
            return ObjectInfo(key, int(found.size), _arrow_version(found))

    def get_memoryview(self, key: str, scratch: memoryview) -> memoryview:
        """Return a read-only view of a new buffer; `scratch` is not used."""
        return memoryview(self.get(key))

    def put(self, key: str, body: bytes | memoryview) -> None:
        """Write or replace the object, and create missing directories.

        Readers may see a part of it unless the file system writes atomically.
        """
        with _translate_errors(self, key):
            # pyarrow creates no missing directories; for buckets this call does nothing or little.
            self._fs.create_dir(posixpath.dirname(self._full_key(key)), recursive=True)
            with self._fs.open_output_stream(self._full_key(key)) as file:
                file.write(body)

    def create(self, key: str, body: bytes) -> None:
        """Raise `AtomicCreateUnsupportedError`: pyarrow's file systems have no atomic create."""
        raise _no_atomic_create_error(self.url, f"pyarrow's {type(self._fs).__name__}")

    def list(self, prefix: str = "", *, after: str = "") -> Iterator[ObjectInfo]:
        from pyarrow.fs import FileSelector, FileType

        folder = self._full_key(prefix) if prefix else self._root
        with _translate_errors(self, prefix):
            found = self._fs.get_file_info(
                FileSelector(folder, recursive=True, allow_not_found=True)
            )
        files = (
            ObjectInfo(info.path, int(info.size), _arrow_version(info))
            for info in found
            if info.type == FileType.File
        )
        yield from _sorted_objects(files, self._root, after)

    def delete(self, key: str) -> None:
        with suppress(NotFoundError), _translate_errors(self, key):
            self._fs.delete_file(self._full_key(key))

    def put_file(self, key: str, path: Path) -> None:
        with path.open("rb") as source, _translate_errors(self, key):
            self._fs.create_dir(posixpath.dirname(self._full_key(key)), recursive=True)
            with self._fs.open_output_stream(self._full_key(key)) as sink:
                shutil.copyfileobj(source, sink, _COPY_CHUNK_BYTES)

    def get_file(self, key: str, path: Path) -> None:
        with (
            _translate_errors(self, key),
            self._fs.open_input_stream(self._full_key(key)) as source,
            atomic_write(path) as part,
            part.open("xb") as copy,
        ):
            shutil.copyfileobj(source, copy, _COPY_CHUNK_BYTES)

    def subtree(self, prefix: str) -> Store:
        return ArrowStore(self._fs, self._full_key(prefix))

    def _full_key(self, key: str) -> str:
        return f"{self._root}/{validate_key(key)}"


def _no_atomic_create_error(url: str, kind: str) -> AtomicCreateUnsupportedError:
    return AtomicCreateUnsupportedError(
        f"{kind} cannot create objects atomically: a run in {url} could have two leaders at once.",
        do="Pass the address as storage_path alone (s3://, gs://, az:// or a directory), or a "
        "file system of such a bucket from pyarrow.fs, s3fs, gcsfs or adlfs.",
    )


def _sorted_objects(files: Iterable[ObjectInfo], root: str, after: str) -> Iterator[ObjectInfo]:
    # Listings give the path with a leading '/' or without it, independently of the root's.
    prefix = f"{root.strip('/')}/"
    for found in sorted(files):
        key = found.key.lstrip("/").removeprefix(prefix)
        if key > after:
            yield found._replace(key=key)


# Attributes of files of fsspec that change with the content, the most precise first.
_VERSION_ATTRIBUTES = [
    "ETag",
    "etag",
    "blob_id",
    "mtime",
    "LastModified",
    "last_modified",
    "created",
]


def _version(found: Mapping[str, Any], like: str = "") -> str:
    """Return the version of a file of fsspec; with `like`, of the same attribute as that one.

    Listings and queries of a file may have different attributes.
    """
    names = (like.partition("=")[0],) if like else _VERSION_ATTRIBUTES
    name = next((name for name in names if found.get(name)), "size")
    value = found.get(name)
    # One file system may have both kinds of times.
    text = value.timestamp() if isinstance(value, datetime) else value
    return f"{name}={text}, {found['size']} bytes"


def _arrow_version(found: Any) -> str:
    return f"{found.mtime_ns or 0}-{found.size}"


@contextmanager
def _translate_errors(store: Store, key: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        what = f"{key} in {store.url}"
        # Both libraries raise the subclasses of OSError that the errors of a bucket correspond to.
        match error:
            case FileExistsError():
                raise AlreadyExistsError(
                    f"{what} already exists.", do=ALREADY_EXISTS_REMEDY
                ) from error
            case FileNotFoundError() | IsADirectoryError() | NotADirectoryError():
                raise NotFoundError(f"{what} does not exist.", do=NOT_FOUND_REMEDY) from error
            case PermissionError():
                raise StorePermissionError(
                    f"The credentials of the file system do not permit this operation on {what}.",
                    do=PERMISSION_REMEDY,
                ) from error
            case ConnectionError() | TimeoutError():
                raise TransientStoreError(
                    f"A request to the storage for {what} failed: {error}",
                    do=TRANSIENT_REMEDY,
                ) from error
            case _:
                raise StoreError(
                    f"The file system rejected a request for {what}: {error}",
                    do="Check storage_path and the configuration of storage_filesystem.",
                ) from error
