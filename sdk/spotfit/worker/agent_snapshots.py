"""A worker's side of Checkpointer snapshots: hands segments to the agent, finds states to resume.

The status of a submitted snapshot:

| status     | message of the agent                                       | next       |
|------------|------------------------------------------------------------|------------|
| submitted  | `Uploaded`                                                 | uploaded   |
| submitted  | `UploadFailed`, `CheckpointNamed` without a name, or a     | failed     |
|            | failed collective "report"                                 |            |
| uploaded   | `CommitConfirmed`                                          | committed  |
| uploaded   | `UploadFailed`: another rank's shard is lost               | failed     |

"submitted" means that the agent reads the segment, which must not be modified.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import msgspec

from spotfit.checkpoint.format import SnapshotIndex, decode_index
from spotfit.checkpoint.reader import (
    MAX_CONCURRENT_READS,
    MemoryShardReader,
    SavedState,
    SavedStateDescriptor,
    open_committed_snapshot,
    open_described,
)
from spotfit.checkpoint.shm_segment import ShmSegment
from spotfit.checkpoint.snapshot_channel import IN_MEMORY_NAME, GroupOutlook, SnapshotStatus
from spotfit.core.cached import cached_property
from spotfit.core.ids import RunId
from spotfit.host import log
from spotfit.ledger.journal import Journal
from spotfit.model.reporting import SaveAtEnd, metrics_to_json
from spotfit.model.topology import SnapshotShard
from spotfit.protocol.worker_agent import (
    CheckpointCorrupt,
    CheckpointNamed,
    CommitConfirmed,
    FilesReport,
    RankZeroBroadcastResult,
    RolledBack,
    SaveFailed,
    SnapshotReport,
    StartWorker,
    ToWorker,
    Uploaded,
    UploadFailed,
)
from spotfit.store.api import Store
from spotfit.worker.agent_connection import AgentConnection

if TYPE_CHECKING:
    from spotfit.checkpoint.peer_store import PeerShardReader
    from spotfit.security.run_key import TlsContexts

ResultT = TypeVar("ResultT")


class SnapshotSession(Protocol):
    """The part of `Session` that `AgentSnapshotChannel` uses. See there for errors and waiting."""

    report_count: int
    """The number of reports made in this round."""
    files_report_count: int
    """How many of them brought files."""
    progress: float | None
    """The share of the training that is done; None if unknown."""

    def allocate_report_index(self) -> int:
        """Return the index of this worker's next report in the round, from 0, and count it."""

    def drain(self) -> None:
        """Process the agent's messages that have arrived, without waiting."""

    def outlook(self) -> GroupOutlook:
        """Return notices and estimates about the worker group, as this rank knows them now."""

    def wait_for(
        self, ready: Callable[[], ResultT | None], *, description: str | None = None
    ) -> ResultT | None:
        """Process messages until `ready()` is not None, without a time limit; return its value.

        With a `description`, such as "its snapshots", it logs a warning with it once a minute.
        """

    def broadcast_bytes(self, kind: str, value: bytes = b"") -> bytes:
        """Return rank 0's `value` once all ranks have made their n-th call with this `kind`.

        Raises `CollectiveTimeoutError` or `SessionMisuseError` if a rank does not.
        """


