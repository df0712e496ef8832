"""Small files that this user's processes keep between runs and can do without.

They are in `$XDG_CACHE_HOME/spotfit`, by default ~/.cache/spotfit, as
https://specifications.freedesktop.org/basedir-spec/latest/ defines it.
"""

from __future__ import annotations

import os
import tempfile
from contextlib import suppress
from pathlib import Path

from spotfit.host import env, log


def read_cached(name: str) -> bytes | None:
    """Return the content of the file `name`, such as 'prices/1.json'; None if it cannot be read.

    Other programs of the user may have changed it: the caller checks the content.
    """
    with suppress(OSError, RuntimeError):  # RuntimeError: the user has no home directory
        return (_directory() / name).read_bytes()
    return None


def write_cached(name: str, body: bytes) -> bool:
    """Write or replace the file `name` atomically. Returns whether that was possible.

    A reader sees the previous content or all of `body`, also if this process is killed. New
    directories are readable by this user only.
    """
    part = ""
    try:
        path = _directory() / name
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor, part = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        with os.fdopen(descriptor, "wb") as file:
            file.write(body)
        Path(part).replace(path)
    except (OSError, RuntimeError) as error:  # for example a home directory that is read-only
        if part:
            Path(part).unlink(missing_ok=True)
        log.debug("user_cache.not_written", file=name, reason=str(error))
        return False
    return True


def prune_cached(folder: str, *, keep: int) -> None:
    """Delete the files of a folder that were written first, except the last `keep`."""
    with suppress(OSError, RuntimeError):  # another process may delete the same files
        files = [path for path in (_directory() / folder).iterdir() if path.is_file()]
        files.sort(key=lambda path: path.stat().st_mtime_ns, reverse=True)
        for path in files[keep:]:
            path.unlink(missing_ok=True)


def _directory() -> Path:
    base = env.lookup("XDG_CACHE_HOME") or ""
    # "If an implementation encounters a relative path [...] it should consider the path invalid".
    cache = Path(base) if base.startswith("/") else Path.home() / ".cache"
    return cache / "spotfit"
