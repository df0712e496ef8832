"""Interfaces between the agent and its machine: transport, worker pool, sidecars, notices.

The agent's logic depends on these protocols only. `driver` implements them with sockets and
processes; the simulator implements them in virtual time, so that it runs the same agent code.

Main types: `AgentTransport`, `WorkerPool`, `CallbackRunner`, `BackendHookRunner`, `Validator`,
`NoticeSource`, `NodeServices`, and the events that the first two return.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import msgspec

from spotfit.control.background_calls import BackgroundCalls
from spotfit.core.ids import AgentId
from spotfit.model.events import CheckpointCommitted
from spotfit.model.leader_state import UserCodeError
from spotfit.model.spec import RunSpec
from spotfit.model.topology import Notice, PreemptionRisk, SnapshotShard
from spotfit.protocol.agent_leader import FromLeader, Join, ToLeader
from spotfit.protocol.agent_sidecar import BackendHook, CallWorkers, ValidationResult
from spotfit.protocol.worker_agent import CallResult, StartWorker, ToWorker, WorkerRaised
from spotfit.provision.api import Provisioner

# --- transport between agents -------------------------------------------------------------


class LeaderMessageReceived(msgspec.Struct, frozen=True):
    """A message of the leader."""

    message: FromLeader


class LeaderDisconnected(msgspec.Struct, frozen=True):
    """The connection to the leader at `address` was lost or could not be established.

    `closed_by_peer` is True if the remote host reported the end (connection reset, refused or
    closed), and False for a timeout: then the leader may still be running.
    """

    address: str
    reason: str
    # With a closed socket an election may start at once; otherwise the lease must expire (0012).
    closed_by_peer: bool


class AgentMessageReceived(msgspec.Struct, frozen=True):
    """A message of an agent to this leader. The first message of each connection is `Join`."""

    agent: AgentId
    message: ToLeader


class AgentDisconnected(msgspec.Struct, frozen=True):
    """The connection of an agent that had joined this leader was lost."""

    agent: AgentId
    reason: str


TransportEvent = (
    LeaderMessageReceived | LeaderDisconnected | AgentMessageReceived | AgentDisconnected
)


class AgentTransport(Protocol):
    """Connections between agents: one listening socket, and one connection to the leader.

    No method blocks. Messages of one connection arrive in order or not at all. The loss of a
    connection is reported by exactly one event. Both sides authenticate by TLS with the run's
    certificate.
    """

    @property
    def address(self) -> str:
        """host:port at which other agents connect to this one."""
        ...

    def connect(self, address: str, join: Join) -> None:
        """Connect to the leader at `address` and send `join` first.

        A previous connection to a leader is closed without an event. `address` may be this agent's
        own: messages are then delivered in memory.
        """
        ...

    def disconnect(self) -> None:
        """Close the connection to the leader, if any, without a `LeaderDisconnected` event."""
        ...

    def send_to_leader(self, message: ToLeader) -> None:
        """Send to the leader. Without a connection the message is dropped: the `LeaderDisconnected`
        event has reported the reason."""
        ...

    def send_to_agent(self, agent: AgentId, message: FromLeader) -> None:
        """Send to an agent that has joined; dropped if it is no longer connected."""
        ...

    def disconnect_agent(self, agent: AgentId) -> None:
        """Close an agent's connection without an `AgentDisconnected` event."""
        ...

    def drain_events(self) -> list[TransportEvent]:
        """Return the events since the last call, in order."""
        ...


# --- the workers of this node -------------------------------------------------------------


class WorkerFramesReceived(msgspec.Struct, frozen=True):
    """Frames that a worker wrote; each is the JSON of a `FromWorker`."""

    # Raw: most frames are only forwarded, and the leader decodes them.
    round: int
    rank: int
    frames: list[msgspec.Raw]


