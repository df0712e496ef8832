"""Parsing and formatting of durations ('90s', '1.5h') and sizes ('4GiB')."""

from __future__ import annotations

import re

from spotfit.core.errors import ConfigError

_SECONDS_PER_UNIT = {"ms": 0.001, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
# Decimal (SI) and binary (IEC) prefixes.
_BYTES_PER_UNIT = {
    "B": 1,
    "kB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
}
_AMOUNT_PATTERN = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")


def parse_seconds(text: str | float) -> float:
    """Return the seconds of '90s' or '1.5h'; a number is returned as a float.

    Raises `ConfigError` for any other text.
    """
    if isinstance(text, (int, float)):
        return float(text)
    return _parse_amount(text, _SECONDS_PER_UNIT, default="s", what="duration")


def parse_size_bytes(text: str | int) -> int:
    """Return the bytes of '4GiB' or '500 MB'; an int is returned unchanged.

    Raises `ConfigError` for any other text.
    """
    if isinstance(text, int):
        return text
    return int(_parse_amount(text, _BYTES_PER_UNIT, default="B", what="size"))


def _parse_amount(
    text: str, units: dict[str, float] | dict[str, int], *, default: str, what: str
) -> float:
    match = _AMOUNT_PATTERN.fullmatch(text)
    if match and (match[2] or default) in units:
        return float(match[1]) * units[match[2] or default]
    known = ", ".join(units)
    raise ConfigError(
        f"{text!r} is not a valid {what}.", do=f"Write a number and one of the units {known}."
    )


def format_seconds(seconds: float) -> str:
    """Format a duration for display: '0.13 s', '95 s', '2.5 h'."""
    if seconds < 10:
        return f"{seconds:.2f} s"
    # Keep seconds up to 2 min and minutes up to 2 h: '95 s' is more precise than '1.6 min'.
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.1f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def format_bytes(size_bytes: float) -> str:
    """Format a size for display in binary units: '3.2 MiB'."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size_bytes < 1024:
            return f"{size_bytes:.0f} {unit}" if unit == "B" else f"{size_bytes:.1f} {unit}"
        size_bytes /= 1024
    return f"{size_bytes:.1f} TiB"
