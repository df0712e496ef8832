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
from spotfit.model.topology import FeederAddress, Notice, PreemptionRisk, SnapshotShard
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
        """`host:port` of the socket at which this agent accepts other agents, `"10.0.0.7:41234"`.

        The host is an IP address; IPv6 addresses are in brackets.
        """
        ...

    def connect(self, address: str, join: Join) -> None:
        """Start to connect to the leader at `address` (numeric `host:port`); `join` is sent first.

        Returns before the connection exists; a failure is reported later as `LeaderDisconnected`. A
        previous connection to a leader is closed without an event. `address` may be this agent's
        own: messages are then delivered in memory.
        """
        ...

    def disconnect(self) -> None:
        """Close the connection to the leader without a `LeaderDisconnected` event.

        Harmless if there is none.
        """
        ...

    def send_to_leader(self, message: ToLeader) -> None:
        """Queue a message for the leader of the last `connect`; its delivery is not confirmed.

        Dropped without an error before `connect`, after `disconnect` and after the connection was
        lost. Messages sent while the connection is being established are sent after `join`.
        """
        ...

    def send_to_agent(self, agent: AgentId, message: FromLeader) -> None:
        """Queue a message for an agent that has joined this leader; its delivery is not confirmed.

        Dropped without an error if the agent is not connected.
        """
        ...

    def disconnect_agent(self, agent: AgentId) -> None:
        """Close an agent's connection to this leader, without an `AgentDisconnected` event.

        The agent itself observes `LeaderDisconnected`. Harmless if it is not connected.
        """
        ...

    def drain_events(self) -> list[TransportEvent]:
        """Return and remove the events since the last call, in order; empty if there are none.

        Called by `Agent.tick`.
        """
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
    """The worker processes of this node, one per rank, for the life of the agent.

    No method blocks, except `snapshot_shards`. `rank` is the global rank in the round.
    """

    def prepare(self, spec: RunSpec) -> None:
        """Start to prepare the run's code, its packages and the fork server for later workers.

        Called once, when the agent has read the run's spec; the work continues in a thread. A
        permanent error is reported as `EnvironmentBroken`; after a temporary one the next `start`
        prepares again.
        """
        ...

    def start(self, start_messages: Sequence[StartWorker]) -> None:
        """Start one worker process per message. All are of one round; no other worker may be left.

        Returns before the processes run. A process that cannot be started is reported like one that
        failed: a `WorkerRaised` frame, then `WorkerExited`.
        """
        ...

    def send(self, rank: int, frame: ToWorker) -> None:
        """Send a frame to the worker with that global rank; dropped if it has exited.

        A `CheckpointNamed` also starts the upload of the snapshot that the rank has submitted with
        that report, if any, even if the worker has exited; `DiscardSnapshotAtEnd` deletes the one
        that it has taken after its function had returned.
        """
        ...

    def dump_stacks(self, dump_id: int) -> None:
        """Request the stacks of every running worker, to diagnose a hang.

        A `WorkerStackDumped` event with this `dump_id` (number of the request in the round) follows
        for each, possibly after seconds.
        """
        ...

    def kill_workers(self) -> None:
        """Kill every worker and its child processes with SIGKILL; returns before they have exited.

        A `WorkerExited` event follows for each. Sidecars and uploads continue. A repeated call is
        harmless.
        """
        ...

    @property
    def has_workers(self) -> bool:
        """Whether any worker was started whose `WorkerExited` event was not yet created.

        False means that the next `drain_events` returns everything that the workers have sent.
        """
        ...

    @property
    def is_warm(self) -> bool:
        """Whether the fork server has imported what workers need up to their first training steps.

        Also True if no fork server is used: waiting would not make the start faster. The agent
        reports it to the leader, which counts only warm nodes as a ready replacement.
        """
        ...

    @property
    def uploading_round(self) -> int | None:
        """Number of the round whose workers queued uploads that are not complete; None without any.

        Uploads continue after the workers have exited. A completed upload is reported as the
        worker's own `SaveCompleted`; a failed one as `SaveFailed` for a snapshot, else as
        `WorkerRaised` if the worker still runs.
        """
        ...

    @property
    def snapshot_shards(self) -> tuple[SnapshotShard, ...]:
        """Complete snapshot shards on this node: those of its own ranks, and replicas of others.

        They are in shared memory, or on disk if that was full. Each access reads and verifies them,
        which is slow: use it only when no worker is running.
        """
        ...

    # Needed before a new round starts, which may use the same names (docs/decisions/0017).
    def cancel_uploads(self) -> None:
        """Cancel all uploads of `uploading_round` without events; harmless if there are none.

        Called before a new round starts, which may use the same checkpoint names.
        """
        ...

    def replicate_to(self, peer_store: str) -> None:
        """Replicate each rank's latest and all later snapshot shards to another node's peer store.

        `peer_store` is its `host:port`; '' stops the replication. A `ReplicaConfirmed` event
        follows for each stored replica.
        """
        ...

    def drain_events(self) -> list[WorkerPoolEvent]:
        """Return and remove the events since the last call, in order; empty if there are none.

        Called at each `Agent.tick`.
        """
        ...


