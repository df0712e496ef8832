"""`LeaderState`: what the leader observes beyond the journal, the second input of its decisions.

It is soft state: it is never persisted, and a new leader observes it again. All times are of the
leader's own monotonic clock.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from typing import Any, Literal

import msgspec

from spotfit.core.ids import AgentId, Token
from spotfit.model.events import MachineTimes, RankFailure, ValidationRequest
from spotfit.model.group import GroupStatus, Role
from spotfit.model.offer import Offer
from spotfit.model.topology import (
    FeederAddress,
    Member,
    Notice,
    Round,
    SnapshotShard,
    StandbyReport,
)


class ValidationReported(msgspec.Struct, frozen=True, kw_only=True, tag="validation_reported"):
    """The result of one validation attempt. Agents resend it to every new leader.

    Status 'lost': the attempt failed for a reason outside the user's function and is retried.
    """

    attempt: int
    status: Literal["validated", "failed", "timeout", "lost"]
    metrics: dict[str, Any] = {}
    reason: str = ""


class MemberStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The state of one connected agent."""

    member: Member
    joined_at: float
    """When the agent joined."""
    last_heard_at: float
    """When the last message of the agent was received."""
    running_round: int | None = None
    """The round whose workers are running on its node."""
    notice: Notice | None = None
    is_warm: bool = True
    """Whether its fork server has finished all imports, so that workers start without delay."""
    node_failure: RankFailure | None = None
    """Why the node can never start a worker, if that is known."""
    last_entered_round: int = -1
    """The number of the last round the agent entered; it never enters this or an earlier round."""
    uploading_round: int | None = None
    """The round whose checkpoints the node is still uploading after its workers have ended."""
    snapshot_shards: tuple[SnapshotShard, ...] = ()
    """The snapshot shards in the node's memory when its last workers ended."""
    feeder: FeederAddress | None = None
    """The feeders that run on its node; None if there are none."""


class StandbyStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The state of an agent that stands by in another network than the leader's."""

    report: StandbyReport
    is_proven: bool
    """Whether this leader has observed that it renews its report: the first one may be old."""

    @property
    def is_ready(self) -> bool:
        """Whether it could train at once."""
        report = self.report
        return self.is_proven and report.is_warm and not report.has_notice and not report.failure


class ReplicaLocation(msgspec.Struct, frozen=True, kw_only=True):
    """The node that holds a replica of a rank's latest snapshot shard, and the shard's step."""

    step: int
    peer_store_address: str
    reported_at: float


