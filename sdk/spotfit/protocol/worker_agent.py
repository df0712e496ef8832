"""Messages between a worker and its agent during a round.

    worker  ── FromWorker ──▶  agent  ── ToLeader ──▶  leader
    worker  ◀── ToWorker  ───  agent  ◀── FromLeader ──  leader

Most messages are addressed to the round coordinator on the leader's node. The agents between
forward them: `FromWorker` inside `WorkerToLeader`, `ToWorker` inside `LeaderToWorker`. The agent
itself consumes `WorkerHeartbeat`, `RequestUpload`, `SnapshotReport` and `RolledBack`.

User code can write to a worker's socket. Agent and leader both verify each frame by
`decode_worker_message`; an invalid one is a failure of that worker.

On the socket, each frame is one JSON object whose first field is the message's tag. Reports are
numbered from 0 in every round; the n-th reports of all ranks form one report of the group.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from spotfit.core.codec import DECODE_ERRORS, decoder, is_nested_deeper
from spotfit.core.errors import ConfigError, IntegrityError
from spotfit.core.ids import parse_name
from spotfit.model.events import FailureCause, ValidationRequest
from spotfit.model.failure_model import FailureModel
from spotfit.model.reporting import MAX_METRICS_BYTES, MAX_METRICS_DEPTH, SaveAtEnd
from spotfit.model.topology import FeederAddress, SnapshotId
from spotfit.protocol.framing import MAX_FRAME_BYTES

MAX_WORKER_FRAME_BYTES = MAX_FRAME_BYTES - 2**20
"""The largest frame of a worker: its agent must be able to forward it inside of a message."""
# The limits of what user code can send by another way than the functions of spotfit. The integers
# fit into a JSON number of any language.
Count = Annotated[int, msgspec.Meta(ge=0, lt=2**53)]
Share = Annotated[float, msgspec.Meta(ge=0, le=1)]
ShortText = Annotated[str, msgspec.Meta(max_length=1_000)]
LongText = Annotated[str, msgspec.Meta(max_length=1_000_000)]
Payload = Annotated[bytes, msgspec.Meta(max_length=12 * 2**20)]
"""A value that the leader sends on to all ranks or to a backend hook; their senders limit it to 8
MiB."""
LEAVE_GROUP = "leave_group"
"""The collective in which ranks wait for each other before they leave the process group."""
MAX_GATHERED_BYTES = 4096
"""The largest value of a rank in an all-gather: the values of 10,000 ranks fit into one frame."""

WorkerPhase = Literal["setup", "train", "leave"]
"""What a worker does after a gate: form the process group, call the training function, exit."""

# --- worker -> agent -------------------------------------------------------------------------


class FunctionStarted(msgspec.Struct, frozen=True, kw_only=True, tag="function_started"):
    """The training function is about to be called."""


# From a thread of its own, so that a long step of the training function does not delay it.
class WorkerHeartbeat(msgspec.Struct, frozen=True, kw_only=True, tag="worker_heartbeat"):
    """The process runs. Sent every `heartbeat_interval_s`; consumed by the agent."""


class AtGate(msgspec.Struct, frozen=True, kw_only=True, tag="at_gate"):
    """The worker accepts hook calls and waits for `OpenGate`.

    At the "leave" gate `WorkerReturned` is sent instead.
    """

    phase: WorkerPhase


class CallResult(msgspec.Struct, frozen=True, kw_only=True, tag="call_result"):
    """The result of a `CallFunction`."""

    call_id: Count
    pickled_value: Payload
    """The pickled return value or exception; empty if the exception cannot be pickled."""
    traceback_text: str | None = None
    """The traceback, if the function raised."""


class MetricsReport(msgspec.Struct, frozen=True, kw_only=True, tag="metrics_report"):
    """A report without files. There is no reply."""

    report_index: Count
    # Raw: the agent verifies metrics, and forwards them as they are.
    metrics: msgspec.Raw
    checkpoint_dir_name: ShortText | None = None


class FilesReport(msgspec.Struct, frozen=True, kw_only=True, tag="files_report"):
    """A report with files. The reply is `CheckpointNamed`, once all ranks have reported."""

    report_index: Count
    metrics: msgspec.Raw
    checkpoint_dir_name: ShortText | None = None
    """The directory name that the user requests; None for a generated one."""
    blocks_training: bool = False
    """Whether the training function itself, in the main thread, waits for the reply."""
    validation: ValidationRequest | None = None
    managed_upload: bool = True
    """Whether spotfit uploads the files; otherwise the user's code does, or has done so."""
    incremental: bool = False
    """Whether the upload may share files of a committed checkpoint (`CheckpointNamed.parent`)."""
    step: Count | None = None
    """For a snapshot, the number of training steps it contains."""
    reason: LongText = ""
    """Why a Checkpointer saves now; empty for `report()`."""
    progress: Share | None = None
    """The share of the training that is done; None if unknown."""


