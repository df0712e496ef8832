"""Synchronization of a round's workers with the hooks of the user's backend.

All workers stop at a gate before each phase; the leader runs the hook of that phase and then opens
the gate:

| phase waited for | event                                  | next                              |
|------------------|----------------------------------------|-----------------------------------|
| setup            | all ranks at the gate                  | `on_start` is submitted           |
| setup            | `on_start` returned                    | gate opened; "train" is next      |
| train            | all ranks at the gate                  | `on_training_start` is submitted  |
| train            | `on_training_start` returned           | gate opened; "leave" is next      |
| leave            | all functions have returned            | `on_shutdown` is submitted        |
| leave            | `on_shutdown` returned                 | gate opened; done                 |
| train, leave     | round closed                           | `on_shutdown` is submitted, done  |
"""

from __future__ import annotations

from collections.abc import Mapping

from spotfit.agent.collectives import OutgoingFrame
from spotfit.agent.ports import BackendHookRunner
from spotfit.agent.round_coordinator import RoundCoordinator
from spotfit.protocol.agent_sidecar import BackendHook
from spotfit.protocol.worker_agent import CallFunction, OpenGate, WorkerPhase

_HOOK_PHASES: tuple[tuple[BackendHook, WorkerPhase], ...] = (
    ("on_start", "setup"),
    ("on_training_start", "train"),
    ("on_shutdown", "leave"),
)
"""Each hook, and the phase that workers enter after it has returned."""


class BackendHookGates:
    """Runs the hooks of one round and forwards the calls of workers that hooks make."""

    def __init__(
        self,
        coordinator: RoundCoordinator,
        backend_hook_runner: BackendHookRunner,
        resources: Mapping[str, float],
    ) -> None:
        self._coordinator = coordinator
        self._backend_hook_runner = backend_hook_runner
        self._resources = resources
        self._phase_index = 0
        """Number of gates that were opened."""
        self._is_hook_submitted = False

    @property
    def is_done(self) -> bool:
        """Whether the last hook has returned."""
        return self._phase_index == len(_HOOK_PHASES)

    def advance(self) -> list[OutgoingFrame]:
        """Submit the next hook if it is due. Returns the frames to send to workers."""
        # Answers of workers first: the hook that runs may return because of them.
        while self._coordinator.call_results:
            rank, result = self._coordinator.call_results.popleft()
            self._backend_hook_runner.deliver_call_result(self._coordinator.round, rank, result)
        all_ranks = tuple(range(self._coordinator.world_size))
        frames: list[OutgoingFrame] = []
        for call in self._backend_hook_runner.drain_worker_calls():
            # One frame per node instead of one per rank if all ranks are called.
            ranks: tuple[int | None, ...] = (None,) if call.ranks == all_ranks else call.ranks
            # Calls for an earlier round were failed by `abandon_round`.
            if call.round == self._coordinator.round:
                frames += [
                    (rank, CallFunction(call_id=call.call_id, pickled_call=call.pickled_call))
                    for rank in ranks
                ]
        # The calls first: their hook made them before it returned, which opens the gate.
        if self.is_done:
            return frames
        hook, phase = _HOOK_PHASES[self._phase_index]
        if not self._is_hook_submitted and self._coordinator.are_all_at_gate(phase):
            self._is_hook_submitted = True
            self._submit_hook(hook)
        if self._is_hook_submitted and self._backend_hook_runner.is_done(
            hook, self._coordinator.round
        ):
            # At most one gate per call: no rank is at the next gate before it passes this one.
            self._phase_index, self._is_hook_submitted = self._phase_index + 1, False
            frames.append((None, OpenGate(phase=phase)))
        return frames

    def abandon_workers(self) -> None:
        """Fail the hook that is waiting for workers, because the round has failed."""
        self._backend_hook_runner.abandon_round(self._coordinator.round)

    def close(self) -> None:
        """End the round. A backend that was started is shut down even without workers."""
        # First: the hook that is running would wait forever for workers that were killed.
        self.abandon_workers()
        is_shutting_down = (
            self._is_hook_submitted and _HOOK_PHASES[self._phase_index][0] == "on_shutdown"
        )
        # `_phase_index` > 0: on_start has returned, so there is something to shut down.
        if self._phase_index and not self.is_done and not is_shutting_down:
            self._submit_hook("on_shutdown")

    def _submit_hook(self, hook: BackendHook) -> None:
        self._backend_hook_runner.submit(
            hook, self._coordinator.round, self._coordinator.world_size, self._resources
        )
