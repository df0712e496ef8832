"""`View`: the state of a run, folded from the first `next_slot` entries of its journal.

A journal without a `FitStarted` entry has only a `JournalView`, which lacks the spec.

`fold(view, entry)` returns the view after an entry. It is pure and total, so all readers that have
folded the same entries have equal views.

    state of the run      | event             | next state
    ----------------------|-------------------|-----------------------------------------
    empty, or fit ended   | FitStarted        | active, no round
    active, no round      | RoundOpened       | active, round open
    active, round open    | RoundClosed       | active, no round
    active                | TrainingEnded     | active, no round, `pending_fit_end` is set
    active                | FitEnded          | fit ended; machines are still to be released
    any                   | all other events  | unchanged; they update groups, checkpoints, …
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, assert_never, overload

import msgspec
from msgspec.structs import replace

from spotfit.core.ids import AgentId, RunId, Token
from spotfit.model.events import (
    AgentCrash,
    CancelRequested,
    CheckpointCommitted,
    CheckpointDropped,
    DeadlineAtRisk,
    FailureCause,
    FeedersStopped,
    FitEnded,
    FitStarted,
    GroupPlanned,
    GroupRefused,
    GroupsReleased,
    GroupSubmitted,
    GroupWaiting,
    JournalEntry,
    JournalEvent,
    LeaderElected,
    MachinesChosen,
    MachinesObserved,
    NodeLost,
    PreemptedNodes,
    PreemptionNoticed,
    PricesChanged,
    RankFailure,
    RoundClosed,
    RoundOpened,
    TrainingEnded,
    TrainingFunctionStarted,
    ValidationEnded,
    ValidationStarted,
)
from spotfit.model.failure_model import LifetimeHistogram
from spotfit.model.group import GroupHandle, GroupPlan, Role
from spotfit.model.market_record import MarketRecord, fold_market, with_complete_moves
from spotfit.model.offer import Market, Offer
from spotfit.model.reporting import ReportedCheckpointStatus
from spotfit.model.spec import RunSpec
from spotfit.model.topology import Notice, Round
from spotfit.model.usage import Usage, fold_usage

# A dropped checkpoint is kept in the view until its files are deleted, which a new leader may have
# to do. 64 is far more than one leader leaves undone, and limits the size of the view.
MAX_DROPPED_CHECKPOINTS = 64

# After these fewer machines may run, or more be needed.
_EVENTS_THAT_END_COMPLETE_MOVES = (NodeLost, GroupsReleased, MachinesChosen, RoundClosed)


# A run whose rounds last this long between two crashes of agents loses little by them: a restart
# takes about a minute, a tenth of the time. Shorter intervals are a crash loop, whose machines cost
# money with little progress. Ages are those of rounds, by their leader's clock: agents of a large
# group may all be old, and crash one after the other for the same reason.
CRASH_FREE_S = 600.0


class AgentCrashes(msgspec.Struct, frozen=True, kw_only=True):
    """The crashes of agents since a round last had the age `CRASH_FREE_S`.

    Crashes of several agents between two rounds are one incident: they have the same cause.
    """

    incidents: int = 0
    by_signature: dict[str, int] = {}
    """Number of incidents by `AgentCrash.signature`."""
    machine_names: tuple[str, ...] = ()
    """The machines of the latest incident."""
    recorded_slot: int = -1
    """The slot of the last recorded crash."""
    latest: AgentCrash | None = None


class FeederFailures(msgspec.Struct, frozen=True, kw_only=True):
    """Machines for feeders that have failed since one has last worked in this fit."""

    refusals: int = 0
    """Those that were refused or failed before they worked."""
    boot_failures: int = 0
    """Those that were granted."""
    failed_starts: int = 0
    """Those that ended with an error or joined and did not work, or whose environment could not be
    set up."""
    last: NodeLost | None = None
    """The last granted one."""

    def with_loss(self, event: NodeLost) -> FeederFailures:
        """Return the failures after the loss of a machine that had not worked."""
        is_failed_start = event.is_failed_start or event.is_unusable
        return FeederFailures(
            refusals=self.refusals + 1,
            boot_failures=self.boot_failures + (not event.is_withdrawn_request),
            failed_starts=self.failed_starts + is_failed_start,
            last=self.last if event.is_withdrawn_request else event,
        )


class MissingAgent(msgspec.Struct, frozen=True, kw_only=True):
    """An agent whose connection was lost in a round, and that has taken part in none since."""

    round_number: int
    cause: FailureCause
    """What the round is charged to."""
    machine_name: str
    ranks: tuple[int, ...]
    has_preempted_peer: bool = False
    """Whether another machine of the round is recorded as preempted."""


class MachineGroup(msgspec.Struct, frozen=True, kw_only=True):
    """A group of machines requested under one token.

    state    | condition                              | next
    ---------|----------------------------------------|-----------------
    pending  | no `handle`, no `refusal`              | granted, refused
    granted  | `handle` is set                        | released
    refused  | `refusal` is set                       | - (closed)
    released | `is_released`                          | - (closed)
    """

    plan: GroupPlan
    handle: GroupHandle | None = None
    refusal: str | None = None
    is_released: bool = False
    lost_nodes: frozenset[int] = frozenset()
    lost_agent_by_restarted_node: dict[int, AgentId] = {}
    """The nodes that the backend has restarted, or restarts, and whose new agents have not taken
    part in a round; with the agent that is lost."""
    role: Role = "train"
    offer: Offer | None = None
    """The offer of its request; None if the backend chooses."""
    is_left: bool = False
    """Whether the run changed to its network, and returned before a round was opened there: its
    machines are released."""
    planned_slot: int = -1
    """The slot of its `GroupPlanned`."""
    has_failed_start: bool = False
    """Whether a machine ended with an error before its agent joined."""
    waiting_reason: str = ""
    """The backend's reason why machines of it do not run yet; '' if it has given none."""

    @property
    def is_pending(self) -> bool:
        """Whether the request was planned, and the journal has neither a grant nor a refusal of it.

        The leader then submits it to the backend, possibly again: submitting is idempotent.
        """
        return self.handle is None and self.refusal is None

    @property
    def is_closed(self) -> bool:
        """Whether the group was released or refused, and thus cannot cause further cost."""
        return self.is_released or self.refusal is not None

    def is_node_active(self, node: int) -> bool:
        """Whether the machine with that index in the group is not known to have ended.

        `node` counts from 0. True also before the machine has booted or was granted; False for an
        index outside of the plan, and for all machines of a closed group.
        """
        if self.is_closed or node in self.lost_nodes:
            return False
        return 0 <= node < self.plan.num_nodes

    @property
    def active_nodes(self) -> tuple[int, ...]:
        """The indices from 0 of all machines that may still run, see `is_node_active`.

        Empty for a closed group.
        """
        if self.is_closed:
            return ()
        return tuple(node for node in range(self.plan.num_nodes) if node not in self.lost_nodes)


