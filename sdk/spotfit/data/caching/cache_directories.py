"""Where the files of cached rows are: in a directory of the user, of the run, or of the process."""

from __future__ import annotations

import atexit
import functools
import os
import secrets
import tempfile
from contextlib import ExitStack
from pathlib import Path

from spotfit.data.caching.cache_files import CacheFiles
from spotfit.host import env
from spotfit.host.owned_dirs import owned_directory

_RUN_FOLDER = "data_cache"


class _RunDirectory:
    path: Path | None = None
    """The directory of the run; None: each process has a temporary one."""


def set_scratch_directory(scratch: str) -> None:
    """Keep files in the scratch directory of a run, which its processes on this machine share."""
    _RunDirectory.path = Path(scratch, _RUN_FOLDER)


def open_files(group: str, *, directory: str | None, limit_bytes: int) -> CacheFiles:
    """Open the files of the rows that `group` identifies. Raises `OSError`.

    They are in the `directory` of the user; None: of the run, or of this process.
    """
    if directory is not None:
        # One of each user: no user can remove the files of another one.
        root = Path(directory, f"spotfit-cache-{os.geteuid()}")
    else:
        # One of each dataset, so that each has its own limit.
        root = (_RunDirectory.path or _temporary_directory(os.getpid())) / group
    return CacheFiles(root, group, limit_bytes)


@functools.cache
def _temporary_directory(process_id: int) -> Path:
    """Return a directory that is removed when this process exits, or by a later process."""
    stack = ExitStack()
    parent = Path(env.read(env.SCRATCH_DIR) or tempfile.gettempdir())
    name = f"data-{process_id}-{secrets.token_hex(4)}"
    atexit.register(stack.close)
    return stack.enter_context(owned_directory(parent, name))