class WorkerExited(msgspec.Struct, frozen=True):
    """A worker process was reaped. All its frames were returned by earlier events.

    `description` is for people: 'exited with code 0', 'was killed by SIGKILL'. `is_clean` means
    exit code 0, `killed_by_agent` that it ran until `kill_workers` killed it.
    """

    round: int
    rank: int
    description: str
    is_clean: bool
    killed_by_agent: bool = False


class EnvironmentBroken(msgspec.Struct, frozen=True):
    """No worker can be started on this node: `raised` is the permanent error of each of them."""

    raised: WorkerRaised


class WorkerLivenessChanged(msgspec.Struct, frozen=True):
    """A worker has not sent a heartbeat for `silent_s` seconds; 0 when it responds again."""

    round: int
    rank: int
    silent_s: float


class WorkerStackDumped(msgspec.Struct, frozen=True):
    """The stacks of a worker, or the reason why they are missing."""

    round: int
    dump_id: int
    rank: int
    stack_text: str


class ReplicaConfirmed(msgspec.Struct, frozen=True):
    """The peer store of another node has a replica of the shard that `rank` saved at `step`."""

    round: int
    rank: int
    step: int
    peer_store: str


WorkerPoolEvent = (
    WorkerLivenessChanged
    | WorkerStackDumped
    | WorkerFramesReceived
    | WorkerExited
    | EnvironmentBroken
    | ReplicaConfirmed
)


class WorkerPool(Protocol):
    """The worker processes of this node, one per rank. No method blocks."""

    def prepare(self, spec: RunSpec) -> None:
        """Prepare what the workers of this run need (code, environment, fork server) in advance."""
        ...

    def start(self, start_messages: Sequence[StartWorker]) -> None:
        """Start one worker per message. All are of one round; no worker of another may be left."""
        ...

    def send(self, rank: int, frame: ToWorker) -> None:
        """Send to one worker of the running round; dropped if it has exited."""
        ...

    def dump_stacks(self, dump_id: int) -> None:
        """Request the stacks of every worker. A `WorkerStackDumped` event follows for each."""
        ...

    def kill_workers(self) -> None:
        """Kill every worker and its child processes. A `WorkerExited` event follows for each."""
        ...

    @property
    def has_workers(self) -> bool:
        """Whether any worker process is running."""
        ...

    @property
    def is_warm(self) -> bool:
        """Whether the fork server has imported everything that workers need."""
        ...

    @property
    def uploading_round(self) -> int | None:
        """The round whose workers queued uploads that are not complete; None if there is none.

        A completed upload is reported as the worker's own `SaveCompleted`, a failed one as its
        `WorkerRaised`.
        """
        ...

    @property
    def snapshot_shards(self) -> tuple[SnapshotShard, ...]:
        """Complete snapshot shards in the shared memory of this node.

        Verifies their contents, which is slow: call it only when no worker is running.
        """
        ...

    # Needed before a new round starts, which may use the same names (docs/decisions/0017).
    def cancel_uploads(self) -> None:
        """Cancel all queued uploads of `uploading_round`."""
        ...

    def replicate_to(self, peer_store: str) -> None:
        """Replicate the latest and all later shards to `peer_store` (host:port); '' stops it."""
        ...

    def drain_events(self) -> list[WorkerPoolEvent]:
        """Return the events since the last call, in order."""
        ...


# --- callbacks --------------------------------------------------------------------------------


class CallbackRunner(Protocol):
    """The process on the leader's node that runs the user's callbacks. No method blocks."""

    def send_report(self, metrics: Sequence[msgspec.Raw], checkpoint: str | None) -> None:
        """Pass on a matched report: metrics by rank, and the name of its committed checkpoint."""
        ...

    def send_failure(self, pickle_keys: dict[int, str], traceback_texts: dict[int, str]) -> None:
        """Pass on the failure of a round: per rank the key of the exception and its text."""
        ...

    # A method, not an exception of `send_report`: callbacks run after the call has returned.
    def user_code_error(self) -> UserCodeError | None:
        """The exception that a callback raised, or None."""
        ...

    @property
    def is_idle(self) -> bool:
        """Whether all reports and failures have been processed."""
        ...