class SnapshotReport(msgspec.Struct, frozen=True, kw_only=True, tag="snapshot_report"):
    """A report with a complete snapshot in a shared-memory segment.

    The agent sends a `FilesReport` to the leader and uploads the snapshot once it has a name, even
    if this worker exits. Until `Uploaded` or `UploadFailed`, the worker must not modify the
    segment.
    """

    report_index: Count
    metrics: msgspec.Raw
    segment: Annotated[str, msgspec.Meta(max_length=4_096)]
    """The path of the segment."""
    step: Count | None = None
    """The number of training steps it contains."""
    reason: LongText = ""
    """Why the Checkpointer saves now."""
    progress: Share | None = None
    """As in `FilesReport`."""
    at_end: bool = False
    """Whether it was taken after the training function had returned.

    The agent then keeps it until `CheckpointNamed` or `DiscardSnapshotAtEnd` arrives with
    `at_end`; `report_index` has no meaning.
    """


class AwaitReports(msgspec.Struct, frozen=True, kw_only=True, tag="await_reports"):
    """The worker waits for its first reports. The reply is `ReportsSettled`."""

    report_count: Count


class SaveFailed(msgspec.Struct, frozen=True, kw_only=True, tag="save_failed"):
    """This rank's files of a report are lost, therefore the report has no checkpoint."""

    report_index: Count
    reason: LongText


class CheckpointCorrupt(msgspec.Struct, frozen=True, kw_only=True, tag="checkpoint_corrupt"):
    """A committed checkpoint cannot be read; later checkpoints must not share its files."""

    checkpoint_name: ShortText


class RolledBack(msgspec.Struct, frozen=True, kw_only=True, tag="rolled_back"):
    """All ranks continue from an earlier checkpoint. Consumed by the agent.

    The agent deletes the snapshots in memory of earlier rounds, and of this round before that
    report: a restart must not resume from them.
    """

    before_report_index: Count


class SaveCompleted(msgspec.Struct, frozen=True, kw_only=True, tag="save_completed"):
    """This rank's files of a report, and its manifest, are in the bucket."""

    report_index: Count
    checkpoint_name: ShortText
    size_bytes: Count = 0
    step: Count | None = None
    """For a snapshot, the number of training steps it contains."""
    custom_folder: ShortText = ""
    """The folder below the run's root, if the user's code has uploaded the files."""
    manifest_digest: Annotated[str, msgspec.Meta(pattern="^([0-9a-f]{64})?$")] = ""
    """`checkpoint.manifest.manifest_digest` of the manifest."""


class RequestUpload(msgspec.Struct, frozen=True, kw_only=True, tag="request_upload"):
    """Upload this rank's files of a report after its earlier ones. The reply is `Uploaded`.

    The agent completes the upload also if this worker exits.
    """

    report_index: Count
    checkpoint_name: ShortText
    upload_job: bytes
    """A pickle for the uploader process; the agent does not load it."""


class RankZeroBroadcast(msgspec.Struct, frozen=True, kw_only=True, tag="rank_zero_broadcast"):
    """Join the `seq`-th collective of this kind.

    Once all ranks have joined, each receives rank 0's value in `RankZeroBroadcastResult`.
    """

    kind: ShortText
    seq: Count
    # Only the value of rank 0 is used; the other ranks usually send nothing.
    value: Payload = b""
    all_values: bool = False
    """Whether the result has the values of all ranks: an all-gather instead of a broadcast."""
    blocks_training: bool = False
    """Whether the training function itself, in the main thread, waits for the result."""


