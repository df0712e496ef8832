"""Rows in files of a local directory, which the processes of a user on a machine share.

| path                     | content                                                               |
|--------------------------|-----------------------------------------------------------------------|
| `lock`                   | the size of all files; locked while one is created, renamed, removed  |
| `<group>/lock`           | empty; locked (shared) by processes that use the group; its time is   |
|                          | that of the last use                                                  |
| `<group>/<name>`         | a header, and rows in the IPC format of Arrow                         |
| `<group>/<name>.<n>.new` | the same, incomplete; locked by its writer                            |

A group has the rows of one dataset. The size of a file counts before it is written, so that the
limit also holds while several processes write. Only files of groups that no process uses are
removed for others: the order of an epoch is random, so a file of the same dataset that was used
long ago is as likely to be needed next as any other.

A file is read into memory and verified, not mapped: a mapped file that another program truncates
ends the process, and one that it changes after the verification has other rows.
"""

from __future__ import annotations

import fcntl
import hashlib
import itertools
import os
import stat
import struct
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from spotfit.host import log
from spotfit.store.transfer import compute_content_hash

_HEADER = struct.Struct("<16s32s16s")
"""Format, SHA-256 of group and name, content hash of the rows. With 64 bytes, the buffers of Arrow
stay aligned."""
_FORMAT = b"spotfit rows 1\0\0"
_TOTAL = struct.Struct("<q")
_LOCK = "lock"
_INCOMPLETE = ".new"
_MAX_FILE_BYTES = 2**31 - 1
"""The content hash is defined below 2 GiB."""
_MAX_RESERVE_BYTES = 2**30
"""Free space that is left to other programs, or 10 % of a smaller disk: checkpoints need it."""
_FREED_SHARE = 20
"""Files are removed until a 20th of the limit is free, because every removal counts all files."""
_REFUSED_WRITES = 255
"""Writes that are skipped after one that found no space, before the next one looks for it."""


