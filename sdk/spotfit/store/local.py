"""A store in a directory, local or mounted by several machines, and atomic file writes.

`create` uses `link(2)`, which is atomic on every POSIX file system, including NFS; on a file
system without hard links it raises an error. No threads are used, so that a fork is safe.

A store in the memory of one process, for tests and simulations.

It has no lock: each operation is a single, atomic operation of a dict, so a fork cannot inherit a
locked lock.
"""

from __future__ import annotations

import errno
import hashlib
import itertools
import os
import re
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from spotfit.core.errors import (
    AlreadyExistsError,
    AtomicCreateUnsupportedError,
    NotFoundError,
    StoreError,
    StorePermissionError,
    TransientStoreError,
)
from spotfit.store.api import (
    ALREADY_EXISTS_REMEDY,
    NOT_FOUND_REMEDY,
    ObjectInfo,
    Store,
    changed_error,
)
from spotfit.store.url import PARTIAL_FILE_PREFIX, RootUrl, validate_file_key, validate_key

_NO_HARD_LINK_ERRNOS = frozenset({errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP, errno.EMLINK})
_TRANSIENT_ERRNOS = frozenset(
    {
        errno.EIO,
        errno.ESTALE,
        errno.ETIMEDOUT,
        # Of a network file system whose server or local process does not answer.
        errno.ENOTCONN,
        errno.ECONNREFUSED,
        errno.ECONNRESET,
        errno.ECONNABORTED,
        errno.EHOSTDOWN,
        errno.EHOSTUNREACH,
        errno.ENETDOWN,
        errno.ENETUNREACH,
        errno.ENODEV,
        errno.ENOMEM,
        errno.EAGAIN,
        errno.EINTR,
        errno.EMFILE,
        errno.ENFILE,
    }
)
_FORBIDDEN_ERRNOS = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})
_COPY_CHUNK_BYTES = 4 * 2**20
# Another process may remove the empty directory between mkdir and the write, repeatedly in
# theory. A hundred attempts fail only if something else is wrong.
_MKDIR_ATTEMPTS = 100
_DISK_FULL_ERRNOS = frozenset({errno.ENOSPC, errno.EDQUOT})


class LocalStore:
    """Objects as files. Directories are created as needed and removed with their last object."""

    def __init__(self, root: RootUrl) -> None:
        self._root = root
        self._directory = Path(root.path)

    @property
    def url(self) -> str:
        """The absolute path of the root directory, for example `"/mnt/shared/runs/my-run"`."""
        return str(self._root)

    def get(self, key: str) -> bytes:
        with self._translate_errors(key, is_read=True):
            return self._object_path(key).read_bytes()

    def written_at_ms(self, key: str) -> int:
        """Return when the file was written, by the file server's clock in ms since 1970."""
        with self._translate_errors(key, is_read=True):
            return self._object_path(key).stat().st_mtime_ns // 1_000_000

    def get_range(self, key: str, start: int, length: int, *, version: str = "") -> bytes:
        with self._translate_errors(key, is_read=True), self._object_path(key).open("rb") as file:
            file.seek(start)
            body = file.read(length)
            # After the read, which detects changes during the read as well.
            if version and _file_version(os.fstat(file.fileno())) != version:
                raise changed_error(f"{key} in {self.url}")
            return body

    def head(self, key: str) -> ObjectInfo:
        """Return size and version of the file; see `Store.head`."""
        path = self._object_path(key)
        with self._translate_errors(key, is_read=True):
            found = path.stat()
            if not stat.S_ISREG(found.st_mode):
                raise FileNotFoundError(errno.ENOENT, "not a file", str(path))
            return ObjectInfo(key, found.st_size, _file_version(found))

    def get_memoryview(self, key: str, scratch: memoryview) -> memoryview:
        """Return a part of `scratch` if the object fits into it, otherwise a new buffer."""
        with (
            self._translate_errors(key, is_read=True),
            self._object_path(key).open("rb", buffering=0) as file,
        ):
            # The open file stays the same object, even if put() replaces its name meanwhile.
            size_bytes = os.fstat(file.fileno()).st_size
            if size_bytes > len(scratch):
                return memoryview(file.read())
            end = 0
            while read := file.readinto(scratch[end:size_bytes]):
                end += read
            return scratch[:end]

    def put(self, key: str, body: bytes | memoryview) -> None:
        """Write or replace the object, and create missing directories; atomic by a rename."""
        self._write_atomically(key, lambda part: part.write_bytes(body))

    def create(self, key: str, body: bytes) -> None:
        """Write the object if it is absent, atomically; see `Store.create`.

        Raises `AtomicCreateUnsupportedError` if the file system does not support hard links.
        """
        file = self._object_path(key)
        with self._translate_errors(key):
            # A temporary file first: link() then makes it visible complete, or fails.
            part = _write_temporary(file, lambda part: part.write_bytes(body))
            try:
                os.link(part, file)
            except OSError as error:
                if error.errno not in _NO_HARD_LINK_ERRNOS:
                    raise
                raise AtomicCreateUnsupportedError(
                    f"The file system of {file.parent} does not support hard links, which are "
                    "needed to create files atomically.",
                    do="Set storage_path to a file system with hard links, or to a bucket.",
                ) from error
            finally:
                part.unlink(missing_ok=True)

    def list(self, prefix: str = "", *, after: str = "") -> Iterator[ObjectInfo]:
        """Return an iterator over all objects of a folder, sorted by key; see `Store.list`.

        The directory is read completely by the call, which therefore raises all errors.
        """
        folder = validate_key(prefix) if prefix else ""
        with self._translate_errors(folder):
            # Read completely: sorted by key, which is not the order of directories and files.
            found = sorted(_walk_objects(self._directory / folder, f"{folder}/" if folder else ""))
        return (item for item in found if item.key > after)

    def delete(self, key: str) -> None:
        """Delete the object, and the directories below the root that are empty afterwards.

        Does nothing if a directory of the key is a link: what it points to is not of this store.
        """
        file = self._object_path(key)
        depth = len(file.relative_to(self._directory).parents) - 1
        if any(folder.is_symlink() for folder in file.parents[:depth]):
            return
        with self._translate_errors(key), suppress(FileNotFoundError, NotADirectoryError):
            file.unlink()
            folder = file.parent
            with suppress(OSError):  # not empty, or removed by another process
                while folder != self._directory:
                    folder.rmdir()
                    folder = folder.parent

    def put_file(self, key: str, path: Path) -> None:
        """Copy a local file to the object, atomically. Raises `OSError` if it cannot be read."""
        # An unreadable source raises OSError here, and not an error of the store.
        with path.open("rb"):
            self._write_atomically(key, lambda part: shutil.copyfile(path, part))

    def get_file(self, key: str, path: Path) -> None:
        """Copy the object to a local file, which is written atomically; see `Store.get_file`."""
        with self._translate_errors(key, is_read=True):
            source = self._object_path(key).open("rb")
        with source, atomic_write(path) as part, part.open("xb") as copy:
            shutil.copyfileobj(source, copy, _COPY_CHUNK_BYTES)

    def subtree(self, prefix: str) -> Store:
        """Return the store of the folder `prefix`, which need not exist."""
        return LocalStore(self._root.join(prefix))

    def _object_path(self, key: str) -> Path:
        return self._directory / validate_file_key(key)

    def _write_atomically(self, key: str, write: Callable[[Path], object]) -> None:
        file = self._object_path(key)
        with self._translate_errors(key):
            part = _write_temporary(file, write)
            try:
                part.replace(file)
            except OSError:
                part.unlink(missing_ok=True)
                raise

    @contextmanager
    def _translate_errors(self, key: str, *, is_read: bool = False) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise _to_store_error(
                error, f"{key or 'the directory'} in {self.url}", is_read=is_read
            ) from error


