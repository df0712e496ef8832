"""'90s', '4GiB' and the like, in and out."""

from __future__ import annotations

import re

from spotfit.core.errors import ConfigError

_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_BYTES = {
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
_AMOUNT = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")


def seconds(text: str | float) -> float:
    """'90s', '1.5h', or a number of seconds."""
    if isinstance(text, (int, float)):
        return float(text)
    return _amount(text, _SECONDS, default="s", what="duration")


def size_bytes(text: str | int) -> int:
    """'4GiB', '500 MB', or a number of bytes."""
    if isinstance(text, int):
        return text
    return int(_amount(text, _BYTES, default="B", what="size"))


def _amount(
    text: str, units: dict[str, float] | dict[str, int], *, default: str, what: str
) -> float:
    match = _AMOUNT.fullmatch(text)
    if match and (match[2] or default) in units:
        return float(match[1]) * units[match[2] or default]
    known = ", ".join(units)
    raise ConfigError(f"{text!r} is no {what}.", do=f"Write a number and one of: {known}.")


def told_seconds(seconds: float) -> str:
    """A duration for people: '0.13 s', '95 s', '2.5 h'."""
    if seconds < 10:
        return f"{seconds:.2f} s"
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.1f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def told_bytes(size_bytes: float) -> str:
    """A size for people: '3.2 MiB'."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size_bytes < 1024:
            return f"{size_bytes:.0f} {unit}" if unit == "B" else f"{size_bytes:.1f} {unit}"
        size_bytes /= 1024
    return f"{size_bytes:.1f} TiB"