# --- callbacks --------------------------------------------------------------------------------


class CallbackRunner(Protocol):
    """The process on the leader's node that runs the user's callbacks. No method blocks."""

    def send_report(
        self, metrics: Sequence[msgspec.Raw], checkpoint: str | None, *, digest: str = ""
    ) -> None:
        """Queue the `after_report` callbacks for a report that all required ranks have made.

        `metrics` has the JSON object of each rank, indexed by global rank; `{}` where that of a
        rank is missing. `checkpoint` is the name of the report's committed checkpoint, such as
        `"checkpoint_2025-01-31_12-00-00.000000"`, None if it has no files or they could not be
        saved, and `digest` its `CheckpointCommitted.manifests_digest`.
        """
        ...

    def send_failure(self, pickle_keys: dict[int, str], traceback_texts: dict[int, str]) -> None:
        """Queue the `after_exception` callbacks for a round that was closed with failures.

        `traceback_texts` has the error text of every failed rank; `pickle_keys` the object key of
        its pickled exception (`".spotfit/failures/3-0.pkl"`), only for ranks that have one.
        """
        ...

    @property
    def finished_count(self) -> int:
        """How many of the queued calls have returned, in the order in which they were queued."""
        ...

    # A method, not an exception of `send_report`: callbacks run after the call has returned.
    def user_code_error(self) -> UserCodeError | None:
        """The first exception of a callback, or the death of their process; None without one.

        Once set it stays, and the leader ends the run with it.
        """
        ...

    @property
    def is_idle(self) -> bool:
        """Whether no queued callback is waiting or running; also True after `user_code_error`.

        The leader ends the run only once this is True.
        """
        ...


# --- a backend's hooks ------------------------------------------------------------------------


class BackendHookRunner(Protocol):
    """The process on the leader's node that runs the hooks of the user's backend. No method
    blocks."""

    def submit(
        self, hook: BackendHook, round_number: int, world_size: int, resources: Mapping[str, float]
    ) -> None:
        """Queue a call of `hook` (such as `"on_start"`) for that round, after those queued before.

        `resources` are those of one worker, for example `{"GPU": 1.0}`. `is_done` reports the end
        of the hook, `user_code_error` its exception.
        """
        ...

    def is_done(self, hook: BackendHook, round_number: int) -> bool:
        """Whether a submitted hook of that round has returned or raised.

        Call it only after `submit`: it cannot distinguish a finished hook from one never submitted.
        """
        ...

    def drain_worker_calls(self) -> list[CallWorkers]:
        """Return and remove the function calls that hooks have requested since the last call.

        The leader sends each to the workers in `CallWorkers.ranks` of its round.
        """
        ...

    def deliver_call_result(self, round_number: int, rank: int, call_result: CallResult) -> None:
        """Return the value or exception of a function call on worker `rank` to the waiting hook.

        Ignored if the round was abandoned.
        """
        ...

    # Without this a hook that waits for lost workers would block the hooks of the next round.
    def abandon_round(self, round_number: int) -> None:
        """Fail all present and later worker calls of that round, whose workers are killed or gone.

        The calls raise `StaleWorkerGroupError` in the hook. A hook that does not return within a
        timeout is killed. A repeated call is harmless.
        """
        ...

    def user_code_error(self) -> UserCodeError | None:
        """The first exception of a hook, or the death of the hooks process; None without one.

        Once set it stays, and the leader ends the run with it. Failures of a hook because its round
        was abandoned do not count.
        """
        ...

    @property
    def is_idle(self) -> bool:
        """Whether no hook is queued or running; also True after `user_code_error`.

        The leader ends the run only once this is True.
        """
        ...


# --- validations ------------------------------------------------------------------------------


