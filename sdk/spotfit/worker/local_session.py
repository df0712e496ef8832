"""Local mode (`num_workers=0`): the training function runs in the caller's own process.

Snapshots in local mode: each is written to a temporary directory and committed immediately.
"""

from __future__ import annotations

import tempfile
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from spotfit.checkpoint.checkpoint_dir import Checkpoint, write_default_metadata
from spotfit.checkpoint.committed import CheckpointReport, ReportedCheckpoint
from spotfit.checkpoint.manifest import Manifest
from spotfit.checkpoint.reader import (
    SavedState,
    SavedStateDescriptor,
    open_described,
    open_snapshot_folder,
)
from spotfit.checkpoint.snapshot_channel import GroupOutlook, SnapshotStatus
from spotfit.checkpoint.writer import SnapshotUploadJob, upload_snapshot
from spotfit.core.cached import cached_property
from spotfit.core.errors import ConfigError
from spotfit.core.lazy_names import is_loaded_instance
from spotfit.host import log
from spotfit.model.config import unknown_dataset_error
from spotfit.model.reporting import (
    CheckpointConsistencyMode,
    SaveAtEnd,
    metrics_from_json,
    metrics_to_json,
    metrics_to_plain_json,
)
from spotfit.model.topology import PreemptionInfo, Ranks
from spotfit.protocol.worker_agent import StartWorker
from spotfit.store.api import Store
from spotfit.store.factory import open_store
from spotfit.worker.training_api import TrainContext

if TYPE_CHECKING:
    from spotfit.data.rank_shards import DatasetShards

# --- Snapshots in local mode ----------------------------------------------------------------------


BroadcastFn = Callable[[Any], Any]
OnSnapshotFn = Callable[[dict[str, Any] | None, Checkpoint], None]
"""Called with the metrics, None for those that are no report, and the checkpoint."""


