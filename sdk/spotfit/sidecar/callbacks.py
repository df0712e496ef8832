"""The agent's side of the callbacks process, which runs user callbacks on the leader's node."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from spotfit.core.codec import decoder
from spotfit.core.errors import IntegrityError
from spotfit.model.leader_state import UserCodeError
from spotfit.protocol.agent_sidecar import (
    CallAfterException,
    CallAfterReport,
    CallbackFinished,
    RankFailureSummary,
    SidecarInit,
)
from spotfit.sidecar.channel import SidecarChannel, StartSidecarFn


class ProcessCallbackRunner:
    """The `CallbackRunner` that uses a process. The leader never waits for a callback."""

    def __init__(self, init: SidecarInit, start_process: StartSidecarFn) -> None:
        self._channel = SidecarChannel(
            start_process,
            decoder=decoder(CallbackFinished),
            on_message=self._on_finished,
            on_exit=self._on_exit,
            init=init,
        )
        self._sent_count = 0
        self._finished_count = 0
        self._user_code_error: UserCodeError | None = None

    def send_report(
        self, metrics: Sequence[msgspec.Raw], checkpoint: str | None, *, digest: str = ""
    ) -> None:
        self._send(
            CallAfterReport(
                metrics_by_rank=tuple(metrics), checkpoint_name=checkpoint, checkpoint_digest=digest
            )
        )

    def send_failure(self, pickle_keys: dict[int, str], traceback_texts: dict[int, str]) -> None:
        failures = tuple(
            RankFailureSummary(
                rank=rank, message=traceback_texts[rank], pickle_key=pickle_keys.get(rank)
            )
            for rank in sorted(traceback_texts)  # all failed ranks, also those without a pickle
        )
        self._send(CallAfterException(failures=failures))

    def _send(self, message: CallAfterReport | CallAfterException) -> None:
        self._sent_count += 1
        try:
            self._channel.send(message)
        except IntegrityError as error:  # the metrics of all ranks together are too large
            self._user_code_error = self._user_code_error or UserCodeError(
                reason="a report is too large for the callbacks", traceback_text=str(error)
            )

    @property
    def finished_count(self) -> int:
        return self._finished_count

    def user_code_error(self) -> UserCodeError | None:
        return self._user_code_error

    @property
    def is_idle(self) -> bool:
        # After an error the run ends; waiting for the remaining callbacks would delay that.
        return self._user_code_error is not None or self._finished_count == self._sent_count

    def close(self) -> None:
        """Kill the callbacks process, if there is one; its exit is not reported as an error.

        Callbacks that were queued do not run. Harmless if repeated.
        """
        self._channel.close()

    def _on_finished(self, response: CallbackFinished) -> None:
        # One reply to each call, in order: counting them is enough.
        if self._finished_count == self._sent_count:
            raise IntegrityError("It answers a call that was not made.")
        self._finished_count += 1
        if response.traceback_text is not None and self._user_code_error is None:
            self._user_code_error = UserCodeError(
                reason="a callback raised",
                traceback_text=response.traceback_text,
                pickle_key=response.pickle_key,
            )

    def _on_exit(self, reason: str) -> None:
        # Also an exit with code 0: the process serves until the agent closes its socket.
        if self._user_code_error is None:
            self._user_code_error = UserCodeError(
                reason="the callbacks process died",
                traceback_text=f"The callbacks process {reason}.",
            )
