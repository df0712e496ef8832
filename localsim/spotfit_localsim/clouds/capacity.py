"""The spot market of a simulated cloud, in real time: capacity, boot times and preemptions from a
seed."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from spotfit.core.errors import ConfigError
from spotfit_localsim.clouds.price_history import PriceHistory, read_price_history
from spotfit_localsim.random_streams import RandomStream
from spotfit_localsim.traces import CapacityTrace, read_trace

UNLIMITED_CAPACITY = 1_000_000


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
    """The largest number of machines; None for no limit."""
    boot_s: float = 0.2
    """Mean boot time of a machine."""
    notice_s: float = 5.0
    """Time from the preemption notice to the termination."""
    notice_probability: float = 0.5
    """The fraction of preemptions with a notice."""
    reclaims_per_hour: float = 0.0
    """Preemption rate of each machine."""
    memory_limits: bool = False
    """Whether a machine is killed whose processes use more memory than its container may."""
    machines_per_instance: int = 1
    """How many machines, as containers, are placed on one instance. Each is preempted alone."""

    def __post_init__(self) -> None:
        below = [
            name
            for name in ("speed", "boot_s", "notice_s", "notice_probability", "reclaims_per_hour")
            if getattr(self, name) < 0
        ]
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
        """Upper bound of the capacity in addition to the trace."""

    def capacity_at(self, now_s: float) -> int:
        """Return the number of machines that may run at `now_s`."""
        capacity = UNLIMITED_CAPACITY
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

    def draw_boot_s(self, rng: RandomStream) -> float:
        """Draw the boot time of a machine."""
        # Machines of one group boot at slightly different times, as in a real cloud.
        return self.options.boot_s * rng.uniform_in((0.9, 1.1))

    def draw_lifetime_s(self, rng: RandomStream) -> float | None:
        """Draw the time until a machine is preempted; None for no preemption."""
        # A rate of 0 has no finite mean lifetime.
        if self.options.reclaims_per_hour == 0:
            return None
        return rng.expovariate(self.options.reclaims_per_hour / 3600)

    def draw_notice(self, rng: RandomStream) -> bool:
        """Draw whether the preemption of a machine is announced."""
        return rng.bernoulli(self.options.notice_probability)
