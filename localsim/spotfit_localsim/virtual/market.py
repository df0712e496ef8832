"""The simulated spot market: capacity, preemptions, boot times and refusals."""

from __future__ import annotations

from dataclasses import dataclass

from spotfit_localsim.random_streams import RandomStream
from spotfit_localsim.traces import CapacityTrace
from spotfit_localsim.virtual.faults import FloatRange

UNLIMITED_CAPACITY = 1_000_000


@dataclass(frozen=True, slots=True)
class SimMarketConfig:
    """Parameters of the market."""

    reclaims_per_hour: float = 0.0
    """Preemption rate of each machine while faults are active."""
    notice_probability: float = 0.5
    """The fraction of preemptions with a notice."""
    notice_s: float = 30.0
    boot_s: FloatRange = (5.0, 20.0)
    boot_failure_probability: float = 0.0
    """The fraction of machines whose agent never starts."""
    failed_start_probability: float = 0.0
    """The fraction of machines that end with an error instead of starting their agent."""
    restarts_per_machine: int = 0
    """How often the API restarts the agent of a preempted machine on another one, by itself."""
    rejects_when_full: bool = False
    """Whether a request without capacity is refused instead of queued."""
    refusal_probability: float = 0.0
    """The fraction of requests that are refused independently of capacity."""
    clean_close_probability: float = 0.7
    """The fraction of lost machines whose kernel closes its connections; others become silent."""
    status_lag_s: FloatRange = (0.5, 5.0)
    """How long the API reports a terminated machine as running."""
    read_lag_s: float = 0.0
    """How long the API does not show a group after it was requested."""
    reports_times: bool = True
    """Whether the API reports from when until when it bills a machine."""
    lost_response_probability: float = 0.0
    """The fraction of API calls that are executed but whose response is lost."""
    latency_s: FloatRange = (0.05, 0.4)
    capacity: CapacityTrace | None = None
    """Capacity over time; None for no limit."""


class SimMarket:
    """The market over time: capacity by the trace while faults are active, unlimited afterwards."""

    def __init__(self, config: SimMarketConfig, stream: RandomStream) -> None:
        self.config = config
        self.stream = stream
        self._faults_stopped = False
        self._credentials_valid_from = 0.0

    def stop_faults(self) -> None:
        """Give unlimited capacity and preempt no machines from now on."""
        self._faults_stopped = True

    def capacity_at(self, now: float) -> int:
        """Return the number of machines that may run at `now`."""
        trace = self.config.capacity
        # Unlimited at the end: every run must be able to finish.
        if trace is None or self._faults_stopped:
            return UNLIMITED_CAPACITY
        # Before its first point the trace has the capacity of that point.
        count = trace.points[0][1]
        for moment, capacity in trace.points:
            if moment > now:
                break
            count = capacity
        return count

    def capacity_change_times(self) -> tuple[float, ...]:
        """Return the times at which the capacity changes."""
        trace = self.config.capacity
        return tuple(moment for moment, _ in trace.points) if trace else ()

    def draw_lifetime_s(self) -> float | None:
        """Draw the time until a machine is preempted; None for no preemption."""
        if self._faults_stopped or self.config.reclaims_per_hour <= 0:
            return None
        # A constant rate gives exponential lifetimes.
        return self.stream.expovariate(self.config.reclaims_per_hour / 3600.0)

    def should_refuse(self) -> bool:
        """Draw whether a request is refused independently of capacity."""
        return not self._faults_stopped and self.stream.bernoulli(self.config.refusal_probability)

    def should_fail_boot(self) -> bool:
        """Draw whether the agent of a machine never starts."""
        return not self._faults_stopped and self.stream.bernoulli(
            self.config.boot_failure_probability
        )

    def should_fail_start(self) -> bool:
        """Draw whether a machine ends with an error instead of starting its agent."""
        probability = self.config.failed_start_probability
        # No draw without the fault: scenarios without it keep their random streams.
        return not self._faults_stopped and probability > 0 and self.stream.bernoulli(probability)

    def reject_credentials_until(self, until_s: float) -> None:
        """Reject every API call until that virtual time."""
        self._credentials_valid_from = until_s

    def are_credentials_invalid(self, now: float) -> bool:
        """Return whether the API rejects the credentials at `now`."""
        return not self._faults_stopped and now < self._credentials_valid_from

    def should_lose_response(self) -> bool:
        """Draw whether the response of an API call is lost."""
        return not self._faults_stopped and self.stream.bernoulli(
            self.config.lost_response_probability
        )
