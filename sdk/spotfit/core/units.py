"""Parsing of durations ('90s', '1.5h'), formatting of durations, sizes, money and foreign text."""

from __future__ import annotations

import re
from collections.abc import Iterable

from spotfit.core.errors import ConfigError

_SECONDS_PER_UNIT = {"ms": 0.001, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
# Longer lists fill the screen; the logs of the ranks have the rest.
_MAX_LISTED_RANKS = 8
# Sequences as in ECMA-48: CSI, OSC and other strings up to their end, and the remaining ones. An
# 8-bit terminal interprets the code points 128 to 159 likewise.
_ESCAPE_SEQUENCE = re.compile(
    r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]"
    r"|(?:\x1b[\]PX^_]|[\x90\x98\x9d-\x9f])[^\x07\x1b\x9c\n]*(?:\x07|\x1b\\|\x9c)?"
    r"|\x1b[ -/]*[0-~]"
)
_COLOR_SEQUENCE = re.compile(r"\x1b\[[0-9;:]*m")
_CONTROL_CHARACTERS = {
    code: None for code in (*range(32), 127, *range(128, 160)) if code not in (9, 10)
}
# Stands for an escape character while the others are removed; no character of Unicode.
_KEPT_ESCAPE = "\ufdd0"
_COLOR_RESET = "\x1b[0m"
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


def format_usd(amount_usd: float) -> str:
    """Format US dollars for display: "$1,234.50", "$0.0042"; "$0" only for exactly 0.

    Amounts below a cent have two significant digits, so that none looks like 0.
    """
    if amount_usd == 0:
        return "$0"
    if 0 < amount_usd < 0.0001:
        return "less than $0.0001"
    return f"${amount_usd:.2g}" if abs(amount_usd) < 0.01 else f"${amount_usd:,.2f}"


def strip_control_characters(text: str, *, keep_colors: bool = False) -> str:
    """Return `text` without what a terminal would execute; tabs and newlines stay.

    For text of workers, and of objects that others may write: it could clear the screen, change the
    title of the window or forge lines. `keep_colors` keeps SGR sequences, for an output that is a
    terminal, and resets the colours at the end of each line that has one.
    """
    if text.isprintable():  # the usual case
        return text
    return "\n".join(_strip_line(line, keep_colors=keep_colors) for line in text.split("\n"))


def _strip_line(line: str, *, keep_colors: bool) -> str:
    has_color = False

    def replace_sequence(found: re.Match[str]) -> str:
        nonlocal has_color
        if not keep_colors or _COLOR_SEQUENCE.fullmatch(found[0]) is None:
            return ""
        has_color = True
        return found[0].replace("\x1b", _KEPT_ESCAPE)

    line = line.replace(_KEPT_ESCAPE, "")
    line = _ESCAPE_SEQUENCE.sub(replace_sequence, line).translate(_CONTROL_CHARACTERS)
    return line.replace(_KEPT_ESCAPE, "\x1b") + (_COLOR_RESET if has_color else "")
