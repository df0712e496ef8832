"""The market behind a simulated cloud, in real time: capacity, boots, reclaims, from one seed."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from spotfit.core.errors import ConfigError
from spotfit_localsim.dice import Stream
from spotfit_localsim.traces import Trace, read_trace

PLENTY = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class MarketOptions:
    """What kind of market it is."""

    seed: int = 0
    trace: str = ""
    """A recorded history of capacity, as a file; see `spotfit_localsim.traces`."""
    speed: float = 1.0
    """How many times faster the trace is told than it happened."""
    capacity: int | None = None
    """Machines there are at most; None: as many as anybody wants."""
    boot_s: float = 0.2
    """How long a machine boots."""
    notice_s: float = 5.0
    """How long before a machine goes its notice comes."""
    with_notice: float = 0.5
    """The share of reclaims that are announced."""
    reclaims_per_hour: float = 0.0
    """How often each machine is taken back."""

    def __post_init__(self) -> None:
        below = [
            name
            for name in ("speed", "boot_s", "notice_s", "with_notice", "reclaims_per_hour")
            if getattr(self, name) < 0
        ]
        if below or self.speed == 0:
            raise ConfigError(f"A market's {', '.join(below) or 'speed'} must be above zero.")


class Tide:
    """The market as it moves."""

    def __init__(self, options: MarketOptions, *, began_s: float) -> None:
        self.options = options
        self._began_s = began_s
        self._trace: Trace | None = read_trace(Path(options.trace)) if options.trace else None
        self.limit: int | None = options.capacity
        """Machines there are at most, whatever the trace says."""

    def capacity(self, now_s: float) -> int:
        """How many machines may run at that moment."""
        told = PLENTY if self._trace is None else self._of_trace(self._trace, now_s)
        return told if self.limit is None else min(told, self.limit)

    def boot_s(self, dice: Stream) -> float:
        """How long the next machine boots."""
        return self.options.boot_s * dice.between((0.9, 1.1))

    def life_s(self, dice: Stream) -> float | None:
        """How long it will be left, or None for ever."""
        if self.options.reclaims_per_hour == 0:
            return None
        return dice.expovariate(self.options.reclaims_per_hour / 3600)

    def announces(self, dice: Stream) -> bool:
        """Whether its end will be announced."""
        return dice.chance(self.options.with_notice)

    def _of_trace(self, trace: Trace, now_s: float) -> int:
        elapsed = (now_s - self._began_s) * self.options.speed
        count = trace.steps[0][1]
        for moment, there in trace.steps:
            if moment > elapsed:
                break
            count = there
        return count