class Validator(Protocol):
    """Runs the user's validation function for one checkpoint in a process. No method blocks."""

    def start(self, spec: RunSpec, checkpoint: CheckpointCommitted) -> None:
        """Start a process that validates a committed checkpoint; no other one may be running.

        Returns before the process runs. `take_result` also reports a process that cannot be
        started.
        """
        ...

    def stop(self) -> None:
        """Kill the process, if there is one, and discard its result, also one not taken yet.

        `is_running` stays True until the process has exited.
        """
        ...

    @property
    def is_running(self) -> bool:
        """Whether a process was started and has not exited, also while it is being killed."""
        ...

    # Not before the exit: until then the process occupies accelerators of the next assignment.
    def take_result(self) -> ValidationResult | None:
        """Return the result once, after the process has exited; otherwise None.

        A process that died without a result gives a `ValidationResult` without metrics. None after
        `stop`.
        """
        ...


# --- feeders ----------------------------------------------------------------------------------


class FeederNode(Protocol):
    """Runs the feeders of a machine that was rented for them. No method blocks."""

    def start(self, spec: RunSpec) -> None:
        """Start the feeders; none may be running. Returns before they run."""
        ...

    def stop(self) -> None:
        """Kill the feeders, if there are any. Harmless if repeated."""
        ...

    @property
    def is_running(self) -> bool:
        """Whether they were started and have not ended."""
        ...

    @property
    def feeder(self) -> FeederAddress | None:
        """Where they accept connections; None before they do."""
        ...


# --- the machine ---------------------------------------------------------------------------


class NoticeSource(Protocol):
    """Detects preemption notices for this machine in one source: a cloud API, a file."""

    def poll(self, now: float) -> Notice | PreemptionRisk | None:
        """Return the preemption notice, else a reported preemption risk, else None (nothing known).

        Called at each `Agent.tick` with the event-loop time `now` in seconds; later calls repeat
        what was found. Never raises. Never blocks for longer than a file read.
        """
        ...


class NodeServices(Protocol):
    """Services of the machine for one agent, implemented by the driver and by the simulator."""

    def open_provisioner(self, spec: RunSpec) -> Provisioner:
        """Return the provisioner that `spec.provisioner` names, for example `"aws_batch"`.

        Called by an agent that was elected leader. Raises `ConfigError` for an unknown name or
        option, and `MissingExtraError` if a package of the backend is not installed.
        """
        ...

    def open_callback_runner(self, spec: RunSpec) -> CallbackRunner | None:
        """Return the runner of the user's callbacks for a new leader; None if the run has none.

        An earlier runner of this node is closed. Its process starts with the first callback.
        """
        ...

    def open_backend_hook_runner(self, spec: RunSpec) -> BackendHookRunner | None:
        """Return the runner of the backend's hooks for a new leader; None if the backend has none.

        An earlier runner of this node is closed. Its process starts with the first hook.
        """
        ...

    def stop_sidecars(self) -> None:
        """Kill the callback and hook processes of this node, if any; harmless if repeated.

        Called when this agent stops leading. Uploader and validator continue.
        """
        ...

    def write_run_log(self, text: str) -> None:
        """Append a line to the log of the run itself, which the console of `fit()` shows.

        Called by the leader, for example with the report of a hang, or with the size of machines.
        Does not block.
        """
        ...

    @property
    def has_unwritten_logs(self) -> bool:
        """Whether output of this node's processes is not in the bucket yet.

        The leader releases its own machine only afterwards, within limits.
        """
        ...

    def open_validator(self) -> Validator:
        """Return the validator of this node. Called once per agent; no process is started yet."""
        ...

    def open_feeder_node(self) -> FeederNode:
        """Return the feeders of this node. Called once per agent; no process is started yet."""
        ...

    def background_calls(self) -> BackgroundCalls:
        """Return the runner of slow calls to the bucket and the cloud, shared by the agent's parts.

        Every call returns the same object.
        """
        ...

    # Separate threads: a lease that is renewed too late costs the leadership (docs/decisions/0023).
    def journal_background_calls(self) -> BackgroundCalls:
        """Return a runner of calls for the journal and the lease only.

        It has its own threads: such calls never queue behind a slow cloud API.
        """
        ...

    def seal(self, payload: bytes, purpose: str) -> bytes:
        """Return `payload` encrypted and authenticated with the run key, to store it in the bucket.

        It can only be opened for the same `purpose`, by convention the object's key, for example
        `".spotfit/results/0-0.pkl"`. Equal arguments give equal envelopes.
        """
        ...

    def new_token(self) -> str:
        """Return a new unique token by which the backend recognizes one request for machines.

        Repeating the request with the same token rents nothing twice.
        """
        ...

    def default_checkpoint_name(self, report_index: int) -> str:
        """Return a unique name for a checkpoint that the user did not name.

        `report_index` is the number of the report in its round, from 0. An agent returns the time
        of the call, `"checkpoint_2025-01-31_12-00-00.000000"`.
        """
        ...