class CacheFiles:
    """The files of one group. Thread-safe; several processes may use the same directory.

    Methods raise nothing for what the disk or other programs do: rows are then computed again.

    Args:
        root: The directory; it is created, for this user only.
        group: Name of the subdirectory, which identifies the rows.
        limit_bytes: Limit on the files of all groups together.

    Raises `OSError` if the directory cannot be used, or if others can write to it.
    """

    def __init__(self, root: Path, group: str, limit_bytes: int) -> None:
        self._root = root
        self._group = group
        self._folder = root / group
        self._limit_bytes = limit_bytes
        self._numbers = itertools.count()
        self._skipped_writes = 0
        self._is_writable = True
        self._is_full = False
        _make_private(root)
        with self._locked() as total:
            self._folder.mkdir(mode=0o700, exist_ok=True)
            self._in_use = _open_lock(self._folder)
            weakref.finalize(self, os.close, self._in_use)
            # At once: the exclusive lock is only taken together with that of the root.
            fcntl.flock(self._in_use, fcntl.LOCK_SH)
            os.utime(self._in_use)
            if total.size_bytes > limit_bytes:  # the limit was higher before
                self._make_space(total, 0)

    def contains(self, name: str) -> bool:
        """Whether there is a file of this name, which may be damaged."""
        return (self._folder / name).exists()

    def read(self, name: str) -> pa.Table | None:
        """Return the rows; None if there is no file, or if it is not what was written."""
        path = self._folder / name
        try:
            body = _read_file(path)
            if body is None:
                return None
            table = self._decode(name, body)
            os.utime(self._in_use)
        except (OSError, ValueError) as error:  # pa.ArrowInvalid is a ValueError
            log.warning("data.cache_file_damaged", file=str(path), reason=str(error))
            self._remove(path)
            return None
        return table

    def write(self, name: str, table: pa.Table) -> None:
        """Write the rows, if there is space and no such file."""
        if not self._is_writable:
            return
        if self._skipped_writes:
            self._skipped_writes -= 1
            return
        try:
            self._write(name, table)
        except OSError as error:
            self._is_writable = False
            log.warning("data.cache_not_written", directory=str(self._root), reason=str(error))

    def _decode(self, name: str, body: pa.Buffer) -> pa.Table:
        content = body[_HEADER.size :]
        # Also compared with the name: a program may have copied one file to the name of another.
        if body[: _HEADER.size].to_pybytes() != self._header(name, content):
            raise ValueError("it is not what was written")
        with pa.ipc.open_stream(content) as reader:
            return reader.read_all()

    def _header(self, name: str, content: pa.Buffer) -> bytes:
        identity = hashlib.sha256(f"{self._group}/{name}".encode()).digest()
        content_hash = bytes.fromhex(compute_content_hash(memoryview(content).cast("B")))
        return _HEADER.pack(_FORMAT, identity, content_hash)

    def _write(self, name: str, table: pa.Table) -> None:
        content = _encode(table)
        size_bytes = _HEADER.size + content.size
        if size_bytes > _MAX_FILE_BYTES:
            return
        unfinished = self._folder / f"{name}.{os.getpid()}-{next(self._numbers)}{_INCOMPLETE}"
        descriptor = self._create(unfinished, size_bytes)
        if descriptor is None:
            self._skipped_writes = _REFUSED_WRITES
            return
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(self._header(name, content))
                file.write(content)
                file.flush()
                # Before the file is closed, which releases its lock.
                self._rename(unfinished, self._folder / name)
        except OSError:
            self._remove(unfinished)
            raise

    def _create(self, path: Path, size_bytes: int) -> int | None:
        """Create and lock a file of this size; return its descriptor, or None without space."""
        with self._locked() as total:
            if total.size_bytes + size_bytes > self._limit_bytes:
                self._make_space(total, size_bytes)
            if total.size_bytes + size_bytes > self._limit_bytes:
                self._report_full(total, "the limit is reached")
                return None
            if _free_bytes(self._root) < size_bytes:
                self._report_full(total, "the disk has no more space")
                return None
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            descriptor = os.open(path, flags, 0o600)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX)
                os.ftruncate(descriptor, size_bytes)
            except OSError:
                os.close(descriptor)
                path.unlink()
                raise
            total.size_bytes += size_bytes
            return descriptor

    def _rename(self, unfinished: Path, path: Path) -> None:
        with self._locked() as total:
            if path.exists():  # another process was first
                total.size_bytes -= _unlink(unfinished)
            else:
                unfinished.rename(path)

    def _remove(self, path: Path) -> None:
        """Remove a file, if it exists and can be removed."""
        with suppress(OSError), self._locked() as total:
            total.size_bytes -= _unlink(path)

    def _report_full(self, total: _Total, reason: str) -> None:
        if not self._is_full:
            self._is_full = True
            log.info(
                "data.cache_full",
                place=str(self._root),
                size_bytes=total.size_bytes,
                limit_bytes=self._limit_bytes,
                reason=f"{reason}; other rows are read and computed in every epoch",
            )

    def _make_space(self, total: _Total, size_bytes: int) -> None:
        """Remove files that no process uses, then files of this group beyond the limit.

        Requires the lock of the root. Corrects the total.
        """
        groups = _read_groups(self._root)
        total.size_bytes = sum(group.size_bytes for group in groups)
        goal = max(self._limit_bytes - size_bytes - self._limit_bytes // _FREED_SHARE, 0)
        if total.size_bytes + size_bytes > self._limit_bytes:
            for group in sorted(groups, key=lambda one: one.used_at_ns):
                total.size_bytes -= group.remove_unused(total.size_bytes - goal)
        for group in groups:
            if group.folder == self._folder:
                total.size_bytes -= group.remove(total.size_bytes - self._limit_bytes)

    @contextmanager
    def _locked(self) -> Iterator[_Total]:
        """Hold the lock of the directory, and store the total at the end. Raises `OSError`."""
        descriptor = _open_lock(self._root)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            stored = os.pread(descriptor, _TOTAL.size, 0)
            is_known = len(stored) == _TOTAL.size
            size_bytes = _TOTAL.unpack(stored)[0] if is_known else _count_bytes(self._root)
            total = _Total(size_bytes)
            # If this process is killed, or an error occurs, the next one counts the files.
            os.ftruncate(descriptor, 0)
            yield total
            os.pwrite(descriptor, _TOTAL.pack(total.size_bytes), 0)
        finally:
            _unlock(descriptor)


@dataclass
class _Total:
    """The size of the files of all groups, which the holder of the lock may change."""

    size_bytes: int


@dataclass(frozen=True)
class _Group:
    folder: Path
    used_at_ns: int
    files: dict[Path, int]
    """Sizes in bytes."""

    @property
    def size_bytes(self) -> int:
        return sum(self.files.values())

    def remove(self, size_bytes: int) -> int:
        """Remove complete files of at least this size together; return their actual size."""
        removed_bytes = 0
        for path, file_bytes in self.files.items():
            if removed_bytes >= size_bytes:
                break
            if not path.name.endswith(_INCOMPLETE):
                path.unlink(missing_ok=True)
                removed_bytes += file_bytes
        return removed_bytes

    def remove_unused(self, size_bytes: int) -> int:
        """Call `remove` if no process uses the group; removes the directory once it is empty."""
        if size_bytes <= 0:
            return 0
        lock = _open_lock(self.folder)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            removed_bytes = self.remove(size_bytes)
            if removed_bytes == self.size_bytes:
                with suppress(OSError):  # there is a file of another program
                    (self.folder / _LOCK).unlink()
                    self.folder.rmdir()
            return removed_bytes
        except BlockingIOError:
            return 0
        finally:
            _unlock(lock)


def _make_private(root: Path) -> None:
    """Create the directory. Raises `OSError` unless only this user can write to it."""
    root.parent.mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError):
        root.mkdir(mode=0o700)
    # The parent may be world-writable: not a link or a directory of another user.
    status = root.lstat()
    is_own = stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()
    if not is_own or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionError(f"{root} is not a directory that only this user can write to")


