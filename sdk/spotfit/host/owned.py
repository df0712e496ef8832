"""Folders that belong to one process each, and go when that one is gone."""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from spotfit.host import log

_OWNER = "owner"
"""The file that its owner keeps locked, and that says whose locks its lock is among."""
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@contextmanager
def owned(parent: Path, name: str) -> Iterator[Path]:
    """A folder of that name below `parent` while the block lasts, for this user alone.

    What owners have left there that died before, on this machine, be it in another container, is
    removed first. Each name is used once.
    """
    parent.mkdir(parents=True, exist_ok=True)
    prefix = f"spotfit-{os.getuid()}-"
    for left in parent.glob(f"{prefix}*"):
        _remove_if_orphaned(left)
    folder = parent / f"{prefix}{name}"
    folder.mkdir(mode=0o700)
    lock = os.open(folder / _OWNER, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        with suppress(OSError):  # without locks nobody names an owner, and nothing is swept
            fcntl.flock(lock, fcntl.LOCK_EX)
            # From now on it is somebody's; before, nobody took it for an orphan's.
            os.pwrite(lock, b"\n".join(_places(lock)), 0)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def _remove_if_orphaned(folder: Path) -> None:
    """Only its owner's death frees the lock; on a disk that machines share each sees to its own.

    No process is asked for: another container has others of the same number.
    """
    with suppress(OSError):  # it goes meanwhile, or is not ours
        if not _is_own(folder):
            return
        lock = os.open(folder / _OWNER, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if set(os.pread(lock, 1024, 0).split(b"\n")).intersection(_places(lock)):
                shutil.rmtree(folder, ignore_errors=True)
                log.info("folder.freed", folder=str(folder))
        finally:
            os.close(lock)


def _is_own(folder: Path) -> bool:
    found = folder.lstat()
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()


def _places(lock: int) -> list[bytes]:
    """Whoever has one of these in common sees that lock: the machine, by its name, of which each
    container has one of its own; and the kernel, as long as it runs, on the same file system."""
    places = [os.uname().nodename.encode()]
    with suppress(OSError):  # a kernel that does not say which it is
        places.append(f"{_BOOT_ID.read_text().strip()} {os.fstat(lock).st_dev}".encode())
    return places
