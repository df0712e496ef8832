"""Files that appear whole or not at all."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from spotfit.store.url import PART_NAME

_count = itertools.count()
_PART = re.compile(rf"{re.escape(PART_NAME)}\d+-\d+-[0-9a-f]{{6}}")


@contextmanager
def appearing(path: Path) -> Iterator[Path]:
    """A new name beside `path` to write to; it becomes `path` when the block ends well.

    A file already there is replaced. Readers see the old or the new, never half; if the process is
    killed meanwhile, the half written file stays under its own name, and is nobody's object.
    """
    part = beside(path)
    try:
        yield part
        part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def is_part(name: str) -> bool:
    """Whether a file of that name is a half written one, by this very way."""
    return _PART.fullmatch(name) is not None


def beside(path: Path) -> Path:
    """A name in the same directory that no other writer of any process uses."""
    return path.with_name(f"{PART_NAME}{os.getpid()}-{next(_count)}-{os.urandom(3).hex()}")