def _write_temporary(file: Path, write: Callable[[Path], object]) -> Path:
    """Write a temporary file beside `file` and return its path; creates the directory."""
    part = temporary_path(file)
    for attempts_left in reversed(range(_MKDIR_ATTEMPTS + 1)):
        try:
            write(part)
            break
        except FileNotFoundError:
            if not attempts_left:
                raise
            # A delete() in another process may remove a parent at the same time.
            with suppress(FileExistsError, FileNotFoundError):
                file.parent.mkdir(parents=True, exist_ok=True)
        except BaseException:
            part.unlink(missing_ok=True)
            raise
    return part


def _walk_objects(folder: Path, prefix: str) -> Iterator[ObjectInfo]:
    """Yield all files below. Skips linked directories, and files deleted meanwhile."""
    with suppress(FileNotFoundError, NotADirectoryError), os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                yield from _walk_objects(Path(entry.path), f"{prefix}{entry.name}/")
            elif entry.is_file() and not entry.name.startswith(PARTIAL_FILE_PREFIX):
                with suppress(FileNotFoundError):
                    found = entry.stat()
                    yield ObjectInfo(prefix + entry.name, found.st_size, _file_version(found))


def _file_version(found: os.stat_result) -> str:
    return f"{found.st_mtime_ns}-{found.st_size}"


def _to_store_error(error: OSError, what: str, *, is_read: bool) -> StoreError:
    code = error.errno
    operation = "read" if is_read else "write"
    # NotFoundError only for reads: a write that misses its directory has failed otherwise.
    if isinstance(error, FileExistsError):
        return AlreadyExistsError(f"{what} already exists.", do=ALREADY_EXISTS_REMEDY)
    absent = (FileNotFoundError, IsADirectoryError, NotADirectoryError)
    if is_read and isinstance(error, absent):
        return NotFoundError(f"{what} does not exist.", do=NOT_FOUND_REMEDY)
    if code in _FORBIDDEN_ERRNOS:
        return StorePermissionError(
            f"This process has no permission to {operation} {what}: {error.strerror}.",
            do="Grant the permission to the user of the process, or choose another storage_path.",
        )
    if code in _DISK_FULL_ERRNOS:
        return StoreError(
            f"The disk is full: {what} could not be written.",
            do="Delete files that are not needed from the disk, or choose another storage_path.",
        )
    if code in _TRANSIENT_ERRNOS:
        return TransientStoreError(
            f"The file system failed to {operation} {what}: {error.strerror}.",
            do="Try again. If it fails again, check the disk or the network file system.",
        )
    return StoreError(
        f"Failed to {operation} {what}: {error.strerror or error}.",
        do="Check the path and its file system, or choose another storage_path.",
    )