class WorkerReturned(msgspec.Struct, frozen=True, kw_only=True, tag="worker_returned"):
    """The training function returned and all uploads are complete."""

    report_count: Count
    pickled_value: bytes = b""
    """The pickled return value of rank 0; empty for other ranks."""
    save_at_end: SaveAtEnd | None = None
    """None without a Checkpointer, and with `save_at_end=False`."""


class WorkerRaised(msgspec.Struct, frozen=True, kw_only=True, tag="worker_raised"):
    """The worker failed: the training function raised, or the worker could not be set up."""

    # Always sent as text, too: the pickle may not be loadable on the driver.
    traceback_text: str
    pickled_exception: bytes = b""
    """Empty if the exception cannot be pickled."""
    cause: FailureCause | None = None
    """Set if the worker could not be set up; see `RankFailure`."""
    is_permanent: bool = False
    """Whether a retry would fail in the same way; see `RankFailure`."""


class DataWaited(msgspec.Struct, frozen=True, kw_only=True, tag="data_waited"):
    """For how long the training loop has waited for rows since the previous message."""

    waited_s: Annotated[float, msgspec.Meta(ge=0)]
    elapsed_s: Annotated[float, msgspec.Meta(gt=0)]
    """Time since the previous message."""


FromWorker = (
    FunctionStarted
    | DataWaited
    | WorkerHeartbeat
    | AtGate
    | CallResult
    | MetricsReport
    | FilesReport
    | SnapshotReport
    | AwaitReports
    | CheckpointCorrupt
    | RolledBack
    | SaveCompleted
    | SaveFailed
    | RequestUpload
    | RankZeroBroadcast
    | WorkerReturned
    | WorkerRaised
)

_TAG_START = b'{"type":"'
_DO = "Check whether the training function writes to file descriptors it has not opened."
_MAX_KIND_CHARS = 40
# The objects around the metrics, also in the journal, and NaN, which is encoded as an object.
_MAX_DEPTH = MAX_METRICS_DEPTH + 10
# The metrics, and as much for the arguments of a validation.
_MAX_REPORT_BYTES = 2 * MAX_METRICS_BYTES + 2**16
_message_decoder: msgspec.json.Decoder[FromWorker] = decoder(FromWorker)  # type: ignore[arg-type]
_metrics_decoder: msgspec.json.Decoder[dict[str, Any]] = decoder(dict[str, Any])


def message_tag(frame: bytes) -> str:
    """Return the type of an encoded worker message, such as "worker_raised", without decoding it.

    `frame` is the body of one frame. The agent routes messages by it; an unknown tag is returned as
    it is. Raises `IntegrityError` if the frame does not start with a tag, which happens if user
    code writes to the worker's socket.
    """
    # msgspec writes the tag first. Reading only that keeps the cost of routing independent of the
    # message's size, which can be megabytes for a return value.
    start = len(_TAG_START)
    end = frame.find(b'"', start)
    if end < 0 or not frame.startswith(_TAG_START):
        raise IntegrityError(f"{frame[:40]!r} is not a message of spotfit.", do=_DO)
    return frame[start:end].decode(errors="replace")


def decode_worker_message(frame: bytes | msgspec.Raw) -> FromWorker:
    """Decode the body of one frame of a worker, and verify what its receivers rely on.

    Raises `IntegrityError` with the kind of the message and the reason if it is malformed, has a
    field of another type or size, is nested too deep, or has metrics or a directory name that
    `report()` does not accept. Then the worker has failed, not the agent or the leader.
    """
    body = bytes(frame)
    kind = message_tag(body)[:_MAX_KIND_CHARS]
    try:
        # First: the depth at which decoders fail depends on the stack of the caller.
        if is_nested_deeper(body, _MAX_DEPTH):
            raise msgspec.ValidationError("It is nested too deep")
        message = _message_decoder.decode(body)
        if isinstance(message, MetricsReport | FilesReport | SnapshotReport):
            if len(body) > _MAX_REPORT_BYTES:
                raise msgspec.ValidationError(f"It has {len(body)} bytes")
            # The leader decodes them later, for another rank's message or none.
            _metrics_decoder.decode(message.metrics)
        if isinstance(message, WorkerReturned) and message.save_at_end is not None:
            metrics = bytes(message.save_at_end.metrics)
            if len(metrics) > MAX_METRICS_BYTES:
                raise msgspec.ValidationError(f"Its metrics have {len(metrics)} bytes")
            _metrics_decoder.decode(metrics)
        if isinstance(message, MetricsReport | FilesReport) and message.checkpoint_dir_name:
            parse_name(message.checkpoint_dir_name, what="checkpoint_dir_name")
    except ConfigError as error:
        raise _invalid_message(kind, error.message) from error
    except DECODE_ERRORS as error:
        raise _invalid_message(kind, str(error)) from error
    return message


