"""`Leader`: what an agent does while it is the elected leader of the run.

It keeps the roster of connected agents, coordinates the open round, and decides with the reconciler
what to append to the journal. None of its state is persisted: a new leader restores it from the
journal, the bucket and the `Join` messages of the agents.

| state    | event                                                | next                        |
|----------|------------------------------------------------------|-----------------------------|
| no round | journal: `RoundOpened`                               | open                        |
| open     | a rank fails, or a required agent disconnects        | failing (`AbortRound` sent) |
| open     | journal: `RoundClosed` or `TrainingEnded`            | no round                    |
| failing  | journal: `RoundClosed`, decided once workers stopped | no round                    |

A leader that finds a round opened by another leader starts in "failing".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from msgspec.structs import replace

from spotfit.agent.checkpoint_cleanup import CheckpointGarbageCollector
from spotfit.agent.hang_detector import HangDetector
from spotfit.agent.hook_gates import BackendHookGates
from spotfit.agent.lease import Lease
from spotfit.agent.open_round import OpenRound
from spotfit.agent.ports import (
    AgentDisconnected,
    AgentMessageReceived,
    AgentTransport,
    BackendHookRunner,
    CallbackRunner,
)
from spotfit.agent.previous_rounds import PreviousRounds
from spotfit.agent.report_sink import ReportSink
from spotfit.agent.roster import Roster
from spotfit.agent.round_coordinator import RoundCoordinator
from spotfit.control.background_calls import BackgroundCalls
from spotfit.control.journal_writer import JournalWriter
from spotfit.control.reconciler import Reconciler
from spotfit.core.ids import AgentId, Token
from spotfit.ledger import view_cache
from spotfit.model.events import (
    CheckpointCommitted,
    CheckpointDropped,
    FitEnded,
    GroupsReleased,
    JournalEntry,
    JournalEvent,
    NodeLost,
    PreemptionNoticed,
    RankFailure,
    RoundClosed,
    RoundOpened,
    TrainingEnded,
    ValidationEnded,
    ValidationStarted,
)
from spotfit.model.leader_state import (
    Failing,
    LeaderState,
    NoRound,
    ReplicaLocation,
    RoundCommit,
    RoundPhase,
    UserCodeError,
    ValidationReported,
)
from spotfit.model.spec import RunSpec, RunTiming
from spotfit.model.topology import Round
from spotfit.model.view import View
from spotfit.policy import pending_uploads
from spotfit.policy.election import CLEANUP_LEASE_TIMEOUT_S
from spotfit.policy.preemption import is_replacement_ready, may_continue_without
from spotfit.protocol.agent_leader import (
    AbortRound,
    ConnectionHeartbeat,
    FromLeader,
    Join,
    JoinRejected,
    JournalEntryCopy,
    NodeUnusable,
    NodeWarm,
    NoticeReceived,
    PreemptionRiskReported,
    SnapshotReplicated,
    StackDump,
    ToLeader,
    UploadsDrained,
    WorkersStopped,
    WorkerTerminated,
    WorkerToLeader,
    WorkerUnresponsive,
)
from spotfit.protocol.worker_agent import CommitConfirmed, SuggestSave, ValidationFinished

# While a background call is pending, ask for its result ten times a second.
_RECHECK_INTERVAL_S = 0.1
# A run with all agents connected observes its groups less often: cloud APIs limit requests.
_IDLE_OBSERVE_FACTOR = 10
# Four renewals fit into the timeout, so that a single failed one never costs the leadership.
_CLEANUP_LEASE_INTERVAL_S = CLEANUP_LEASE_TIMEOUT_S / 4


@dataclass(frozen=True, slots=True)
class LeaderServices:
    """The collaborators of a leader; the agent provides them when it is elected."""

    journal_writer: JournalWriter
    transport: AgentTransport
    reconciler: Reconciler
    background_calls: BackgroundCalls
    journal_background_calls: BackgroundCalls
    """For the lease: it never queues behind a slow cloud API."""
    report_sink: ReportSink
    callback_runner: CallbackRunner | None
    backend_hook_runner: BackendHookRunner | None
    default_checkpoint_name: Callable[[int], str]
    write_run_log: Callable[[str], None]
    releases_on_agent_exit: bool
    """Whether the backend releases a machine when its agent exits."""


class Leader:
    """One term of leadership.

    `on_agent_event` processes messages, `on_journal_entry` entries, and `tick` acts on both.
    """

    def __init__(self, services: LeaderServices, *, now: float) -> None:
        self._services = services
        self._ledger = ledger = services.journal_writer.ledger
        self.epoch = ledger.view.epoch
        self._roster = Roster(ledger.agent_id, services.transport)
        self._state = LeaderState(
            agent_id=ledger.agent_id,
            releases_on_agent_exit=services.releases_on_agent_exit,
            leading_since=now,
            validation_changed_at=now,
        )
        self._open_round: OpenRound | None = None
        """The open round if this leader has opened it."""
        self._no_round = NoRound(since=now, bucket_searched=False)
        """The phase while no round is open."""
        self._failing_since: float | None = None
        """When the first failure or disconnect of the open round was observed."""
        self._previous_rounds = PreviousRounds(ledger, services.background_calls)
        self._lease = Lease(ledger, services.journal_background_calls, now)
        self._early_messages: list[
            tuple[AgentId, WorkerToLeader | WorkerTerminated | WorkersStopped]
        ] = []
        """Messages about a round whose entry is being written and not confirmed yet."""
        self._checkpoint_gc = CheckpointGarbageCollector(
            ledger.store, services.background_calls, lambda: ledger.view.is_leader(ledger.agent_id)
        )
        self._latest_entry_copy: JournalEntryCopy | None = None
        self._heartbeat_at = now
        self._dirty = True
        self._wait_until = now
        if ledger.view.round is not None:
            self._fail_round(now)  # the coordinator of the previous leader is gone

    @property
    def is_finished(self) -> bool:
        """Whether all machines are released, all reports written and all deletions done."""
        has_pending = self._services.report_sink.has_unwritten or self._checkpoint_gc.is_busy
        return self._services.reconciler.is_idle and not has_pending

    # --- messages of agents ------------------------------------------------------------------

    def on_agent_event(self, event: AgentMessageReceived | AgentDisconnected, now: float) -> None:
        """Process a message or the disconnection of an agent."""
        match event:
            case AgentDisconnected(agent=agent):
                self._on_agent_disconnected(agent, now)
            case AgentMessageReceived(agent=agent, message=Join() as join):
                self._on_join(agent, join, now)
            case AgentMessageReceived(agent=agent, message=message):
                if self._roster.touch(agent, now) is None:
                    self._services.transport.disconnect_agent(agent)
                else:
                    self._on_message(agent, message, now)

    def _on_message(self, agent: AgentId, message: ToLeader, now: float) -> None:
        if isinstance(
            message, WorkerToLeader | WorkerTerminated | WorkersStopped
        ) and self._is_future_round(message.round):
            self._early_messages.append((agent, message))
            return
        match message:
            case WorkerToLeader():
                self._forward_to_coordinator(agent, message, now)
            case WorkerTerminated(round=number, rank=rank, failure=failure):
                self._record_rank_failure(number, rank, failure, now)
            case WorkersStopped():
                self._on_workers_stopped(agent, message, now)
            case SnapshotReplicated():
                self._record_replica(message, now)
            case UploadsDrained(round=number):
                self._roster.mark_uploads_drained(agent, number)
                self._dirty = True
            case WorkerUnresponsive(round=number, rank=rank, silent_s=silent_s):
                if (open_round := self._find_open_round(number)) is not None:
                    open_round.hang_detector.record_liveness(rank, silent_s)
            case StackDump(round=number):
                if (open_round := self._find_open_round(number)) is not None:
                    open_round.hang_detector.add_stack_dump(message)
            case NoticeReceived(notice=notice):
                self._roster.record_notice(agent, notice, now)
                self._dirty = True
            case PreemptionRiskReported(reason=reason):
                if self._open_round is not None:
                    self._open_round.send_to_workers([(None, SuggestSave(reason=reason))])
            case NodeWarm():
                self._roster.mark_warm(agent)
                self._dirty = True
            case NodeUnusable(failure=failure):
                self._roster.mark_unusable(agent, failure)
                self._dirty = True
            case ValidationReported():
                self._on_validation_report(message)
            case ConnectionHeartbeat() | Join():
                return

    def _on_validation_report(self, validation_report: ValidationReported) -> None:
        """Record the result of an attempt, unless a later attempt was already reported.

        An agent repeats its last report after it has reconnected.
        """
        known = self._state.validation_reported
        if known is None or validation_report.attempt >= known.attempt:
            self._state = replace(self._state, validation_reported=validation_report)
            self._dirty = True

    def _on_join(self, agent: AgentId, join: Join, now: float) -> None:
        if join.run_id != self._ledger.run_id:
            self._services.transport.send_to_agent(agent, JoinRejected(reason="other_run"))
            self._services.transport.disconnect_agent(agent)
            return
        # A second connection: messages on the first one may have been lost.
        self._on_agent_disconnected(agent, now)
        self._roster.join(agent, join, now)
        # An entry after the agent's next slot makes it read the missing ones at once.
        if self._latest_entry_copy is not None and join.next_slot < self._ledger.view.next_slot:
            self._services.transport.send_to_agent(agent, self._latest_entry_copy)
        if self._find_open_round(join.running_round) is not None:
            self._fail_round(now)  # frames of its workers may have been lost before it rejoined
        opened = self._ledger.view.round
        if self._failing_since is not None and opened and opened.assignment_of(agent):
            # It was not connected when the round was aborted.
            self._services.transport.send_to_agent(agent, AbortRound(round=opened.number))
        self._dirty = True

    def _on_agent_disconnected(self, agent: AgentId, now: float) -> None:
        if not self._roster.mark_disconnected(agent, now):
            return
        # The backend may know why the machine is gone, which decides what the loss is charged to.
        self._services.reconciler.observe_soon()
        self._dirty = True
        view = self._ledger.view
        assignment = view.round.assignment_of(agent) if view.round else None
        if assignment is None or self._open_round is None:
            return
        self._open_round.send_to_workers(
            self._open_round.coordinator.mark_disconnected(assignment.ranks)
        )
        if not may_continue_without(view, assignment):
            self._fail_round(now)

    def _find_open_round(self, round_number: int | None) -> OpenRound | None:
        """Return the open round if it has that number and was opened by this leader."""
        return (
            self._open_round
            if self._open_round and self._open_round.coordinator.round == round_number
            else None
        )

    def _record_rank_failure(
        self, round_number: int, rank: int, failure: RankFailure | None, now: float
    ) -> None:
        open_round = self._find_open_round(round_number)
        if failure is None or open_round is None:
            return
        # The first failure of a rank is its cause; later ones follow from the abort.
        open_round.rank_failures.setdefault(rank, failure)
        self._fail_round(now)

    def _on_workers_stopped(self, agent: AgentId, stopped: WorkersStopped, now: float) -> None:
        """Record that an agent's workers have exited; fail the round if they had not returned."""
        self._roster.mark_stopped(
            agent,
            stopped.round,
            is_uploading=stopped.is_uploading,
            snapshot_shards=stopped.snapshot_shards,
        )
        self._dirty = True
        view, open_round = self._ledger.view, self._find_open_round(stopped.round)
        if view.round is None or open_round is None:
            return
        assignment = view.round.assignment_of(agent)
        returned = open_round.coordinator.returned_ranks
        if assignment is not None and not returned.issuperset(assignment.ranks):
            self._fail_round(now)

    def _record_replica(self, replicated: SnapshotReplicated, now: float) -> None:
        if (open_round := self._find_open_round(replicated.round)) is None:
            return
        location = ReplicaLocation(
            step=replicated.step, peer_store_address=replicated.peer_store_address, reported_at=now
        )
        open_round.replica_locations[replicated.rank] = location
        self._dirty = True

    def _forward_to_coordinator(self, agent: AgentId, message: WorkerToLeader, now: float) -> None:
        open_round = self._find_open_round(message.round)
        if open_round is None:
            return
        coordinator = open_round.coordinator
        returned_before = len(coordinator.returned_ranks)
        failure = open_round.on_worker_message(agent, message, now)
        self._record_rank_failure(message.round, message.rank, failure, now)
        has_returned = len(coordinator.returned_ranks) > returned_before
        if has_returned:
            open_round.returned_at = now
        if coordinator.reports.ready_checkpoints or has_returned:
            self._dirty = True

    def _send_to_round(self, round_: Round, message: FromLeader) -> None:
        for assignment in round_.assignments:
            self._services.transport.send_to_agent(assignment.agent, message)

    def _fail_round(self, now: float) -> None:
        """Stop all workers at once; the entry that closes the round follows."""
        self._dirty = True
        if self._failing_since is not None:
            return
        self._failing_since = now
        if self._open_round is not None:
            self._open_round.abandon_workers()
        opened = self._ledger.view.round
        if opened is not None:
            self._send_to_round(opened, AbortRound(round=opened.number))

    # --- entries of the journal --------------------------------------------------------------

    def on_journal_entry(self, slot: int, body: bytes, entry: JournalEntry, now: float) -> None:
        """Process an entry of any author that was applied, and send it to all agents."""
        self._latest_entry_copy = JournalEntryCopy(slot=slot, body=body)
        self._dirty = True
        self._roster.broadcast(self._latest_entry_copy)
        view = self._ledger.view
        # The cached view spares later readers the replay of the whole journal.
        if view_cache.is_cache_due(view):
            self._services.background_calls.send(
                "view cache", lambda: view_cache.write_cached_view(self._ledger.store, view)
            )
        self._apply_event(entry.event, view, now)

    def _apply_event(self, event: JournalEvent, view: View, now: float) -> None:
        match event:
            case RoundOpened(round=opened):
                self._on_round_opened(opened, now)
            case RoundClosed():
                self._on_round_closed(event, now)
            case TrainingEnded():
                self._on_training_ended(now)
            case FitEnded():
                self._no_round = replace(self._no_round, since=now)
                self._lease.renew_soon(now)
            case CheckpointCommitted():
                self._on_checkpoint_committed(event, now)
            case CheckpointDropped(name=name):
                self._checkpoint_gc.schedule_deletion(name)
            case PreemptionNoticed():
                if self._open_round is not None:
                    self._open_round.announce_preemption(view, self._state, now)
            case NodeLost(token=token, node=node, agent=agent):
                self._roster.forget(token, node, agent)
                self._reset_validation_clock((token,), now)
            case GroupsReleased(token=token, other_tokens=others):
                self._reset_validation_clock((token, *others), now)
            case ValidationStarted():
                self._state = replace(self._state, validation_changed_at=now)
            case ValidationEnded(checkpoint_name=name):
                self._state = replace(self._state, validation_changed_at=now)
                if self._open_round is not None:
                    self._open_round.send_to_workers(
                        [(None, ValidationFinished(checkpoint_name=name))]
                    )
            case _:
                return

    def _is_future_round(self, round_number: int) -> bool:
        """Whether an agent knows of a round before this leader's own write was confirmed."""
        last_round = self._ledger.view.last_round
        return round_number > (last_round.number if last_round else 0)

    def _replay_early_messages(self, opened: Round, now: float) -> None:
        """Process the messages that arrived while the entry of the round was being written."""
        messages, self._early_messages = self._early_messages, []
        for agent, message in messages:
            if message.round == opened.number and agent in self._roster.members:
                self._on_message(agent, message, now)

    def _on_round_opened(self, opened: Round, now: float) -> None:
        self._previous_rounds.begin_round(opened.number)
        self._open_round = self._create_open_round(opened, now)
        self._checkpoint_gc.scan_for_debris(self._ledger.view, before_round=opened.number)
        self._roster.assign_round(opened.assignments, opened.number)
        self._failing_since = None
        for assignment in opened.assignments:
            if not self._roster.can_enter(assignment, opened.number):
                # The agent has left between the decision and the entry.
                self._open_round.send_to_workers(
                    self._open_round.coordinator.mark_disconnected(assignment.ranks)
                )
                self._fail_round(now)
        self._replay_early_messages(opened, now)

    def _create_open_round(self, opened: Round, now: float) -> OpenRound:
        spec, services = self._ledger.view.spec, self._services
        coordinator = self._create_coordinator(opened, spec, now)
        hang_detector = HangDetector(
            coordinator,
            spec.hang_detection,
            request_stacks=partial(self._send_to_round, opened),
            ledger=self._ledger,
            background_calls=services.background_calls,
        )
        hook_runner = services.backend_hook_runner
        return OpenRound(
            opened,
            coordinator,
            hang_detector=hang_detector,
            hook_gates=BackendHookGates(coordinator, hook_runner, spec.resources_per_worker)
            if hook_runner
            else None,
            transport=services.transport,
            checkpoint_gc=self._checkpoint_gc,
            report_sink=services.report_sink,
            callback_runner=services.callback_runner,
        )

    def _create_coordinator(self, opened: Round, spec: RunSpec, now: float) -> RoundCoordinator:
        previous_rounds = self._previous_rounds
        coordinator = RoundCoordinator(
            opened.number,
            opened.world_size,
            default_checkpoint_name=self._services.default_checkpoint_name,
            # Evaluated per snapshot: ranks of this very round may find the latest one corrupt.
            parent_snapshot=lambda: previous_rounds.parent_snapshot(self._ledger.view, coordinator),
            latest_checkpoint_named=previous_rounds.latest_checkpoint_named,
            collective_timeout_s=spec.collective_timeout_s,
            collective_warn_s=spec.collective_warn_interval_s,
            keep_all_metrics=spec.has_callbacks,
            now=now,
        )
        return coordinator

    def _on_round_closed(self, closed: RoundClosed, now: float) -> None:
        if self._open_round is not None:
            # Reports whose checkpoint was committed by the entry before are delivered, too.
            self._open_round.deliver_matched_reports()
            self._open_round.record_assigned_names()
            self._previous_rounds.adopt_ready_checkpoints(self._open_round.coordinator)
        if self._services.callback_runner is not None and closed.failures:
            self._services.callback_runner.send_failure(
                {
                    failure.rank: failure.pickle_key
                    for failure in closed.failures
                    if failure.pickle_key
                },
                {failure.rank: failure.message for failure in closed.failures},
            )
        # An agent that misses earlier entries cannot apply this one: AbortRound needs no journal.
        if self._failing_since is None:
            self._roster.broadcast(AbortRound(round=closed.round_number))
        self._no_round = NoRound(
            since=now, bucket_searched=False, uncommitted_work_s=self._time_since_commit_s(now)
        )
        self._failing_since = None
        self._state = replace(self._state, latest_metrics=self._latest_metrics())
        self._close_open_round()

    def _close_open_round(self) -> None:
        if self._open_round is not None:
            self._previous_rounds.absorb_round(self._open_round.coordinator)
            self._open_round.close()
            self._open_round = None

    def _time_since_commit_s(self, now: float) -> float:
        """Return how long the round has trained since its last commit.

        Infinity if another leader opened the round: the time of its commits is unknown then.
        """
        if self._open_round is None:
            return math.inf
        commit = self._open_round.last_commit
        return now - (commit.committed_at if commit else self._open_round.coordinator.opened_at)

    def _on_training_ended(self, now: float) -> None:
        """Deliver the last reports and keep the last metrics: no round follows."""
        if self._open_round is not None:
            self._open_round.deliver_matched_reports()
        self._no_round = replace(self._no_round, since=now)
        self._failing_since = None
        self._state = replace(self._state, latest_metrics=self._latest_metrics())
        self._close_open_round()

    def _reset_validation_clock(self, lost_groups: Sequence[Token], now: float) -> None:
        """Restart the timeout for a validation machine if such a machine was lost."""
        groups = self._ledger.view.groups
        if any(token in groups and groups[token].role == "validate" for token in lost_groups):
            self._state = replace(self._state, validation_changed_at=now)

    def _on_checkpoint_committed(self, event: CheckpointCommitted, now: float) -> None:
        self._previous_rounds.mark_committed(event.name)
        ready_snapshots = self._state.ready_checkpoints if event.is_snapshot else ()
        taken_at = next(
            (ready.snapshot_taken_at for ready in ready_snapshots if ready.name == event.name), None
        )
        if self._open_round is not None:
            self._open_round.last_commit = RoundCommit(committed_at=now, snapshot_taken_at=taken_at)
        # The first checkpoint to validate starts the timeout for a validation machine.
        if event.validation is not None and len(self._ledger.view.unvalidated_checkpoints) == 1:
            self._state = replace(self._state, validation_changed_at=now)
        if (open_round := self._find_open_round(event.round)) is not None:
            open_round.coordinator.reports.remove_committed(event.report_index)
            open_round.send_to_workers(
                [(None, CommitConfirmed(checkpoint_name=event.name, metrics=event.metrics))]
            )

    # --- tick --------------------------------------------------------------------------------

    def tick(self, now: float) -> float:
        """Do everything that is due. Returns the time of the next call."""
        view = self._ledger.view
        self._maintain_liveness(view, view.spec.timing, now)
        self._find_uncommitted_checkpoints(view, now)
        self._collect_garbage(view, now)
        self._forward_reports(view, now)
        if self._open_round is not None:
            self._open_round.send_to_workers(self._open_round.coordinator.check_timeouts(now))
        self._check_for_hangs(now)
        reconciler = self._services.reconciler
        is_complete = view.round is not None and not self._roster.disconnected_since
        factor = _IDLE_OBSERVE_FACTOR if is_complete else 1
        reconciler.observe(now, every_s=view.spec.timing.observe_interval_s * factor)
        if reconciler.group_statuses is not self._state.group_statuses or now >= self._wait_until:
            self._dirty = True
        if (
            self._failing_since is not None
            and reconciler.status_as_of is not self._state.status_as_of
        ):
            # While an agent is missing, the fact that its machine still runs matters, too.
            self._dirty = True
        if self._dirty:
            self._decide_and_act(now)
        return self._next_wake(now)

    def _decide_and_act(self, now: float) -> None:
        """Decide until nothing is due.

        Nothing is decided while an entry is being written: a decision holds only for the view that
        it was made from.
        """
        self._announce_replacement_ready(now)
        has_acted = True
        while (
            has_acted
            and self._services.journal_writer.is_settled
            and self._ledger.view.is_leader(self._ledger.agent_id)
        ):
            has_acted, wait = self._services.reconciler.reconcile(self._refresh_state(), now)
            self._wait_until = wait.until
        self._dirty = not self._services.journal_writer.is_settled

    def _announce_replacement_ready(self, now: float) -> None:
        """Inform workers once that only their save is missing before the change of machines."""
        view, open_round = self._ledger.view, self._open_round
        if not view.notices or open_round is None or open_round.replacement_ready_at is not None:
            return
        if is_replacement_ready(view, self._refresh_state()):
            open_round.announce_preemption(view, self._state, now)

    def _refresh_state(self) -> LeaderState:
        """Update and return the facts that decisions are based on."""
        view, roster, reconciler = self._ledger.view, self._roster, self._services.reconciler
        self._refresh_round_state(self._coordinator)
        self._state = replace(
            self._state,
            members=roster.members,
            disconnected_since=roster.disconnected_since,
            disconnected_in_round=roster.disconnected_in_round,
            notice_received_at=roster.noticed_at,
            last_agent_by_node=roster.last_agent_by_node,
            phase=self._round_phase(view),
            ready_checkpoints=self._previous_rounds.uncommitted_checkpoints(
                view, self._coordinator
            ),
            group_statuses=reconciler.group_statuses,
            status_as_of=reconciler.status_as_of,
            granted_at=reconciler.granted_at,
            refused_at=reconciler.refused_at,
            validator_refused_at=reconciler.validator_refused_at,
            user_code_error=self._user_code_error(),
        )
        return self._state

    def _round_phase(self, view: View) -> RoundPhase:
        if view.round is None:
            return self._no_round
        workers_stopped = self._roster.are_all_stopped(view.round.assignments)
        if self._open_round is None:
            # Another leader opened it: its coordinator is lost, and the round fails since then.
            return Failing(
                round=view.round, since=self._state.leading_since, workers_stopped=workers_stopped
            )
        return self._open_round.phase(self._failing_since, workers_stopped=workers_stopped)

    def _refresh_round_state(self, coordinator: RoundCoordinator | None) -> None:
        reports = coordinator.reports if coordinator else None
        callback_runner = self._services.callback_runner
        self._state = replace(
            self._state,
            reports_delivered=(reports is None or reports.is_settled)
            and (callback_runner is None or callback_runner.is_idle)
            and self._are_hooks_done(),
            latest_metrics=self._latest_metrics(),
        )

    @property
    def _coordinator(self) -> RoundCoordinator | None:
        return self._open_round.coordinator if self._open_round else None

    def _latest_metrics(self) -> dict[str, Any] | None:
        latest = self._coordinator.reports.latest_metrics if self._coordinator else None
        return latest if latest is not None else self._state.latest_metrics

    def _user_code_error(self) -> UserCodeError | None:
        """Return the exception of the user's callbacks, else of the hooks, else None."""
        errors = (
            runner.user_code_error()
            for runner in (self._services.callback_runner, self._services.backend_hook_runner)
            if runner is not None
        )
        return next(filter(None, errors), None)

    def _are_hooks_done(self) -> bool:
        """Whether no hook is queued or running, including those of the open round."""
        if self._open_round is not None and self._open_round.hook_gates is not None:
            return self._open_round.hook_gates.is_done
        return (
            self._services.backend_hook_runner is None or self._services.backend_hook_runner.is_idle
        )

    def _maintain_liveness(self, view: View, timing: RunTiming, now: float) -> None:
        self._lease.renew_if_due(
            _CLEANUP_LEASE_INTERVAL_S if view.fit_end else timing.lease_interval_s, now
        )
        if now >= self._heartbeat_at:
            self._heartbeat_at = now + timing.heartbeat_interval_s
            # A frozen machine keeps its TCP connection open: only missing messages reveal it.
            for agent in self._roster.find_unresponsive(timing.heartbeat_timeout_s, now):
                self._services.transport.disconnect_agent(agent)
                self._on_agent_disconnected(agent, now)
            self._roster.send_heartbeats()

    def _find_uncommitted_checkpoints(self, view: View, now: float) -> None:
        """Search for complete but uncommitted checkpoints before the next round is opened."""
        if self._no_round.bucket_searched or view.round is not None or view.fit_end is not None:
            return
        # Uploads that are still in progress may complete a further checkpoint.
        if pending_uploads.wait_for_uploads(view, self._refresh_state(), now) is not None:
            return
        if self._previous_rounds.find_complete_checkpoints(view, now):
            self._no_round = replace(self._no_round, bucket_searched=True)
            self._dirty = True

    def _collect_garbage(self, view: View, now: float) -> None:
        if self._open_round is not None:
            self._open_round.record_assigned_names()
        # No further round is opened that would search for the remains of earlier ones.
        if view.pending_fit_end is not None or view.fit_end is not None:
            self._checkpoint_gc.scan_for_undeleted(view)
        reports = self._coordinator.reports if self._coordinator else None
        self._checkpoint_gc.advance(
            view,
            reports.uncommitted_names if reports else (),
            now,
            (reports or self._previous_rounds).parent_checkpoints,
        )

    def _forward_reports(self, view: View, now: float) -> None:
        """Deliver reports, run hooks, and write metrics to the bucket."""
        if self._open_round is not None:
            self._open_round.deliver_matched_reports()
            # The end of the run then depends on callbacks and hooks, which cause no event.
            self._dirty |= bool(self._open_round.coordinator.returned_ranks)
            self._open_round.advance_hooks()
        self._dirty |= self._user_code_error() is not None
        self._services.report_sink.flush(now, force=view.fit_end is not None)

    def _check_for_hangs(self, now: float) -> None:
        # Ranks of a failing round are being killed: silence is expected.
        if self._open_round is None or self._failing_since is not None:
            return
        report = self._open_round.check_for_hangs(self._ledger.view, now)
        if report is None:
            return
        self._services.write_run_log(report.text)
        for rank in report.hang.ranks if report.hang.ends_round else ():
            failure = RankFailure(
                rank=rank, kind="timeout", message=f"The worker of rank {rank} hung: {report.text}"
            )
            self._record_rank_failure(self._open_round.coordinator.round, rank, failure, now)

    def _next_wake(self, now: float) -> float:
        wakes = [self._heartbeat_at, self._lease.next_wake()]
        # Without it the tick follows the end of the write, which wakes the event loop.
        if self._services.journal_writer.is_settled:
            wakes.append(self._wait_until)
        if self._open_round is not None:
            wakes.append(self._open_round.next_wake(now))
        if (
            not self._no_round.bucket_searched
            or self._checkpoint_gc.is_busy
            or self._services.report_sink.has_unwritten
        ):
            wakes.append(now + _RECHECK_INTERVAL_S)
        return min(wakes)
