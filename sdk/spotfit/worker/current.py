"""The session of this process: what every worker function asks first."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from spotfit.checkpoint.handle import Checkpoint
from spotfit.core.errors import SessionMisuseError
from spotfit.model.preemption import PreemptionInfo
from spotfit.model.reporting import CheckpointConsistencyMode
from spotfit.worker.context import TrainContext
from spotfit.worker.handover import Handover
from spotfit.worker.reported import Luggage, ReportedCheckpoint


class TrainSession(Protocol):
    """What a training function may ask of us, be it a worker's or in local mode."""

    @property
    def context(self) -> TrainContext:
        """Who this worker is."""
        ...

    @property
    def devices(self) -> tuple[str, ...] | None:
        """Accelerators that are this worker's own; None in local mode, where nobody deals out."""
        ...

    @property
    def snapshots(self) -> Handover:
        """What a Checkpointer hands over and finds."""
        ...

    def report_metrics(self, metrics: dict[str, Any], dir_name: str | None = None) -> None:
        """Take part in the next report without files. Waits for nobody."""
        ...

    def report_files(self, metrics: dict[str, Any], luggage: Luggage) -> None:
        """Take part in the next report with a checkpoint."""
        ...

    def checkpoint(self) -> Checkpoint | None:
        """What to start or go on from."""
        ...

    def dataset(self, name: str | None) -> Any:
        """This worker's part of a dataset. Raises `UnknownDatasetError`."""
        ...

    def reported(
        self, mode: CheckpointConsistencyMode, timeout_s: float | None
    ) -> list[ReportedCheckpoint]:
        """All checkpoints of the run, worst to best."""
        ...

    def preemption_info(self) -> PreemptionInfo | None:
        """What rank 0 knows of nodes that will be taken away. All ranks must ask."""
        ...

    def barrier(self) -> None:
        """Wait for all ranks."""
        ...

    def broadcast(self, thing: Any) -> Any:
        """What rank 0 gave. All ranks must call."""
        ...


_session: TrainSession | None = None


def enter(session: TrainSession) -> None:
    """From now on worker functions of this process mean `session`."""
    global _session  # a process trains in one session at a time
    _session = session


def leave() -> None:
    """Worker functions have nobody to ask any more."""
    global _session
    _session = None


@contextmanager
def entered(session: TrainSession) -> Iterator[None]:
    """While it lasts worker functions mean `session`; then whatever they meant before."""
    global _session
    before, _session = _session, session
    try:
        yield
    finally:
        _session = before


def inside() -> bool:
    """Whether this process is within a training function."""
    return _session is not None


def current(asker: str) -> TrainSession:
    """The session. Raises `SessionMisuseError`, which is a RuntimeError, where there is none."""
    if _session is None:
        raise SessionMisuseError(
            f"`{asker}` cannot be used outside of a spotfit training function.",
            do="Call it within the function that the trainer was given, on a worker.",
        )
    return _session
