"""How many machines the market gives, and how long it leaves them."""

from __future__ import annotations

from dataclasses import dataclass

from spotfit_localsim.dice import Stream
from spotfit_localsim.faults import Span
from spotfit_localsim.traces import Trace

PLENTY = 1_000_000


@dataclass(frozen=True, slots=True)
class Market:
    """What kind of market it is; `Tide` makes a history of it."""

    reclaims_per_hour: float = 0.0
    """How often each machine is taken back, while the storm lasts."""
    with_notice: float = 0.5
    """The share of reclaims that are announced."""
    notice_s: float = 30.0
    boot_s: Span = (5.0, 20.0)
    dead_boots: float = 0.0
    """The share of machines that are started and never say a word."""
    refuses: bool = False
    """Whether a request that cannot be served at once is refused, or waits for capacity."""
    refusals: float = 0.0
    """The share of requests that are refused whatever there is."""
    told_deaths: float = 0.7
    """The share of machines whose peers are told by the dying kernel; the others fall silent."""
    observed_after_s: Span = (0.5, 5.0)
    """How long the backend goes on calling a dead machine alive."""
    lost_answers: float = 0.0
    """The share of calls to the cloud that have their effect, and whose answer is lost."""
    latency_s: Span = (0.05, 0.4)
    capacity: Trace | None = None
    """Machines there are to be had, over time; None: as many as anybody wants."""


class Tide:
    """The market as it moves: capacity by the trace while the storm lasts, plenty afterwards."""

    def __init__(self, market: Market, stream: Stream) -> None:
        self.market = market
        self.stream = stream
        self._calm = False

    def calm(self) -> None:
        """From here on there are machines for everybody, and nobody is reclaimed."""
        self._calm = True

    def capacity(self, now: float) -> int:
        """How many machines may run at that moment."""
        trace = self.market.capacity
        if trace is None or self._calm:
            return PLENTY
        count = trace.steps[0][1]
        for moment, there in trace.steps:
            if moment > now:
                break
            count = there
        return count

    def turns(self) -> tuple[float, ...]:
        """The moments at which capacity changes."""
        trace = self.market.capacity
        return tuple(moment for moment, _ in trace.steps) if trace else ()

    def life_s(self) -> float | None:
        """How long a machine that starts now will be left, or None for ever."""
        if self._calm or self.market.reclaims_per_hour <= 0:
            return None
        return self.stream.expovariate(self.market.reclaims_per_hour / 3600.0)

    def refused(self) -> bool:
        """Whether a request is refused for no reason that could be known."""
        return not self._calm and self.stream.chance(self.market.refusals)

    def boots_dead(self) -> bool:
        """Whether a machine that is up will never say a word."""
        return not self._calm and self.stream.chance(self.market.dead_boots)

    def answer_lost(self) -> bool:
        """Whether the cloud's answer does not arrive."""
        return not self._calm and self.stream.chance(self.market.lost_answers)