class AgentSnapshotChannel:
    """The `SnapshotChannel` of one worker in one round.

    Reports go to the node's agent, which uploads segments; the agent's replies reach `on_message`.
    """

    def __init__(
        self,
        session: SnapshotSession,
        start: StartWorker,
        connection: AgentConnection,
        store: Store,
    ) -> None:
        self._session = session
        self._start = start
        self._digests = {start.checkpoint: start.checkpoint_digest} if start.checkpoint else {}
        """The `manifests_digest` of the committed checkpoints that are known, by name."""
        self._connection = connection
        self._store = store
        self._statuses: dict[int, SnapshotStatus] = {}
        self._reports_by_name: dict[str, int] = {}
        self._segment_count = 0
        self.save_at_end: Callable[[], SaveAtEnd] | None = None
        """See `SnapshotChannel.save_at_end`."""

    @property
    def files_report_count(self) -> int:
        """The number of reports with files, without snapshots, of this worker in the round."""
        return self._session.files_report_count

    @property
    def segment_dirs(self) -> list[Path]:
        """Directories for segments: shared memory if the node has it, then the scratch disk."""
        # The disk is the fallback for a /dev/shm that is full or missing.
        on_disk = Path(self._start.scratch_dir, "segments")
        return [Path(self._start.segment_dir), on_disk] if self._start.segment_dir else [on_disk]

    def record_progress(self, progress: float) -> None:
        """Send the share of the training that is done with the following reports of this rank."""
        self._session.progress = progress

    def new_segment_path(self, directory: Path) -> Path:
        """Return an unused path in `directory`, such as `3-0-1.segment`: round, rank, counter."""
        # Round and rank keep the paths apart: segments of the last round may still be uploaded.
        self._segment_count += 1
        return directory / f"{self._start.round}-{self._start.rank}-{self._segment_count}.segment"

    def submit(
        self, metrics: dict[str, Any], segment: Path, reason: str = "", *, step: int | None = None
    ) -> int:
        """Send the snapshot in `segment` to the agent for upload; return its report index.

        Does not block. The segment must not change while its status is "submitted". Raises
        `ConfigError` if the metrics are not JSON-serializable.
        """
        n = self._session.allocate_report_index()
        # Before the message: the reply may arrive in another thread at once.
        self._statuses[n] = "submitted"
        self._connection.send(
            SnapshotReport(
                report_index=n,
                metrics=msgspec.Raw(metrics_to_json(metrics)),
                segment=str(segment),
                step=step,
                reason=reason,
                progress=self._session.progress,
            )
        )
        return n

    def submit_at_end(self, metrics: bytes, segment: Path, *, step: int) -> None:
        """Hand the snapshot in `segment` to the agent, which keeps it until the leader decides.

        Does not block. `metrics` follow in `WorkerReturned`.
        """
        self._connection.send(
            SnapshotReport(
                report_index=self._session.report_count,
                metrics=msgspec.Raw(metrics),
                segment=str(segment),
                step=step,
                at_end=True,
            )
        )

    def skip(self, metrics: dict[str, Any], reason: str) -> None:
        """Take part in the next report without a snapshot; no checkpoint results from it.

        `reason` is logged here as a warning and sent to the agent. Does not block.
        """
        n = self._session.allocate_report_index()
        log.warning("checkpoint.skipped", rank=self._start.rank, reason=reason)
        # The other ranks report files and wait for all ranks: take part, then declare the loss.
        self._connection.send(
            FilesReport(
                report_index=n, metrics=msgspec.Raw(metrics_to_json(metrics)), incremental=True
            )
        )
        self._connection.send(SaveFailed(report_index=n, reason=reason))

    def status_of(self, report_index: int) -> SnapshotStatus:
        """Process pending messages and return the status of the snapshot with that report index.

        Raises KeyError for an index that `submit` did not return.
        """
        self._session.drain()
        return self._statuses[report_index]

    def wait_for_upload(self, report_index: int) -> SnapshotStatus:
        """Wait until the snapshot is no longer "submitted" and return its status.

        There is no time limit; a warning is logged once a minute. Raises KeyError for an index that
        `submit` did not return.
        """
        self._session.wait_for(
            lambda: None if self._statuses[report_index] == "submitted" else True,
            description="an earlier snapshot",
        )
        return self._statuses[report_index]

    def wait_for_uploads(self) -> None:
        """Wait until no snapshot of this round is "submitted": each is uploaded or has failed.

        Blocks without a time limit; failures are logged, not raised.
        """
        self._session.wait_for(
            lambda: None if "submitted" in self._statuses.values() else True,
            description="its snapshots",
        )

    def roll_back(self) -> None:
        """Ask the agent to exclude all snapshots submitted so far from later restores.

        Does not block; the agent processes it even if this worker dies.
        """
        self._connection.send(RolledBack(before_report_index=self._session.report_count))

    def broadcast_bytes(self, kind: str, value: bytes) -> bytes:
        """Return rank 0's `value` once all ranks have called this, as `Session.broadcast_bytes`."""
        return self._session.broadcast_bytes(kind, value)

    def on_message(self, message: ToWorker) -> bool:
        """Update the status of a snapshot; return False if the session must process `message` too.

        Called by `Session` for every message of the agent, under the inbox's lock. New failures are
        logged as warnings.
        """
        match message:
            case CheckpointNamed(report_index=n, checkpoint_name=name) if n in self._statuses:
                self._reports_by_name[name] = n
                if not name:
                    self._mark_failed(n, "the report was completed without this rank")
            case Uploaded(report_index=n) if n in self._statuses:
                # A snapshot that is lost because of another rank's shard stays lost.
                if self._statuses[n] == "submitted":
                    self._statuses[n] = "uploaded"
            case UploadFailed(report_index=n, reason=reason) if n in self._statuses:
                self._mark_failed(n, reason)
            case RankZeroBroadcastResult(
                kind="report", seq=n, missing_ranks=missing, reason=reason
            ) if n in self._statuses:
                self._mark_failed(n, reason or f"ranks {missing} did not report in time")
            case CommitConfirmed(checkpoint_name=name) if name in self._reports_by_name:
                self._statuses[self._reports_by_name[name]] = "committed"
            case _:
                return False
        return True

    def _mark_failed(self, report_index: int, reason: str) -> None:
        # Several messages may report the same failure; it is logged once.
        if self._statuses[report_index] == "failed":
            return
        log.warning(
            "checkpoint.failed",
            rank=self._start.rank,
            n=report_index,
            reason=reason.strip().splitlines()[-1],  # of a traceback: the exception
        )
        self._statuses[report_index] = "failed"

    def outlook(self) -> GroupOutlook:
        """Return the current outlook of the group, without blocking; see `Session.outlook`."""
        return self._session.outlook()

    # --- states to resume from -----------------------------------------------------------------

    @property
    def initial_checkpoint(self) -> str | None:
        """Name of the committed checkpoint that the round starts from; None if the run had none."""
        return self._start.checkpoint

    @property
    def initial_step(self) -> int:
        """The number of training steps in `initial_checkpoint`; 0 if it is no snapshot."""
        return self._start.checkpoint_step

    @property
    def has_snapshots(self) -> bool:
        """Whether a stored checkpoint of a Checkpointer existed when the round started."""
        return self._start.has_snapshots

    def open_in_memory(self) -> SavedState | None:
        """Open the state that surviving machines kept in memory; None if the round has none.

        Shards that this node does not hold are opened in the peer stores of others, in parallel.
        Raises `IntegrityError` if a shard is missing or corrupt.
        """
        if self._start.memory_snapshot is None:
            return None
        ranks = range(len(self._start.local_segments))
        # An index on another node costs a round trip.
        with ThreadPoolExecutor(MAX_CONCURRENT_READS, "spotfit-indices") as readers:
            return SavedState(readers.map(self._open_shard, ranks), IN_MEMORY_NAME)

    def _open_shard(
        self, rank: int, index: SnapshotIndex | None = None
    ) -> MemoryShardReader | PeerShardReader:
        """Open the shard that `rank` saved: a local segment, or one in a peer store."""
        # Imports TLS, which a worker that resumes from the bucket does not need.
        from spotfit.checkpoint.peer_store import PeerShardReader

        path = self._start.local_segments[rank]
        if path:
            return MemoryShardReader(ShmSegment.open(Path(path)))
        assert self._start.memory_snapshot is not None
        shard = SnapshotShard(
            snapshot_id=self._start.memory_snapshot,
            rank=rank,
            world_size=len(self._start.local_segments),
        )
        return PeerShardReader(
            self._start.peer_store_addresses[rank], shard, tls=self._tls.client, index=index
        )

    # Derived once: peers of all shards use the run's certificate.
    @cached_property
    def _tls(self) -> TlsContexts:
        from spotfit.security.run_key import make_tls_contexts

        return make_tls_contexts(self._start.secret, RunId(self._start.run_id))

    def open_checkpoint(self, name: str) -> SavedState | None:
        """Open the committed checkpoint `name`; None if it holds no snapshot. Reads the store.

        Raises `IntegrityError` if it is incomplete or corrupt.
        """
        return open_committed_snapshot(self._store, name, digest=self._digests.get(name, ""))

    def mark_corrupt(self, name: str) -> None:
        """Report to the leader that checkpoint `name` cannot be read. Does not block.

        Later snapshots then share no files of it.
        """
        self._connection.send(CheckpointCorrupt(checkpoint_name=name))

    def reopen(self, opened: SavedStateDescriptor) -> SavedState:
        """Open the state that rank 0 has opened and described in `opened`.

        Reads no index: `opened` contains them.
        """
        # Rank 0 has read the indices of all shards, and has broadcast them in `opened`.
        if opened.name != IN_MEMORY_NAME:
            return open_described(self._store, opened)
        indices = [decode_index(body, source=opened.name) for _, body in opened.shards]
        return SavedState(
            [self._open_shard(index.rank, index) for index in indices], IN_MEMORY_NAME
        )

    def committed_checkpoints(self) -> Iterator[str]:
        """Yield the names of all checkpoints committed by now, the latest first, each once.

        Reads the journal when iteration starts.
        """
        # Without duplicates: a name that was committed twice is the later checkpoint.
        yield from dict.fromkeys(reversed(self._journaled_checkpoints()))

    def earlier_checkpoints(self) -> Iterator[str]:
        """Yield the names of checkpoints before `initial_checkpoint`, the latest first, each once.

        Reads the journal when iteration starts. All checkpoints if `initial_checkpoint` is None or
        was deleted.
        """
        # Those after the initial checkpoint were committed during this round.
        names = self._journaled_checkpoints()
        if self.initial_checkpoint in names:
            names = names[: names.index(self.initial_checkpoint)]
        yield from dict.fromkeys(reversed(names))

    def _journaled_checkpoints(self) -> list[str]:
        """Read the names of all committed checkpoints, oldest first; a name may repeat."""
        commits = Journal(self._store).catch_up().checkpoints
        self._digests |= {commit.name: commit.manifests_digest for commit in commits}
        return [commit.name for commit in commits]
