"""Validations on this node: those the journal assigns to it, each in a process of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from spotfit.agent.ports import ORPHANED, UNBORN, Assessor, Net
from spotfit.core.codec import decoder, encode
from spotfit.core.ids import AgentId, RunId
from spotfit.model.assessment import Assessment, Verdict
from spotfit.model.events import CheckpointCommitted, ValidationAsked, ValidationBegun
from spotfit.model.spec import RunSpec
from spotfit.model.view import View
from spotfit.model.wire import Assessed

_verdicts = decoder(Verdict)


class Validation:
    """What this node validates at the moment, if anything.

    The journal says what; whoever leads is told what came of it, and every new leader again, until
    the journal says that it is over.
    """

    def __init__(self, me: AgentId, net: Net, assessor: Assessor) -> None:
        self._me = me
        self._net = net
        self._assessor = assessor
        self._begun = 0
        """The last attempt begun here; none is begun twice."""
        self._running: ValidationBegun | None = None
        self._timeout_s: float | None = None
        self._ends_at: float | None = None
        self._assessed: Assessed | None = None
        self._told = False

    @property
    def busy(self) -> bool:
        """Whether a process of it lives here."""
        return self._assessor.busy

    @property
    def wake_at(self) -> float:
        """When its time is over."""
        return float("inf") if self._ends_at is None else self._ends_at

    def follow(self, view: View, now: float) -> None:
        """Begin what the journal assigns to this node, and end what it does not."""
        mine = view.validation if view.validation and view.validation.agent == self._me else None
        if self._running is not None and self._running != mine:
            self.stop()
        if mine is None or mine.attempt <= self._begun or self._assessor.busy:
            return
        kept = next((one for one in view.unvalidated if one.mark == mine.mark), None)
        if kept is not None and view.spec is not None:
            self._begin(view.spec, kept, mine, now)

    def hear(self, now: float) -> None:
        """Take in how it went, or that it took too long."""
        verdict = self._assessor.verdict()
        if self._running is None:
            return
        if verdict is not None:
            self._conclude(_assessed(self._running.attempt, verdict))
        elif self._ends_at is not None and now >= self._ends_at:
            self._assessor.stop()
            why = f"it took longer than {self._timeout_s:g} s"
            self._conclude(Assessed(self._running.attempt, "timeout", why=why))

    def tell(self, *, anew: bool) -> None:
        """Tell whoever leads, once; `anew`, if that is a new connection, once more."""
        if self._assessed is not None and (anew or not self._told):
            self._told = True
            self._net.send_up(self._assessed)

    def stop(self) -> None:
        """End it; nothing will be told of it any more."""
        self._assessor.stop()
        self._running = self._ends_at = self._assessed = None

    def _begin(
        self, spec: RunSpec, kept: CheckpointCommitted, mine: ValidationBegun, now: float
    ) -> None:
        self._begun, self._running = mine.attempt, mine
        self._assessed, self._told = None, False
        self._timeout_s = _timeout_of(spec, kept.validation or ValidationAsked())
        self._ends_at = None if self._timeout_s is None else now + self._timeout_s
        self._assessor.begin(spec, kept)

    def _conclude(self, assessed: Assessed) -> None:
        self._assessed, self._told = assessed, False
        self._ends_at = None


def _timeout_of(spec: RunSpec, asked: ValidationAsked) -> float | None:
    if asked.kwargs is None:
        return spec.validation.timeout_s if spec.validation else None
    return asked.timeout_s


def _assessed(attempt: int, verdict: Verdict) -> Assessed:
    if verdict.again:
        return Assessed(attempt, "lost", why=verdict.told)
    if verdict.metrics is None:
        return Assessed(attempt, "failed", why=verdict.told)
    return Assessed(attempt, "validated", verdict.metrics)


# --- the process ---------------------------------------------------------------------------------


class Process(Protocol):
    """The process, as far as this room needs it."""

    def send(self, body: bytes) -> None: ...

    def kill(self) -> None: ...


Begin = Callable[[Callable[[list[bytes]], None], Callable[[str, bool], None]], Process]
"""Starts the process, given who hears its frames and who hears of its end."""


class LiveAssessor:
    """`Assessor` in a process made as workers are."""

    def __init__(
        self, begin: Begin, *, secret: str, run_id: RunId, scratch: str, devices: tuple[str, ...]
    ) -> None:
        self._start = begin
        self._secret = secret
        self._run_id = run_id
        self._scratch = scratch
        self._devices = devices
        self._process: Process | None = None
        self._stopped = False
        self._said: Verdict | None = None
        self._over: Verdict | None = None

    def begin(self, spec: RunSpec, kept: CheckpointCommitted) -> None:
        self._stopped, self._said, self._over = False, None, None
        self._process = self._start(self._hear, self._ended)
        asked = kept.validation or ValidationAsked()
        task = Assessment(
            spec.storage_url,
            spec.luggage,
            self._secret,
            self._run_id,
            kept.name,
            asked.kwargs or {},
            _devices_for(spec, self._devices),
            self._scratch,
            spec.name,
            spec.log_level,
        )
        self._process.send(encode(task))

    def stop(self) -> None:
        self._stopped, self._over = True, None
        if self._process is not None:
            self._process.kill()

    @property
    def busy(self) -> bool:
        return self._process is not None

    def verdict(self) -> Verdict | None:
        over, self._over = self._over, None
        return over

    def _hear(self, frames: list[bytes]) -> None:
        self._said = _verdicts.decode(frames[-1])

    def _ended(self, how: str, _clean: bool) -> None:  # noqa: FBT001 - as a child's end is told
        self._process = None
        if not self._stopped:
            again = how.startswith((ORPHANED, UNBORN))
            died = Verdict(told=f"The process of the validation {how}.", again=again)
            self._over = self._said or died


def _devices_for(spec: RunSpec, devices: tuple[str, ...]) -> tuple[str, ...]:
    """As many of the node's accelerators as a validation asked for; none, if it asked for none."""
    wanted = spec.validation.resources.get("GPU", 0) if spec.validation else 0
    return devices[: max(1, int(wanted))] if wanted > 0 else ()