def _open_lock(folder: Path) -> int:
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    return os.open(folder / _LOCK, flags, 0o600)


def _unlock(descriptor: int) -> None:
    """Release the lock of a file, and close it."""
    try:
        # Not by the closing alone: a process that was forked meanwhile has the file open, too.
        fcntl.flock(descriptor, fcntl.LOCK_UN)
    finally:
        os.close(descriptor)


def _free_bytes(folder: Path) -> int:
    """Return the space that the cache may use, without the reserve."""
    disk = os.statvfs(folder)
    reserve_bytes = min(_MAX_RESERVE_BYTES, disk.f_blocks * disk.f_frsize // 10)
    return disk.f_bavail * disk.f_frsize - reserve_bytes


def _encode(table: pa.Table) -> pa.Buffer:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue()


def _read_file(path: Path) -> pa.Buffer | None:
    """Return the content; None if there is no file. Raises `OSError`, and `ValueError`."""
    try:
        # Without O_NONBLOCK, a named pipe would block.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    with os.fdopen(descriptor, "rb", buffering=0) as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
            raise ValueError("it is not a file of this user")
        if not _HEADER.size < status.st_size <= _MAX_FILE_BYTES:
            raise ValueError(f"it has {status.st_size} bytes")
        body = pa.allocate_buffer(status.st_size)
        view = memoryview(body)
        while view:
            count = file.readinto(view)
            if not count:
                raise ValueError("it was truncated")
            view = view[count:]
    return body


def _unlink(path: Path) -> int:
    """Remove a file and return its size. Raises `OSError`."""
    size_bytes = path.lstat().st_size
    path.unlink()
    return size_bytes


def _count_bytes(root: Path) -> int:
    return sum(group.size_bytes for group in _read_groups(root))


def _read_groups(root: Path) -> list[_Group]:
    """Return all groups. Removes files whose writers have ended before they were complete."""
    groups = []
    for folder in root.iterdir():
        if folder.is_symlink() or not folder.is_dir():
            continue
        files, used_at_ns = dict[Path, int](), 0
        for path in folder.iterdir():
            status = path.lstat()
            if path.name == _LOCK:
                used_at_ns = status.st_mtime_ns
            elif not stat.S_ISDIR(status.st_mode) and not _remove_abandoned(path):
                files[path] = status.st_size
        groups.append(_Group(folder, used_at_ns, files))
    return groups


def _remove_abandoned(path: Path) -> bool:
    """Remove an incomplete file whose writer has ended; return whether it was one."""
    if not path.name.endswith(_INCOMPLETE):
        return False
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    else:
        path.unlink()
        return True
    finally:
        _unlock(descriptor)
