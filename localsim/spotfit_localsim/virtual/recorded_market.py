"""Recorded spot markets by ticks, as `deadline_market` and `elastic_market` replay them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from spotfit_localsim.traces import CapacityTrace

MIN_TICK_S = 290.0
"""Recordings with shorter intervals are combined: available is what was so all the time."""
# Zones such as us-east-1a, and asia-southeast1-b.
_ZONE = re.compile(r"[a-z]+(-[a-z]+)+-?[0-9]+-?[a-z]?")
DEFAULT_PRICE_RATIO = 3.0
"""On-demand price divided by spot price, where prices are unknown."""


@dataclass(frozen=True, slots=True)
class MarketGrid:
    """The units of a simulation: `tick` units per recording interval."""

    unit_s: float
    tick: int
    boot: int


@dataclass(frozen=True, slots=True)
class MarketRecording:
    """A recorded zone, by ticks of `tick_s`: the least number of machines in each."""

    name: str
    tick_s: float
    counts: tuple[int, ...]
    machines: int
    """The largest number of machines."""
    spot_usd: float
    on_demand_usd: float


def market_grid(tick_s: float, changeover_s: float) -> MarketGrid:
    """Return units in which a tick and the changeover time are integers.

    The changeover time is within 2 per cent, or a hundredth of a tick where it is less than that.
    """

    def error(tick: int) -> float:
        unit_s = tick_s / tick
        return abs(max(1, round(changeover_s / unit_s)) * unit_s - changeover_s) / changeover_s

    sizes = range(4, 101)
    tick = next((size for size in sizes if error(size) < 0.02), min(sizes, key=error))
    unit_s = tick_s / tick
    return MarketGrid(unit_s, tick, max(1, round(changeover_s / unit_s)))


def market_recording(trace: CapacityTrace) -> MarketRecording:
    """Return the recording by ticks of at least `MIN_TICK_S`.

    Without recorded prices that of spot machines is 1, and `DEFAULT_PRICE_RATIO` that of on-demand
    ones.
    """
    interval_s = trace.sampling_interval_s or MIN_TICK_S
    tick_s = interval_s * max(1, round(MIN_TICK_S / interval_s))
    counts = tuple(_least_counts(trace, tick_s))
    spot_usd = trace.spot_usd_per_hour or 1.0
    on_demand_usd = trace.on_demand_usd_per_hour or DEFAULT_PRICE_RATIO * spot_usd
    return MarketRecording(
        trace.name, tick_s, counts, trace.max_capacity, spot_usd, on_demand_usd=on_demand_usd
    )


def _least_counts(trace: CapacityTrace, tick_s: float) -> Iterator[int]:
    points, at = trace.points, 0
    for tick in range(int(trace.duration_s / tick_s + 1e-6)):
        start, end = tick * tick_s, (tick + 1) * tick_s
        while at + 1 < len(points) and points[at + 1][0] <= start + 1e-6:
            at += 1
        last = at
        while last + 1 < len(points) and points[last + 1][0] < end - 1e-6:
            last += 1
        yield min(count for _, count in points[at : last + 1])


def recorded_together(recordings: Sequence[MarketRecording]) -> list[list[MarketRecording]]:
    """Return the recordings in sets of zones of one machine type, recorded at the same time.

    Their names are equal except for the zone, such as `aws_us-east-1a_v100`.
    """
    sets: dict[tuple[float, int, tuple[str, ...]], list[MarketRecording]] = {}
    for one in recordings:
        parts = (("zone" if _ZONE.fullmatch(part) else part) for part in one.name.split("_"))
        sets.setdefault((one.tick_s, len(one.counts), tuple(parts)), []).append(one)
    return list(sets.values())
