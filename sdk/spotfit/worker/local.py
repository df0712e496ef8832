"""Local mode (`num_workers=0`): the training function runs in the caller's own process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from spotfit.checkpoint.handle import Checkpoint
from spotfit.model.data import unknown_dataset
from spotfit.model.metrics import metrics_to_json
from spotfit.model.preemption import PreemptionInfo
from spotfit.model.ranks import Ranks
from spotfit.model.reporting import CheckpointConsistencyMode
from spotfit.model.wire import Start
from spotfit.worker.context import TrainContext
from spotfit.worker.local_snapshots import LocalSnapshots
from spotfit.worker.reported import Luggage, ReportedCheckpoint


class Peers(Protocol):
    """Other processes in which the same function runs, because a launcher has started them."""

    @property
    def ranks(self) -> Ranks:
        """Who this process is among them."""
        ...

    def barrier(self) -> None:
        """Wait for all of them."""
        ...

    def broadcast(self, thing: Any) -> Any:
        """What rank 0 gave."""
        ...


class LocalSession:
    """Remembers the last metrics and checkpoint; copies nothing, and meets its peers if any."""

    devices: tuple[str, ...] | None = None

    def __init__(
        self,
        name: str,
        peers: Peers | None = None,
        *,
        datasets: Mapping[str, Any] | None = None,
    ) -> None:
        self._peers = peers
        ranks = peers.ranks if peers else Ranks()
        self.context = TrainContext(_start(name, ranks), None)
        self.snapshots = LocalSnapshots(ranks, self.broadcast, self._note_snapshot)
        self._given = dict(datasets or {})
        self._datasets: dict[str, Any] = {}
        """Those that were asked for."""
        self.metrics: dict[str, Any] | None = None
        """Of the last report, with or without a checkpoint."""
        self.last_checkpoint: Checkpoint | None = None

    def report_metrics(self, metrics: dict[str, Any], dir_name: str | None = None) -> None:
        """Remember them, if a worker could have reported them."""
        metrics_to_json(metrics)
        self.metrics = metrics

    def report_files(self, metrics: dict[str, Any], luggage: Luggage) -> None:
        """Remember both; nothing is uploaded, copied or deleted."""
        self.report_metrics(metrics)
        self.last_checkpoint = luggage.checkpoint

    def _note_snapshot(self, metrics: dict[str, Any], checkpoint: Checkpoint) -> None:
        self.report_metrics(metrics)
        self.last_checkpoint = checkpoint

    def checkpoint(self) -> Checkpoint | None:
        """The last one reported."""
        return self.last_checkpoint

    def dataset(self, name: str | None) -> Any:
        """The whole of it; where the trainer was given a function, what that returns."""
        if name not in self._given:
            raise unknown_dataset(name, self._given)
        if name not in self._datasets:
            given = self._given[name]
            self._datasets[name] = given() if callable(given) else given
        return self._datasets[name]

    def reported(
        self, mode: CheckpointConsistencyMode, timeout_s: float | None
    ) -> list[ReportedCheckpoint]:
        """Nothing is kept, so there is nothing to tell."""
        return []

    def preemption_info(self) -> PreemptionInfo | None:
        """Nobody takes this machine away."""
        return None

    def barrier(self) -> None:
        """Wait for the peers; alone, for nobody."""
        if self._peers is not None:
            self._peers.barrier()

    def broadcast(self, thing: Any) -> Any:
        """What rank 0 gave; alone, what was given."""
        return thing if self._peers is None else self._peers.broadcast(thing)


def _start(name: str, ranks: Ranks) -> Start:
    return Start(
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
        luggage={},
    )
