"""Recorded spot histories: how many machines a zone gave, over time, from a JSON file.

Three kinds are known, told apart by the file's own `kind`: `availability` and `preemption` (a count
every `gap_seconds`), `count-series` (rows of moment and count) and `membership` (machines that
came and went).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec

from spotfit.core.errors import ConfigError
from spotfit.core.nearest import did_you_mean


@dataclass(frozen=True, slots=True)
class Trace:
    """Capacity over time: from each moment (seconds from the start) so many machines."""

    name: str
    steps: tuple[tuple[float, int], ...]
    tick_s: float = 0.0
    """How far apart somebody looked: a change came at any time since the look before. 0 where each
    was seen as it came."""

    @property
    def most(self) -> int:
        """The largest capacity it ever had."""
        return max(count for _, count in self.steps)

    def squeezed(self, *, into_s: float, machines: int) -> Trace:
        """The same history in other units: told within `into_s`, with `machines` at its best."""
        last = self.steps[-1][0] or 1.0
        steps = (
            (moment * into_s / last, round(count * machines / max(1, self.most)))
            for moment, count in self.steps
        )
        return Trace(self.name, _changes(steps), self.tick_s * into_s / last)


def read_trace(path: Path) -> Trace:
    """Parse a recorded history. Raises `ConfigError` for a file that is none."""
    try:
        told = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
        name, tick_s = str(told.get("id", path.stem)), float(told.get("gap_seconds", 0.0))
        return Trace(name, _changes(_reader(told)(told)), tick_s)
    except OSError as error:
        raise ConfigError(f"The trace {path} cannot be read: {error}.") from error
    except (msgspec.DecodeError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{path} is no recorded spot history: {error}.",
            do="It needs `kind` and the fields of that kind; see spotfit_localsim.traces.",
        ) from error


def _reader(told: Mapping[str, Any]) -> Callable[[Mapping[str, Any]], Iterable[tuple[float, int]]]:
    kind = str(told.get("kind"))
    if kind not in _READERS:
        raise ValueError(f"kind {kind!r} is unknown. {did_you_mean(kind, _READERS)}")
    return _READERS[kind]


def _counts(told: Mapping[str, Any]) -> Iterable[tuple[float, int]]:
    gap_s = float(told["gap_seconds"])
    return ((n * gap_s, int(count)) for n, count in enumerate(told["data"]))


def _rows(told: Mapping[str, Any]) -> Iterable[tuple[float, int]]:
    moments = sorted((datetime.fromisoformat(moment), int(count)) for moment, count in told["rows"])
    first = moments[0][0]
    return (((moment - first).total_seconds(), count) for moment, count in moments)


def _members(told: Mapping[str, Any]) -> Iterable[tuple[float, int]]:
    here: set[str] = set()
    for moment_ms, what, node in told["events"]:
        (here.add if what == "add" else here.discard)(node)
        yield moment_ms / 1000, len(here)


_READERS: Mapping[str, Callable[[Mapping[str, Any]], Iterable[tuple[float, int]]]] = {
    "availability": _counts,
    "preemption": _counts,
    "count-series": _rows,
    "membership": _members,
}


def _changes(steps: Iterable[tuple[float, int]]) -> tuple[tuple[float, int], ...]:
    """Only the moments at which the count changes; several at one moment are the last of them."""
    kept: dict[float, int] = {}
    for moment, count in steps:
        kept[moment] = count
    changes: list[tuple[float, int]] = []
    for moment, count in kept.items():
        if not changes or changes[-1][1] != count:
            changes.append((moment, count))
    if not changes:
        raise ValueError("it tells of no moment at all")
    return tuple(changes)
