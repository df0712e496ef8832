"""Folders of shared memory. Each belongs to one process, and goes when that one is gone."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from spotfit.host import log

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - there is no other name for it
_OWNER = "owner"


@contextmanager
def folder_for(name: str, parent: Path | None = None) -> Iterator[Path]:
    """A folder of that name in shared memory while the block lasts, for this user alone.

    What owners have left that died before is removed first. Without shared memory it lies among
    the temporary files.
    """
    above = parent or _best()
    prefix = f"spotfit-{os.getuid()}-"
    for left in above.glob(f"{prefix}*"):
        _remove_if_orphaned(left)
    folder = above / f"{prefix}{name}"
    folder.mkdir(mode=0o700, exist_ok=True)
    lock = os.open(folder / _OWNER, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def _best() -> Path:
    if SHARED_MEMORY.is_dir() and os.access(SHARED_MEMORY, os.W_OK):
        return SHARED_MEMORY
    return Path(tempfile.gettempdir())


def _remove_if_orphaned(folder: Path) -> None:
    """Only its owner's death frees the lock."""
    with suppress(OSError):  # it goes meanwhile, or is not ours
        lock = os.open(folder / _OWNER, os.O_RDWR | os.O_CLOEXEC)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
            log.info("shared_memory.freed", folder=str(folder))
        finally:
            os.close(lock)
