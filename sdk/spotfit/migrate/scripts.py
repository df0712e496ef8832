"""Which files are meant, and how a new text gets into one."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

from spotfit.core.errors import ConfigError

_NOT_THE_USERS = {"__pycache__", "node_modules", "site-packages"}


def scripts_in(places: Iterable[Path]) -> list[Path]:
    """Every script that is named or lies below a named directory, each once.

    Hidden directories, virtual environments and installed packages are passed over. Raises
    `ConfigError` for a place that is not there.
    """
    found: dict[Path, None] = {}
    for place in places:
        if not place.exists():
            raise ConfigError(f"There is no {place}.", do="Name scripts or directories of scripts.")
        found |= dict.fromkeys(_below(place) if place.is_dir() else [place])
    return list(found)


def write(script: Path, text: bytes) -> None:
    """Put the new text there at once, whole, with the old one's permissions."""
    target = script.resolve()
    beside = target.with_name(f".{target.name}.spotfit")
    beside.write_bytes(text)
    shutil.copymode(target, beside)
    beside.replace(target)


def _below(directory: Path) -> Iterator[Path]:
    for folder, inner, names in os.walk(directory):
        inner[:] = sorted(name for name in inner if _is_looked_into(Path(folder, name)))
        yield from (Path(folder, name) for name in sorted(names) if name.endswith(".py"))


def _is_looked_into(directory: Path) -> bool:
    hidden = directory.name.startswith(".")
    environment = (directory / "pyvenv.cfg").exists()
    return not (hidden or environment or directory.name in _NOT_THE_USERS)
