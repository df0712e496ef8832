"""Folders of shared memory. Each belongs to one process, and goes when that one is gone."""

from __future__ import annotations

import os
import tempfile
from contextlib import AbstractContextManager
from pathlib import Path

from spotfit.host.owned import owned

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - there is no other name for it


def folder_for(name: str) -> AbstractContextManager[Path]:
    """A folder of that name in shared memory while the block lasts, for this user alone.

    What owners have left that died before is removed first. Without shared memory it lies among
    the temporary files.
    """
    return owned(_best(), name)


def _best() -> Path:
    if SHARED_MEMORY.is_dir() and os.access(SHARED_MEMORY, os.W_OK):
        return SHARED_MEMORY
    return Path(tempfile.gettempdir())
