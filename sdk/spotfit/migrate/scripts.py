"""Finding scripts in directories, and replacing them atomically."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

from spotfit.core.errors import ConfigError

_SKIPPED_DIRECTORIES = {"__pycache__", "node_modules", "site-packages"}


def find_scripts(paths: Iterable[Path]) -> list[Path]:
    """Return all given files and all Python files in the given directories, each once.

    Skips hidden directories, virtual environments and installed packages. Raises `ConfigError` for
    a path that does not exist.
    """
    found: dict[Path, None] = {}
    for path in paths:
        if not path.exists():
            raise ConfigError(
                f"The script or directory {path} does not exist.",
                do="Correct the path; pass scripts or directories.",
            )
        found |= dict.fromkeys(_scripts_below(path) if path.is_dir() else [path])
    return list(found)


def write_script(script: Path, text: bytes) -> None:
    """Replace the content of a script atomically. Permissions and symbolic links are preserved."""
    # rename() would replace a symbolic link by a file, and is atomic only within a directory.
    target = script.resolve()
    temporary = target.with_name(f".{target.name}.spotfit")
    temporary.write_bytes(text)
    shutil.copymode(target, temporary)
    temporary.replace(target)


def _scripts_below(directory: Path) -> Iterator[Path]:
    for parent, subdirectories, names in os.walk(directory):
        # os.walk() descends into what remains in this list. Every virtual environment has a
        # pyvenv.cfg (PEP 405).
        subdirectories[:] = sorted(
            name
            for name in subdirectories
            if not name.startswith(".")
            and name not in _SKIPPED_DIRECTORIES
            and not Path(parent, name, "pyvenv.cfg").exists()
        )
        yield from (Path(parent, name) for name in sorted(names) if name.endswith(".py"))
