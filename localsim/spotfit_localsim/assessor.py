"""Pretend validations: they read the checkpoint, take their time, and tell, fail or hang."""

from __future__ import annotations

from spotfit.model.assessment import Verdict
from spotfit.model.events import CheckpointCommitted
from spotfit.model.spec import RunSpec
from spotfit_localsim.crew import Theatre, restored
from spotfit_localsim.engine import Process, Timer
from spotfit_localsim.saves import Kept
from spotfit_localsim.workload import Validations, score


class SimAssessor:
    """The `Assessor` of one agent."""

    def __init__(self, theatre: Theatre, process: Process) -> None:
        self._theatre = theatre
        self._process = process
        self._kept: CheckpointCommitted | None = None
        self._timer: Timer | None = None
        self._verdict: Verdict | None = None

    def begin(self, spec: RunSpec, kept: CheckpointCommitted) -> None:
        self._process.touch()
        plan, stream = self._theatre.training.load.validations, self._theatre.stream
        assert plan is not None
        if self.busy:
            self._theatre.complain(f"{self._process.name} validates two checkpoints at once")
        self._read(kept)
        self._kept, self._verdict, self._timer = kept, None, None
        if not stream.chance(plan.hanging):
            self._timer = self._theatre.engine.after(
                stream.between(plan.takes_s), lambda: self._come_to_an_end(plan)
            )

    def stop(self) -> None:
        """SIGKILL; it takes a moment to be gone."""
        self._process.touch()
        self._verdict = None
        if self._timer is not None:
            self._timer.call_off()
        if self.busy:
            end_s = self._theatre.stream.between(self._theatre.training.load.end_s)
            self._timer = self._theatre.engine.after(end_s, lambda: self._end(None))

    @property
    def busy(self) -> bool:
        return self._kept is not None

    def verdict(self) -> Verdict | None:
        verdict, self._verdict = self._verdict, None
        return verdict

    def close(self) -> None:
        """The machine is gone."""
        if self._timer is not None:
            self._timer.call_off()
        self._kept = None

    def _come_to_an_end(self, plan: Validations) -> None:
        assert self._kept is not None
        found = self._read(self._kept)
        if found is None or self._theatre.stream.chance(plan.failing):
            self._end(Verdict(told="a mistake in the validation"))
        else:
            self._end(Verdict({"score": score(found.step)}))

    def _end(self, verdict: Verdict | None) -> None:
        self._kept, self._verdict = None, verdict
        if self._process.alive:
            self._process.wake()

    def _read(self, kept: CheckpointCommitted) -> Kept | None:
        """What it finds; a checkpoint that is to be validated is whole, or nobody needs it more."""
        found = restored(self._theatre.bucket.objects, kept.name)
        if isinstance(found, str):
            if self._theatre.is_pending(kept):
                self._theatre.complain(f"{kept.name} is being validated, but {found}")
            return None
        return found