_temporary_counter = itertools.count()
_PARTIAL_FILE_NAME = re.compile(rf"{re.escape(PARTIAL_FILE_PREFIX)}\d+-\d+-[0-9a-f]{{6}}")


@contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """Yield a temporary path in the same directory; rename it to `path` after the block.

    The block creates the file at the yielded path; it does not exist yet. The directory must exist.
    An existing `path` is replaced. Readers see the old or the new file, never a part. If the block
    raises, the temporary file is deleted; if the process is killed, it stays and is ignored by
    stores and uploads.
    """
    part = temporary_path(path)
    try:
        yield part
        part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def is_partial_file(name: str) -> bool:
    """Whether a file of this name (without directory) is a temporary file of `atomic_write`.

    `upload_tree` skips such files: a download that was killed may have left them.
    """
    return _PARTIAL_FILE_NAME.fullmatch(name) is not None


def temporary_path(path: Path) -> Path:
    """Return an unused path in the directory of `path`, unique among all processes and machines.

    Nothing is created. The name starts with `PARTIAL_FILE_PREFIX`, so that stores do not list the
    file.
    """
    # The process id is not unique on a directory that several machines mount; hence random bytes.
    return path.with_name(
        f"{PARTIAL_FILE_PREFIX}{os.getpid()}-{next(_temporary_counter)}-{os.urandom(3).hex()}"
    )


# --- A store in the memory of one process, for tests and simulations ------------------------------


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
        """The address, for example `"memory://name/folder"`, or `"memory://private"`."""
        return str(self._root)

    def get(self, key: str) -> bytes:
        try:
            return self._objects[self._full_key(key)][0]
        except KeyError:
            raise NotFoundError(
                f"{key} does not exist in {self.url}.", do=NOT_FOUND_REMEDY
            ) from None

    def get_range(self, key: str, start: int, length: int, *, version: str = "") -> bytes:
        body = self.get(key)
        if version and body_version(body) != version:
            raise changed_error(f"{key} in {self.url}")
        return body[start : start + length]

    def head(self, key: str) -> ObjectInfo:
        """Return size and version of the object; see `Store.head`."""
        body = self.get(key)
        return ObjectInfo(key, len(body), body_version(body))

    def get_memoryview(self, key: str, scratch: memoryview) -> memoryview:
        """Return a read-only view of the stored bytes, without a copy; `scratch` is not used."""
        return memoryview(self.get(key))

    def put(self, key: str, body: bytes | memoryview) -> None:
        self._objects[self._full_key(key)] = (bytes(body),)

    def create(self, key: str, body: bytes) -> None:
        entry = (bytes(body),)
        if self._objects.setdefault(self._full_key(key), entry) is not entry:
            raise AlreadyExistsError(
                f"{key} already exists in {self.url}.", do=ALREADY_EXISTS_REMEDY
            )

    def list(self, prefix: str = "", *, after: str = "") -> Iterator[ObjectInfo]:
        folder = f"{self._full_key(prefix)}/" if prefix else self._key_prefix()
        skip = len(self._key_prefix())
        # A copy of the keys first: other threads may change the dict during the iteration.
        for full_key in sorted(key for key in tuple(self._objects) if key.startswith(folder)):
            entry = self._objects.get(full_key)
            if entry is not None and full_key[skip:] > after:
                yield ObjectInfo(full_key[skip:], len(entry[0]), body_version(entry[0]))

    def delete(self, key: str) -> None:
        self._objects.pop(self._full_key(key), None)

    def put_file(self, key: str, path: Path) -> None:
        self.put(key, path.read_bytes())

    def get_file(self, key: str, path: Path) -> None:
        body = self.get(key)
        with atomic_write(path) as part:
            part.write_bytes(body)

    def subtree(self, prefix: str) -> Store:
        """Return a store of the folder `prefix`, which shares the objects with this one."""
        if self._is_named:
            return MemoryStore(self._root.join(prefix))
        return _make_private_store(self._root.join(prefix), self._objects)

    def _full_key(self, key: str) -> str:
        return self._key_prefix() + validate_key(key)

    def _key_prefix(self) -> str:
        return f"{self._root.prefix}/" if self._root.prefix else ""


def body_version(body: bytes) -> str:
    """Return the version of an object in memory: a hash of its content."""
    return hashlib.blake2b(body, digest_size=8).hexdigest()


def _make_private_store(root: RootUrl, objects: ObjectsByKey) -> MemoryStore:
    store = MemoryStore()
    store._root, store._objects = root, objects  # noqa: SLF001 - an alternative constructor
    return store