class UnsettledGroup(msgspec.Struct, frozen=True, kw_only=True):
    """A group of an earlier fit of which the journal has neither a refusal nor a release.

    It may still cost money, and belongs to the backend of that fit: it is looked up and released
    there, and no other backend receives its token. The later fits do not use its machines.
    """

    group: MachineGroup
    provisioner: str
    """The name of the backend in the spec of the fit that requested it."""
    provisioner_options: dict[str, Any] = {}


class JournalView(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a journal after its first `next_slot` entries.

    It is a `View` from the first `FitStarted` on; before, the journal is normally empty.
    """

    next_slot: int = 0
    run_id: RunId | None = None
    fit_count: int = 0
    leader: LeaderElected | None = None
    """The current leader; None before the first election of the fit."""
    epoch: int = 0
    """Number of elections in all fits."""
    network: str = ""
    """The network of the last leader with a machine, in which the run trains; '' before the first
    one, or if it has no name."""
    former_network: str = ""
    """The network before that; '' if there was none."""
    network_slot: int = -1
    """The slot of the election that has changed the network; -1 before the first one."""
    groups: dict[Token, MachineGroup] = {}
    """The groups of the last fit."""
    unsettled_groups: dict[Token, UnsettledGroup] = {}
    """Groups of earlier fits that may still cost money (docs/decisions/0049)."""
    round: Round | None = None
    """The open round, if any."""
    last_round: Round | None = None
    first_round: int = 0
    """Number of the first round of the fit; 0 in a cached view of an earlier version."""
    last_round_closed: RoundClosed | None = None
    # For the complete fit: a commit does not reset them (`FailureLimits`).
    failure_counts: dict[FailureCause, int] = {}
    rounds_without_progress: int = 0
    """Consecutive rounds that failed without a commit."""
    refusals: int = 0
    """Refused requests since the last granted group."""
    last_refusal: str | None = None
    final_refusal: str | None = None
    """The reason of a refusal after which further requests are pointless, such as a quota of 0.
    Only before the first round of the fit: later, see `permanent_refusals`."""
    permanent_refusals: int = 0
    """Consecutive requests since a round of the fit was opened, which the backend has refused for a
    reason that usually does not change, such as missing permissions."""
    partial_releases: int = 0
    """How often machines were released because too few were granted, since the last round."""
    partial_release_slot: int = -1
    """The slot of the first loss of the last such release; -1 if there was none since the last
    round."""
    boot_failures: int = 0
    """Consecutive machines lost before their agent took part in a round."""
    has_started_agent: bool = False
    """Whether any agent has started in this fit."""
    failed_starts: int = 0
    """Groups with a machine that ended with an error before its agent joined, while no agent of the
    fit has ever started."""
    last_failed_start: NodeLost | None = None
    agent_crashes: AgentCrashes = AgentCrashes()
    refused_networks: tuple[str, ...] = ()
    """`GroupHandle.network` of groups that got no machine since a round was last opened, the
    latest one last."""
    unreachable_machines: tuple[NodeLost, ...] = ()
    """Losses of machines that could not reach the storage or the leader, since a round was last
    opened or closed."""
    former_leader: AgentId | None = None
    """The leader before the current one in this fit."""
    missing_agents: dict[AgentId, MissingAgent] = {}
    """Agents whose loss revises the cause of a closed round."""
    notices: dict[AgentId, Notice] = {}
    notice_slots: dict[AgentId, int] = {}
    """The slot of each agent's first notice: a later commit was saved with knowledge of it."""
    lost_agents: frozenset[AgentId] = frozenset()
    """Agents lost since the last round was opened, and older ones that are still referenced."""
    platform_outages: frozenset[AgentId] = frozenset()
    """Lost agents whose machines still run according to the backend."""
    checkpoints: tuple[CheckpointCommitted, ...] = ()
    """Committed checkpoints that are not dropped, in commit order."""
    dropped_checkpoints: tuple[str, ...] = ()
    """Names of the last dropped checkpoints; at most `MAX_DROPPED_CHECKPOINTS`."""
    # Slots, not times: they order the events of several leaders without comparing clocks.
    latest_committed_slot: int = -1
    """The slot of the last `CheckpointCommitted`; -1 if there is none."""
    round_opened_slot: int = -1
    """The slot of the last `RoundOpened`; -1 if there is none."""
    round_startup_s: float | None = None
    """How long the workers of the last round took to call the training function; None before all
    have, or if the leader has not recorded it."""
    unvalidated_checkpoints: tuple[CheckpointCommitted, ...] = ()
    """Checkpoints whose validation is pending, in commit order."""
    validation_results: dict[str, ValidationEnded] = {}
    """Validation results by checkpoint uid, for checkpoints that are not dropped."""
    current_validation: ValidationStarted | None = None
    """The validation that is running, or whose attempt was lost."""
    validation_attempts: int = 0
    """Number of validations started in all fits."""
    current_validation_tries: int = 0
    """Number of attempts of the current validation."""
    # Counted apart from `refusals`: a run whose workers have machines must not slow down, or end,
    # because none is available for validations.
    validator_refusals: int = 0
    """Consecutive machines for validations that were refused or failed while booting."""
    permanent_validator_refusals: int = 0
    """`permanent_refusals` of machines for validations."""
    last_validator_refusal: str | None = None
    feeder_failures: FeederFailures = FeederFailures()
    feeder_releases: int = 0
    """Number of releases of machines for feeders in this fit."""
    feeders_stopped: str = ""
    """Why no further machines for feeders are requested; '' if they are."""
    pending_fit_end: FitEnded | None = None
    """The outcome of the training, recorded once all validations are finished."""
    lifetimes: LifetimeHistogram = LifetimeHistogram()
    """Observed group lifetimes in all fits."""
    group_age_s: float = 0.0
    """Age of the group when the open round was opened, counted from the last loss."""
    round_age_s: float = 0.0
    """Age of the open round at its last commit."""
    cancel_reason: str | None = None
    saves_before_cancel: bool = False
    """Whether a requested cancellation waits for a save of a Checkpointer."""
    is_time_budget_used: bool = False
    """Whether the requested cancellation follows from `RunSpec.time_budget_s`."""
    is_cost_budget_used: bool = False
    """Whether the requested cancellation follows from `CostSpec.budget_usd`."""
    market: MarketRecord = MarketRecord()
    """Observations of a run that chooses its offers, see `CostSpec.chooses_offers`."""
    elapsed_s: float = 0.0
    """How long the fit has lasted at least when the last entry was written."""
    fit_end: FitEnded | None = None
    usage: Usage = Usage()
    """The machine-hours of all fits."""
    # For display only: they are of the clocks of two machines.
    fit_started_at_ms: int = 0
    """When the last fit was started, in ms since 1970; 0 if unknown."""
    fit_ended_at_ms: int = 0
    """When the last fit has ended, in ms since 1970; 0 if it has not, or if unknown."""

    @property
    def is_active(self) -> bool:
        """Whether a fit was started and has not ended; always False before the first `FitStarted`.

        Machines may still have to be released after the fit has ended.
        """
        return False

    @property
    def latest_checkpoint(self) -> CheckpointCommitted | None:
        """The last committed checkpoint that is not dropped, of any fit; None if there is none.

        The next round resumes from it, unless its machines hold a newer snapshot in memory.
        """
        return self.checkpoints[-1] if self.checkpoints else None

    def latest_checkpoint_named(self, name: str) -> str | None:
        """Return the unique name of the latest checkpoint under `name`, a unique or requested name.

        Returns '' if it was dropped and None if the name was never used, as far as the view knows:
        it contains only the last `MAX_DROPPED_CHECKPOINTS` dropped names. A requested name is the
        one that user code passed to `report`, before a suffix "@<round>-<index>" made it unique.
        """
        # Without `num_to_keep` a requested name has at most one checkpoint, otherwise several
        # (docs/decisions/0043); the last one is meant.
        names = [one.name for one in self.checkpoints if name in (one.name, one.requested_name)]
        if names:
            return names[-1]
        return "" if name in self.dropped_checkpoints else None

    def status_of(self, checkpoint: CheckpointCommitted) -> ReportedCheckpointStatus:
        """Return the validation status of a checkpoint of this view, for user code.

        `COMMITTED` if it was reported without validation.
        """
        if checkpoint.validation is None:
            return ReportedCheckpointStatus.COMMITTED
        if checkpoint.uid not in self.validation_results:
            return ReportedCheckpointStatus.PENDING_VALIDATION
        return _VALIDATION_STATUSES[self.validation_results[checkpoint.uid].status]

    @property
    def waiting_reason(self) -> str:
        """Why machines are missing, in words of the backend; '' if it has given no reason.

        The last refusal since a grant, else the reason of a group that waits.
        """
        reasons = (group.waiting_reason for group in self.groups.values() if not group.is_closed)
        return self.last_refusal or next(filter(None, reasons), "")

    @property
    def is_capacity_released(self) -> bool:
        """Whether too few machines were granted and released, and none were requested since."""
        released = self.partial_release_slot
        return released >= 0 and not any(
            group.role == "train" and group.planned_slot > released and not group.is_closed
            for group in self.groups.values()
        )

    @property
    def is_round_starting(self) -> bool:
        """Whether a round is open in which not all ranks have called the training function.

        False after a commit of the round: a leader of an earlier version records only that.
        """
        has_committed = self.latest_committed_slot > self.round_opened_slot
        return self.round is not None and self.round_startup_s is None and not has_committed

    def is_leader(self, agent: AgentId) -> bool:
        """Whether that agent, or driver, may append the next decision after this view.

        True until the journal has the election of another process, also if the lease has expired.
        """
        return self.leader is not None and self.leader.leader == agent

    def network_of(self, token: Token) -> str:
        """Return the network of the machines of that group; '' if it has no name or is unknown."""
        group = self.groups.get(token)
        if group is None:
            return ""
        # The offer states it before the request is granted.
        planned = group.offer.network if group.offer is not None else ""
        return (group.handle.network if group.handle is not None else "") or planned

    def stands_by(self, token: Token) -> bool:
        """Whether machines of that group are in another network than those that the run trains on.

        Their agents cannot connect to the leader. False once no machine remains in the network of
        the run, or before one has a name.
        """
        own, current = self.network_of(token), self.network
        return own not in ("", current) and any(
            group.handle is not None and group.handle.network == current and group.active_nodes
            for group in self.groups.values()
            if current and group.role == "train"
        )

    def metrics_of(self, name: str) -> dict[str, Any] | None:
        """Return the metrics of the retained checkpoint with that unique name; None without one.

        In JSON form: pass them to `metrics_from_json` before user code sees them.
        """
        return next((one.metrics for one in self.checkpoints if one.name == name), None)


class View(JournalView, frozen=True, kw_only=True):
    """The state of a run: the view of a journal in which a fit was started."""

    # `fold` returns this type after the first `FitStarted`, so that a reader checks once, when it
    # opens the run, whether there is one.

    run_id: RunId
    spec: RunSpec

    @property
    def is_active(self) -> bool:
        """Whether the last fit has not ended; True also while only validations are pending."""
        return self.fit_end is None

    def workers_to_move(self, workers: int) -> int:
        """Return with how many workers the run moves from its round, of `workers`, to chosen
        machines.

        With as many, but while on-demand machines are chosen with as many as are chosen: they start
        at about the same time, and the run can work with the others until then.
        """
        choice = self.market.choice
        if not self.spec.is_elastic or choice is None:
            return workers
        markets = {one.name: one.market for one in self.spec.cost.offers}
        if all(markets.get(name) is not Market.ON_DEMAND for name in choice.workers):
            return workers
        return max(workers, min(self.spec.max_workers, sum(choice.workers.values())))

    def started_nodes(self, offer: str) -> list[tuple[Token, int]]:
        """Return the machines of the offer that run, as group and index, also those with a notice.

        Also one that its backend restarts.
        """
        return [
            (token, node)
            for token, request in self.market.requests.items()
            if request.offer == offer
            for node in self.groups[token].active_nodes
            if node in request.started_s
        ]

    def is_move_complete(self, offer: str) -> bool:
        """Whether enough machines run for a move to the offer, which is chosen or the standing
        request; False without a round or a choice.

        With those of the other chosen offers, but a standing request replaces all machines.
        """
        opened, choice = self.market.round, self.market.choice
        if opened is None or choice is None:
            return False
        offers, needed = [offer], self.spec.max_workers
        if offer in choice.workers:
            offers, needed = [*choice.workers], self.workers_to_move(opened.workers)
        tokens = [token for name in offers for token, _ in self.started_nodes(name)]
        return sum(self.groups[token].plan.slots_per_node for token in tokens) >= needed


_VALIDATION_STATUSES = {
    "validated": ReportedCheckpointStatus.VALIDATED,
    "failed": ReportedCheckpointStatus.VALIDATION_FAILED,
    "timeout": ReportedCheckpointStatus.VALIDATION_TIMEOUT,
}


# --- Effects of journal events --------------------------------------------------------------------


@overload
def fold(view: View, entry: JournalEntry) -> View: ...


@overload
def fold(view: JournalView, entry: JournalEntry) -> JournalView: ...


def fold(view: JournalView, entry: JournalEntry) -> JournalView:
    """Return the view after one more entry; it is a `View` from the first `FitStarted` on.

    `entry` must be the one in slot `view.next_slot`: neither the slot nor the run id is checked.
    Pure: `view` is unchanged. Called by `ledger.journal`, which reads the entries. Raises
    `KeyError` for an unknown group token, which shows that an earlier entry is missing.
    """
    after = _apply_event(view, entry.event, run_id=entry.run_id)
    if isinstance(entry.event, FitStarted):
        after = replace(after, fit_started_at_ms=entry.written_at_ms)
    if isinstance(after, View) and after.spec.cost.chooses_offers:
        # With a deadline, offers are chosen once the leader has measured the storage's clock.
        at_ms = entry.written_at_ms if after.spec.cost.deadline_ms is not None else None
        elapsed_s = max(view.elapsed_s, entry.elapsed_s)
        market = after.market
        if isinstance(view, View) and isinstance(entry.event, _EVENTS_THAT_END_COMPLETE_MOVES):
            market = with_complete_moves(market, _complete_moves(view), elapsed_s)
        market = fold_market(market, entry.event, elapsed_s, at_ms)
        after = replace(after, market=market)
    if isinstance(entry.event, FitEnded):
        after = replace(after, fit_ended_at_ms=entry.written_at_ms)
    return replace(
        after,
        next_slot=view.next_slot + 1,
        run_id=view.run_id or entry.run_id,
        usage=fold_usage(view.usage, entry),
        elapsed_s=max(after.elapsed_s, entry.elapsed_s),
    )


def _complete_moves(view: View) -> list[str]:
    """The offers to which the run could move now: enough of their machines run."""
    choice = view.market.choice
    names = set() if choice is None else {*choice.workers, choice.standing_offer} - {""}
    return [name for name in sorted(names) if view.is_move_complete(name)]


def _apply_event(view: JournalView, event: JournalEvent, *, run_id: RunId) -> JournalView:
    match event:
        case FitStarted():
            return _start_fit(view, event, run_id=run_id)
        case LeaderElected():
            return _elect_leader(view, event)
        case GroupPlanned() | GroupSubmitted() | GroupRefused() | GroupsReleased() | NodeLost():
            return _apply_group_event(view, event)
        case GroupWaiting(token=token, reason=reason):
            return _with_group(view, token, replace(view.groups[token], waiting_reason=reason))
        case PreemptionNoticed(agent=agent, notice=notice):
            # The slot of the first notice is kept: what was saved after it stays saved, even if a
            # second notice announces an earlier deadline.
            return replace(
                view,
                notices={**view.notices, agent: notice},
                notice_slots={agent: view.next_slot, **view.notice_slots},
            )
        case RoundOpened(round=opened):
            return _open_round(view, opened)
        case TrainingFunctionStarted(startup_s=startup_s):
            return replace(view, round_startup_s=startup_s)
        case RoundClosed():
            return _close_round(view, event)
        case CheckpointCommitted() | CheckpointDropped() | ValidationStarted() | ValidationEnded():
            return _apply_checkpoint_event(view, event)
        case TrainingEnded(fit_end=fit_end):
            return replace(view, pending_fit_end=fit_end, round=None)
        case FeedersStopped(reason=reason):
            return replace(view, feeders_stopped=reason)
        case CancelRequested(reason=reason, save=save):
            # A request without a save also ends the wait of an earlier one, never the reverse.
            saves = save and (view.cancel_reason is None or view.saves_before_cancel)
            return replace(
                view,
                cancel_reason=reason,
                saves_before_cancel=saves,
                is_time_budget_used=event.is_time_budget,
                is_cost_budget_used=event.is_cost_budget,
            )
        case MachinesChosen() | DeadlineAtRisk():
            return view  # see `fold_market`
        case FitEnded():
            # Groups stay in the view until they are released.
            return replace(view, fit_end=event, round=None, current_validation=None)
        case MachinesObserved() | PricesChanged():
            return view  # see `fold_usage`
    assert_never(event)


def _start_fit(view: JournalView, event: FitStarted, *, run_id: RunId) -> View:
    """Start a fit: keep checkpoints, round numbers, lifetimes and groups that are not released."""
    # Round numbers continue: they are part of checkpoint uids and object keys, which are unique in
    # the run.
    # `leader` is reset: otherwise the first election of the new fit had to wait until the lease of
    # the previous fit's leader expires.
    return View(
        next_slot=view.next_slot,
        run_id=run_id,
        spec=event.spec,
        fit_count=view.fit_count + 1,
        epoch=view.epoch,
        unsettled_groups=_unsettled_groups(view),
        last_round=view.last_round,
        first_round=(view.last_round.number if view.last_round else 0) + 1,
        checkpoints=view.checkpoints,
        dropped_checkpoints=view.dropped_checkpoints,
        latest_committed_slot=view.latest_committed_slot,
        unvalidated_checkpoints=view.unvalidated_checkpoints,
        validation_results=view.validation_results,
        validation_attempts=view.validation_attempts,
        lifetimes=view.lifetimes,
        market=view.market.after_fit(),
    )


def _unsettled_groups(view: JournalView) -> dict[Token, UnsettledGroup]:
    """All groups that are not closed; those of the last fit with the backend of its spec."""
    if not isinstance(view, View):  # no fit has planned a group
        return {}
    spec = view.spec
    return view.unsettled_groups | {
        token: UnsettledGroup(
            group=group,
            provisioner=spec.provisioner,
            provisioner_options=spec.provisioner_options,
        )
        for token, group in view.groups.items()
        if not group.is_closed
    }


def _without_settled(view: JournalView, tokens: Iterable[Token]) -> JournalView:
    settled = set(tokens)
    kept = {token: one for token, one in view.unsettled_groups.items() if token not in settled}
    return replace(view, unsettled_groups=kept)


def _elect_leader(view: JournalView, event: LeaderElected) -> JournalView:
    former = view.leader.leader if view.leader is not None else None
    if event.coordinator_address is not None and event.network != view.network:
        view = _change_network(view, event.network)
    elected = replace(
        view,
        leader=event,
        epoch=event.epoch,
        former_leader=view.former_leader if former == event.leader else former,
    )
    # A headless leader has no coordinator.
    if event.coordinator_address is None:
        return elected
    return replace(elected, has_started_agent=True, failed_starts=0, last_failed_start=None)


def _change_network(view: JournalView, network: str) -> JournalView:
    """The view after a leader of another network was elected."""
    # Otherwise the run would change to a network whose machines cannot connect again and again.
    has_returned = network == view.former_network and view.round_opened_slot < view.network_slot
    groups = {
        token: replace(group, is_left=True)
        if has_returned and network and view.network_of(token) == view.network
        else group
        for token, group in view.groups.items()
    }
    return replace(
        view,
        network=network,
        former_network=view.network,
        network_slot=view.next_slot,
        groups=groups,
    )


def _apply_group_event(
    view: JournalView,
    event: GroupPlanned | GroupSubmitted | GroupRefused | GroupsReleased | NodeLost,
) -> JournalView:
    match event:
        case GroupPlanned(plan=plan, request=request):
            groups = view.groups
            if request.role != "train":
                # Closed groups are normally removed when a round opens (`_open_round`). Many
                # machines for validations and feeders may come and go within one round, so remove
                # theirs here: the view must stay small.
                groups = {
                    token: group
                    for token, group in groups.items()
                    if group.role != request.role or not group.is_closed
                }
            planned = MachineGroup(
                plan=plan,
                role=request.role,
                offer=request.offer,
                planned_slot=view.next_slot,
            )
            return replace(view, groups={**groups, plan.token: planned})
        case GroupSubmitted(token=token, handle=handle):
            submitted = _with_group(view, token, replace(view.groups[token], handle=handle))
            if view.groups[token].role == "validate":
                # `validator_refusals` is reset only when a validation starts there: such machines
                # may also fail while booting, which counts as a refusal.
                return replace(submitted, permanent_validator_refusals=0)
            # Reset when a machine that has joined ends, for the same reason.
            if view.groups[token].role == "feed":
                return submitted
            return replace(submitted, refusals=0, permanent_refusals=0, last_refusal=None)
        case GroupRefused(token=token):
            if token in view.unsettled_groups:
                return _without_settled(view, [token])
            return _refuse_group(view, event)
        case GroupsReleased(token=token, other_tokens=others):
            tokens = {token, *others}
            own = tokens - view.unsettled_groups.keys()
            released = {t: replace(view.groups[t], is_released=True) for t in own}
            settled = _without_settled(view, tokens)
            has_fed = any(
                view.groups[t].role == "feed" and view.groups[t].active_nodes for t in own
            )
            return replace(
                settled,
                groups={**view.groups, **released},
                feeder_failures=FeederFailures() if has_fed else view.feeder_failures,
                feeder_releases=view.feeder_releases + has_fed,
            )
        case NodeLost():
            return _lose_node(view, event)
    assert_never(event)


def _with_group(view: JournalView, token: Token, group: MachineGroup) -> JournalView:
    return replace(view, groups={**view.groups, token: group})


def _refuse_group(view: JournalView, event: GroupRefused) -> JournalView:
    group = view.groups[event.token]
    refused = _with_group(view, event.token, replace(group, refusal=event.reason))
    if group.role == "validate":
        return replace(
            refused,
            validator_refusals=view.validator_refusals + 1,
            permanent_validator_refusals=view.permanent_validator_refusals + 1
            if event.is_final
            else 0,
            last_validator_refusal=event.reason,
        )
    if group.role == "feed":
        failures = view.feeder_failures
        counted = replace(failures, refusals=failures.refusals + 1)
        return replace(refused, feeder_failures=counted)
    # A fit whose machines have trained had valid credentials and quota: it may have them again.
    has_trained = view.round_opened_slot >= 0
    # The refusals of each offer are in `JournalView.market`.
    is_final = event.is_final and group.offer is None
    return replace(
        refused,
        refusals=view.refusals + 1,
        permanent_refusals=view.permanent_refusals + 1 if is_final and has_trained else 0,
        last_refusal=event.reason,
        final_refusal=event.reason if is_final and not has_trained else view.final_refusal,
    )


def _lose_node(view: JournalView, event: NodeLost) -> JournalView:
    view = _count_crash(view, event, event.crash) if event.crash is not None else view
    group = view.groups[event.token]
    restarted = {
        node: agent
        for node, agent in group.lost_agent_by_restarted_node.items()
        if node != event.node
    }
    if event.machine_returned and event.agent is not None:
        restarted[event.node] = event.agent
    nodes = group.lost_nodes if event.machine_returned else group.lost_nodes | {event.node}
    changed = replace(group, lost_nodes=nodes, lost_agent_by_restarted_node=restarted)
    after = _with_group(view, event.token, changed)
    if event.is_unused:
        return _release_unused_node(after, event)
    if event.agent is None and group.role == "validate":
        return replace(after, validator_refusals=view.validator_refusals + 1)
    if group.role == "feed":
        has_failed = event.agent is None or event.is_unusable
        failures = view.feeder_failures.with_loss(event) if has_failed else FeederFailures()
        lost_agents = view.lost_agents | ({event.agent} if event.agent else set())
        return replace(after, feeder_failures=failures, lost_agents=lost_agents)
    if event.agent is None and event.cause is FailureCause.PREEMPTION:
        # The backend withdrew a granted machine. A group counts as one refusal, not one per node.
        added = 0 if group.lost_nodes else 1
        network = group.handle.network if group.handle is not None else ""
        others = tuple(one for one in view.refused_networks if one != network)
        return replace(
            after,
            refusals=view.refusals + added,
            last_refusal=event.reason,
            refused_networks=(*others, network) if network else others,
        )
    # A machine that never had an agent ended no round: it counts as a boot failure only.
    if event.agent is None:
        return _count_boot_failure(after, event)
    outage = {event.agent} if event.cause is FailureCause.PLATFORM else set()
    after = replace(
        after,
        lost_agents=view.lost_agents | {event.agent},
        platform_outages=view.platform_outages | outage,
    )
    return _recharge_closed_round(after, event, event.agent)


def _release_unused_node(view: JournalView, event: NodeLost) -> JournalView:
    lost_agents = view.lost_agents | ({event.agent} if event.agent else set())
    after = replace(view, lost_agents=lost_agents)
    # The losses of one release count once.
    if view.groups[event.token].planned_slot < view.partial_release_slot:
        return after
    return replace(
        after,
        refusals=view.refusals + 1,
        last_refusal=event.reason,
        partial_releases=view.partial_releases + 1,
        partial_release_slot=view.next_slot,
    )


def _count_boot_failure(view: JournalView, event: NodeLost) -> JournalView:
    after = replace(
        view,
        boot_failures=view.boot_failures + 1,
        unreachable_machines=view.unreachable_machines + ((event,) if event.unreachable else ()),
    )
    if not event.is_failed_start or view.has_started_agent:
        return after
    # Machines of one group fail for the same reason: a group counts as one failed start.
    group = view.groups[event.token]
    return replace(
        _with_group(after, event.token, replace(group, has_failed_start=True)),
        failed_starts=view.failed_starts + (not group.has_failed_start),
        last_failed_start=event,
    )


def _count_crash(view: JournalView, event: NodeLost, crash: AgentCrash) -> JournalView:
    machine_name = f"{event.token}/{event.node}"
    before = view.agent_crashes
    # An agent that was started, or took part in a round, after the last recorded crash repeats it;
    # one that was running then crashed with it, although its loss may be established later. The
    # backend may have restarted the agent on the same machine.
    assignments = view.last_round.assignments if view.last_round else ()
    was_in_round = any(one.agent == crash.agent for one in assignments)
    round_slot = view.round_opened_slot if was_in_round else -1
    started_slot = max(round_slot, view.groups[event.token].planned_slot)
    is_same_incident = (
        before.incidents > 0
        and started_slot < before.recorded_slot
        and machine_name not in before.machine_names
    )
    known = before.by_signature.get(crash.signature, 0)
    count = max(1, known) if is_same_incident else known + 1
    machine_names = before.machine_names if is_same_incident else ()
    crashes = AgentCrashes(
        incidents=before.incidents + (not is_same_incident),
        by_signature={**before.by_signature, crash.signature: count},
        machine_names=(*machine_names, machine_name),
        recorded_slot=view.next_slot,
        latest=crash,
    )
    return replace(view, agent_crashes=crashes)


def _recharge_closed_round(view: JournalView, event: NodeLost, agent: AgentId) -> JournalView:
    """Charge a closed round to the cause of the loss of one of its nodes.

    A round is closed before the backend is known to have lost the node, because waiting for that
    would delay recovery by seconds (docs/decisions/0018, 0047).
    """
    missing = view.missing_agents.get(agent)
    others = {other: one for other, one in view.missing_agents.items() if other != agent}
    if missing is None:
        return view
    if event.cause is None:  # its connection was established again
        return replace(view, missing_agents=others)
    before, is_preempted = missing.cause, event.cause is FailureCause.PREEMPTION
    of_round = {a: one for a, one in others.items() if one.round_number == missing.round_number}
    # A preemption is revised only if all lost machines have ended for another reason.
    is_own_end = event.crash is not None or event.cause is FailureCause.WORKER
    has_other_reason = is_own_end and not missing.has_preempted_peer and not of_round
    is_revised = before in _UNKNOWN_CAUSES or (
        before is FailureCause.PREEMPTION and has_other_reason
    )
    cause = event.cause if is_revised else before
    updated = {
        a: replace(one, cause=cause, has_preempted_peer=one.has_preempted_peer or is_preempted)
        for a, one in of_round.items()
    }
    view = replace(view, missing_agents={**others, **updated})
    if is_revised:
        return _revise_cause(view, event, missing, cause=cause)
    return replace(view, last_round_closed=_with_preempted_node(view, event, missing))


def _revise_cause(
    view: JournalView, event: NodeLost, missing: MissingAgent, cause: FailureCause
) -> JournalView:
    counts = {
        **view.failure_counts,
        missing.cause: view.failure_counts.get(missing.cause, 1) - 1,
        cause: view.failure_counts.get(cause, 0) + 1,
    }
    # Preemptions do not count as rounds without progress, see `_close_round`.
    was_preemption = missing.cause is FailureCause.PREEMPTION
    added = was_preemption - (cause is FailureCause.PREEMPTION)
    return replace(
        view,
        failure_counts={cause: count for cause, count in counts.items() if count},
        last_round_closed=_revised_end(view, event, missing),
        rounds_without_progress=max(0, view.rounds_without_progress + added),
    )


_UNKNOWN_CAUSES = (FailureCause.NETWORK, FailureCause.LEADER_CHANGE)


def _revised_end(view: JournalView, event: NodeLost, missing: MissingAgent) -> RoundClosed | None:
    """The end of the last closed round with the cause of the loss, if it is the revised round."""
    closed = view.last_round_closed
    if closed is None or event.cause is None or closed.round_number != missing.round_number:
        return closed
    preempted = (
        PreemptedNodes(node_to_ranks={missing.machine_name: missing.ranks})
        if event.cause is FailureCause.PREEMPTION
        else None
    )
    reason = f"{closed.reason}; {missing.machine_name} is lost: {event.reason}"
    failures = closed.failures
    if event.cause is FailureCause.WORKER:
        # The errors of other ranks follow from the loss of these.
        message = f"The machine {missing.machine_name} ended: {event.reason}"
        failures = tuple(
            RankFailure(rank=rank, kind="died", message=message) for rank in missing.ranks
        )
    return replace(closed, cause=event.cause, reason=reason, preempted=preempted, failures=failures)


def _with_preempted_node(
    view: JournalView, event: NodeLost, missing: MissingAgent
) -> RoundClosed | None:
    """The end of the last closed round, with a further node that was preempted in it."""
    closed = view.last_round_closed
    if (
        closed is None
        or closed.preempted is None
        or closed.round_number != missing.round_number
        or event.cause is not FailureCause.PREEMPTION
    ):
        return closed
    nodes = {**closed.preempted.node_to_ranks, missing.machine_name: missing.ranks}
    return replace(closed, preempted=replace(closed.preempted, node_to_ranks=nodes))


def _missing_agents(view: JournalView, event: RoundClosed) -> dict[AgentId, MissingAgent]:
    """The agents of the closed round whose loss may revise its cause."""
    if view.round is None or event.cause not in (*_UNKNOWN_CAUSES, FailureCause.PREEMPTION):
        return {}
    # Each agent is recorded as lost once, some before their round is closed.
    gone = view.lost_agents & {one.agent for one in view.round.assignments}
    return {
        one.agent: MissingAgent(
            round_number=event.round_number,
            cause=event.cause,
            machine_name=one.machine_name,
            ranks=tuple(one.ranks),
            has_preempted_peer=not gone <= view.platform_outages,
        )
        for one in view.round.assignments
        if one.agent in event.missing_agents and one.agent not in gone
    }


def _close_round(view: JournalView, event: RoundClosed) -> JournalView:
    cause = event.cause
    # A preemption or resize says nothing about whether the training itself can make progress, so
    # neither slows down the following rounds (`rendezvous`).
    closed = replace(
        view,
        round=None,
        last_round_closed=event,
        # A run that makes progress outlives replacements that reach nothing.
        unreachable_machines=(),
        missing_agents={**view.missing_agents, **_missing_agents(view, event)},
        failure_counts={**view.failure_counts, cause: view.failure_counts.get(cause, 0) + 1},
        rounds_without_progress=view.rounds_without_progress
        + (cause not in (FailureCause.PREEMPTION, FailureCause.RESIZE)),
    )
    if event.duration_s is not None and event.duration_s >= CRASH_FREE_S:
        closed = replace(closed, agent_crashes=AgentCrashes())
    # If the leader was lost with its round, the duration is unknown; the age at the last commit is
    # a lower bound. With a single node that is always the case (docs/decisions/0027).
    age_s = view.group_age_s + (view.round_age_s if event.duration_s is None else event.duration_s)
    agents = [assignment.agent for assignment in view.round.assignments] if view.round else []
    notice_slots = [view.notice_slots[agent] for agent in agents if agent in view.notices]
    # A voluntary resize is not the end of a group's lifetime.
    if cause is FailureCause.RESIZE and not notice_slots:
        return replace(closed, group_age_s=age_s)
    saved_in_time = bool(notice_slots) and (
        event.state_replicated or view.latest_committed_slot > max(notice_slots)
    )
    lifetimes = view.lifetimes.with_end(
        age_s, saved_in_time=saved_in_time, was_training=not view.is_round_starting
    )
    return replace(closed, lifetimes=lifetimes, group_age_s=0.0)


def _open_round(view: JournalView, opened: Round) -> JournalView:
    # Remove closed groups, lost agents and their notices: the view of a run of many weeks must not
    # grow with the number of preemptions.
    nodes = {(one.token, one.node) for one in opened.assignments}
    groups = {
        token: _without_restarts(group, [node for t, node in nodes if t == token])
        for token, group in view.groups.items()
        if not group.is_released and group.refusal is None
    }
    notices = {
        agent: notice for agent, notice in view.notices.items() if agent not in view.lost_agents
    }
    assigned = {assignment.agent for assignment in opened.assignments}
    # These two agents may be looked up although they have no assignment in the new round.
    former_leader = view.leader.lost_leader if view.leader else None
    validator = view.current_validation.agent if view.current_validation else None
    # Such an agent may still run and has not seen its loss yet: it must exit, and gets no ranks.
    restarting = {
        agent for group in groups.values() for agent in group.lost_agent_by_restarted_node.values()
    }
    lost = view.lost_agents & {former_leader, validator, *restarting}
    return replace(
        view,
        round=opened,
        last_round=opened,
        round_age_s=0.0,
        round_opened_slot=view.next_slot,
        round_startup_s=None,
        # A round proves that machines can boot and join.
        boot_failures=0,
        partial_releases=0,
        partial_release_slot=-1,
        has_started_agent=True,
        failed_starts=0,
        last_failed_start=None,
        refused_networks=(),
        unreachable_machines=(),
        # An agent that takes part again was not lost.
        missing_agents={
            agent: one for agent, one in view.missing_agents.items() if agent not in assigned
        },
        groups=groups,
        lost_agents=lost,
        platform_outages=view.platform_outages & lost,
        notices=notices,
        notice_slots={agent: view.notice_slots[agent] for agent in notices},
    )


def _without_restarts(group: MachineGroup, assigned_nodes: Iterable[int]) -> MachineGroup:
    """The group after agents on these nodes have taken part in a round."""
    restarted = group.lost_agent_by_restarted_node
    if not (known := restarted.keys() & set(assigned_nodes)):
        return group
    others = {node: agent for node, agent in restarted.items() if node not in known}
    return replace(group, lost_agent_by_restarted_node=others)


def _apply_checkpoint_event(
    view: JournalView,
    event: CheckpointCommitted | CheckpointDropped | ValidationStarted | ValidationEnded,
) -> JournalView:
    match event:
        case CheckpointCommitted(name=name):
            to_validate = (event,) if event.validation else ()
            return replace(
                view,
                checkpoints=(*view.checkpoints, event),
                # A name that is committed again is in use: its files must not be deleted.
                dropped_checkpoints=tuple(n for n in view.dropped_checkpoints if n != name),
                # `failure_counts` are not reset: limits are for the complete fit.
                rounds_without_progress=0,
                round_age_s=view.round_age_s if event.round_age_s is None else event.round_age_s,
                agent_crashes=AgentCrashes()
                if (event.round_age_s or 0.0) >= CRASH_FREE_S
                else view.agent_crashes,
                latest_committed_slot=view.next_slot,
                unvalidated_checkpoints=(*view.unvalidated_checkpoints, *to_validate),
            )
        case CheckpointDropped(name=name):
            return _drop_checkpoint(view, name)
        case ValidationStarted():
            current, group = view.current_validation, view.groups.get(event.token)
            is_retry = current is not None and current.checkpoint_uid == event.checkpoint_uid
            on_own_machine = group is not None and group.role == "validate"
            return replace(
                view,
                current_validation=event,
                validation_attempts=event.attempt,
                current_validation_tries=view.current_validation_tries + 1 if is_retry else 1,
                validator_refusals=0 if on_own_machine else view.validator_refusals,
            )
        case ValidationEnded():
            return _end_validation(view, event)
    assert_never(event)


def _drop_checkpoint(view: JournalView, name: str) -> JournalView:
    uids = {checkpoint.uid for checkpoint in view.checkpoints if checkpoint.name == name}
    dropped = [*(n for n in view.dropped_checkpoints if n != name), name]
    return replace(
        view,
        checkpoints=tuple(c for c in view.checkpoints if c.name != name),
        dropped_checkpoints=tuple(dropped[-MAX_DROPPED_CHECKPOINTS:]),
        unvalidated_checkpoints=tuple(c for c in view.unvalidated_checkpoints if c.name != name),
        # By uid: a later checkpoint of the same name has a result of its own.
        validation_results={
            uid: result for uid, result in view.validation_results.items() if uid not in uids
        },
    )


def _end_validation(view: JournalView, event: ValidationEnded) -> JournalView:
    # The metrics are merged here, so that retention, `Result` and all other readers of checkpoints
    # need no case for validations (docs/decisions/0024).
    checkpoints = tuple(
        replace(checkpoint, metrics={**checkpoint.metrics, **event.metrics})
        if checkpoint.uid == event.checkpoint_uid
        else checkpoint
        for checkpoint in view.checkpoints
    )
    return replace(
        view,
        checkpoints=checkpoints,
        unvalidated_checkpoints=tuple(
            c for c in view.unvalidated_checkpoints if c.uid != event.checkpoint_uid
        ),
        validation_results={**view.validation_results, event.checkpoint_uid: event},
        current_validation=None,
        current_validation_tries=0,
    )