class ReadyCheckpoint(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint that is completely uploaded and not yet committed to the journal.

    The fields have the meaning of those of `events.CheckpointCommitted`.
    """

    name: str
    round: int
    report_index: int
    metrics: dict[str, Any]
    ranks: tuple[int, ...]
    size_bytes: int = 0
    validation: ValidationRequest | None = None
    is_snapshot: bool = False
    step: int | None = None
    reason: str = ""
    custom_folder: str = ""
    manifests_digest: str = ""
    progress: float | None = None
    snapshot_taken_at: float | None = None
    """When the last rank had taken its shard of the snapshot; None if unknown."""


class RoundProgress(msgspec.Struct, frozen=True, kw_only=True):
    """The observable progress of the ranks of a round, input of hang detection."""

    progress_counts: tuple[int, ...]
    """By rank: the number of its reports, collectives and saves."""
    progressed_at: float
    """When any of these counts last increased."""
    running_ranks: AbstractSet[int] = frozenset()
    """Ranks whose training function was called."""
    returned_ranks: AbstractSet[int] = frozenset()
    """Ranks whose training function returned."""
    is_uploading: bool = False
    """Whether a checkpoint upload is in flight."""
    is_validating: bool = False
    """Whether a validation is pending; the training function may wait for its result."""


class RoundCommit(msgspec.Struct, frozen=True, kw_only=True):
    """The last commit since the open round was opened."""

    committed_at: float
    snapshot_taken_at: float | None = None
    """When the committed snapshot was taken; None for files saved by user code."""


class NoRound(msgspec.Struct, frozen=True, kw_only=True):
    """No round is open. A headless leader, which observes no rounds, is always in this phase."""

    since: float = 0.0
    """When the last round was closed, the training or the fit ended, or the leader was elected."""
    bucket_searched: bool = True
    """Whether the bucket was searched for complete checkpoints since the last round ended."""
    uncommitted_work_s: float = math.inf
    """Training time since the last commit when the last round closed; infinite for a new leader,
    which did not observe it."""


class Training(msgspec.Struct, frozen=True, kw_only=True):
    """The workers are starting or training, and no failure was observed."""

    round: Round
    since: float
    """When the round was opened."""
    running_ranks: AbstractSet[int] = frozenset()
    """Ranks whose training function was called."""
    uploading_ranks: AbstractSet[int] = frozenset()
    """Ranks that are uploading files of the next checkpoint."""
    last_commit: RoundCommit | None = None
    replacement_ready_at: float | None = None
    """When the workers were notified that the replacement is ready."""
    replica_locations: Mapping[int, ReplicaLocation] = {}
    """The replicas of each rank on other nodes."""
    save_requested_at: float | None = None
    """When the Checkpointer was asked to save before the run is cancelled; None without one."""
    save_suggested_at: float | None = None
    """When the Checkpointer was asked to save because other or further machines are ready; None
    without one."""


class Failing(msgspec.Struct, frozen=True, kw_only=True):
    """A failure or a disconnect was observed, or the round's leader was lost: the workers are being
    stopped."""

    round: Round
    since: float
    """When the first failure or disconnect was observed."""
    # Not `since`: durations in the journal count from the opening.
    opened_at: float | None = None
    """When the round was opened; None if by another leader, whose clock cannot be compared."""
    rank_failures: Mapping[int, RankFailure] = {}
    """The first failure of each rank that has failed."""
    workers_stopped: bool = True
    """Whether no connected node has a running worker of the round."""


class Returned(msgspec.Struct, frozen=True, kw_only=True):
    """The training function of every rank has returned, and the workers are exiting.

    Snapshots that were taken after the return are uploaded. A round that fails afterwards stays in
    this phase: its result is complete.
    """

    round: Round
    since: float
    """When the last rank returned."""
    opened_at: float
    result_key: str
    """Object key of rank 0's return value."""
    last_save_error: str = ""
    """Why the last report with files did not become a checkpoint; '' if it did or still may."""
    missing_reports: str = ""
    """Which ranks made fewer reports than others; '' if none."""
    workers_stopped: bool = True
    """Whether no connected node has a running worker of the round."""


# Built from the view's open round for every decision, so that it cannot contradict the view. The
# order of precedence is Returned, Failing, Training.
RoundPhase = NoRound | Training | Failing | Returned


class UserCodeError(msgspec.Struct, frozen=True, kw_only=True):
    """User code outside the workers (a callback or a backend hook) raised. This ends the run."""

    reason: str
    traceback_text: str
    pickle_key: str | None = None
    """Object key of the sealed pickled exception; None if it could not be pickled."""


class LeaderState(msgspec.Struct, frozen=True, kw_only=True):
    """The leader's observations that are not in the journal."""

    # The defaults are those of a headless leader, which observes only machines; a leader with a
    # round coordinator sets all fields.

    agent_id: AgentId
    is_headless: bool = False
    """Whether this leader has no round coordinator, and thus no agents: it manages machines."""
    releases_on_agent_exit: bool = True
    """Whether a machine terminates, and stops costing money, when its agent exits."""
    requeues_itself: bool = False
    """Whether the backend restarts lost machines by itself, see `Traits.requeues_itself`."""
    leading_since: float = 0.0
    elapsed_s: float = 0.0
    """How long the fit has lasted at least; see `JournalEntry.elapsed_s`."""
    wall_ms: int | None = None
    """The time by the storage's clock, in ms since 1970; None if it is unknown."""
    members: dict[AgentId, MemberStatus] = {}
    disconnected_since: dict[AgentId, float] = {}
    """Agents that are disconnected, with the time of the disconnect."""
    # Frames may have been lost even if the agent is connected again.
    disconnected_in_round: AbstractSet[AgentId] = frozenset()
    """Agents that were disconnected at any time since the round was opened."""
    notice_received_at: Mapping[AgentId, float] = {}
    """When the leader received each agent's preemption notice, also of agents that have left."""
    last_agent_by_node: Mapping[tuple[Token, int], AgentId] = {}
    """The agent that was last connected from each node. In another network, the one that took part
    in the last round before the election of this leader."""
    standby: Mapping[AgentId, StandbyStatus] = {}
    """The agents that are not connected and have renewed their `StandbyReport` within the lease
    timeout."""
    loss_recorded_at: Mapping[Token, float] = {}
    """When this leader last recorded the loss of a node, by group."""
    agent_lost_at: Mapping[Token, float] = {}
    """The same of nodes whose agents had been connected."""
    feeding_since: Mapping[AgentId, float] = {}
    """When the feeders of each agent first accepted connections, also of agents that have left."""
    phase: RoundPhase = NoRound()
    has_unfinished_writes: bool = False
    """Whether this leader still deletes checkpoints or writes reports."""
    has_unwritten_logs: bool = False
    """Whether output of the leader's own node is not in the bucket yet."""
    # Not part of the phase: callbacks may still run when the round is closed.
    reports_delivered: bool = True
    """Whether all reports of the round are matched and delivered to the callbacks."""
    user_code_error: UserCodeError | None = None
    ready_checkpoints: tuple[ReadyCheckpoint, ...] = ()
    # The next five fields describe machines; a headless leader observes them, too.
    group_statuses: dict[Token, GroupStatus] = {}
    status_as_of: Mapping[Token, float] = {}
    """The time for which each status is certain. Backends may report a terminated machine as
    running for `Traits.status_lag_s`."""
    granted_at: Mapping[tuple[Token, int], float] = {}
    """When each machine was observed to run, after it was not. Without those that do not."""
    reported_running: frozenset[tuple[Token, int]] = frozenset()
    """Machines that were observed to run at any time: WAITING then means a restart by the backend,
    and is not a report that is older than the machine."""
    unrecorded_times: Mapping[Token, tuple[MachineTimes, ...]] = {}
    """Starts and ends of machines that were observed and are not in the journal, by group."""
    listed_offers: tuple[Offer, ...] = ()
    """The offers as the backend last listed them; empty before."""
    refused_at: Mapping[Role, float] = {}
    """When a request for machines of each role was last refused, or one failed before it worked."""
    latest_metrics: dict[str, Any] | None = None
    """The last metrics of rank 0."""
    validation_changed_at: float = 0.0
    """When a validation was last requested (while none was pending), started, ended or lost."""
    validation_reported: ValidationReported | None = None
    """The reported result of the current validation."""
    data_wait_share: float | None = None
    """The share of the last minute for which the worker that waits most has waited for rows; None
    if it was not measured for a minute with the present machines for feeders."""
    data_wait_measured_s: float = 0.0
    """For how long it was measured with these machines."""
