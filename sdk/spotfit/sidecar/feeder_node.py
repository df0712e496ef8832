"""The agent's side of the feeder processes of a machine for feeders."""

from __future__ import annotations

import math
from collections.abc import Callable

from spotfit.core.codec import decoder
from spotfit.host import log
from spotfit.model.spec import RunSpec
from spotfit.model.topology import FeederAddress
from spotfit.protocol.agent_sidecar import FeedersListening, SidecarInit, StartFeeders
from spotfit.sidecar.channel import SidecarChannel, StartSidecarFn


class ProcessFeederNode:
    """The `FeederNode` that uses a sidecar, which starts the feeder processes."""

    def __init__(
        self,
        start_process: StartSidecarFn,
        make_init: Callable[[RunSpec], SidecarInit],
        *,
        processors: int,
    ) -> None:
        self._start_process = start_process
        self._make_init = make_init
        self._processors = processors
        self._channel: SidecarChannel[FeedersListening] | None = None
        self._feeder: FeederAddress | None = None

    def start(self, spec: RunSpec) -> None:
        self._channel = SidecarChannel(
            self._start_process,
            decoder=decoder(FeedersListening),
            on_message=self._on_listening,
            on_exit=self._on_exit,
            init=self._make_init(spec),
        )
        processes = _process_count(spec, self._processors)
        self._channel.send(StartFeeders(processes=processes, log_level=spec.log_level))

    def stop(self) -> None:
        self._feeder = None
        if self._channel is not None:
            self._channel.close()
            self._channel = None

    @property
    def is_running(self) -> bool:
        return self._channel is not None

    @property
    def feeder(self) -> FeederAddress | None:
        return self._feeder

    def _on_listening(self, message: FeedersListening) -> None:
        self._feeder = message.feeder

    def _on_exit(self, reason: str) -> None:
        log.warning("feeder.node_ended", reason=reason)
        self.stop()


def _process_count(spec: RunSpec, processors: int) -> int:
    """Return one process for each processor that was requested, as far as the machine has them.

    A machine that several agents share, as on the local backend, has more.
    """
    requested = spec.feeders.resources.get("CPU", processors) if spec.feeders else processors
    return max(1, min(math.ceil(requested), processors))