class LocalSnapshotChannel:
    """The `SnapshotChannel` of a process in local mode, alone or with torchrun peers.

    There is no agent: a snapshot is "committed" as soon as `submit` returns. Snapshots are written
    to a temporary directory that all peers share, and stay there after the process exits.
    """

    def __init__(self, ranks: Ranks, broadcast: BroadcastFn, on_snapshot: OnSnapshotFn) -> None:
        self._ranks = ranks
        self._broadcast = broadcast
        self._on_snapshot = on_snapshot
        self._submitted_count = 0
        self._segment_count = 0
        self._latest_name: str | None = None
        self._committed_names: list[str] = []
        self.save_at_end: Callable[[], SaveAtEnd] | None = None
        """See `SnapshotChannel.save_at_end`."""
        self.files_report_count = 0
        """How many checkpoints with files this process has reported."""

    @property
    def segment_dirs(self) -> list[Path]:
        """The only directory for segments, `segments` below the temporary directory.

        The first access creates the temporary directory and is a collective of all peers.
        """
        return [self._root / "segments"]

    def record_progress(self, progress: float) -> None:
        """Do nothing: no machines are rented that depend on it."""

    def new_segment_path(self, directory: Path) -> Path:
        """Return an unused path for a segment in `directory`, such as `0-1.segment`.

        The first number is the rank, the second a counter.
        """
        self._segment_count += 1
        return directory / f"{self._ranks.world_rank}-{self._segment_count}.segment"

    def submit(
        self, metrics: dict[str, Any], segment: Path, reason: str = "", *, step: int | None = None
    ) -> int:
        """Write the snapshot in `segment` to the temporary directory; return its report index.

        Blocks until it is written; the first index is 0. `reason` is stored in its manifest. Raises
        `ConfigError` if the metrics are not JSON-serializable.
        """
        n, checkpoint = self._write(metrics, segment, reason)
        self._on_snapshot(metrics, checkpoint)
        return n

    def submit_at_end(self, metrics: bytes, segment: Path, *, step: int) -> None:
        """Write the snapshot in `segment`, as `submit` does; its metrics are no report."""
        # With peers the snapshot would be complete only if all of them save the same step, and
        # there is no leader that knows.
        if self._ranks.world_size > 1:
            raise ConfigError(
                "local mode with a launcher such as torchrun does not save at the end",
                do="Call Checkpointer.save() on all ranks after the last step.",
            )
        decoded = metrics_from_json(msgspec.json.decode(metrics))
        _, checkpoint = self._write(decoded, segment, "the training function has returned")
        self._on_snapshot(None, checkpoint)

    def _write(self, metrics: dict[str, Any], segment: Path, reason: str) -> tuple[int, Checkpoint]:
        n, self._submitted_count = self._submitted_count, self._submitted_count + 1
        name, rank = f"checkpoint_{n:06d}", self._ranks.world_rank
        ranks = tuple(range(self._ranks.world_size))
        # Every rank writes its own shard and manifest; a snapshot is complete once all have.
        manifest = Manifest(
            name=name,
            round=0,
            report_index=n,
            rank=rank,
            ranks=ranks,
            metrics=metrics_to_plain_json(metrics),
            files=(),
            reason=reason,
        )
        # With the latest snapshot as the parent, equal chunks are not written again.
        job = SnapshotUploadJob(str(segment), manifest, self._latest_name or "")
        upload_snapshot(self._store, job)
        self._latest_name = name
        self._committed_names.append(name)
        return n, Checkpoint.from_store(self._store, name)

    def skip(self, metrics: dict[str, Any], reason: str) -> None:
        """Count a report without a snapshot and log `reason` as a warning."""
        # The other ranks may have submitted: equal counts keep the names of all ranks equal.
        self._submitted_count += 1
        log.warning("checkpoint.skipped", rank=self._ranks.world_rank, reason=reason)

    def status_of(self, report_index: int) -> SnapshotStatus:
        """Return "committed": `submit` blocks until the snapshot is written."""
        return "committed"

    def wait_for_upload(self, report_index: int) -> SnapshotStatus:
        """Return "committed" at once."""
        return "committed"

    def roll_back(self) -> None:
        """Do nothing: a restarted process does not resume from this one's snapshots."""

    def broadcast_bytes(self, kind: str, value: bytes) -> bytes:
        """Return rank 0's value; without peers, `value`.

        A collective of all peers; `kind` is ignored.
        """
        result: bytes = self._broadcast(value)
        return result

    def outlook(self) -> GroupOutlook:
        """Return an outlook without notices: nothing reports them in local mode."""
        return GroupOutlook()  # no agent runs here that could report notices

    @property
    def initial_checkpoint(self) -> str | None:
        """Name of this process's latest snapshot, such as "checkpoint_000003".

        None before the first one, and after the latest one was marked corrupt.
        """
        return self._latest_name

    @property
    def initial_step(self) -> int:
        """0: needed only for states in memory, which local mode does not keep."""
        return 0

    @property
    def has_snapshots(self) -> bool:
        """Whether `initial_checkpoint` names a snapshot."""
        return self._latest_name is not None

    def open_in_memory(self) -> SavedState | None:
        """Return None: local mode keeps no state in memory."""
        return None

    def open_checkpoint(self, name: str) -> SavedState | None:
        """Open this process's snapshot `name`, such as "checkpoint_000003".

        Raises `ConfigError` if there is none, and `IntegrityError` if it is corrupt.
        """
        return open_snapshot_folder(self._store, name)

    def mark_corrupt(self, name: str) -> None:
        """Exclude the snapshot `name` from later restores. Idempotent; its files are kept."""
        self._committed_names = [other for other in self._committed_names if other != name]
        self._latest_name = None if name == self._latest_name else self._latest_name

    def reopen(self, opened: SavedStateDescriptor) -> SavedState:
        """Open a snapshot that another rank has opened and described in `opened`."""
        return open_described(self._store, opened)

    def committed_checkpoints(self) -> Iterator[str]:
        """Yield the names of this process's snapshots, the latest first, without corrupt ones."""
        yield from reversed(self._committed_names)

    def earlier_checkpoints(self) -> Iterator[str]:
        """Yield nothing: there are no checkpoints of an earlier process."""
        yield from ()

    @cached_property
    def _root(self) -> Path:
        # Rank 0 chooses the directory: all ranks write into the same checkpoints.
        root = Path(self._broadcast(tempfile.mkdtemp(prefix="spotfit-checkpoints-")))
        # A module function: a bound method would keep this object alive until the process exits.
        weakref.finalize(self, _delete_segments, root / "segments", self._ranks.world_rank)
        return root

    @cached_property
    def _store(self) -> Store:
        return open_store(str(self._root))


def _delete_segments(segments: Path, rank: int) -> None:
    """Delete this rank's segments at exit; the checkpoints in the directory stay."""
    for path in segments.glob(f"{rank}-*"):
        with suppress(OSError):  # Windows refuses it while the file is mapped
            path.unlink(missing_ok=True)
    with suppress(OSError):  # not empty because of a peer, or never created
        segments.rmdir()


class Peers(Protocol):
    """The other processes of a group that a launcher such as torchrun has started."""

    @property
    def ranks(self) -> Ranks:
        """World, local and node rank of this process, and the sizes of the group."""

    def barrier(self) -> None:
        """Wait until all processes of the group have called this."""

    def broadcast(self, value: Any) -> Any:
        """Return rank 0's `value` on every process, once all have called this; it is pickled."""