# --- a backend's hooks ------------------------------------------------------------------------


class BackendHookRunner(Protocol):
    """The process on the leader's node that runs the hooks of the user's backend. No method
    blocks."""

    def submit(
        self, hook: BackendHook, round_number: int, world_size: int, resources: Mapping[str, float]
    ) -> None:
        """Queue a call of `hook` for that round, after those queued before."""
        ...

    def is_done(self, hook: BackendHook, round_number: int) -> bool:
        """Whether a submitted hook has returned."""
        ...

    def drain_worker_calls(self) -> list[CallWorkers]:
        """Return the calls of workers that hooks have requested since the last call."""
        ...

    def deliver_call_result(self, round_number: int, rank: int, call_result: CallResult) -> None:
        """Return the result of such a call to the hook."""
        ...

    # Without this a hook that waits for lost workers would block the hooks of the next round.
    def abandon_round(self, round_number: int) -> None:
        """Fail all calls of workers of that round: the workers are gone."""
        ...

    def user_code_error(self) -> UserCodeError | None:
        """The exception that a hook raised, or None."""
        ...

    @property
    def is_idle(self) -> bool:
        """Whether no hook is queued or running."""
        ...


# --- validations ------------------------------------------------------------------------------


class Validator(Protocol):
    """Runs the user's validation function for one checkpoint in a process. No method blocks."""

    def start(self, spec: RunSpec, checkpoint: CheckpointCommitted) -> None:
        """Start the validation of `checkpoint`; no other one may be running."""
        ...

    def stop(self) -> None:
        """Kill the process and discard its result."""
        ...

    @property
    def is_running(self) -> bool:
        """Whether the process is running."""
        ...

    # Not before the exit: until then the process occupies accelerators of the next assignment.
    def take_result(self) -> ValidationResult | None:
        """Return the result once, after the process has exited; otherwise None."""
        ...


# --- the machine ---------------------------------------------------------------------------


class NoticeSource(Protocol):
    """Detects preemption notices for this machine."""

    def poll(self, now: float) -> Notice | PreemptionRisk | None:
        """Return the notice, else a reported preemption risk, else None.

        Never raises. Never blocks for longer than a file read.
        """
        ...


class NodeServices(Protocol):
    """Services of the machine, implemented by the driver and by the simulator."""

    def open_provisioner(self, spec: RunSpec) -> Provisioner:
        """Open the provisioner of the run. Only the leader needs it."""
        ...

    def open_callback_runner(self, spec: RunSpec) -> CallbackRunner | None:
        """Open the callback process; None if the run has no callbacks."""
        ...

    def open_backend_hook_runner(self, spec: RunSpec) -> BackendHookRunner | None:
        """Open the process of the backend's hooks; None if the backend has none."""
        ...

    def stop_sidecars(self) -> None:
        """Stop the callback and hook processes. Called when this agent stops leading."""
        ...

    def write_run_log(self, text: str) -> None:
        """Append a line to the log of the run itself."""
        ...

    def open_validator(self) -> Validator:
        """Open the validator of this machine."""
        ...

    def background_calls(self) -> BackgroundCalls:
        """Threads for slow calls to the bucket and the cloud."""
        ...

    # Separate threads: a lease that is renewed too late costs the leadership (docs/decisions/0023).
    def journal_background_calls(self) -> BackgroundCalls:
        """Threads for the journal and the lease only: these never queue behind a slow cloud API."""
        ...

    def seal(self, payload: bytes, purpose: str) -> bytes:
        """Encrypt `payload` with the run's key; it can only be opened for the same `purpose`."""
        ...

    def new_token(self) -> str:
        """Return a new unique token for a machine request."""
        ...

    def default_checkpoint_name(self, report_index: int) -> str:
        """Return a directory name for a checkpoint that the user did not name."""
        ...
