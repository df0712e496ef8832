"""Temporary directories that are filled once per node and shared by several processes.

File locks (flock) coordinate the processes: the kernel releases the lock of a killed process, so
a crash never blocks the others. Locks also exclude two blocks of one process from each other,
because each opens the lock file itself.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from spotfit.core.errors import StorePermissionError


@contextmanager
def shared_directory(directory: Path, fill: Callable[[Path], None]) -> Iterator[Path]:
    """Yield `directory`, filled by exactly one of its readers and removed by the last.

    `fill` writes into the directory that it is passed, which may hold the remains of a killed
    process. If it raises, `directory` does not appear, and the next reader calls `fill` again.
    """
    while True:
        lock = _lock_file(_reader_lock_path(directory), fcntl.LOCK_SH)
        if directory.is_dir():
            break
        os.close(lock)
        # Then again: the last reader may remove the directory before this process locks it.
        _fill_exclusively(directory, fill)
    try:
        yield directory
    finally:
        try:
            # Fails while another reader holds its lock: the last one removes the directory.
            with suppress(BlockingIOError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(directory, ignore_errors=True)
                _reader_lock_path(directory).unlink(missing_ok=True)
        finally:
            os.close(lock)


def fill_once(target: Path, lock_folder: Path, fill: Callable[[Path], None]) -> None:
    """Call `fill(target)`, unless another process finishes doing so during this call.

    Waits for the other process, and fills the target itself if that one fails. `lock_folder` must
    be private to this user.
    """
    name = hashlib.sha256(os.fsencode(target)).hexdigest()[:32]
    lock = os.open(lock_folder / f"{name}.filling", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        # The lock file counts completed fills. A count that grew while this process waited means
        # that the target is as new as the call; an unchanged one that it may be outdated.
        count_before = _fill_count(lock)
        fcntl.flock(lock, fcntl.LOCK_EX)
        count = _fill_count(lock)
        if count == count_before:
            fill(target)
            os.pwrite(lock, f"{count + 1}".encode(), 0)
    finally:
        os.close(lock)


def _fill_count(lock: int) -> int:
    return int(os.pread(lock, 32, 0) or b"0")


def private_folder(parent: Path) -> Path:
    """Return a folder below `parent` that only this user can access, and create it if absent.

    Raises `StorePermissionError` if the name exists but is not such a folder.
    """
    folder = parent / f"spotfit-checkpoints-{os.getuid()}"
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    # /tmp is shared: another user may have created the name first, also as a link (hence lstat).
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise StorePermissionError(
            f"The path {folder} is not a directory that only user {os.getuid()} can access: other "
            "users could change checkpoints in it.",
            do="Remove it, or set TMPDIR to a directory of your own.",
        )
    return folder


def _fill_exclusively(directory: Path, fill: Callable[[Path], None]) -> None:
    # A lock apart from the readers' lock: a process that waits for the directory to be filled
    # must not wait until a reader is done with it.
    part = directory.with_name(f"{directory.name}.part")
    fill_lock_path = directory.with_name(f"{directory.name}.fill")
    lock = _lock_file(fill_lock_path, fcntl.LOCK_EX)
    try:
        if not directory.is_dir():
            part.mkdir(parents=True, exist_ok=True)
            fill(part)
            part.rename(directory)  # atomic: readers see no directory or a complete one
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        _reader_lock_path(directory).unlink(missing_ok=True)
        raise
    finally:
        # Unlinked while it is locked: `_lock_file` of a waiting process detects that.
        fill_lock_path.unlink(missing_ok=True)
        os.close(lock)


def _lock_file(path: Path, operation: int) -> int:
    """Open and lock the file that is at `path` once the lock is held."""
    while True:
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(lock, operation)
        # The previous owner may have unlinked the file while this process waited: then a lock on
        # it excludes no one who opens the path now.
        with suppress(FileNotFoundError):
            if os.path.samestat(path.stat(), os.fstat(lock)):
                return lock
        os.close(lock)


def _reader_lock_path(directory: Path) -> Path:
    return directory.with_name(f"{directory.name}.lock")
