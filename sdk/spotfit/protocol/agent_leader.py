"""Messages between an agent and the leader.

`ToLeader` is the union of the messages that an agent sends, `FromLeader` of those that it receives.
Each travels as one JSON frame; the first frame of a connection is `Join`.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from spotfit.model.events import RankFailure
from spotfit.model.leader_state import ValidationReported
from spotfit.model.topology import FeederAddress, Member, Notice, SnapshotShard
from spotfit.protocol.worker_agent import ToWorker

# --- agent -> leader -------------------------------------------------------------------------


class Join(msgspec.Struct, frozen=True, kw_only=True, tag="join"):
    """The first message of a connection: the state of an agent when it connects."""

    run_id: str
    member: Member
    # The leader sends its latest entry if that is later, so that the agent reads the gap at once.
    next_slot: int
    """First slot of the journal that this agent has not read."""
    running_round: int | None = None
    """Number of the round whose workers are running on this node."""
    notice: Notice | None = None
    is_warm: bool = True
    """Whether the fork server has imported everything that workers need."""
    last_entered_round: int = -1
    """The last round that this agent entered or aborted; it never enters a lower number again."""
    uploading_round: int | None = None
    """The round whose checkpoints are still being uploaded although its workers have exited."""
    node_failure: RankFailure | None = None
    """Why no worker can be started on this node, as a failure of rank 0."""
    snapshot_shards: tuple[SnapshotShard, ...] = ()
    """Snapshot shards in the shared memory of this node."""


class NodeUnusable(msgspec.Struct, frozen=True, kw_only=True, tag="node_unusable"):
    """No worker can be started on this node."""

    failure: RankFailure


class NodeWarm(msgspec.Struct, frozen=True, kw_only=True, tag="node_warm"):
    """The fork server of this node has imported everything that workers need."""


# Without a time: only its arrival counts, measured by the receiver's own clock.
class ConnectionHeartbeat(msgspec.Struct, frozen=True, kw_only=True, tag="connection_heartbeat"):
    """Proves that the sender is running. Sent in both directions."""


class NoticeReceived(msgspec.Struct, frozen=True, kw_only=True, tag="notice_received"):
    """The machine of this agent received a preemption notice."""

    notice: Notice


class PreemptionRiskReported(
    msgspec.Struct, frozen=True, kw_only=True, tag="preemption_risk_reported"
):
    """The cloud reported an elevated preemption risk for this machine."""

    reason: str


class WorkerToLeader(msgspec.Struct, frozen=True, kw_only=True, tag="worker_to_leader"):
    """Frames of a worker in order; each is the JSON of a `FromWorker`."""

    round: int
    rank: int
    # Raw: only the round coordinator decodes them, once.
    frames: list[msgspec.Raw]


class WorkerTerminated(msgspec.Struct, frozen=True, kw_only=True, tag="worker_terminated"):
    """A worker process has exited. `failure` is None if its function had returned."""

    round: int
    rank: int
    failure: RankFailure | None = None


class WorkerUnresponsive(msgspec.Struct, frozen=True, kw_only=True, tag="worker_unresponsive"):
    """A worker has not sent a heartbeat for `silent_s` seconds; 0 when it responds again."""

    round: int
    rank: int
    silent_s: float


class StackDump(msgspec.Struct, frozen=True, kw_only=True, tag="stack_dump"):
    """The stacks of a worker, in reply to `DumpStacks`."""

    round: int
    dump_id: int
    rank: int
    stack_text: str


class WorkersStopped(msgspec.Struct, frozen=True, kw_only=True, tag="workers_stopped"):
    """All workers of that round on this node have exited."""

    round: int
    is_uploading: bool = False
    """Whether uploads that they queued are in progress; `UploadsDrained` follows."""
    snapshot_shards: tuple[SnapshotShard, ...] = ()
    """Snapshot shards of this and earlier rounds in the shared memory of this node."""


class UploadsDrained(msgspec.Struct, frozen=True, kw_only=True, tag="uploads_drained"):
    """All uploads of that round on this node are complete or cancelled."""

    round: int


class SnapshotReplicated(msgspec.Struct, frozen=True, kw_only=True, tag="snapshot_replicated"):
    """A peer store on another node has a replica of that rank's snapshot shard."""

    round: int
    rank: int
    step: int
    peer_store_address: str
    """host:port of that peer store."""


class FeederReady(msgspec.Struct, frozen=True, kw_only=True, tag="feeder_ready"):
    """The feeders of this node accept connections of workers, or do not any more."""

    feeder: FeederAddress | None


ToLeader = (
    Join
    | FeederReady
    | NodeUnusable
    | NodeWarm
    | ConnectionHeartbeat
    | NoticeReceived
    | PreemptionRiskReported
    | WorkerToLeader
    | WorkerTerminated
    | WorkerUnresponsive
    | StackDump
    | WorkersStopped
    | UploadsDrained
    | SnapshotReplicated
    | ValidationReported
)

# --- leader -> agent -------------------------------------------------------------------------


class JournalEntryCopy(msgspec.Struct, frozen=True, kw_only=True, tag="journal_entry_copy"):
    """A copy of a journal entry that was just written.

    It saves the receiver a read of the bucket. An agent that misses one reads the journal instead.
    """

    slot: int
    # The stored bytes: the receiver folds exactly what is in the bucket.
    body: bytes


# A message, not only an entry: stopping the workers must not wait for a write to the bucket.
class AbortRound(msgspec.Struct, frozen=True, kw_only=True, tag="abort_round"):
    """Kill the workers of that round now, before the journal contains its `RoundClosed`."""

    round: int


class DumpStacks(msgspec.Struct, frozen=True, kw_only=True, tag="dump_stacks"):
    """Collect the stacks of each worker of that round; each is answered by a `StackDump`."""

    round: int
    dump_id: int


class LeaderToWorker(msgspec.Struct, frozen=True, kw_only=True, tag="leader_to_worker"):
    """A frame for one rank of that round, or for all ranks of the node if `rank` is None."""

    round: int
    rank: int | None
    frame: ToWorker


class JoinRejected(msgspec.Struct, frozen=True, kw_only=True, tag="join_rejected"):
    """The receiver of a `Join` refuses it: it is not the leader, or serves another run."""

    reason: Literal["not_leading", "other_run"]


FromLeader = (
    JournalEntryCopy | AbortRound | DumpStacks | LeaderToWorker | ConnectionHeartbeat | JoinRejected
)
