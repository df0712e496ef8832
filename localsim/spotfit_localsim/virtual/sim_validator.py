"""Simulated validations: they read the checkpoint, take time, and report a score, fail or hang."""

from __future__ import annotations

from spotfit.model.events import CheckpointCommitted
from spotfit.model.spec import RunSpec
from spotfit.protocol.agent_sidecar import ValidationResult
from spotfit_localsim.virtual.engine import SimProcess, Timer
from spotfit_localsim.virtual.sim_snapshots import SimSavedState
from spotfit_localsim.virtual.sim_workers import SimWorkerContext, read_checkpoint_state
from spotfit_localsim.virtual.workload import validation_score


class SimValidator:
    """The `Validator` of one agent."""

    def __init__(self, context: SimWorkerContext, process: SimProcess) -> None:
        self._context = context
        self._process = process
        self._checkpoint: CheckpointCommitted | None = None
        self._timer: Timer | None = None
        self._result: ValidationResult | None = None

    def start(self, spec: RunSpec, checkpoint: CheckpointCommitted) -> None:
        self._process.simulate_call()
        plan, stream = self._context.training.workload.validations, self._context.stream
        assert plan is not None
        if self.is_running:
            self._context.report_violation(f"{self._process.name} runs two validations at once")

        def finish() -> None:
            state = self._read_state(checkpoint)
            if state is None or stream.bernoulli(plan.failure_probability):
                self.exit(ValidationResult(message="simulated validation error"))
            else:
                self.exit(ValidationResult(metrics={"score": validation_score(state.step)}))

        # Read at the start and at the end: the checkpoint must not be deleted in between.
        self._read_state(checkpoint)
        self._checkpoint, self._result, self._timer = checkpoint, None, None
        # Without a timer it hangs until the agent stops it.
        if not stream.bernoulli(plan.hang_probability):
            duration_s = stream.uniform_in(plan.duration_s)
            self._timer = self._context.engine.schedule_after(duration_s, finish)

    def stop(self) -> None:
        """Kill the validation; it exits after a short time."""
        self._process.simulate_call()
        self._result = None
        if self._timer is not None:
            self._timer.cancel()
        if self.is_running:
            # The next validation must wait for the exit: the accelerator is still in use.
            end_s = self._context.stream.uniform_in(self._context.training.workload.exit_s)
            self._timer = self._context.engine.schedule_after(end_s, lambda: self.exit(None))

    @property
    def is_running(self) -> bool:
        return self._checkpoint is not None

    def take_result(self) -> ValidationResult | None:
        result, self._result = self._result, None
        return result

    def close(self) -> None:
        """Stop at once: the machine is terminated."""
        if self._timer is not None:
            self._timer.cancel()
        self._checkpoint = None

    def exit(self, result: ValidationResult | None) -> None:
        """End the process, with its result if it was not killed."""
        self._checkpoint, self._result = None, result
        if self._process.is_alive:
            self._process.wake()

    def _read_state(self, checkpoint: CheckpointCommitted) -> SimSavedState | None:
        """Return the state in the checkpoint; a pending checkpoint must be complete."""
        state = read_checkpoint_state(self._context.bucket.objects, checkpoint.name)
        if isinstance(state, str):
            # A checkpoint that is not pending any more may be deleted at any time.
            if self._context.is_pending(checkpoint):
                self._context.report_violation(f"{checkpoint.name} is being validated, but {state}")
            return None
        return state
