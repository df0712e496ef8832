"""Local mode (`num_workers=0`): the training function runs in the caller's own process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from spotfit.checkpoint.checkpoint_dir import Checkpoint
from spotfit.checkpoint.reported import CheckpointReport, ReportedCheckpoint
from spotfit.model.data import unknown_dataset_error
from spotfit.model.metrics import metrics_to_json
from spotfit.model.reporting import CheckpointConsistencyMode
from spotfit.model.topology import PreemptionInfo, Ranks
from spotfit.protocol.worker_agent import StartWorker
from spotfit.worker.context import TrainContext
from spotfit.worker.local_snapshots import LocalSnapshotChannel


class Peers(Protocol):
    """The other processes of a group that a launcher such as torchrun has started."""

    @property
    def ranks(self) -> Ranks:
        """The ranks of this process in the group."""

    def barrier(self) -> None:
        """Wait until all processes have called this."""

    def broadcast(self, value: Any) -> Any:
        """Return rank 0's value."""


class LocalSession:
    """The session of a function that runs in the caller's process, alone or with torchrun peers.

    It keeps the last reported metrics and checkpoint in memory, and uploads nothing.
    """

    devices: tuple[str, ...] | None = None

    def __init__(
        self, name: str, peers: Peers | None = None, *, datasets: Mapping[str, Any] | None = None
    ) -> None:
        self._peers = peers
        ranks = peers.ranks if peers else Ranks()
        self.context = TrainContext(_make_start(name, ranks), None)
        # With `broadcast`, the peers agree on one directory for their snapshots.
        self.snapshot_channel = LocalSnapshotChannel(ranks, self.broadcast, self._record_snapshot)
        self._dataset_sources = dict(datasets or {})
        self._loaded_datasets: dict[str, Any] = {}
        """Cache, so that each call returns the same object."""
        self.metrics: dict[str, Any] | None = None
        """The metrics of the last report, with or without a checkpoint."""
        self.last_checkpoint: Checkpoint | None = None

    def report_metrics(self, metrics: dict[str, Any], dir_name: str | None = None) -> None:
        """Store the metrics. Raises ValueError if they are not JSON-serializable."""
        metrics_to_json(metrics)  # only for its check, which a worker makes, too
        self.metrics = metrics

    def report_checkpoint(self, metrics: dict[str, Any], report: CheckpointReport) -> None:
        """Store the metrics and the checkpoint; no file is uploaded, copied or deleted."""
        self._record_snapshot(metrics, report.checkpoint)

    def _record_snapshot(self, metrics: dict[str, Any], checkpoint: Checkpoint) -> None:
        self.report_metrics(metrics)
        self.last_checkpoint = checkpoint

    def latest_checkpoint(self) -> Checkpoint | None:
        """Return the checkpoint that was reported last."""
        return self.last_checkpoint

    def dataset_shard(self, name: str | None) -> Any:
        """Return the complete dataset, or the result of calling it if it is a factory function."""
        if name not in self._dataset_sources:
            raise unknown_dataset_error(name, self._dataset_sources)
        if name not in self._loaded_datasets:
            source = self._dataset_sources[name]
            self._loaded_datasets[name] = source() if callable(source) else source
        return self._loaded_datasets[name]

    def reported_checkpoints(
        self, mode: CheckpointConsistencyMode, timeout_s: float | None
    ) -> list[ReportedCheckpoint]:
        """Return an empty list: local mode has no journal of checkpoints."""
        return []

    def preemption_info(self) -> PreemptionInfo | None:
        """Return None: local mode does not receive preemption notices."""
        return None

    def barrier(self) -> None:
        """Wait for the peers; without peers, return at once."""
        if self._peers is not None:
            self._peers.barrier()

    def broadcast(self, value: Any) -> Any:
        """Return rank 0's value; without peers, `value`."""
        return value if self._peers is None else self._peers.broadcast(value)


def _make_start(name: str, ranks: Ranks) -> StartWorker:
    # TrainContext reads only names and ranks; the other fields have no meaning in local mode.
    return StartWorker(
        run_id="",
        run_name=name,
        round=0,
        rank=ranks.world_rank,
        local_rank=ranks.local_rank,
        world_size=ranks.world_size,
        local_world_size=ranks.local_world_size,
        node_rank=ranks.node_rank,
        host="127.0.0.1",
        storage_url="",
        framework="none",
        framework_options={},
        code_bundle={},
    )
