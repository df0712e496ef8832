"""A directory of this machine, or one several machines mount. It needs no driver and no thread.

That makes it quick, and as safe after a fork as before. `create` rests on `link(2)`, which is
atomic on every POSIX file system, NFS included; where there are no hard links it says so.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from spotfit.core.errors import (
    AlreadyExistsError,
    NotFoundError,
    StoreError,
    StorePermissionError,
    TransientStoreError,
    UntrustworthyStoreError,
)
from spotfit.store.api import ObjectInfo, Store
from spotfit.store.parts import appearing, beside
from spotfit.store.url import PART_NAME, RootUrl, checked_key

_NO_HARD_LINKS = frozenset({errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP, errno.EMLINK})
_PASSING = frozenset({errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EAGAIN, errno.EINTR})
_FORBIDDEN = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})
_COPIED_AT_ONCE = 4 * 2**20
_TRIES_AGAINST_TIDYING = 100
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})


class LocalStore:
    """Objects as files. Folders are made when needed and go with their last object."""

    def __init__(self, root: RootUrl) -> None:
        self._root = root
        self._directory = Path(root.path)

    @property
    def url(self) -> str:
        return str(self._root)

    def get(self, key: str) -> bytes:
        with self._telling(key, reading=True):
            return self._file(key).read_bytes()

    def get_range(self, key: str, start: int, length: int) -> bytes:
        with self._telling(key, reading=True), self._file(key).open("rb") as file:
            return os.pread(file.fileno(), length, start)

    def view(self, key: str, spare: memoryview) -> memoryview:
        with self._telling(key, reading=True), self._file(key).open("rb", buffering=0) as file:
            size_bytes = os.fstat(file.fileno()).st_size
            if size_bytes > len(spare):
                return memoryview(file.read())
            at = 0
            while read := file.readinto(spare[at:size_bytes]):
                at += read
            return spare[:at]

    def put(self, key: str, body: bytes | memoryview) -> None:
        self._replace(key, lambda part: part.write_bytes(body))

    def create(self, key: str, body: bytes) -> None:
        with self._telling(key):
            part = _in_its_folder(self._file(key), lambda part: part.write_bytes(body))
            try:
                _link(part, self._file(key))
            finally:
                part.unlink(missing_ok=True)

    def list(self, prefix: str = "", *, after: str = "") -> Iterator[ObjectInfo]:
        folder = checked_key(prefix) if prefix else ""
        with self._telling(folder):
            found = sorted(_objects_in(self._directory / folder, f"{folder}/" if folder else ""))
        return (item for item in found if item.key > after)

    def delete(self, key: str) -> None:
        file = self._file(key)
        with self._telling(key), suppress(FileNotFoundError, NotADirectoryError):
            file.unlink()
            self._remove_empty(file.parent)

    def put_file(self, key: str, path: Path) -> None:
        with path.open(
            "rb"
        ):  # a file that cannot be read is the caller's trouble, told as an OSError
            self._replace(key, lambda part: shutil.copyfile(path, part))

    def get_file(self, key: str, path: Path) -> None:
        with self._telling(key, reading=True):
            source = self._file(key).open("rb")
        with source, appearing(path) as part, part.open("xb") as copy:
            shutil.copyfileobj(source, copy, _COPIED_AT_ONCE)

    def under(self, prefix: str) -> Store:
        return LocalStore(self._root.below(prefix))

    def _file(self, key: str) -> Path:
        return self._directory / checked_key(key)

    def _replace(self, key: str, write: Callable[[Path], object]) -> None:
        file = self._file(key)
        with self._telling(key):
            part = _in_its_folder(file, write)
            try:
                part.replace(file)
            except OSError:
                part.unlink(missing_ok=True)
                raise

    def _remove_empty(self, folder: Path) -> None:
        with suppress(OSError):  # not empty, or somebody was quicker: both end the walk
            while folder != self._directory:
                folder.rmdir()
                folder = folder.parent

    @contextmanager
    def _telling(self, key: str, *, reading: bool = False) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise _ours(error, f"{key or 'the folder'} in {self.url}", reading=reading) from error


def _in_its_folder(file: Path, write: Callable[[Path], object]) -> Path:
    """A half written neighbour of `file`; its folder is made, even while others tidy it away."""
    part = beside(file)
    for _ in range(_TRIES_AGAINST_TIDYING):
        try:
            return _written(part, write)
        except FileNotFoundError:
            with suppress(FileExistsError, FileNotFoundError):  # tidied away while it is made
                file.parent.mkdir(parents=True, exist_ok=True)
    return _written(part, write)


def _written(part: Path, write: Callable[[Path], object]) -> Path:
    try:
        write(part)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    return part


def _link(part: Path, file: Path) -> None:
    try:
        os.link(part, file)
    except OSError as error:
        if error.errno not in _NO_HARD_LINKS:
            raise
        raise UntrustworthyStoreError(
            f"The file system of {file.parent} has no hard links, so nothing can be created there "
            "in such a way that only one writer wins.",
            do="Store the run on another file system, or in a bucket.",
        ) from error


def _objects_in(folder: Path, prefix: str) -> Iterator[ObjectInfo]:
    """All files below; what vanishes meanwhile is gone, and linked folders are not entered."""
    with suppress(FileNotFoundError, NotADirectoryError), os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                yield from _objects_in(Path(entry.path), f"{prefix}{entry.name}/")
            elif entry.is_file() and not entry.name.startswith(PART_NAME):
                with suppress(FileNotFoundError):
                    yield ObjectInfo(prefix + entry.name, entry.stat().st_size)


def _ours(error: OSError, what: str, *, reading: bool) -> StoreError:
    code = error.errno
    if isinstance(error, FileExistsError):
        return AlreadyExistsError(f"{what} is there already.")
    absent = (FileNotFoundError, IsADirectoryError, NotADirectoryError)
    if reading and isinstance(error, absent):
        return NotFoundError(f"There is no {what}.")
    if code in _FORBIDDEN:
        return StorePermissionError(
            f"This process may not {'read' if reading else 'write'} {what}: {error.strerror}.",
            do="Give its user the right to, or choose another storage_path.",
        )
    if code in _FULL:
        return StoreError(f"There is no room left for {what}.", do="Free some space on that disk.")
    if code in _PASSING:
        return TransientStoreError(f"The file system failed at {what}: {error.strerror}.")
    return StoreError(f"The file system refused {what}: {error.strerror or error}.")
