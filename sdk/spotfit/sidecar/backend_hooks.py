"""The agent's side of the hooks process, which runs backend hooks on the leader's node."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping

import msgspec

from spotfit.core.codec import decoder
from spotfit.core.errors import IntegrityError
from spotfit.core.units import format_ranks
from spotfit.host import log
from spotfit.model.leader_state import UserCodeError
from spotfit.protocol.agent_sidecar import (
    BackendHook,
    CallWorkers,
    FromHookRunner,
    HookFinished,
    RunHook,
    SidecarInit,
    WorkerCallResult,
    WorkersUnavailable,
)
from spotfit.protocol.worker_agent import CallResult
from spotfit.sidecar.channel import SidecarChannel, StartSidecarFn

_message_decoder: msgspec.json.Decoder[FromHookRunner] = decoder(FromHookRunner)  # type: ignore[arg-type]

# Hooks run one at a time, so a hook that waits for workers of a lost round would block the next
# round. It gets time to fail by itself, because killing the process loses the backend's state.
STUCK_HOOK_TIMEOUT_S = 30.0


class ProcessBackendHookRunner:
    """The `BackendHookRunner` that uses a process. The leader never waits for a hook."""

    def __init__(
        self,
        init: SidecarInit,
        start_process: StartSidecarFn,
        call_later: Callable[[float, Callable[[], None]], object],
    ) -> None:
        self._channel = SidecarChannel(
            start_process,
            decoder=_message_decoder,
            on_message=self._on_message,
            on_exit=self._on_exit,
            init=init,
        )
        self._call_later = call_later
        self._pending_hooks: deque[RunHook] = deque()
        """Submitted and not finished; the first one is running."""
        self._worker_calls: list[CallWorkers] = []
        self._user_code_error: UserCodeError | None = None
        self._world_sizes: dict[int, int] = {}
        """The number of workers of each round for which a hook was submitted."""

    def submit(
        self, hook: BackendHook, round_number: int, world_size: int, resources: Mapping[str, float]
    ) -> None:
        request = RunHook(
            hook=hook,
            round=round_number,
            world_size=world_size,
            resources_per_worker=dict(resources),
        )
        self._world_sizes[round_number] = world_size
        # Sent at once, although another hook may be running: the process has a queue.
        self._pending_hooks.append(request)
        self._channel.send(request)

    def is_done(self, hook: BackendHook, round_number: int) -> bool:
        """Whether no such hook of that round is queued or running.

        True also if it was dropped because it had hung after `abandon_round`.
        """
        return not any(
            pending.hook == hook and pending.round == round_number
            for pending in self._pending_hooks
        )

    def drain_worker_calls(self) -> list[CallWorkers]:
        calls, self._worker_calls = self._worker_calls, []
        return calls

    def deliver_call_result(self, round_number: int, rank: int, call_result: CallResult) -> None:
        self._channel.send(
            WorkerCallResult(
                round=round_number,
                rank=rank,
                call_id=call_result.call_id,
                pickled_value=call_result.pickled_value,
                traceback_text=call_result.traceback_text,
            )
        )

    def abandon_round(self, round_number: int) -> None:
        """Fail the worker calls of that round in the process, if it was started.

        If a hook of the round still runs after `STUCK_HOOK_TIMEOUT_S`, the process is killed; hooks
        of other rounds run in a new one, without the backend's attributes.
        """
        # Without a process there is no hook to fail, and this must not start one.
        if self._channel.is_started:
            # Fails the worker calls for which a hook of that round waits.
            self._channel.send(WorkersUnavailable(round=round_number))
            self._call_later(STUCK_HOOK_TIMEOUT_S, lambda: self._kill_if_stuck(round_number))

    def user_code_error(self) -> UserCodeError | None:
        return self._user_code_error

    @property
    def is_idle(self) -> bool:
        # After an error the run ends without the remaining hooks.
        return self._user_code_error is not None or not self._pending_hooks

    def close(self) -> None:
        """Kill the hooks process, if there is one; its exit is not reported as an error.

        Hooks that were submitted do not finish. Harmless if repeated.
        """
        self._channel.close()

    def _on_message(self, message: FromHookRunner) -> None:
        match message:
            case CallWorkers(round=number, ranks=ranks):
                world_size = self._world_sizes.get(number, 0)
                if not all(0 <= rank < world_size for rank in ranks):
                    raise IntegrityError(
                        f"It calls {format_ranks(ranks)} of round {number}, which has "
                        f"{world_size} workers."
                    )
                self._worker_calls.append(message)
            case HookFinished():
                # Hooks finish in the order of their submission.
                if self._pending_hooks:
                    self._pending_hooks.popleft()
                if message.traceback_text is not None and self._user_code_error is None:
                    self._user_code_error = UserCodeError(
                        reason=f"the backend's {message.hook} raised",
                        traceback_text=message.traceback_text,
                        pickle_key=message.pickle_key,
                    )

    def _on_exit(self, reason: str) -> None:
        # Not restarted: the attributes of the backend are lost with the process.
        if self._user_code_error is None:
            self._user_code_error = UserCodeError(
                reason="the backend hooks process died",
                traceback_text=f"The backend hooks process {reason}.",
            )

    def _kill_if_stuck(self, round_number: int) -> None:
        """Restart the process if it still runs a hook of that round, which has ended."""
        running = self._pending_hooks[0] if self._pending_hooks else None
        if not self._channel.is_started or running is None or running.round != round_number:
            return
        log.error("hook.timed_out", hook=running.hook, after_s=STUCK_HOOK_TIMEOUT_S)
        self._channel.close()
        # Hooks of later rounds are repeated in the new process; none of them has started.
        self._pending_hooks = deque(
            request for request in self._pending_hooks if request.round != round_number
        )
        for request in self._pending_hooks:
            self._channel.send(request)
