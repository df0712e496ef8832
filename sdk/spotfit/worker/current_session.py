"""The session of this process, which `report()`, `get_checkpoint()` and their like use."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from spotfit.checkpoint.checkpoint_dir import Checkpoint
from spotfit.checkpoint.reported import CheckpointReport, ReportedCheckpoint
from spotfit.checkpoint.snapshot_channel import SnapshotChannel
from spotfit.core.errors import SessionMisuseError
from spotfit.model.reporting import CheckpointConsistencyMode
from spotfit.model.topology import PreemptionInfo
from spotfit.worker.context import TrainContext


class TrainSession(Protocol):
    """The operations available to a training function, on a worker or in local mode."""

    @property
    def context(self) -> TrainContext:
        """The identity of this worker."""

    @property
    def devices(self) -> tuple[str, ...] | None:
        """The accelerators of this worker; None in local mode, which does not assign any."""

    @property
    def snapshot_channel(self) -> SnapshotChannel:
        """The interface of a Checkpointer."""

    def report_metrics(self, metrics: dict[str, Any], dir_name: str | None = None) -> None:
        """Make the next report without files. Does not wait for other ranks."""

    def report_checkpoint(self, metrics: dict[str, Any], report: CheckpointReport) -> None:
        """Make the next report with a checkpoint."""

    def latest_checkpoint(self) -> Checkpoint | None:
        """Return the checkpoint to resume from; None if there is none."""

    def dataset_shard(self, name: str | None) -> Any:
        """Return this worker's shard of a dataset. Raises `UnknownDatasetError`."""

    def reported_checkpoints(
        self, mode: CheckpointConsistencyMode, timeout_s: float | None
    ) -> list[ReportedCheckpoint]:
        """Return all checkpoints of the run, worst to best."""

    def preemption_info(self) -> PreemptionInfo | None:
        """Return the preemption notices that rank 0 has received. A collective of all ranks."""

    def barrier(self) -> None:
        """Wait until all ranks have called this."""

    def broadcast(self, value: Any) -> Any:
        """Return rank 0's value. A collective of all ranks."""


_session: TrainSession | None = None


def set_session(session: TrainSession) -> None:
    """Make `session` the current session of this process."""
    global _session  # a process trains in one session at a time
    _session = session


def clear_session() -> None:
    """Leave this process without a current session."""
    global _session
    _session = None


@contextmanager
def use_session(session: TrainSession) -> Iterator[None]:
    """Make `session` the current session within the block, then restore the previous one."""
    global _session
    # Nested: a training function may call a trainer in local mode.
    previous, _session = _session, session
    try:
        yield
    finally:
        _session = previous


def has_session() -> bool:
    """Return whether this process is executing a training function."""
    return _session is not None


def require_session(caller: str) -> TrainSession:
    """Return the current session. Raises `SessionMisuseError` (a RuntimeError) without one."""
    if _session is None:
        raise SessionMisuseError(
            f"`{caller}` cannot be used outside of a spotfit training function.",
            do="Call it in the function that is passed to the trainer; that runs on a worker.",
        )
    return _session