def _invalid_message(kind: str, reason: str) -> IntegrityError:
    return IntegrityError(f"{kind!r} is invalid: {reason.rstrip('.')}.", do=_DO)


# --- agent -> worker -------------------------------------------------------------------------


class StartWorker(msgspec.Struct, frozen=True, kw_only=True, tag="start_worker"):
    """The first frame that a worker receives: its ranks, and what to run."""

    run_id: str
    run_name: str
    round: int
    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    node_rank: int
    host: str
    """The address at which other nodes reach this node."""
    storage_url: str
    """The root of the run in the bucket."""
    framework: str
    framework_options: dict[str, Any]
    code_bundle: dict[str, Any]
    """A `CodeBundleRef` as plain JSON."""
    checkpoint: str | None = None
    """The committed checkpoint to resume from."""
    checkpoint_digest: str = ""
    """Its `CheckpointCommitted.manifests_digest`."""
    checkpoint_metrics: dict[str, Any] | None = None
    checkpoint_step: int = 0
    """The number of training steps in `checkpoint`; 0 if it is no snapshot."""
    has_snapshots: bool = False
    """Whether any committed checkpoint was saved by a Checkpointer."""
    devices: tuple[str, ...] = ()
    """All accelerators of the node; `frameworks.devices` selects those of a worker."""
    default_metadata: str = ""
    """`RunSpec.default_metadata`."""
    scratch_dir: str = ""
    """A directory of this run on this node, shared by its workers."""
    segment_dir: str = ""
    """The shared-memory directory for snapshots; empty if the agent does not upload snapshots."""
    memory_snapshot: SnapshotId | None = None
    """The in-memory snapshot to resume from, if it is newer than `checkpoint`."""
    local_segments: tuple[str, ...] = ()
    """The paths of its segments by saving rank; empty for those on other nodes."""
    peer_store_addresses: tuple[str, ...] = ()
    """The peer stores of its other shards by saving rank; empty for those on this node."""
    replica_target: str = ""
    """The peer store that receives replicas of this node's snapshots; consumed by the agent."""
    collective_timeout_s: float | None = None
    relax_collectives: bool = False
    has_backend_hooks: bool = False
    """Whether the worker must wait at gates for the backend's hooks."""
    share_devices: bool = False
    """Whether the workers of a node see each other's accelerators, whatever the framework needs."""
    heartbeat_interval_s: float = 0.0
    """The interval of `WorkerHeartbeat`; 0 disables it."""
    log_level: str = "INFO"
    secret: str = ""
    """The run key as text. It is never passed in argv, the journal or logs."""
    failure_model: FailureModel = FailureModel()
    # Raw: most workers never decode it.
    spec: msgspec.Raw = msgspec.Raw(b"null")
    """The complete `RunSpec`, decoded only where it is needed."""

    def __repr__(self) -> str:
        return f"StartWorker(run={self.run_name!r}, round={self.round}, rank={self.rank})"


class OpenGate(msgspec.Struct, frozen=True, kw_only=True, tag="open_gate"):
    """The hooks before this phase are complete."""

    phase: WorkerPhase


class CallFunction(msgspec.Struct, frozen=True, kw_only=True, tag="call_function"):
    """Call a pickled function with its arguments. The reply is `CallResult`."""

    call_id: int
    pickled_call: bytes


