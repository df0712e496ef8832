"""Recorded spot capacity: the number of machines that a zone offered over time, from a JSON file.

The field `kind` of the file selects the format:

    availability, preemption   a count every `gap_seconds`
    count-series               rows of (time, count)
    membership                 events: a machine was added or removed
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec

from spotfit.core.errors import ConfigError
from spotfit.core.input_checks import did_you_mean

BUNDLED_RECORDINGS = Path(__file__).resolve().parent / "recordings"
"""The folder with the recordings of this package; its README names their sources."""


@dataclass(frozen=True, slots=True)
class CapacityTrace:
    """Capacity over time: (seconds since the start, number of machines), in order."""

    name: str
    points: tuple[tuple[float, int], ...]
    sampling_interval_s: float = 0.0
    """The interval of the recording: a change happened at some time within it. For a series of
    counts with times it is the median distance of two rows, for events the resolution of their
    times (the recordings of Bamboo: 60 s)."""
    duration_s: float = 0.0
    """Time from the first to the end of the last observation."""
    spot_usd_per_hour: float | None = None
    """The recorded price of a machine, its mean where it changed; None if it was not recorded."""
    on_demand_usd_per_hour: float | None = None
    spot_prices: tuple[tuple[float, float], ...] = ()
    """The recorded changes of the spot price: (seconds since the start, US dollars per hour), in
    order; empty if the recording has one price or none."""

    @property
    def max_capacity(self) -> int:
        """The largest capacity of the trace."""
        return max(count for _, count in self.points)

    def rescaled(self, *, duration_s: float, max_machines: int) -> CapacityTrace:
        """Return the trace stretched to `duration_s`, with a maximum of `max_machines`."""
        # A trace with one point has no duration to scale.
        last = self.points[-1][0] or 1.0
        steps = (
            (moment * duration_s / last, round(count * max_machines / max(1, self.max_capacity)))
            for moment, count in self.points
        )
        return replace(
            self,
            points=_deduplicate(steps),
            spot_prices=tuple(
                (moment * duration_s / last, usd_per_hour)
                for moment, usd_per_hour in self.spot_prices
            ),
            sampling_interval_s=self.sampling_interval_s * duration_s / last,
            duration_s=self.duration_s * duration_s / last,
        )


def read_trace(path: Path) -> CapacityTrace:
    """Parse a recorded trace. Raises `ConfigError` for an unreadable or invalid file."""
    try:
        document = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
        name = str(document.get("id", path.stem))
        kind = str(document.get("kind"))
        if kind not in _PARSERS:
            raise ValueError(f"kind {kind!r} is unknown. {did_you_mean(kind, _PARSERS)}")  # noqa: TRY301  # becomes a ConfigError below
        points = tuple(_PARSERS[kind](document))
        gap_s = document.get("gap_seconds")
        interval_s = _median_gap_s(points) if gap_s is None else float(gap_s)
        if kind == "membership":
            interval_s = math.gcd(*(int(event[0]) for event in document["events"])) / 1000
        return CapacityTrace(
            name,
            _deduplicate(points),
            interval_s,
            duration_s=points[-1][0] + interval_s if points else 0.0,
            spot_usd_per_hour=_mean_price(document, "spot_price"),
            on_demand_usd_per_hour=_mean_price(document, "on_demand_price"),
            spot_prices=_spot_prices(document),
        )
    except OSError as error:
        raise ConfigError(f"The trace {path} cannot be read: {error}.") from error
    except (msgspec.DecodeError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{path} is not a recorded capacity trace: {error}.",
            do="Give it `kind` and the fields of that kind; see spotfit_localsim.traces.",
        ) from error


def _mean_price(document: Mapping[str, Any], field: str) -> float | None:
    recorded = document.get(field)
    if isinstance(recorded, list):
        return statistics.fmean(map(float, recorded)) if recorded else None
    return None if recorded is None else float(recorded)


def _spot_prices(document: Mapping[str, Any]) -> tuple[tuple[float, float], ...]:
    recorded = document.get("spot_price")
    if not isinstance(recorded, list):
        return ()
    gap_s = float(document["gap_seconds"])
    changes: list[tuple[float, float]] = []
    for n, usd_per_hour in enumerate(map(float, recorded)):
        if not changes or changes[-1][1] != usd_per_hour:
            changes.append((n * gap_s, usd_per_hour))
    return tuple(changes)


def _parse_counts(document: Mapping[str, Any]) -> Iterable[tuple[float, int]]:
    gap_s = float(document["gap_seconds"])
    return ((n * gap_s, int(count)) for n, count in enumerate(document["data"]))


def _parse_rows(document: Mapping[str, Any]) -> Iterable[tuple[float, int]]:
    moments = sorted(
        (datetime.fromisoformat(moment), int(count)) for moment, count in document["rows"]
    )
    first = moments[0][0]
    return (((moment - first).total_seconds(), count) for moment, count in moments)


def _parse_membership(document: Mapping[str, Any]) -> Iterable[tuple[float, int]]:
    members: set[str] = set()
    for moment_ms, action, node in document["events"]:
        (members.add if action == "add" else members.discard)(node)
        yield moment_ms / 1000, len(members)


def _median_gap_s(points: Sequence[tuple[float, int]]) -> float:
    gaps = [later - earlier for (earlier, _), (later, _) in itertools.pairwise(points)]
    return statistics.median(gaps) if gaps else 0.0


_PARSERS: Mapping[str, Callable[[Mapping[str, Any]], Iterable[tuple[float, int]]]] = {
    "availability": _parse_counts,
    "preemption": _parse_counts,
    "count-series": _parse_rows,
    "membership": _parse_membership,
}


def _deduplicate(points: Iterable[tuple[float, int]]) -> tuple[tuple[float, int], ...]:
    """Keep only the points at which the count changes; the last of several at one time counts."""
    counts: dict[float, int] = {}
    for moment, count in points:
        # Events of one time are applied one by one: only the last count was visible.
        counts[moment] = count
    changes: list[tuple[float, int]] = []
    for moment, count in counts.items():
        if not changes or changes[-1][1] != count:
            changes.append((moment, count))
    if not changes:
        raise ValueError("it has no data points")
    return tuple(changes)
