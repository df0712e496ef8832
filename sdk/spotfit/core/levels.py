"""Levels of a log, by the names that Python's own logging gives them."""

from __future__ import annotations

from typing import Any

from spotfit.core.errors import ConfigError
from spotfit.core.nearest import did_you_mean

LEVELS = {
    "NOTSET": 0,
    "DEBUG": 10,
    "INFO": 20,
    "WARN": 30,
    "WARNING": 30,
    "ERROR": 40,
    "FATAL": 50,
    "CRITICAL": 50,
}
"""What is below a level is not told."""


def parse_level(name: Any) -> str:
    """A level's name in any case, in upper case. Raises `ConfigError`."""
    level = name.upper() if isinstance(name, str) else repr(name)
    if level not in LEVELS:
        raise ConfigError(f"Invalid log_level {name!r}.", do=did_you_mean(level, LEVELS))
    return level