class CheckpointNamed(msgspec.Struct, frozen=True, kw_only=True, tag="checkpoint_named"):
    """All ranks have made a report that has files."""

    # Chosen by the leader: only it can ensure that a name is used once (docs/decisions/0043).
    report_index: int
    checkpoint_name: str
    """The directory; empty if the report was completed without this rank's files."""
    ranks: tuple[int, ...]
    """The ranks that upload files."""
    metrics: msgspec.Raw
    """The metrics of rank 0."""
    parent: str = ""
    """A committed checkpoint whose files may be shared; it is not deleted before this save ends."""
    at_end: bool = False
    """Whether this names the snapshot that was taken after the training function had returned."""


class DiscardSnapshotAtEnd(
    msgspec.Struct, frozen=True, kw_only=True, tag="discard_snapshot_at_end"
):
    """The snapshot that was taken after the return does not become a checkpoint.

    Consumed by the agent, which deletes it.
    """


class UploadFailed(msgspec.Struct, frozen=True, kw_only=True, tag="upload_failed"):
    """A report of this worker has no checkpoint, because its or another rank's files are lost."""

    report_index: int
    reason: str


class Uploaded(msgspec.Struct, frozen=True, kw_only=True, tag="uploaded"):
    """The agent has uploaded this rank's files of a report."""

    report_index: int
    checkpoint_name: str


class CommitConfirmed(msgspec.Struct, frozen=True, kw_only=True, tag="commit_confirmed"):
    """The commit of a checkpoint is in the journal."""

    checkpoint_name: str
    metrics: dict[str, Any]


class ReportsSettled(msgspec.Struct, frozen=True, kw_only=True, tag="reports_settled"):
    """The checkpoints of the first reports of the group are committed or have failed.

    Also sent if these reports can never be complete, because a rank has returned without them.
    """

    report_count: int


class ValidationFinished(msgspec.Struct, frozen=True, kw_only=True, tag="validation_finished"):
    """The result of a validation is in the journal."""

    checkpoint_name: str


class RankZeroBroadcastResult(
    msgspec.Struct, frozen=True, kw_only=True, tag="rank_zero_broadcast_result"
):
    """A collective is complete or has failed. The kind "report" rejects a `FilesReport`."""

    kind: str
    seq: int
    value: bytes = b""
    """The value of rank 0."""
    values: tuple[bytes, ...] = ()
    """The values of all ranks, ordered by rank, for `RankZeroBroadcast.all_values`."""
    missing_ranks: tuple[int, ...] = ()
    """The ranks that did not join, if the collective has failed."""
    reason: str = ""
    """Why the collective can never complete; empty if it timed out."""


class CollectiveWaiting(msgspec.Struct, frozen=True, kw_only=True, tag="collective_waiting"):
    """A collective has waited for `missing_ranks` for `waited_s`, and continues to wait."""

    kind: str
    missing_ranks: tuple[int, ...]
    waited_s: float


class PreemptionUpdate(msgspec.Struct, frozen=True, kw_only=True, tag="preemption_update"):
    """Nodes of this round have received preemption notices."""

    # Wall-clock time, because it comes from the cloud and is compared on every node.
    deadline_ms: int
    """When the first node is preempted, in Unix milliseconds; 0 if unknown."""
    node_to_ranks: dict[str, tuple[int, ...]]
    replacement_ready: bool = False
    """Whether the next round can start at once; then the group waits only for a save."""


class FeedersChanged(msgspec.Struct, frozen=True, kw_only=True, tag="feeders_changed"):
    """The machines with feeders, which transform datasets for this worker."""

    feeders: tuple[FeederAddress, ...]


class SuggestSave(msgspec.Struct, frozen=True, kw_only=True, tag="suggest_save"):
    """The cloud predicts, but has not announced, the preemption of a node of the round."""

    reason: str


class RequestFinalSave(msgspec.Struct, frozen=True, kw_only=True, tag="request_final_save"):
    """The run is about to be cancelled: the Checkpointer saves at its next check."""

    reason: str


ToWorker = (
    StartWorker
    | OpenGate
    | CallFunction
    | CheckpointNamed
    | DiscardSnapshotAtEnd
    | Uploaded
    | UploadFailed
    | CommitConfirmed
    | ReportsSettled
    | ValidationFinished
    | RankZeroBroadcastResult
    | CollectiveWaiting
    | PreemptionUpdate
    | FeedersChanged
    | SuggestSave
    | RequestFinalSave
)