class LocalSession:
    """The `TrainSession` of a function in the caller's process, alone or with torchrun peers.

    It keeps the last reported metrics and checkpoint in memory, and uploads nothing.
    """

    devices: tuple[str, ...] | None = None

    def __init__(
        self,
        name: str,
        peers: Peers | None = None,
        *,
        datasets: Mapping[str, Any] | None = None,
        dataset_config: Any = None,
    ) -> None:
        self._peers = peers
        ranks = peers.ranks if peers else Ranks()
        self.context = TrainContext(_make_start(name, ranks), None)
        # With `broadcast`, the peers agree on one directory for their snapshots.
        self.snapshot_channel = LocalSnapshotChannel(ranks, self.broadcast, self._record_snapshot)
        self._dataset_sources = dict(datasets or {})
        self._dataset_config = dataset_config
        self._loaded_datasets: dict[str, Any] = {}
        """Cache, so that each call returns the same object."""
        self.metrics: dict[str, Any] | None = None
        """The metrics of the last report, with or without a checkpoint."""
        self._default_metadata: dict[str, Any] = {}
        """Metadata of checkpoints: the preprocessor of the dataset "train"."""
        self.last_checkpoint: Checkpoint | None = None

    def report_metrics(self, metrics: dict[str, Any], dir_name: str | None = None) -> None:
        """Keep `metrics` (not a copy) as those of the last report; `dir_name` is ignored.

        Raises `ConfigError` (a ValueError) if they are not JSON-serializable.
        """
        metrics_to_json(metrics)  # only for its check, which a worker makes, too
        self.metrics = metrics

    def report_checkpoint(self, metrics: dict[str, Any], report: CheckpointReport) -> None:
        """Keep the metrics and the checkpoint as those of the last report.

        No file is uploaded, copied or deleted, whatever the options in `report`. Does not wait for
        peers. Raises `ConfigError` (a ValueError) if the metrics are not JSON-serializable.
        """
        self.snapshot_channel.files_report_count += 1
        self._record_snapshot(metrics, report.checkpoint)

    def _record_snapshot(self, metrics: dict[str, Any] | None, checkpoint: Checkpoint) -> None:
        if metrics is not None:
            self.report_metrics(metrics)
        directory = checkpoint.local_directory
        # The directory of a report may be missing, and other processes report their own.
        is_first = self.context.get_world_rank() == 0
        if self._default_metadata and is_first and directory and directory.is_dir():
            write_default_metadata(directory, self._default_metadata)
        self.last_checkpoint = checkpoint

    def latest_checkpoint(self) -> Checkpoint | None:
        """Return the checkpoint that this process has reported last; None before the first one."""
        return self.last_checkpoint

    def dataset_shard(self, name: str | None) -> Any:
        """Return this process's shard of the dataset `name`, the same object on every call.

        A `DataIterator` if it is a `spotfit.data.Dataset`, else the trainer's object, complete. If
        the trainer was given a callable, the first call calls it and uses its result. Raises
        `UnknownDatasetError` (a KeyError) for other names, also for None.
        """
        if name not in self._dataset_sources:
            raise unknown_dataset_error(name, self._dataset_sources)
        assert name is not None
        if name not in self._loaded_datasets:
            source = self._dataset_sources[name]
            loaded = source() if callable(source) else source
            self._loaded_datasets[name] = self._open_shard(name, loaded)
        return self._loaded_datasets[name]

    def _open_shard(self, name: str, loaded: Any) -> Any:
        if not is_loaded_instance(loaded, "spotfit.data.dataset", "Dataset"):
            if self.context.get_world_size() > 1:
                raise ConfigError(
                    f"The dataset {name!r} is a {type(loaded).__name__}, which cannot be split "
                    f"among the {self.context.get_world_size()} processes of the launcher.",
                    do="Pass a spotfit.data.Dataset, or a function that returns one.",
                )
            return loaded
        if name == "train":
            from spotfit.data.preprocessors.stored_preprocessor import default_metadata

            self._default_metadata = default_metadata({name: loaded})
        self._dataset_shards.add(name, loaded)
        return self._dataset_shards.get(name)

    @cached_property
    def _dataset_shards(self) -> DatasetShards:
        from spotfit.data.iteration.shard import ShardGroup
        from spotfit.data.rank_shards import DatasetShards, TrainerDatasets

        rank, world_size = self.context.get_world_rank(), self.context.get_world_size()
        group = ShardGroup(rank=rank, world_size=world_size, world_sizes=(world_size,))
        return DatasetShards(TrainerDatasets({}, self._dataset_config), group, dict, device="auto")

    def data_positions(self) -> dict[str, dict[str, Any]]:
        """Return the positions in the datasets that were iterated, for a snapshot."""
        return self._dataset_shards.positions() if "_dataset_shards" in vars(self) else {}

    def resume_data(self, positions: Mapping[str, Mapping[str, Any]]) -> None:
        """Continue the datasets at the positions of a snapshot that was restored."""
        if "_dataset_shards" in vars(self):
            self._dataset_shards.resume(positions)

    def reported_checkpoints(
        self, mode: CheckpointConsistencyMode, timeout_s: float | None
    ) -> list[ReportedCheckpoint]:
        """Return an empty list at once: local mode has no journal of checkpoints."""
        return []

    def preemption_info(self) -> PreemptionInfo | None:
        """Return None: local mode does not receive preemption notices."""
        return None

    def barrier(self) -> None:
        """Wait until all peers have called this; without peers, return at once."""
        if self._peers is not None:
            self._peers.barrier()

    def broadcast(self, value: Any) -> Any:
        """Return rank 0's `value` once all peers have called this; without peers, `value`."""
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
