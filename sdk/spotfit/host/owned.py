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
"""The file that its owner keeps locked, and that names the owner's machine."""


@contextmanager
def owned(parent: Path, name: str) -> Iterator[Path]:
    """A folder of that name below `parent` while the block lasts, for this user alone.

    What owners have left there that died before, on this machine, is removed first. Each name is
    used once.
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
            os.pwrite(lock, _machine(), 0)  # now it is no orphan's, and was nobody's before
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def _remove_if_orphaned(folder: Path) -> None:
    """Only its owner's death frees the lock; on a disk that machines share each sees to its own."""
    with suppress(OSError):  # it goes meanwhile, or is not ours
        if not _is_own(folder):
            return
        lock = os.open(folder / _OWNER, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.pread(lock, 1024, 0) == _machine():
                shutil.rmtree(folder, ignore_errors=True)
                log.info("folder.freed", folder=str(folder))
        finally:
            os.close(lock)


def _is_own(folder: Path) -> bool:
    found = folder.lstat()
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()


def _machine() -> bytes:
    return os.uname().nodename.encode()
