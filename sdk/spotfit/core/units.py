"""Parsing of durations ('90s', '1.5h'), formatting of durations, sizes and ranks."""

from __future__ import annotations

import re
from collections.abc import Iterable

from spotfit.core.errors import ConfigError

_SECONDS_PER_UNIT = {"ms": 0.001, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
# Longer lists fill the screen; the logs of the ranks have the rest.
_MAX_LISTED_RANKS = 8
_AMOUNT_PATTERN = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")


def parse_seconds(text: str | float, *, setting: str = "") -> float:
    """Return a duration in seconds: 90.0 for "90s", 5400.0 for "1.5h".

    The units are ms, s, m or min, h and d; without a unit, and for numbers, seconds. Raises
    `ConfigError` for any other text; `setting` names the value in its message. Negative texts are
    invalid, but numbers are not checked.
    """
    if isinstance(text, (int, float)):
        return float(text)
    match = _AMOUNT_PATTERN.fullmatch(text)
    if match and (match[2] or "s") in _SECONDS_PER_UNIT:
        return float(match[1]) * _SECONDS_PER_UNIT[match[2] or "s"]
    known = ", ".join(_SECONDS_PER_UNIT)
    raise ConfigError(
        f"{setting or repr(text)} is not a valid duration.",
        do=f"Write a number and one of the units {known}, for example '90s'.",
    )


def format_seconds(seconds: float) -> str:
    """Format a duration in seconds for display: "0.13 s", "95 s", "90.0 min", "2.5 h"."""
    if seconds < 10:
        return f"{seconds:.2f} s"
    # Keep seconds up to 2 min and minutes up to 2 h: '95 s' is more precise than '1.6 min'.
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.1f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def format_ranks(ranks: Iterable[int]) -> str:
    """Return ranks for display, sorted: "rank 3", "ranks 0, 2"; of many only the first eight."""
    ordered = sorted(ranks)
    listed = ", ".join(map(str, ordered[:_MAX_LISTED_RANKS]))
    omitted = len(ordered) - _MAX_LISTED_RANKS
    more = f" and {omitted} more" if omitted > 0 else ""
    return f"rank{'s' if len(ordered) > 1 else ''} {listed}{more}"


def format_count(count: int, noun: str) -> str:
    """Return a number with its noun, for display: "1 machine", "2 machines", "0 machines"."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def format_bytes(size_bytes: float) -> str:
    """Format a number of bytes for display in binary units: "512 B", "3.2 MiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size_bytes < 1024:
            return f"{size_bytes:.0f} {unit}" if unit == "B" else f"{size_bytes:.1f} {unit}"
        size_bytes /= 1024
    return f"{size_bytes:.1f} TiB"
