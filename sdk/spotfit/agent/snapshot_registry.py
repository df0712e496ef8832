"""The snapshots in shared memory that the workers of this node have submitted.

| state     | event                                               | next                     |
|-----------|-----------------------------------------------------|--------------------------|
| submitted | `make_upload`: the report has a checkpoint name     | uploading and replicated |
| submitted | `forget`, or a name for a report without this rank  | not uploaded             |
| at end    | `make_upload`: the ranks have returned alike        | uploading and replicated |
| at end    | `discard_at_end`, or the workers were stopped       | deleted                  |
| any       | `make_upload` in a later round, or `roll_back`      | deleted                  |

A worker reuses the segments of its round; segments of earlier rounds stay until all ranks have
submitted a snapshot in the current round, because they may be the only state to resume from.
A snapshot "at end" was taken after the training function had returned. Other ranks may have
returned at another step, so that nothing resumes from it before the leader has named it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from contextlib import suppress
from operator import itemgetter
from pathlib import Path

from msgspec.structs import replace

from spotfit.checkpoint.manifest import Manifest
from spotfit.checkpoint.node_sharing import RING_SUFFIX
from spotfit.checkpoint.replication import PendingReplica, ReplicaId, ReplicaStore
from spotfit.checkpoint.shm_segment import ShmSegment
from spotfit.checkpoint.writer import SnapshotUploadJob, encode_upload_job
from spotfit.core.codec import decoder
from spotfit.core.errors import IntegrityError
from spotfit.model.topology import SnapshotId, SnapshotShard
from spotfit.protocol.worker_agent import (
    CheckpointNamed,
    RequestUpload,
    SnapshotReport,
    StartWorker,
)
from spotfit.sidecar.uploader import QueuedUpload

_metrics_decoder = decoder(dict)
_SEGMENT_NAME = re.compile(r"(?P<round>[0-9]{1,9})-.*\.segment", re.DOTALL)


class SnapshotRegistry:
    """The snapshots of this node's workers below `directory`, and the replicas of peers there.

    Used by the node's worker pool; one per agent. Ranks are global.
    """

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self._directories = {Path(directory)} if directory else set()
        """All directories with segments: a worker uses the disk if shared memory is full."""
        self.replicas = ReplicaStore(Path(directory, "copies"))
        """Replicas of a peer node's segments."""
        self.replicate: Callable[[PendingReplica], None] | None = None
        """Sends a local segment to a peer store; None if replication is off."""
        self._replication_target = ""
        self._last_replicas: dict[int, PendingReplica] = {}
        """The latest replication of each rank."""
        self._local_ranks: tuple[int, ...] = ()
        self._paths_by_shard: dict[SnapshotShard, Path] = {}
        self._round = -1
        self._default_metadata = ""
        self._unnamed: dict[tuple[int, int], SnapshotReport] = {}
        """Snapshots without a checkpoint name, by rank and report index."""
        self._at_end: dict[int, SnapshotReport] = {}
        """Snapshots of ranks that have returned, which the leader has not named, by rank."""

    def prepare_start(self, start: StartWorker) -> StartWorker:
        """Return `start` with the segment directory and the local segments to resume from.

        Called for each worker before its start; the first one of a new round discards what is known
        of the previous round's snapshots. Segments of earlier rounds stay.
        """
        if start.round != self._round:  # the first worker of a new round
            self._round = start.round
            self._default_metadata = start.default_metadata
            self._unnamed.clear()
            self._last_replicas.clear()
            # Shared rings of earlier rounds: the workers that read through them have exited.
            self._delete_other_rounds(self._glob(f"*{RING_SUFFIX}"))
        self._replication_target = start.replica_target
        # The ranks of a node are consecutive.
        first = start.rank - start.local_rank
        self._local_ranks = tuple(range(first, first + start.local_world_size))
        segments: tuple[str, ...] = ()
        if start.memory_snapshot is not None:
            found = {
                shard.rank: str(path)
                for shard, path in self._paths_by_shard.items()
                if shard.snapshot_id == start.memory_snapshot
            }
            # By saving rank, '' for shards that a peer store serves. "missing" is not a path:
            # opening it raises the same IntegrityError as a deleted segment.
            segments = tuple(
                "" if address else found.get(rank, "missing")
                for rank, address in enumerate(start.peer_store_addresses)
            )
        return replace(start, segment_dir=self._directory, local_segments=segments)

    def find_shard(self, shard: SnapshotShard) -> Path | None:
        """Return the path of a shard that the last `scan_shards` has found; None for any other.

        Called by the peer store, which serves the shard to other nodes.
        """
        return self._paths_by_shard.get(shard)

    def scan_shards(self) -> tuple[SnapshotShard, ...]:
        """Read the index of every segment and replica; return the complete shards, sorted.

        Blocks for file reads: call it only when no worker is running. Incomplete ones are ignored,
        and those of ranks that have returned are deleted if the leader has not named them.
        """
        for rank in list(self._at_end):
            self.discard_at_end(rank)
        found: list[tuple[int, SnapshotShard, Path]] = []
        for path in [*self.replicas.replicas.values(), *self._segment_paths()]:
            try:
                with ShmSegment.open(path) as segment:
                    index = segment.index()
            except IntegrityError:  # incomplete, because its writer died
                continue
            if not 0 <= index.rank < index.world_size or index.step < 0:  # written by user code
                continue
            shard = SnapshotShard(
                snapshot_id=SnapshotId(round=int(path.name.partition("-")[0]), step=index.step),
                rank=index.rank,
                world_size=index.world_size,
            )
            found.append((index.save_number, shard, path))
        found.sort(key=itemgetter(0))
        # Sorted by save number: of two saves of the same step, the later one is used.
        self._paths_by_shard = {shard: path for _, shard, path in found}
        return tuple(sorted(self._paths_by_shard))

    def add(self, rank: int, snapshot: SnapshotReport) -> None:
        """Register a complete snapshot of a worker whose report has no checkpoint name yet.

        Raises `IntegrityError` if its path is not one that `AgentSnapshotChannel` makes: files next
        to it are deleted by their names.
        """
        path, name = Path(snapshot.segment), _SEGMENT_NAME.fullmatch(Path(snapshot.segment).name)
        is_valid = name is not None and int(name["round"]) == self._round
        if not is_valid or not path.is_absolute() or "\0" in snapshot.segment:
            raise IntegrityError(
                f"'snapshot_report' is invalid: {snapshot.segment!r} is not the absolute path of a "
                f"segment of round {self._round}.",
                do="Save with the Checkpointer of this worker, which names its segments.",
            )
        if snapshot.at_end:
            self._at_end[rank] = snapshot
        else:
            self._unnamed[rank, snapshot.report_index] = snapshot
        # The worker has chosen the directory: memory, or the disk if that is full.
        self._directories.add(path.parent)

    def make_upload(self, rank: int, assignment: CheckpointNamed) -> QueuedUpload | None:
        """Return the upload job of the snapshot that the leader has named; start its replication.

        Returns None if this rank has submitted no snapshot with that report, or if the name is
        empty. Otherwise deletes the segments of earlier rounds: all ranks have a newer snapshot.
        """
        number = assignment.report_index
        if assignment.at_end:
            snapshot = self._at_end.pop(rank, None)
        else:
            snapshot = self._unnamed.pop((rank, number), None)
        if snapshot is None or not assignment.checkpoint_name:
            return None
        # A name means that all ranks have submitted: earlier rounds are obsolete.
        self._delete_other_rounds(self._segment_paths())
        replica, segment = ReplicaId(self._round, number, rank), Path(snapshot.segment)
        # IntegrityError: the segment was deleted or is being overwritten by a later save.
        with suppress(IntegrityError), ShmSegment.open(segment) as opened:
            self._last_replicas[rank] = PendingReplica(
                replica, segment, opened.version_stamp, self._local_ranks, self._replication_target
            )
            self._enqueue(self._last_replicas[rank])
        manifest = Manifest(
            name=assignment.checkpoint_name,
            round=self._round,
            report_index=number,
            rank=rank,
            ranks=assignment.ranks,
            metrics=_metrics_decoder.decode(assignment.metrics),
            files=(),
            reason=snapshot.reason,
            default_metadata=self._default_metadata,
        )
        job = encode_upload_job(SnapshotUploadJob(snapshot.segment, manifest, assignment.parent))
        request = RequestUpload(
            report_index=number, checkpoint_name=assignment.checkpoint_name, upload_job=job
        )
        return QueuedUpload(self._round, rank, request, is_snapshot=True)

    def set_replication_target(self, peer_store: str) -> None:
        """Send replicas to that peer store from now on, including the latest one of each rank.

        `peer_store` is `host:port`; '' stops the replication. Returns before anything is sent.
        """
        self._replication_target = peer_store
        # The node that holds the previous replicas leaves: copy the latest ones again.
        for replica in self._last_replicas.values():
            self._enqueue(replica._replace(target=peer_store))

    def _enqueue(self, pending: PendingReplica) -> None:
        if self.replicate is not None and pending.target:
            self.replicate(pending)

    def forget(self, rank: int, report_index: int) -> None:
        """Drop the snapshot of a report that was rejected, which is then not uploaded.

        Harmless if it is unknown. The segment itself stays.
        """
        self._unnamed.pop((rank, report_index), None)

    def discard_at_end(self, rank: int) -> None:
        """Delete the snapshot that a rank has taken after its return; harmless without one."""
        if (snapshot := self._at_end.pop(rank, None)) is not None:
            Path(snapshot.segment).unlink(missing_ok=True)

    def roll_back(self, before: int) -> None:
        """Delete the snapshots of earlier rounds, and replicas of reports before number `before`.

        The workers delete their own segments. All ranks send `RolledBack`, so every node does this.
        """
        self.replicas.roll_back(ReplicaId(self._round, before, 0))
        self._delete_other_rounds(self._segment_paths())
        self._last_replicas = {
            rank: pending
            for rank, pending in self._last_replicas.items()
            if pending.replica.report >= before
        }

    def _delete_other_rounds(self, files: Iterable[Path]) -> None:
        for path in files:
            if not path.name.startswith(f"{self._round}-"):
                with suppress(OSError):  # deleted by its worker meanwhile
                    path.unlink()

    def _segment_paths(self) -> list[Path]:
        # Other files in a directory that a worker has named are not ours.
        return [path for path in self._glob("*.segment") if _SEGMENT_NAME.fullmatch(path.name)]

    def _glob(self, pattern: str) -> list[Path]:
        return [path for directory in self._directories for path in directory.glob(pattern)]
