"""The markets of a simulated cloud, in real time: capacity, boot times and preemptions from a seed.

Spot and on-demand machines have separate capacities. On-demand machines are never preempted.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from spotfit.core.errors import ConfigError
from spotfit.model.offer import Market
from spotfit_localsim.clouds.price_history import PriceHistory, read_price_history
from spotfit_localsim.random_streams import RandomStream
from spotfit_localsim.traces import CapacityTrace, read_trace

UNLIMITED_CAPACITY = 1_000_000
_NOT_NEGATIVE = (
    "speed",
    "capacity",
    "on_demand_capacity",
    "boot_s",
    "on_demand_boot_s",
    "notice_s",
    "notice_probability",
    "reclaims_per_hour",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class MarketOptions:
    """Options of the market."""

    seed: int = 0
    trace: str = ""
    """Path of a recorded capacity trace; see `spotfit_localsim.traces`."""
    price_history: str = ""
    """Path of spot and on-demand prices; see `spotfit_localsim.clouds.price_history`."""
    speed: float = 1.0
    """Replay speed of trace and prices; 60 replays an hour in a minute."""
    capacity: int | None = None
    """The largest number of spot machines; None for no limit."""
    on_demand_capacity: int | None = None
    """The largest number of on-demand machines; None for no limit, 0 refuses all of them."""
    boot_s: float = 0.2
    """Mean boot time of a machine."""
    on_demand_boot_s: float | None = None
    """Mean boot time of an on-demand machine; None: `boot_s`."""
    notice_s: float = 5.0
    """Time from the preemption notice to the termination."""
    notice_probability: float = 0.5
    """The fraction of preemptions with a notice."""
    reclaims_per_hour: float = 0.0
    """Preemption rate of each spot machine."""
    memory_limits: bool = False
    """Whether a machine is killed whose processes use more memory than its container may."""
    machines_per_instance: int = 1
    """How many machines, as containers, are placed on one instance. Each is preempted alone."""

    def __post_init__(self) -> None:
        below = [name for name in _NOT_NEGATIVE if (getattr(self, name) or 0) < 0]
        if below or self.speed == 0:
            raise ConfigError(
                f"Market options must not be negative, and speed must not be 0: "
                f"{', '.join(below) or 'speed'}."
            )
        if self.machines_per_instance < 1:
            raise ConfigError(
                f"machines_per_instance={self.machines_per_instance} must be at least 1."
            )


class RealTimeMarket:
    """Capacity as a function of time, and random draws for each machine."""

    def __init__(self, options: MarketOptions, *, started_s: float) -> None:
        self.options = options
        self._started_s = started_s
        self._trace: CapacityTrace | None = (
            read_trace(Path(options.trace)) if options.trace else None
        )
        self.prices = (
            read_price_history(Path(options.price_history))
            if options.price_history
            else PriceHistory()
        )
        self.max_machines: int | None = options.capacity
        """Upper bound of the spot capacity in addition to the trace."""
        self.max_on_demand_machines: int | None = options.on_demand_capacity

    def capacity_at(self, now_s: float, market: Market = Market.SPOT) -> int:
        """Return the number of machines of the market that may run at `now_s`."""
        capacity = UNLIMITED_CAPACITY
        # Traces are recordings of spot capacity.
        if market is Market.ON_DEMAND:
            limit = self.max_on_demand_machines
            return capacity if limit is None else limit
        if self._trace is not None:
            elapsed = (now_s - self._started_s) * self.options.speed
            # Before its first point the trace has the capacity of that point.
            counts = [count for moment, count in self._trace.points if moment <= elapsed]
            capacity = counts[-1] if counts else self._trace.points[0][1]
        return capacity if self.max_machines is None else min(capacity, self.max_machines)

    def price_changes(self, zone: str) -> list[tuple[float, float]]:
        """Return the spot prices of a zone: (seconds since 1970-01-01 UTC, US dollars per hour)."""
        start_s, speed = self._started_s, self.options.speed
        return [(start_s + moment / speed, usd) for moment, usd in self.prices.changes(zone)]

    def spot_price_at(self, zone: str, now_s: float) -> float:
        """Return the spot price of a zone; before its first change that of this change."""
        changes = self.price_changes(zone)
        in_force = [usd for moment_s, usd in changes if moment_s <= now_s]
        return in_force[-1] if in_force else changes[0][1]

    def draw_boot_s(self, rng: RandomStream, market: Market = Market.SPOT) -> float:
        """Draw the boot time of a machine."""
        options = self.options
        own_s = options.on_demand_boot_s if market is Market.ON_DEMAND else None
        # Machines of one group boot at slightly different times, as in a real cloud.
        return (options.boot_s if own_s is None else own_s) * rng.uniform_in((0.9, 1.1))

    def draw_lifetime_s(self, rng: RandomStream, market: Market = Market.SPOT) -> float | None:
        """Draw the time until a machine is preempted; None for no preemption."""
        # A rate of 0 has no finite mean lifetime.
        if self.options.reclaims_per_hour == 0 or market is Market.ON_DEMAND:
            return None
        return rng.expovariate(self.options.reclaims_per_hour / 3600)

    def draw_notice(self, rng: RandomStream) -> bool:
        """Draw whether the preemption of a machine is announced."""
        return rng.bernoulli(self.options.notice_probability)
