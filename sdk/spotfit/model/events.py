"""The journal's entry format: `JournalEntry` and the event types it can hold.

The format is append-only (docs/decisions/0010): new event types and new fields with a default may
be added, but no event or field that was ever written is renamed, retyped or given another meaning.
`model.view` defines what each event means for the state of the run.
"""

from __future__ import annotations

import enum
from typing import Annotated, Any, Literal

import msgspec

from spotfit.core.ids import AgentId, RunId, Token
from spotfit.model.group import GroupHandle, GroupPlan, GroupRequest, Unreachable
from spotfit.model.offer import Offer
from spotfit.model.spec import RunSpec
from spotfit.model.topology import Notice, Round


class FailureCause(enum.StrEnum):
    """Why a round ended.

    WORKER, PLATFORM and PREEMPTION each count against their own limit of `FailureLimits`; the
    others have no limit. NETWORK is a broken connection whose reason is still unknown; if the node
    turns out to be lost, its `NodeLost` recharges the round to PREEMPTION or PLATFORM. So does the
    loss of a node that was not connected when its round was closed for LEADER_CHANGE.
    """

    # The values are written to the journal and must not change.
    WORKER = "worker"
    PLATFORM = "platform"
    PREEMPTION = "preemption"
    NETWORK = "network"
    RESIZE = "resize"
    LEADER_CHANGE = "leader_change"


class RankFailure(msgspec.Struct, frozen=True, kw_only=True):
    """The failure of one rank. `pickle_key` is the object key of its sealed pickled exception."""

    rank: int
    kind: Literal["raised", "died", "lost", "timeout"]
    message: str
    pickle_key: str | None = None
    cause: FailureCause | None = None
    """The cause as diagnosed on the node; None if it must be derived from `kind`."""
    is_permanent: bool = False
    """Whether a retry would fail in the same way."""


class PreemptedNodes(msgspec.Struct, frozen=True, kw_only=True):
    """Nodes of a round that were preempted, with the world ranks of each."""

    node_to_ranks: dict[str, tuple[int, ...]]
    deadline_ms: int = 0
    """The earliest announced deadline, in milliseconds since 1970; 0 if unknown."""
    drain_timed_out: bool = False
    """Whether workers were still running at the deadline."""


class AgentCrash(msgspec.Struct, frozen=True, kw_only=True):
    """The error with which an agent has ended, as the agent itself stored it in the bucket."""

    agent: AgentId
    token: Token
    node: int
    """Index of its machine within the group `token`."""
    signature: str
    """Digest of the type of the exception and of the code that raised it, without the message:
    equal for errors with the same cause on different machines."""
    traceback_text: str
    """The end of the traceback, at most `MAX_CRASH_TEXT_CHARS` characters."""
    unreachable: Unreachable | None = None
    """What an agent that never joined could not reach. `traceback_text` is a sentence then."""


MAX_CRASH_TEXT_CHARS = 4000


