"""Injected faults: lost, refused and slow requests, damaged responses, stalls, outages, frozen and
killed processes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from spotfit.core.errors import StorePermissionError, TransientStoreError
from spotfit_localsim.random_streams import RandomStream

FloatRange = tuple[float, float]

CLIENT_TIMEOUT_S = 10.0
"""Timeout of one store request, as in production."""


@dataclass(frozen=True, slots=True)
class FaultConfig:
    """Fault probabilities; each is the fraction of calls that it hits."""

    lost_request_probability: float = 0.0
    """Store requests that are not executed, as after 429, 503 or a reset of the connection."""
    lost_response_probability: float = 0.0
    """Store requests that are executed but whose response is lost."""
    false_conflict_probability: float = 0.0
    """Creates that are answered as if the object existed, although nothing was written."""
    damaged_response_probability: float = 0.0
    """Reads of which the last byte is lost."""
    flipped_response_probability: float = 0.0
    """Reads in which one bit is changed."""
    truncated_response_probability: float = 0.0
    """Reads that end at any byte."""
    conflict_probability: float = 0.0
    """Creates answered with 409 ConditionalRequestConflict; half of them are executed before."""
    denied_create_probability: float = 0.0
    """Creates answered with 403 as often as the store repeats them, and not executed."""
    latency_s: FloatRange = (0.005, 0.03)
    slow_request_probability: float = 0.0
    """Store requests that take `slow_latency_s` instead of `latency_s`."""
    slow_latency_s: FloatRange = (0.5, 8.0)
    stall_probability: float = 0.0
    """Store requests that hang for `stall_s`; the client times out after `CLIENT_TIMEOUT_S`."""
    stall_s: FloatRange = (5.0, 60.0)
    freeze_probability: float = 0.0
    """Calls after which the process is suspended for `freeze_s`."""
    freeze_s: FloatRange = (0.5, 40.0)
    crash_probability: float = 0.0
    """Calls after which the process dies."""


NO_FAULTS = FaultConfig()


@dataclass(frozen=True, slots=True)
class ProcessFault:
    """A fault of a process at one call."""

    freeze_s: float = 0.0
    is_fatal: bool = False


class ActiveFaults:
    """The faults that are active at present, for all processes."""

    def __init__(self, faults: FaultConfig) -> None:
        self.faults = faults
        self._baseline = faults
        self._stall_ends_at = 0.0

    def start_outage(self) -> None:
        """Fail every store request until `end_outage`."""
        self.faults = replace(self.faults, lost_request_probability=1.0)

    def end_outage(self) -> None:
        """End the outage."""
        self.faults = replace(
            # The probability before the outage, which the scenario may have set.
            self.faults,
            lost_request_probability=self._baseline.lost_request_probability,
        )

    def stall_until(self, until_s: float) -> None:
        """Let every store request hang until that virtual time."""
        self._stall_ends_at = max(self._stall_ends_at, until_s)

    def remaining_stall_s(self, now: float) -> float:
        """Return the remaining duration of the current stall."""
        return max(0.0, self._stall_ends_at - now)

    def stop_faults(self) -> None:
        """Inject no more faults."""
        self._stall_ends_at = 0.0
        # The latency remains: the network does not become faster when faults end.
        self.faults = self._baseline = FaultConfig(latency_s=self.faults.latency_s)


class ProcessFaultInjector:
    """Decides at which calls a process is frozen or killed."""

    def __init__(
        self, active_faults: ActiveFaults, stream: RandomStream, *, can_crash: bool = True
    ) -> None:
        self._active_faults = active_faults
        self._stream = stream
        # Drawing a call count instead of a number per call keeps calls cheap.
        # Geometric: the number of trials until the first success at a constant probability.
        self._calls_until_freeze = stream.geometric(active_faults.faults.freeze_probability)
        self._calls_until_crash = (
            stream.geometric(active_faults.faults.crash_probability) if can_crash else 0
        )

    def next_fault(self) -> ProcessFault | None:
        """Return the fault at this call; None for most calls."""
        faults = self._active_faults.faults
        if faults.freeze_probability and self._calls_until_freeze:
            self._calls_until_freeze -= 1
            if self._calls_until_freeze == 0:
                self._calls_until_freeze = self._stream.geometric(faults.freeze_probability)
                return ProcessFault(freeze_s=self._stream.uniform_in(faults.freeze_s))
        # The count is 0 for a process that cannot crash, and after its crash.
        if faults.crash_probability and self._calls_until_crash:
            self._calls_until_crash -= 1
            if self._calls_until_crash == 0:
                return ProcessFault(is_fatal=True)
        return None


class FaultyConnection:
    """The connection of one client to the bucket: slow, and losing requests or responses."""

    def __init__(self, active_faults: ActiveFaults, stream: RandomStream) -> None:
        self._active_faults = active_faults
        self._stream = stream

    def draw_latency_s(self) -> float:
        """Draw the duration of half a request."""
        faults = self._active_faults.faults
        # No draw without the fault: scenarios without it keep their random streams.
        if faults.slow_request_probability and self._stream.bernoulli(
            faults.slow_request_probability
        ):
            return self._stream.uniform_in(faults.slow_latency_s)
        return self._stream.uniform_in(faults.latency_s) / 2

    def draw_stall_s(self, now: float) -> float:
        """Draw how long this request hangs; 0 for most requests."""
        stalls, own_s = self._active_faults.faults.stall_probability, 0.0
        if stalls and self._stream.bernoulli(stalls):
            own_s = self._stream.uniform_in(self._active_faults.faults.stall_s)
        return max(own_s, self._active_faults.remaining_stall_s(now))

    def should_execute_late(self) -> bool:
        """Draw whether a request that has timed out is executed nevertheless."""
        # Both outcomes are likely in production, and the client must survive both.
        return self._stream.bernoulli(0.5)

    def reports_false_conflict(self) -> bool:
        """Draw whether a create is answered as if the object existed."""
        probability = self._active_faults.faults.false_conflict_probability
        return probability > 0.0 and self._stream.bernoulli(probability)

    def reports_conflict(self) -> bool:
        """Draw whether a create is answered with 409 ConditionalRequestConflict."""
        return self._stream.bernoulli(self._active_faults.faults.conflict_probability)

    def should_execute_conflict(self) -> bool:
        """Draw whether a create that is answered with 409 is executed nevertheless."""
        return self._stream.bernoulli(0.5)

    def maybe_deny_create(self) -> None:
        """Raise `StorePermissionError` if the create is answered with 403."""
        if self._stream.bernoulli(self._active_faults.faults.denied_create_probability):
            raise StorePermissionError("The create was denied.", do="Retry.")

    def maybe_damage(self, body: bytes) -> bytes:
        """Return the body of a response, shortened or with a changed bit if it is damaged."""
        faults = self._active_faults.faults
        if self._stream.bernoulli(faults.damaged_response_probability):
            body = body[:-1]
        if self._stream.bernoulli(faults.flipped_response_probability) and body:
            flipped = bytearray(body)
            flipped[self._stream.randrange(len(body))] ^= 1 << self._stream.randrange(8)
            body = bytes(flipped)
        if self._stream.bernoulli(faults.truncated_response_probability):
            body = body[: self._stream.randrange(len(body) + 1)]
        return body

    def maybe_lose_request(self) -> None:
        """Raise `TransientStoreError` if the request is lost before its execution."""
        if self._stream.bernoulli(self._active_faults.faults.lost_request_probability):
            raise TransientStoreError("The request was not sent.", do="Retry.")

    def maybe_lose_response(self) -> None:
        """Raise `TransientStoreError` if the response is lost after the execution."""
        if self._stream.bernoulli(self._active_faults.faults.lost_response_probability):
            raise TransientStoreError("The response was lost.", do="Read the object.")
