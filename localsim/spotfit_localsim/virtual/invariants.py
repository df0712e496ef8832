"""The invariants of a run, checked at every change of the bucket and of the cloud.

The checker sees a change before any simulated process can. Its reference view is the fold of the
entries that are in the bucket.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, assert_never

import msgspec

from spotfit.core.codec import decoder
from spotfit.core.ids import AgentId, Token
from spotfit.ledger import keys
from spotfit.ledger.journal import CachedView, decode_entry
from spotfit.model.events import (
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
    LeaderElected,
    MachineEvent,
    MachinesChosen,
    MachinesObserved,
    NodeLost,
    PreemptionNoticed,
    PricesChanged,
    RoundClosed,
    RoundOpened,
    TrainingEnded,
    TrainingFunctionStarted,
    ValidationEnded,
    ValidationStarted,
)
from spotfit.model.group import GroupPlan
from spotfit.model.topology import Round, SnapshotId
from spotfit.model.view import JournalView, View, fold
from spotfit.security.object_mac import strip_mac
from spotfit_localsim.virtual.billing_check import Books, find_billing_error
from spotfit_localsim.virtual.scenario import IsolateHost, Scenario
from spotfit_localsim.virtual.sim_workers import read_checkpoint_state
from spotfit_localsim.virtual.workload import ModelState, SimTraining, validation_score


class _StoredReport(msgspec.Struct, frozen=True):
    """A line of the metrics history."""

    round: int
    report_index: int
    metrics: dict[str, Any]


_view_cache_decoder = decoder(CachedView)
_metrics_decoder = decoder(dict[str, Any])
_report_decoder = decoder(_StoredReport)
# Writing equal bytes again is allowed: a retry cannot tell whether it succeeded.
_IMMUTABLE_PREFIXES = (
    keys.JOURNAL,
    keys.VIEWS,
    ".spotfit/fn/",
    ".spotfit/code/",
    ".spotfit/reports/",
    ".spotfit/logs/",
)
# The writer is the last part of the key, so no two agents write one object.
_SINGLE_WRITER_PREFIXES = (keys.lease(AgentId("")), keys.MEMBERS, keys.STANDBY)


class InvariantViolation(AssertionError):  # noqa: N818  # a violation, not an error of the program
    """An invariant was violated; the message contains the timeline."""


class InvariantChecker:
    """Checks one simulation.

    It does not raise into the code under test: the first violation stops the run.
    """

    def __init__(
        self,
        objects: Mapping[str, bytes],
        training: SimTraining,
        *,
        on_violation: Callable[[str], None],
        on_entry: Callable[[JournalEntry], None],
    ) -> None:
        self.reference_view = JournalView()
        self.entry_bodies: list[bytes] = []
        self.views: list[JournalView] = [self.reference_view]
        self.entries: list[JournalEntry] = []
        self.violation: str | None = None
        self.intended_tokens: dict[Token, str] = {}
        """Every planned token with the provisioner it was planned for; a view forgets refused
        ones."""
        self.lost_agents: set[AgentId] = set()
        """Every agent that was declared lost; a view forgets those without a machine."""
        self.terminated_agents: set[AgentId] = set()
        """Every agent whose machine was terminated by the cloud or with its agent."""
        self.crashed_agents: set[AgentId] = set()
        """Every agent that has ended with an exception."""
        self._unexplained_ends: list[frozenset[AgentId]] = []
        """For each round that was closed without a known cause: its agents that were gone then."""
        self._round_leader: AgentId | None = None
        """The leader that opened the last round."""
        self._explained_losses: set[AgentId] = set()
        """Agents that were declared lost with a cause."""
        self.round_epochs: dict[int, int] = {}
        """The epoch of the leader that opened each round: only that leader has its reports."""
        self._round_leaders: dict[int, str] = {}
        """The process that opened each round as leader."""
        self._committed_reports: dict[int, int] = {}
        """By round: the last report with a checkpoint that its leader has committed in its term.

        The next leader may commit one of which it knows the metrics of no rank.
        """
        self._rounds_with_rank_0_on_leader: set[int] = set()
        self.stored_reports: dict[str, list[tuple[int, int]]] = {}
        """Round and index of the reports in the metrics history, by the leader that stored them."""
        self._stored_steps: dict[tuple[str, tuple[int, int]], int | None] = {}
        """The step in the metrics of each stored report."""
        self.reports_to_callbacks: dict[str, list[int | None]] = {}
        """The steps of the reports that callbacks have received, by leader."""
        self.compares_views = True
        """Whether views of agents are compared with the reference, in addition to their entries."""
        self._objects = objects
        self._training = training
        self._on_violation = on_violation
        self._on_entry = on_entry

    @property
    def leader(self) -> str:
        """The leader by the reference view."""
        return self.reference_view.leader.leader if self.reference_view.leader else "no agent"

    def is_pending(self, checkpoint: CheckpointCommitted) -> bool:
        """Return whether the checkpoint waits for validation."""
        return self.reference_view.is_active and any(
            one.uid == checkpoint.uid for one in self.reference_view.unvalidated_checkpoints
        )

    def latest_checkpoint(self) -> str | None:
        """Return the name of the last committed checkpoint."""
        return (
            self.reference_view.latest_checkpoint.name
            if self.reference_view.latest_checkpoint
            else None
        )

    def report_violation(self, violation: str) -> None:
        """Record a violation; only the first one counts."""
        # Later violations are usually consequences of the first.
        if self.violation is None:
            self.violation = violation
            self._on_violation(violation)

    # --- reads -------------------------------------------------------------------------------

    def on_entry_applied(self, reader: str, slot: int, body: bytes, view: JournalView) -> None:
        """A process applied an entry: it must equal the stored one, and give the same view."""
        if slot >= len(self.entry_bodies) or self.entry_bodies[slot] != body:
            self.report_violation(f"{reader} read an entry {slot} that was never written")
        elif self.compares_views and view != self.views[slot + 1]:
            self.report_violation(
                f"after entry {slot} the view of {reader} differs from the reference view"
            )

    # --- writes ------------------------------------------------------------------------------

    def on_object_changed(
        self, writer: str, key: str, before: bytes | None, after: bytes | None
    ) -> None:
        """An object is about to change."""
        owner = key.rpartition("/")[2].removesuffix(".json")
        if after is None and key.startswith(keys.JOURNAL):
            self.report_violation(f"the entry {key} was deleted")
        elif after is None:
            if (checkpoint := self._find_checkpoint_of(key)) is not None:
                self.report_violation(f"{key} of the committed checkpoint {checkpoint} was deleted")
        elif key.startswith(_IMMUTABLE_PREFIXES) and before is not None and before != after:
            self.report_violation(f"{writer} changed {key}, which is immutable")
        elif key.startswith(_SINGLE_WRITER_PREFIXES) and writer != owner:
            self.report_violation(f"{writer} wrote {key}, which has another writer")
        elif (
            before not in (None, after)
            and (checkpoint := self._find_checkpoint_of(key)) is not None
        ):
            self.report_violation(
                f"{writer} changed {key} of the committed checkpoint {checkpoint}"
            )
        elif key.startswith(keys.JOURNAL) and before is None:
            self._check_entry_written(writer, key, after)
        elif key.startswith(keys.REPORTS) and before is None:
            self._check_reports_stored(writer, key, after)
        elif key.startswith(keys.VIEWS) and before is None:
            view = _view_cache_decoder.decode(strip_mac(after)).view
            if key != keys.cached_view(view.next_slot) or view != self.views[view.next_slot]:
                self.report_violation(
                    f"the cached view {key} of {writer} differs from the reference view"
                )

    def _find_checkpoint_of(self, key: str) -> str | None:
        """Return the committed checkpoint that the key belongs to."""
        names = (kept.name for kept in self.reference_view.checkpoints)
        places = ((name, (f"{name}/", f"{keys.MANIFESTS}{name}/")) for name in names)
        return next((name for name, place in places if key.startswith(place)), None)

    def _check_entry_written(self, writer: str, key: str, body: bytes) -> None:
        if key != keys.entry(self.reference_view.next_slot):
            self.report_violation(
                f"{writer} wrote {key}: a gap, the next slot is {self.reference_view.next_slot}"
            )
            return
        entry = decode_entry(body)
        self.entry_bodies.append(body)
        self.entries.append(entry)
        self._on_entry(entry)
        # Checked against the view before the entry: a decision is valid only directly after it.
        error = self._check_entry(entry, writer)
        if error is not None:
            self.report_violation(f"{writer}, entry {self.reference_view.next_slot}: {error}")
        if isinstance(entry.event, GroupPlanned):
            spec = self.reference_view.spec if isinstance(self.reference_view, View) else None
            self.intended_tokens[entry.event.plan.token] = spec.provisioner if spec else ""
        if isinstance(entry.event, NodeLost) and entry.event.agent is not None:
            self.lost_agents.add(entry.event.agent)
            if entry.event.cause is not None:
                self._explained_losses.add(entry.event.agent)
        if isinstance(entry.event, RoundOpened):
            opened = entry.event.round
            self._round_leader = entry.author
            self._round_leaders[opened.number] = writer
            self._committed_reports[opened.number] = -1
            self.round_epochs[opened.number] = self.reference_view.epoch
            if opened.assignment_for_rank(0).agent == entry.author:
                self._rounds_with_rank_0_on_leader.add(opened.number)
            # Its connection broke before its machine was lost: that loss ends a later round.
            members = {one.agent for one in opened.assignments}
            self._unexplained_ends = [gone - members for gone in self._unexplained_ends]
        if isinstance(entry.event, CheckpointCommitted):
            number = entry.event.round
            if self.round_epochs.get(number) == self.reference_view.epoch:
                self._committed_reports[number] = entry.event.report_index
        if isinstance(entry.event, RoundClosed):
            self._record_unexplained_end(entry.event, entry.author)
        # Folded also after a violation, so that the timeline of the result is complete.
        self.reference_view = fold(self.reference_view, entry)
        self.views.append(self.reference_view)

    # --- reports -----------------------------------------------------------------------------

    def on_callback(
        self, agent: str, metrics_by_rank: Sequence[msgspec.Raw], checkpoint: str | None
    ) -> None:
        """The leader `agent` passes a report to the callbacks of the user."""
        decoded = [_metrics_decoder.decode(metrics) for metrics in metrics_by_rank]
        # A rank on a leaving machine may be missing.
        if len({one["step"] for one in decoded if one}) > 1:
            self.report_violation(f"callbacks of {agent} received ranks of two steps: {decoded}")
        committed = {
            entry.event.name
            for entry in self.entries
            if isinstance(entry.event, CheckpointCommitted)
        }
        if checkpoint is not None and checkpoint not in committed:
            self.report_violation(
                f"callbacks of {agent} received {checkpoint}, which is not committed"
            )
        self.reports_to_callbacks.setdefault(agent, []).append(decoded[0].get("step"))

    def _check_reports_stored(self, writer: str, key: str, body: bytes) -> None:
        stored = self.stored_reports.setdefault(writer, [])
        for line in strip_mac(body).splitlines():
            report = _report_decoder.decode(line)
            position = (report.round, report.report_index)
            expected = self._training.reported_steps.get(position)
            step = report.metrics.get("step", expected)
            # The leader numbers the save after the return of the training function.
            load = self._training.workload
            if step != expected and not (load.saves_at_end and step == load.steps):
                self.report_violation(f"{key} has {report.metrics} of report {position}")
            self._stored_steps[writer, position] = step
            if position in stored:
                self.report_violation(f"{writer} stored report {position} twice")
            stored.append(position)

    def _check_history(self) -> None:
        """Check that the history has the reports that count, and that callbacks received them.

        A lost leader takes the reports of its last second along: only those of rounds that the
        last leader has opened are checked, and those that each leader has stored.
        """
        stored = {position for positions in self.stored_reports.values() for position in positions}
        for round_number, last in self._last_counted_reports().items():
            if self.round_epochs[round_number] != self.reference_view.epoch:
                continue
            for position in ((round_number, n) for n in range(last + 1)):
                if position not in stored:
                    self.report_violation(f"report {position} counts, but it is not in the history")
        self._check_callbacks()

    def _check_callbacks(self) -> None:
        """Check that callbacks received each report: once from its leader, at least once in all.

        The last leader first repeats reports of lost leaders, then delivers its own. A run whose
        last leader has opened no round ended without callbacks.
        """
        rounds = {n for n, epoch in self.round_epochs.items() if epoch == self.reference_view.epoch}
        if not rounds:
            return
        leader = self._round_leaders[max(rounds)]
        received = list(self.reports_to_callbacks.get(leader, []))
        stored = self.stored_reports.get(leader, [])
        # A leader that crashes after the end of the run takes the reports of its last second along.
        while stored and received and received[-1] != self._stored_steps[leader, stored[-1]]:
            received.pop()
        for position in reversed(stored):
            if position[0] not in rounds:
                break  # of an earlier term of leadership
            if received[-1:] == [self._stored_steps[leader, position]]:
                received.pop()
            # A report whose checkpoint was not committed when its round was closed is made again.
            elif position[0] == max(rounds) or position[1] <= self._committed_reports[position[0]]:
                self.report_violation(f"callbacks of {leader} did not receive report {position}")
                return
        missing = Counter(
            step
            for (agent, (number, index)), step in self._stored_steps.items()
            if agent == self._round_leaders.get(number)
            and index <= self._committed_reports.get(number, -1)
        )
        for steps in self.reports_to_callbacks.values():
            missing.subtract(steps)
        if lost := sorted(step for step, count in missing.items() if count > 0 and step):
            self.report_violation(f"callbacks never received the reports of the steps {lost}")

    def _last_counted_reports(self) -> dict[int, int]:
        """Return the last report of each round from whose state training has continued.

        For the last round the one before its last checkpoint, which is committed after it is
        stored.
        """
        counted = dict.fromkeys(self.round_epochs, -1)
        commits: dict[str, CheckpointCommitted] = {}
        for entry in self.entries:
            match entry.event:
                case CheckpointCommitted() as commit:
                    commits[commit.name] = commit
                    counted[commit.round] = max(counted[commit.round], commit.report_index - 1)
                case RoundOpened(round=opened):
                    if (resumed := commits.get(opened.checkpoint_name or "")) is not None:
                        last = max(counted[resumed.round], resumed.report_index)
                        counted[resumed.round] = last
                    state = opened.memory_snapshot
                    # Otherwise rank 0's report may be lost with the connection of its machine.
                    if state is not None and state.round in self._rounds_with_rank_0_on_leader:
                        self._count_snapshot(counted, state)
        return counted

    def _count_snapshot(self, counted: dict[int, int], state: SnapshotId) -> None:
        # The latest one: after a rollback a step is reported again. A snapshot that was taken after
        # the return of the training function has no report of a worker.
        reports = self._training.reported_steps.items()
        position = (state.round, state.step)
        numbers = [n for (number, n), step in reports if (number, step) == position]
        counted[state.round] = max(counted[state.round], *numbers, -1)

    # --- journal entries ---------------------------------------------------------------------

    def _check_entry(self, entry: JournalEntry, writer: str) -> str | None:
        view, event = self.reference_view, entry.event
        if entry.author != writer:
            return f"signed by {entry.author}"
        if isinstance(event, FitStarted):
            return "a fit started while another one is active" if view.is_active else None
        if isinstance(event, LeaderElected):
            # A client elects itself, or hands over to an agent; an agent elects only itself.
            if entry.author not in (event.leader, self.leader):
                return f"elected {event.leader} without being the leader or the candidate"
            return (
                None
                if event.epoch == view.epoch + 1
                else f"epoch {event.epoch} follows {view.epoch}"
            )
        if isinstance(event, CancelRequested):
            return None if view.is_active else "nothing to cancel"
        if isinstance(event, GroupRefused | GroupsReleased) and _tokens_of(event) <= (
            view.unsettled_groups.keys()
        ):
            return None  # any process may settle groups of earlier fits
        if isinstance(event, MachinesObserved) and not view.is_active:
            return None  # any process may record the ends of machines
        leader = self.leader
        if entry.author != leader:
            return f"appended {type(event).__name__} while {leader} is the leader"
        # After the end the leader still releases machines and records what became of them.
        if view.fit_end is not None and not isinstance(
            event, GroupSubmitted | GroupRefused | GroupsReleased | NodeLost
        ):
            return f"{type(event).__name__} after the end"
        return self._check_decision(event)

    def _check_decision(  # one case per event type
        self,
        event: MachineEvent
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
        | FitEnded
        | MachinesChosen,
    ) -> str | None:
        view = self.reference_view
        match event:
            case MachinesChosen():
                return None if self.reference_view.is_active else "machines chosen after the end"
            case RoundOpened():
                return self._check_round(event)
            case TrainingFunctionStarted(round_number=number):
                is_first = view.round is not None and view.round_startup_s is None
                is_open = is_first and view.round is not None and view.round.number == number
                return None if is_open else f"round {number} is not open, or has started before"
            case RoundClosed():
                return self._check_round_close(event)
            case CheckpointCommitted():
                return self._check_commit(event)
            case CheckpointDropped(name=name):
                return self._check_drop(name)
            case ValidationStarted():
                return self._check_validation(event)
            case ValidationEnded():
                return self._check_validation_result(event)
            case TrainingEnded(fit_end=ended):
                return self._check_result(ended)
            case FitEnded():
                return self._check_fit_end(event)
            case FeedersStopped():
                return "feeders were stopped before" if view.feeders_stopped else None
            case DeadlineAtRisk(risk=risk):
                is_known = risk in view.market.deadline_risks
                return f"the deadline risk {risk} was recorded before" if is_known else None
            case _:
                return self._check_machine_event(event)

    def _check_machine_event(self, event: MachineEvent) -> str | None:
        view = self.reference_view
        match event:
            case GroupPlanned():
                return self._check_intent(event)
            case GroupSubmitted(token=token) | GroupRefused(token=token):
                # An outcome without an intent, or a second outcome, means a request outside of the
                # journal.
                pending = token in view.groups and view.groups[token].is_pending
                return None if pending else f"{token} was not pending"
            case GroupWaiting(token=token):
                is_open = token in view.groups and not view.groups[token].is_closed
                return None if is_open else f"{token} does not wait"
            case NodeLost():
                return self._check_loss(event)
            case GroupsReleased(token=token, other_tokens=others):
                groups = view.groups
                lost = [t for t in (token, *others) if t not in groups or groups[t].is_released]
                return f"{', '.join(lost)} was not held" if lost else None
            case PreemptionNoticed():
                return None
            case MachinesObserved(times=times):
                unknown = times.keys() - view.usage.groups.keys()
                return f"{', '.join(unknown)} has no machines" if unknown else None
            case PricesChanged():
                return None
        assert_never(event)

    def _check_loss(self, event: NodeLost) -> str | None:
        groups = self.reference_view.groups
        if event.is_unused and self.reference_view.round is not None:
            return f"{event.token}.{event.node} was released in a round"
        # A node that is lost twice would be replaced and charged twice.
        if event.token not in groups or event.node not in groups[event.token].active_nodes:
            return f"{event.token}.{event.node} was not active"
        # An error in spotfit must not use up the budget of preemptions, nor be retried forever.
        has_crashed = event.agent in self.crashed_agents
        is_stored = keys.crash(event.token, event.node) in self._objects
        if has_crashed and is_stored and event.cause is not FailureCause.PLATFORM:
            return f"the crash of {event.agent} is charged to {event.cause}"
        return None

    def _record_unexplained_end(self, event: RoundClosed, author: AgentId) -> None:
        round_ = self.reference_view.round
        if round_ and event.cause in (FailureCause.NETWORK, FailureCause.LEADER_CHANGE):
            # A machine that was terminated at the same time by chance did not end the round: only
            # its leader, and agents that the next leader missed, did. The author of the entry was
            # alive when it decided, also if its request is executed after its end.
            suspects = {self._round_leader, *event.missing_agents} - {author}
            agents = {one.agent for one in round_.assignments if one.agent in suspects}
            self._unexplained_ends.append(frozenset(agents & self.terminated_agents))

    def _check_charges(self) -> str | None:
        """A round must be charged to the loss that has ended it, once that is established."""
        counts = self.reference_view.failure_counts
        free = counts.get(FailureCause.NETWORK, 0) + counts.get(FailureCause.LEADER_CHANGE, 0)
        unexplained = sum(not gone & self._explained_losses for gone in self._unexplained_ends)
        if free <= unexplained:
            return None
        return f"{free - unexplained} rounds with a lost machine are charged to no loss"

    def _check_intent(self, event: GroupPlanned) -> str | None:
        view = self.reference_view
        if event.plan.token in self.intended_tokens:
            return f"token {event.plan.token} was used before"
        if event.request.role == "train":
            is_over = view.pending_fit_end is not None
            return "machines for workers planned after the training" if is_over else None
        if event.request.role == "feed":
            return self._check_feeder_intent(view)
        if not view.unvalidated_checkpoints:
            return "machine for validation planned without a pending validation"
        groups = [
            one for one in view.groups.values() if one.role == "validate" and one.active_nodes
        ]
        # A machine with a preemption notice may be replaced before it is lost.
        spare = len(groups) - len(view.notices)
        return f"{spare} machines for validation are active already" if spare > 0 else None

    def _check_feeder_intent(self, view: JournalView) -> str | None:
        feeders = view.spec.feeders if isinstance(view, View) else None
        if feeders is None or view.round is None:
            return "machine for feeders planned without a round that uses them"
        if view.feeders_stopped:
            return "machine for feeders planned after their stop"
        if feeders.networks and view.network and view.network not in feeders.networks:
            return f"machine for feeders planned while the workers are in {view.network}"
        groups = [one for one in view.groups.values() if one.role == "feed" and one.active_nodes]
        spare = len(groups) - len(view.notices) - feeders.max_nodes + 1
        return f"{spare} machines for feeders more than the maximum" if spare > 0 else None

    def _check_round(self, event: RoundOpened) -> str | None:
        view, opened = self.reference_view, event.round
        assert isinstance(view, View), "decisions follow the start of a fit"
        if view.pending_fit_end is not None:
            return f"round {opened.number} opened after the training"
        if view.round is not None:
            return f"round {opened.number} opened while round {view.round.number} is open"
        if view.last_round is not None and opened.number <= view.last_round.number:
            return f"round {opened.number} comes after round {view.last_round.number}"
        ranks = [rank for place in opened.assignments for rank in place.ranks]
        # Process groups need consecutive ranks from 0.
        if ranks != list(range(opened.world_size)):
            return f"ranks {ranks}"
        if len({place.agent for place in opened.assignments}) < len(opened.assignments):
            return "an agent has two assignments"
        # A lost agent exits when it sees its loss: it must not be counted on.
        if any(place.agent in self.lost_agents for place in opened.assignments):
            return "a lost agent has an assignment"
        if not view.spec.min_workers <= opened.world_size <= view.spec.max_workers:
            return f"{opened.world_size} workers"
        # Starting from an older checkpoint would repeat committed steps.
        latest = view.latest_checkpoint.name if view.latest_checkpoint else None
        if opened.checkpoint_name != latest:
            return f"starts from {opened.checkpoint_name}, not {latest}"
        return self._check_memory_restore(opened)

    def _check_memory_restore(self, opened: Round) -> str | None:
        """A snapshot in memory must not be older than the latest checkpoint, nor rolled back."""
        state, latest = opened.memory_snapshot, self.reference_view.latest_checkpoint
        if state is None:
            return None
        if state.step > self._training.max_step:
            return f"starts from step {state.step} in memory, which was never executed"
        if state.step not in self._training.snapshot_steps.get(state.round, ()):
            return f"starts from step {state.step} in memory, which was rolled back"
        # An in-memory snapshot saves an upload, but must never cost committed progress.
        committed = latest.metrics["step"] if latest is not None else 0
        if state.step < committed:
            return f"starts from step {state.step} in memory, but step {committed} was committed"
        return None

    def _check_round_close(self, event: RoundClosed) -> str | None:
        if (
            self.reference_view.round is None
            or self.reference_view.round.number != event.round_number
        ):
            return f"round {event.round_number} is not open"
        # Losses of machines and errors that follow from them must not use up the budget of the user
        # code.
        failures = self.reference_view.failure_counts.get(FailureCause.WORKER, 0) + 1
        crashes = self._training.crash_count + self._training.memory_kill_count
        if event.cause is FailureCause.WORKER and failures > crashes:
            return f"{failures} worker failures recorded, but {crashes} occurred: {event.reason}"
        return None

    def _check_commit(self, event: CheckpointCommitted) -> str | None:
        view = self.reference_view
        if view.last_round is None or event.round > view.last_round.number:
            return f"round {event.round} has not started"
        for rank in event.ranks:
            # A commit means that every part is in the bucket already, not that it will be.
            if keys.manifest(event.name, event.round, rank) not in self._objects:
                return f"{event.name} has no files of rank {rank}"
        saved = read_checkpoint_state(self._objects, event.name)
        if isinstance(saved, str):
            return f"{event.name}: {saved}"
        if not self._training.is_correct(ModelState(saved.step, saved.link)):
            return f"{event.name}: step {saved.step} differs from the reference run"
        reported_step = event.metrics.get("step")
        if reported_step != saved.step:
            return f"{event.name} contains step {saved.step}, its metrics say {reported_step}"
        # The request passes from the report through the manifest: it must survive a change of the
        # leader.
        if event.validation != self._training.validation_request(saved.step):
            return f"{event.name} has the wrong validation request: {event.validation}"
        # A late upload of an earlier round must not roll the run back.
        latest = view.latest_checkpoint
        if latest is not None and saved.step <= latest.metrics["step"]:
            return f"step {saved.step} is committed after step {latest.metrics['step']}"
        return None

    def _check_drop(self, name: str) -> str | None:
        latest = self.reference_view.latest_checkpoint
        if latest is None or name not in {kept.name for kept in self.reference_view.checkpoints}:
            return f"{name} was dropped but does not exist"
        # The validator still reads it.
        if name in {kept.name for kept in self.reference_view.unvalidated_checkpoints}:
            return f"{name} is not validated yet"
        return f"{name} is the latest" if name == latest.name else None

    def _check_validation(self, event: ValidationStarted) -> str | None:
        view, current = self.reference_view, self.reference_view.current_validation
        due = view.unvalidated_checkpoints[0].uid if view.unvalidated_checkpoints else None
        if event.checkpoint_uid != due:
            return f"validation of {event.checkpoint_uid} started, but {due} is next"
        if event.attempt != view.validation_attempts + 1:
            return f"attempt {event.attempt} follows {view.validation_attempts}"
        group = view.groups.get(event.token)
        if event.agent in view.lost_agents or group is None or not group.is_node_active(event.node):
            return f"{event.agent} cannot validate"
        if current is None:
            return None
        group_of_current = view.groups.get(current.token)
        # A validation moves to another node only after its node was lost.
        is_lost = (
            group_of_current is None
            or not group_of_current.is_node_active(current.node)
            or current.agent in view.lost_agents
        )
        return None if is_lost else f"{current.agent} already validates {current.checkpoint_uid}"

    def _check_validation_result(self, event: ValidationEnded) -> str | None:
        due = (
            self.reference_view.unvalidated_checkpoints[0]
            if self.reference_view.unvalidated_checkpoints
            else None
        )
        if due is None or due.uid != event.checkpoint_uid:
            return f"{event.checkpoint_uid} was not to be validated"
        if event.status == "validated":
            # The score is a function of the step: a result of another checkpoint is recognized.
            found = validation_score(due.metrics["step"])
            right = event.metrics == {"score": found}
            return None if right else f"metrics {event.metrics} recorded, but the score is {found}"
        return f"metrics {event.metrics} of a failed validation" if event.metrics else None

    def _check_fit_end(self, event: FitEnded) -> str | None:
        view = self.reference_view
        if not view.is_active:
            return "no fit is active"
        # A time budget may end the validations after the training: the next fit makes them.
        is_limited = isinstance(view, View) and view.spec.time_budget_s is not None
        if view.unvalidated_checkpoints and event.outcome == "finished" and not is_limited:
            return f"{len(view.unvalidated_checkpoints)} checkpoints are not validated yet"
        if view.pending_fit_end is not None and event.outcome != "cancelled":
            # Validations after the training do not change its outcome.
            before = view.pending_fit_end
            return (
                None if event == before else f"expected outcome {before.outcome}: {before.reason}"
            )
        return self._check_result(event)

    def _check_result(self, event: FitEnded) -> str | None:
        if event.outcome != "finished":
            return None
        state = self._result_state(event)
        if not self._training.is_correct(state):
            return f"the result {state} differs from the reference run"
        return self._check_last_steps(event)

    def _result_state(self, event: FitEnded) -> ModelState:
        result = self._objects.get(event.result_key or "", b"")
        # The object is sealed: a prefix precedes the payload.
        return ModelState(self._training.workload.steps, result.rpartition(b":")[2].decode())

    def _check_last_steps(self, event: FitEnded) -> str | None:
        """The last steps are in a checkpoint, or the end says that they are not."""
        load, latest = self._training.workload, self.reference_view.latest_checkpoint
        if not (load.uses_snapshots and load.saves_at_end) or event.last_save_error:
            return None
        step = latest.metrics["step"] if latest is not None else 0
        if step != load.steps:
            return f"finished after step {load.steps}, but step {step} was saved last"
        return None

    # --- machines ----------------------------------------------------------------------------

    def on_machines_requested(self, plan: GroupPlan) -> None:
        """A group is requested: the journal must contain its plan.

        The late request of a deposed leader may have been recorded as refused meanwhile; its
        machines find that out and exit by themselves.
        """
        if plan.token not in self.intended_tokens:
            self.report_violation(
                f"machines for {plan.token} requested, which is not in the journal"
            )

    def on_cloud_called(self, cloud: str, token: Token) -> None:
        """A call about a group has arrived: it must belong to the backend of the group's fit.

        Another cloud could grant it, or answer that it has no machines that must be released.
        """
        planned_for = self.intended_tokens.get(token, cloud)
        if cloud != planned_for:
            self.report_violation(f"{token} was sent to {cloud}, but was planned for {planned_for}")

    def check_books(self, books: Mapping[Token, Books], now_ms: int) -> None:
        """Check the record of machine-hours against what the clouds have billed."""
        if (error := find_billing_error(self.entries, books, now_ms)) is not None:
            self.report_violation(error)

    # --- the end -----------------------------------------------------------------------------

    def _is_like_a_firewall(self, scenario: Scenario) -> bool:
        """Whether the run has ended because interruptions before its first round lasted as long as
        `RunTiming.reach_timeout_s`: no process can distinguish them from a firewall."""
        view = self.reference_view
        assert view.fit_end is not None
        is_interrupted = scenario.network.partitions_per_hour > 0 or any(
            isinstance(event, IsolateHost) for event in scenario.events
        )
        reason = view.fit_end.reason
        return is_interrupted and view.last_round is None and "not reach the leader" in reason

    def result_state(self) -> ModelState | None:
        """Return the state that the run has returned; None if it has not finished."""
        fit_end = self.reference_view.fit_end
        if fit_end is None or fit_end.outcome != "finished":
            return None
        return self._result_state(fit_end)

    def check_end(self, scenario: Scenario) -> None:
        """Check the final state of the run."""
        fit_end = self.reference_view.fit_end
        expected_outcome = scenario.expected_outcome
        if fit_end is None:
            self.report_violation("the run did not end")
        elif scenario.may_exceed_time_budget and "time budget" in fit_end.reason:
            if fit_end.outcome != "cancelled":
                self.report_violation(f"the run ended {fit_end.outcome} ({fit_end.reason})")
        elif scenario.may_exhaust_budget and "budget" in fit_end.reason:
            if fit_end.outcome == "failed":
                self.report_violation(f"the run ended {fit_end.outcome} ({fit_end.reason})")
        elif fit_end.outcome != expected_outcome and not self._is_like_a_firewall(scenario):
            self.report_violation(
                f"the run ended {fit_end.outcome} ({fit_end.reason}), expected {expected_outcome}"
            )
        if self._training.history is not None and (state := self.result_state()) is not None:
            self._training.history.check_end(state)
        if (violation := self._check_charges()) is not None:
            self.report_violation(violation)
        # Garbage collection must not have deleted a file that a kept checkpoint shares.
        for kept in self.reference_view.checkpoints:
            found = read_checkpoint_state(self._objects, kept.name)
            if isinstance(found, str):
                self.report_violation(
                    f"the committed checkpoint {kept.name} cannot be read: {found}"
                )
        # Every requested validation has ended exactly once, in order.
        events = [entry.event for entry in self.entries]
        requested = [
            event.uid
            for event in events
            if isinstance(event, CheckpointCommitted) and event.validation
        ]
        ended = [event.checkpoint_uid for event in events if isinstance(event, ValidationEnded)]
        if fit_end is None or fit_end.outcome != "finished":
            return
        # The time budget may have ended the fit before the last ones.
        expected = requested[: len(ended)] if scenario.time_budget_s is not None else requested
        if ended != expected:
            self.report_violation(f"validations requested: {requested}, ended: {ended}")
        self._check_history()


def _tokens_of(event: GroupRefused | GroupsReleased) -> set[Token]:
    return {event.token, *(event.other_tokens if isinstance(event, GroupsReleased) else ())}