class MachineTimes(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """From when until when the provider bills a machine, as far as it is known.

    All times are milliseconds since 1970. A pair is the earliest and the latest possible time; both
    are equal if the provider reports the time, which is then of the provider's clock.
    """

    node: int
    """Index of the machine within its group."""
    started_ms: tuple[int, int] | None = None
    ended_ms: tuple[int, int] | None = None
    """An end before `started_ms` is that of the machine's previous attempt."""
    attempt: int | None = None
    """Number of the attempt that started; None if the backend does not report it."""
    waiting_ms: int | None = None
    """It did not run then, and all attempts before are recorded."""
    unseen_until_ms: int | None = None
    """Between the recorded attempts and then, the backend may have started others. Without
    `started_ms`, none of them is known to run."""
    is_unbilled: bool = False
    """Whether it ended without having started."""
    may_be_restarted: bool = False
    """Whether its backend restarts it and does not report when: each agent may be of another
    attempt than the recorded one."""


class FitStarted(msgspec.Struct, frozen=True, kw_only=True, tag="fit_started"):
    """A `fit()` call started or resumed the run. Checkpoints of earlier fits are retained."""

    spec: RunSpec


class LeaderElected(msgspec.Struct, frozen=True, kw_only=True, tag="leader_elected"):
    """Until the next election, only `leader` may append decisions."""

    leader: AgentId
    # Distinguishes terms of one agent, which may be elected again.
    epoch: int
    coordinator_address: str | None = None
    """host:port of its round coordinator. None for a headless leader, which any agent may
    replace."""
    reason: str = ""
    lost_leader: AgentId | None = None
    """The previous leader, if the new leader observed that its coordinator stopped listening."""
    network: str = ""
    """The network of its machine, as in `GroupHandle.network`; '' for a headless leader. From then
    on agents of this network join the leader, and those of other networks stand by."""


class GroupPlanned(msgspec.Struct, frozen=True, kw_only=True, tag="group_planned"):
    """The leader will request these machines. A new leader completes an unfinished request."""

    request: GroupRequest
    plan: GroupPlan
    reason: str = ""


class GroupSubmitted(msgspec.Struct, frozen=True, kw_only=True, tag="group_submitted"):
    """The backend accepted the request."""

    token: Token
    handle: GroupHandle


class GroupRefused(msgspec.Struct, frozen=True, kw_only=True, tag="group_refused"):
    """The backend rejected the request. With `is_final`, a new request is likely to be, too.

    That ends a fit without a round. A later one is repeated for some minutes: credentials expire
    and are renewed, and quotas are shared with other runs.
    """

    token: Token
    reason: str
    is_final: bool = False


class GroupWaiting(msgspec.Struct, frozen=True, kw_only=True, tag="group_waiting"):
    """The backend's reason why machines of the group do not run yet; '' once they do. For display
    only."""

    token: Token
    reason: str


class NodeLost(msgspec.Struct, frozen=True, kw_only=True, tag="node_lost"):
    """One node of a group is permanently lost."""

    token: Token
    node: int
    agent: AgentId | None
    reason: str
    cause: FailureCause | None = None
    """PREEMPTION if the machine is gone, PLATFORM if it runs but its agent is unreachable, or if
    its agent crashed, WORKER if it was killed for exceeding its memory limit. A round that was
    closed without a known cause is recharged to it. For a node that never had an agent, PREEMPTION
    means that the backend withdrew a machine it had granted."""
    machine_returned: bool = False
    """Only the agent is lost: the backend has restarted the machine with a new agent, or restarts
    it."""
    crash: AgentCrash | None = None
    """The error with which its agent has ended, if the agent stored one."""
    is_failed_start: bool = False
    """Whether the backend reports that it ended with an error before its agent joined."""
    output: tuple[str, ...] = ()
    """For a failed start, the last lines that the machine printed, if the backend has them."""
    unreachable: Unreachable | None = None
    """What the machine could not reach before its agent joined."""
    is_unused: bool = False
    """Whether the leader releases the machine because the backend granted too few for a round: all
    are requested again, after a pause."""
    is_unusable: bool = False
    """Whether the machine has started, but was of no use: its environment could not be set up, it
    ended before its feeders had worked, or no round could be opened in its network, another one
    than the leader's."""
    times: MachineTimes | None = None
    """What was not recorded before; None if nothing is known."""

    @property
    def is_withdrawn_request(self) -> bool:
        """Whether the backend has refused it after its request was accepted: it has no output."""
        return self.agent is None and self.cause is FailureCause.PREEMPTION


class GroupsReleased(msgspec.Struct, frozen=True, kw_only=True, tag="groups_released"):
    """The groups were released and cause no further cost."""

    token: Token
    other_tokens: tuple[Token, ...] = ()
    times: dict[Token, tuple[MachineTimes, ...]] = {}
    """By group: what was not recorded before. Ends that are unknown at the release are
    recorded later, in `MachinesObserved`."""


class PreemptionNoticed(msgspec.Struct, frozen=True, kw_only=True, tag="preemption_noticed"):
    """A node received a preemption notice."""

    agent: AgentId
    notice: Notice


class RoundOpened(msgspec.Struct, frozen=True, kw_only=True, tag="round_opened"):
    """A round started: every assigned agent starts its workers."""

    round: Round
    reason: str = ""


class TrainingFunctionStarted(
    msgspec.Struct, frozen=True, kw_only=True, tag="training_function_started"
):
    """All ranks of the open round have called the training function.

    For display, and for the lifetime statistics: before it there is no training state to save.
    """

    round_number: int
    startup_s: float
    """Time from the opening of the round until then, by the clock of its leader."""


class RoundClosed(msgspec.Struct, frozen=True, kw_only=True, tag="round_closed"):
    """The round ended: every assigned agent stops its workers."""

    round_number: int
    cause: FailureCause
    reason: str
    failures: tuple[RankFailure, ...] = ()
    preempted: PreemptedNodes | None = None
    # Input of the lifetime statistics (docs/decisions/0027).
    duration_s: float | None = None
    """Duration of the round by the clock of the leader that opened it; None if another leader
    closed it, because clocks of two machines are never compared."""
    state_replicated: bool = False
    """Whether leaving nodes had replicated their latest snapshot to nodes that stay."""
    missing_agents: tuple[AgentId, ...] = ()
    """Agents of the round whose connection to the leader was lost. If the machine of one is lost
    before it takes part in another round, its `NodeLost` may revise the cause."""


class ValidationRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request to validate a checkpoint, with the trainer's settings or with its own."""

    fn_kwargs: dict[str, Any] | None = None
    """Arguments that override the trainer's. None: use all of the trainer's settings, including its
    timeout."""
    timeout_s: float | None = None


class CheckpointCommitted(msgspec.Struct, frozen=True, kw_only=True, tag="checkpoint_committed"):
    """A checkpoint is complete. Files in the bucket without this entry are not a checkpoint."""

    name: str
    round: int
    report_index: int
    """Index of the report in its round, from 0."""
    metrics: dict[str, Any]
    ranks: tuple[int, ...]
    """The world ranks whose manifests list its files."""
    size_bytes: int = 0
    validation: ValidationRequest | None = None
    """Set if the checkpoint is to be validated; it is not dropped before that."""
    round_age_s: float | None = None
    """Age of the round at the commit by its leader's clock; None if the round was already
    closed."""
    is_snapshot: bool = False
    """Whether a `Checkpointer` can resume from it."""
    step: int | None = None
    """Number of completed training steps; None for files that were saved by user code."""
    reason: str = ""
    """Why a `Checkpointer` saved it at this step; empty for files that were saved by user code."""
    custom_folder: str = ""
    """The folder below the run's root that user code wrote the files to; empty: the folder
    `name`."""
    manifests_digest: str = ""
    """`checkpoint.manifest.combine_digests` of its manifests; empty if unknown, as in entries of
    earlier versions. Binds the manifests to this entry."""
    progress: float | None = None
    """The share of the training that it contains, from 0 to 1; None if user code does not report
    it."""

    @property
    def folder(self) -> str:
        """The folder of the checkpoint's files below the run's root: usually its `name`.

        `custom_folder` if user code wrote the files itself; then several checkpoints may share it.
        """
        return self.custom_folder or self.name

    @property
    def uid(self) -> str:
        """The id of the checkpoint within the run, "<round>-<report index>" such as "3-0".

        Unlike `name` it is never used twice.
        """
        return f"{self.round}-{self.report_index}"

    @property
    def requested_name(self) -> str:
        """`name` without the suffix "@<uid>" that spotfit appends to a name that was used before.

        Equal to `name` for its first use, and for names that spotfit generated.
        """
        return self.name.removesuffix(f"@{self.uid}")


class CheckpointDropped(msgspec.Struct, frozen=True, kw_only=True, tag="checkpoint_dropped"):
    """The checkpoint may not be used any more. Its files are deleted after this entry."""

    name: str
    reason: str


class ValidationStarted(msgspec.Struct, frozen=True, kw_only=True, tag="validation_started"):
    """The validation of a checkpoint was assigned to an agent, which runs it in a sidecar
    process."""

    checkpoint_name: str
    checkpoint_uid: str
    """The `uid` of the checkpoint: several may share the name."""
    # Agents resend results to every new leader; the attempt identifies an outdated one.
    attempt: int
    """Number of validations started in the run so far, including this one; identifies the
    attempt."""
    agent: AgentId
    token: Token
    node: int
    """The agent's node within the group `token`."""
    reason: str = ""


class ValidationEnded(msgspec.Struct, frozen=True, kw_only=True, tag="validation_ended"):
    """The validation has a final result. `metrics` are merged into the checkpoint's metrics."""

    checkpoint_name: str
    checkpoint_uid: str
    status: Literal["validated", "failed", "timeout"]
    metrics: dict[str, Any] = {}
    reason: str = ""


class FeedersStopped(msgspec.Struct, frozen=True, kw_only=True, tag="feeders_stopped"):
    """No further machines for feeders are requested in this fit: none of the last has worked."""

    reason: str


class DeadlineAtRisk(msgspec.Struct, frozen=True, kw_only=True, tag="deadline_at_risk"):
    """The leader has found that the deadline cannot be met, or that it cannot know whether it can.

    For display: at most one of each kind in a fit, whichever leader has found it.
    """

    risk: Literal["late", "no_progress"]
    reason: str
    """With figures, as a sentence without a final period."""
    remedy: str = ""
    """What to do, as a sentence."""


class CancelRequested(msgspec.Struct, frozen=True, kw_only=True, tag="cancel_requested"):
    """Cancellation of the run was requested."""

    reason: str
    save: bool = False
    """Whether a Checkpointer of the run saves first. Entries of versions without it do not."""
    is_time_budget: bool = False
    """Whether the leader requested it because the time budget of the run is used up."""
    is_cost_budget: bool = False
    """Whether the leader requested it because the run would exceed its budget in US dollars."""


class FitEnded(msgspec.Struct, frozen=True, kw_only=True, tag="fit_ended"):
    """The fit has ended. Its machines are released after this entry."""

    outcome: Literal["finished", "failed", "cancelled"]
    reason: str = ""
    cause: FailureCause | None = None
    failures: tuple[RankFailure, ...] = ()
    metrics: dict[str, Any] | None = None
    """The last metrics reported by rank 0, with or without a checkpoint."""
    result_key: str | None = None
    """Object key of the sealed pickle of rank 0's return value."""
    preempted: PreemptedNodes | None = None
    """The nodes whose preemption exceeded the limit, if the fit ended for that."""
    last_save_error: str = ""
    """Why the last save, or the one of the last steps at the end, is no checkpoint; '' if it is."""
    missing_reports: str = ""
    """Which ranks made fewer reports than others, whose metrics therefore do not count; '' if
    none."""
    failed_machine: str = ""
    """The machine "<group token>/<node index>" that crashed or started no agent, if the fit ended
    for that."""
    remedy: str = ""
    """What to do, as a sentence; '' if the reason does not tell."""
    is_time_budget: bool = False
    """Whether it was cancelled because the time budget of the run is used up."""
    is_cost_budget: bool = False
    """Whether it was cancelled because the run would exceed its budget in US dollars."""


# Separate from FitEnded, so that the result of the training cannot be lost while validations run.
class TrainingEnded(msgspec.Struct, frozen=True, kw_only=True, tag="training_ended"):
    """No further round is opened. The fit ends with `fit_end` once all validations are finished."""

    fit_end: FitEnded


class MachinesChosen(msgspec.Struct, frozen=True, kw_only=True, tag="machines_chosen"):
    """The offers that the run is to have its machines from, of those in `RunSpec.cost`.

    Machines of other offers are released once all workers have machines of these.
    """

    workers: dict[str, int]
    """Number of workers by the name of the offer; empty to wait."""
    standing_offer: str = ""
    """An offer that is refused at present, and requested as well because the run would move to it;
    '' if there is none."""
    incomplete_offer: str = ""
    """An offer to which the run would have moved, but which has granted only a part of the machines
    for too long; '' if there is none. That part is released, and the move is paused."""
    reason: str = ""


class MachinesObserved(msgspec.Struct, frozen=True, kw_only=True, tag="machines_observed"):
    """The leader has observed that machines were started, or have ended.

    For the bill (docs/decisions/0059), and for moves of which a part of the machines is granted
    (docs/decisions/0084). Groups that are unknown, or settled already, are
    ignored: after the end of a fit, several processes may record the same ends.
    """

    times: dict[Token, tuple[MachineTimes, ...]]
    """By group."""


class PricesChanged(msgspec.Struct, frozen=True, kw_only=True, tag="prices_changed"):
    """From this entry on, these offers have these prices; the others are unchanged."""

    offers: tuple[Offer, ...]


# The `tag=` of each type is its name in the journal and must not change. An unknown tag raises
# `JournalError` in readers: an event must never be skipped.
MachineEvent = (
    GroupPlanned
    | GroupSubmitted
    | GroupRefused
    | GroupWaiting
    | NodeLost
    | GroupsReleased
    | PreemptionNoticed
    | MachinesObserved
    | PricesChanged
)
"""What happens to machines, and what they cost."""

JournalEvent = (
    FitStarted
    | LeaderElected
    | MachineEvent
    | RoundOpened
    | TrainingFunctionStarted
    | RoundClosed
    | CheckpointCommitted
    | CheckpointDropped
    | ValidationStarted
    | ValidationEnded
    | TrainingEnded
    | FeedersStopped
    | DeadlineAtRisk
    | CancelRequested
    | FitEnded
    | MachinesChosen
)


class JournalEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One journal entry.

    `written_at_ms` is displayed, and the bill is computed from it (`model.usage`). No decision on
    agents or machines depends on another machine's clock.
    """

    run_id: RunId
    author: AgentId
    event: JournalEvent
    # A limit for forged entries only: greater numbers are no valid arguments of a calendar.
    written_at_ms: Annotated[int, msgspec.Meta(ge=-(2**62), le=2**62)] = 0
    format_version: int = 1
    elapsed_s: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    """How long the fit has lasted at least, as measured by the monotonic clocks of its leaders;
    0 if unknown (docs/decisions/0053)."""
