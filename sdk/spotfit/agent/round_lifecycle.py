"""`RoundLifecycle`: opens, fails and closes the rounds of one term of leadership.

| state    | event                                                | next                        |
|----------|------------------------------------------------------|-----------------------------|
| no round | journal: `RoundOpened`                               | open                        |
| open     | a rank fails, or a required agent disconnects        | failing (`AbortRound` sent) |
| open     | journal: `RoundClosed` or `TrainingEnded`            | no round                    |
| failing  | journal: `RoundClosed`, decided once workers stopped | no round                    |

A leader that finds a round opened by another leader starts in "failing".

`OpenRound`: the round that this leader has opened, with everything that belongs to it.

It carries frames between agents and the round coordinator, and passes the coordinator's results to
the report sink, the callbacks, the backend hooks and the garbage collector.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from itertools import takewhile
from typing import Any

import msgspec
from msgspec.structs import replace

from spotfit.agent.callback_delivery import CallbackDelivery
from spotfit.agent.checkpoint_cleanup import CheckpointGarbageCollector
from spotfit.agent.collectives import OutgoingFrame
from spotfit.agent.hang_detector import HangDetector, HangReport
from spotfit.agent.leader_context import LeaderServices, Observations
from spotfit.agent.machine_messages import MachineMessages
from spotfit.agent.ports import AgentTransport
from spotfit.agent.previous_rounds import PreviousRounds
from spotfit.agent.report_matching import MatchedReport, ReportSink
from spotfit.agent.roster import Roster
from spotfit.agent.round_coordinator import BackendHookGates, RoundCoordinator
from spotfit.core.codec import encode
from spotfit.core.errors import IntegrityError
from spotfit.core.ids import AgentId
from spotfit.core.units import format_ranks
from spotfit.host import log
from spotfit.ledger import keys
from spotfit.model.events import CheckpointCommitted, RankFailure, RoundClosed
from spotfit.model.leader_state import (
    Failing,
    LeaderState,
    NoRound,
    ReadyCheckpoint,
    ReplicaLocation,
    Returned,
    RoundCommit,
    RoundPhase,
    Training,
)
from spotfit.model.topology import Round, SnapshotId
from spotfit.model.view import View
from spotfit.policy.preemption import is_replacement_ready, may_continue_without
from spotfit.policy.retry_budget import preempted_nodes
from spotfit.policy.secondary_errors import is_secondary
from spotfit.policy.validation_schedule import pending_validations
from spotfit.protocol.agent_leader import (
    AbortRound,
    FromLeader,
    Join,
    LeaderToWorker,
    SnapshotReplicated,
    StackDump,
    WorkersStopped,
    WorkerTerminated,
    WorkerToLeader,
    WorkerUnresponsive,
)
from spotfit.protocol.worker_agent import (
    CommitConfirmed,
    PreemptionUpdate,
    RequestFinalSave,
    SuggestSave,
)

# --- OpenRound ------------------------------------------------------------------------------------


# A hang check that is overdue is repeated at most ten times a second.
_RECHECK_INTERVAL_S = 0.1


class OpenRound:
    """State of one round on the leader that has opened it; discarded when the round ends.

    `PreviousRounds.absorb_round` saves before what later rounds need.
    """

    def __init__(
        self,
        round_: Round,
        coordinator: RoundCoordinator,
        *,
        hang_detector: HangDetector,
        hook_gates: BackendHookGates | None,
        transport: AgentTransport,
        checkpoint_gc: CheckpointGarbageCollector,
        report_sink: ReportSink,
        callbacks: CallbackDelivery | None,
    ) -> None:
        self.coordinator = coordinator
        self.hang_detector = hang_detector
        self.hook_gates = hook_gates
        self._round = round_
        self._ranks_by_agent = {one.agent: frozenset(one.ranks) for one in round_.assignments}
        self._transport = transport
        self._checkpoint_gc = checkpoint_gc
        self._report_sink = report_sink
        self._callbacks = callbacks
        self.replacement_ready_at: float | None = None
        """When workers were informed that a replacement is ready; None before."""
        self.save_requested_at: float | None = None
        """When the Checkpointer was asked to save before the run is cancelled; None before."""
        self.save_suggested_at: float | None = None
        """When the workers were asked to save because other machines are ready; None before."""
        self.last_commit: RoundCommit | None = None
        self.replica_locations: dict[int, ReplicaLocation] = {}
        self.abort_at = math.inf
        """When the round is aborted because of exceptions that may have another cause."""
        self.rank_failures: dict[int, RankFailure] = {}
        """The first failure of each rank: its cause; later ones follow from the abort."""
        self.returned_at = coordinator.opened_at
        """When the last rank returned."""

    def phase(self, failing_since: float | None, *, workers_stopped: bool) -> RoundPhase:
        """Return the phase of the round, from which the policies decide.

        `failing_since`: event-loop time in seconds of the first failure, None without one.
        `workers_stopped`: whether no connected node has workers of the round. If all functions have
        returned and the last steps are saved, the phase is `Returned` even after a failure.
        """
        coordinator, reports = self.coordinator, self.coordinator.reports
        # A loss before that repeats the last steps, like one before the functions returned.
        is_lost = failing_since is not None and coordinator.has_lost_save_at_end
        is_saved = not reports.is_saving_at_end and not is_lost
        # Before failures: a machine that is lost after its function returned does not matter.
        if len(coordinator.returned_ranks) == self._round.world_size and is_saved:
            return Returned(
                round=self._round,
                since=self.returned_at,
                opened_at=coordinator.opened_at,
                result_key=keys.result(self._round.number, 0),
                last_save_error=reports.last_save_error,
                missing_reports=reports.missing_reports,
                workers_stopped=workers_stopped,
            )
        if failing_since is not None:
            return Failing(
                round=self._round,
                since=failing_since,
                opened_at=coordinator.opened_at,
                rank_failures=self.rank_failures,
                workers_stopped=workers_stopped,
            )
        return Training(
            round=self._round,
            since=coordinator.opened_at,
            running_ranks=coordinator.running_ranks,
            uploading_ranks=reports.uploading_ranks,
            last_commit=self.last_commit,
            replacement_ready_at=self.replacement_ready_at,
            replica_locations=self.replica_locations,
            save_requested_at=self.save_requested_at,
            save_suggested_at=self.save_suggested_at if coordinator.has_checkpointer else None,
        )

    # --- frames ------------------------------------------------------------------------------

    def is_from_own_node(self, agent: AgentId, message: RoundMessage) -> bool:
        """Whether the rank in `message`, if it has one, runs on the node of `agent` in this round.

        Any holder of the run key can send messages: none may fail the worker of another node.
        """
        if isinstance(message, WorkersStopped):
            return True
        ranks = {message.rank}
        if isinstance(message, WorkerTerminated) and message.failure is not None:
            ranks.add(message.failure.rank)
        if ranks <= self._ranks_by_agent.get(agent, frozenset()):
            return True
        log.warning(
            "round.message_ignored",
            round=self._round.number,
            agent=agent,
            ranks=sorted(ranks),
            message=type(message).__name__,
        )
        return False

    def on_worker_message(
        self, agent: AgentId, message: WorkerToLeader, now: float
    ) -> RankFailure | None:
        """Process the frames of one worker and send the answers to workers.

        Returns a failure of that rank if one of its frames is invalid (the others still count),
        else None. Ignores frames of ranks that do not run on the node of `agent`.
        """
        if not self.is_from_own_node(agent, message):
            return None
        failure: RankFailure | None = None
        for frame in message.frames:
            try:
                self.send_to_workers(self.coordinator.handle_frame(message.rank, frame, now))
            # Only this rank fails: the valid frames of the same message count.
            except IntegrityError as error:
                text = f"The worker of rank {message.rank} sent an invalid message: {error.message}"
                failure = failure or RankFailure(rank=message.rank, kind="died", message=text)
        return failure

    def send_to_workers(self, frames: Sequence[OutgoingFrame]) -> None:
        """Send frames to workers by way of their agents; rank None means all workers of the round.

        Frames for agents that are not connected are dropped.
        """
        for rank, frame in frames:
            # For all ranks one message per node, which the agent distributes to its workers.
            assignments = (
                self._round.assignments
                if rank is None
                else (self._round.assignment_for_rank(rank),)
            )
            message = LeaderToWorker(round=self._round.number, rank=rank, frame=frame)
            for assignment in assignments:
                self._transport.send_to_agent(assignment.agent, message)

    def mark_disconnected(self, ranks: Sequence[int]) -> None:
        """Ignore later reports, broadcasts and returns of these ranks, whose agent disconnected.

        Sends answers to ranks that need not wait for them any more. Does not fail the round.
        """
        self.send_to_workers(self.coordinator.mark_disconnected(ranks))

    def request_final_save(self, reason: str, now: float) -> None:
        """Ask the Checkpointer to save before the run is cancelled; no effect without one."""
        if self.coordinator.has_checkpointer and self.save_requested_at is None:
            self.save_requested_at = now
            self.send_to_workers([(None, RequestFinalSave(reason=reason))])

    def suggest_save(self, reason: str, now: float) -> None:
        """Ask the Checkpointer to save soon, once in this round; no effect without one."""
        if self.save_suggested_at is None:
            self.save_suggested_at = now
            self.send_to_workers([(None, SuggestSave(reason=reason))])

    def announce_preemption(self, view: View, state: LeaderState, now: float) -> None:
        """Send all workers the nodes with preemption notices, and whether a replacement is ready.

        Does nothing if no node of this round has a notice. Called for each new notice, and once
        when the replacement becomes ready (`replacement_ready_at`). With `spec.relax_collectives`,
        reports without a snapshot and `preemption_info` then do not wait for ranks of these nodes.

        Ranks receive the update at different steps; `preemption_info`, a collective, makes them
        agree on it.
        """
        leaving = [
            assignment for assignment in self._round.assignments if assignment.agent in view.notices
        ]
        # The notice may be about a machine that is not part of this round, such as a spare one.
        if not leaving:
            return
        preempted = preempted_nodes(leaving, view)
        is_ready = is_replacement_ready(view, state)
        self.replacement_ready_at = now if is_ready else None
        update = PreemptionUpdate(
            deadline_ms=preempted.deadline_ms,
            node_to_ranks=preempted.node_to_ranks,
            replacement_ready=is_ready,
        )
        self.send_to_workers([(None, update)])
        # Their machines may end before they join: the others must not wait for them.
        if view.spec.relax_collectives:
            ranks = frozenset(rank for ranks in preempted.node_to_ranks.values() for rank in ranks)
            self.send_to_workers(self.coordinator.exclude_ranks(ranks))

    # --- results of the coordinator ----------------------------------------------------------

    def record_assigned_names(self) -> None:
        """Queue a marker object for every checkpoint name assigned since the last call.

        The markers are written by later calls of `CheckpointGarbageCollector.advance`.
        """
        while self.coordinator.reports.assigned_names:
            assigned = self.coordinator.reports.assigned_names.popleft()
            self._checkpoint_gc.record_name(
                assigned.name, self.coordinator.round, is_generated=assigned.is_generated
            )

    def deliver_matched_reports(self) -> None:
        """Pass matched reports to the `ReportSink` and to the callbacks, each once, in order.

        Called at each tick. A report whose checkpoint is not committed yet delays the callbacks of
        those after it. Answers the workers that wait for these reports.
        """
        reports = self.coordinator.reports.matched_reports
        # Before the commit: if this leader is lost afterwards, the report is not made again.
        for report in reports:
            self._report_sink.add(self.coordinator.round, report)
        # A callback may read the checkpoint: only committed ones are protected from deletion.
        uncommitted = {ready.name for ready in self.coordinator.reports.ready_checkpoints}
        while reports and reports[0].checkpoint not in uncommitted:
            report = reports.popleft()
            if self._callbacks is not None:
                self._callbacks.send_report(self.coordinator.round, report)
        self.send_to_workers(self.coordinator.reports.answer_waiting())

    def advance_hooks(self) -> None:
        """Run the backend hooks that are due and send their frames to workers; called at each tick.

        Does nothing if the backend has no hooks.
        """
        if self.hook_gates is not None:
            self.send_to_workers(self.hook_gates.advance())

    def check_for_hangs(self, view: View, now: float) -> HangReport | None:
        """Return the report of a hang once, when its stacks were collected and stored; else None.

        Called at each tick: it also requests the stacks. Ranks that may wait for a pending
        validation do not count as hung.
        """
        # A rank that waits for a validation makes no progress, and does not hang.
        self.coordinator.set_validation_pending(is_pending=bool(pending_validations(view)), now=now)
        return self.hang_detector.check(now)

    def next_wake(self, now: float) -> float:
        """Event-loop time in seconds at which the next timeout or hang check is due.

        `math.inf` if there is none. A hang check that is overdue is due 0.1 s after `now`.
        """
        timeout_check_at = self.coordinator.next_timeout_check()
        hang_check_at = max(self.hang_detector.next_check(), now + _RECHECK_INTERVAL_S)
        timeout_check_at = math.inf if timeout_check_at is None else timeout_check_at
        return min(hang_check_at, timeout_check_at, self.abort_at)

    # --- end of the round --------------------------------------------------------------------

    def abandon_workers(self) -> None:
        """Fail the worker calls of this failed round's backend hooks; no effect without hooks."""
        if self.hook_gates is not None:
            self.hook_gates.abandon_workers()

    def close(self) -> None:
        """End the round: fail the hooks' worker calls; queue `on_shutdown` of a started backend."""
        if self.hook_gates is not None:
            self.hook_gates.close()


def _deliver_report(
    round_number: int,
    report: MatchedReport,
    report_sink: ReportSink,
    callbacks: CallbackDelivery | None,
) -> None:
    report_sink.add(round_number, report)
    if callbacks is not None:
        callbacks.send_report(round_number, report)


QueueableMessage = WorkerToLeader | WorkerTerminated | WorkersStopped
RoundMessage = QueueableMessage | SnapshotReplicated | WorkerUnresponsive | StackDump
"""The messages of an agent about the round whose number they carry."""


class RoundLifecycle:
    """The open round, and what later rounds need of the previous ones, for one term of leadership.

    Records in `observations` what the policies decide from. It decides nothing itself except to
    stop the workers of a round that cannot continue. `now` is event-loop time in seconds.
    """

    def __init__(
        self,
        services: LeaderServices,
        *,
        roster: Roster,
        observations: Observations,
        checkpoint_gc: CheckpointGarbageCollector,
        now: float,
    ) -> None:
        self._services = services
        self._ledger = services.journal_writer.ledger
        self._roster = roster
        self._observations = observations
        self._checkpoint_gc = checkpoint_gc
        self._previous_rounds = PreviousRounds(
            self._ledger, services.node_services.background_calls()
        )
        runner = services.callback_runner
        self.callbacks = (
            CallbackDelivery(runner, self._ledger, services.node_services.background_calls())
            if runner is not None
            else None
        )
        self.open_round: OpenRound | None = None
        """The open round if this leader has opened it."""
        self.failing_since: float | None = None
        """When the first failure or disconnect of the open round was observed."""
        self._no_round = NoRound(since=now, bucket_searched=False)
        """The phase while no round is open."""
        self._reports_before: dict[str, int] = {}
        """By ready checkpoint, the number of reports to write before its commit."""
        self._reports_before_saves: dict[str, int] = {}
        """By named checkpoint, the number of reports that had been added when it was named."""
        self._machine_messages = MachineMessages()
        self._early_messages: list[tuple[AgentId, QueueableMessage]] = []
        """Messages about a round whose entry is being written and not confirmed yet."""

    @property
    def coordinator(self) -> RoundCoordinator | None:
        """The live coordinator of the open round; None if no round is open.

        Also None if the open round was opened by another leader: its coordinator is lost.
        """
        return self.open_round.coordinator if self.open_round else None

    @property
    def is_bucket_searched(self) -> bool:
        """Whether the bucket was searched for complete checkpoints since the last round ended.

        False for a new leader. Only meaningful while no round is open.
        """
        return self._no_round.bucket_searched

    @property
    def parent_checkpoints(self) -> set[str]:
        """Names of committed checkpoints whose files are shared by uploads in progress.

        They must not be deleted meanwhile. Without an open round: those of the last one, whose
        uploads may continue.
        """
        # Uploads of a closed round continue on the nodes until the next round is opened.
        source = self.open_round.coordinator.reports if self.open_round else self._previous_rounds
        return source.parent_checkpoints

    def _find_open_round(self, round_number: int | None) -> OpenRound | None:
        """Return the open round if it has that number and was opened by this leader."""
        return (
            self.open_round
            if self.open_round and self.open_round.coordinator.round == round_number
            else None
        )

    # --- messages of agents ------------------------------------------------------------------

    def on_message(self, agent: AgentId, message: RoundMessage, now: float) -> None:
        """Process a message of an agent about the round whose number it carries.

        A message about a round whose entry is not confirmed yet is processed by `open`. If the
        round is over or of another leader, only `WorkersStopped` has an effect, on the roster, and
        reports that were made before the workers stopped. A message about a rank that does not run
        on the node of `agent` is ignored.
        """
        last_round = self._ledger.view.last_round
        next_round = (last_round.number if last_round else 0) + 1
        if isinstance(message, QueueableMessage) and message.round >= next_round:
            # The agent read the entry before the write of this leader was confirmed. No agent can
            # know a later round.
            if message.round == next_round:
                self._early_messages.append((agent, message))
            return
        if isinstance(message, WorkersStopped):
            self._roster.mark_stopped(
                agent,
                message.round,
                is_uploading=message.is_uploading,
                snapshot_shards=message.snapshot_shards,
            )
            self._observations.record()
        open_round = self._find_open_round(message.round)
        if open_round is None:
            if isinstance(message, WorkerToLeader):
                self._record_late_frames(agent, message, now)
            return
        if not open_round.is_from_own_node(agent, message):
            return
        match message:
            case WorkerToLeader():
                self._process_frames(open_round, agent, message, now)
            case WorkerTerminated(rank=rank, failure=failure):
                self._record_rank_failure(open_round, rank, failure, now=now)
            case WorkersStopped():
                self._fail_if_unexplained(open_round, agent, now)
            case SnapshotReplicated(rank=rank):
                open_round.replica_locations[rank] = ReplicaLocation(
                    step=message.step,
                    peer_store_address=message.peer_store_address,
                    reported_at=now,
                )
                self._observations.record()
            case WorkerUnresponsive(rank=rank, silent_s=silent_s):
                open_round.hang_detector.record_liveness(rank, silent_s)
            case StackDump():
                open_round.hang_detector.add_stack_dump(message)

    def _fail_if_unexplained(self, open_round: OpenRound, agent: AgentId, now: float) -> None:
        opened = self._ledger.view.round
        assignment = opened.assignment_of(agent) if opened else None
        explained = open_round.coordinator.returned_ranks | open_round.rank_failures.keys()
        # If its workers have raised, the round is failing, or is aborted at `abort_at`.
        if assignment is not None and not explained.issuperset(assignment.ranks):
            self.fail(now)

    def _record_late_frames(self, agent: AgentId, message: WorkerToLeader, now: float) -> None:
        last_round = self._ledger.view.last_round
        assignment = last_round.assignment_of(agent) if last_round is not None else None
        if assignment is not None and message.rank in assignment.ranks:
            self._previous_rounds.record_late_frames(message, now)

    def _process_frames(
        self, open_round: OpenRound, agent: AgentId, message: WorkerToLeader, now: float
    ) -> None:
        coordinator = open_round.coordinator
        returned_before = len(coordinator.returned_ranks)
        running_before = len(coordinator.running_ranks)
        failure = open_round.on_worker_message(agent, message, now)
        self._record_rank_failure(open_round, message.rank, failure, now=now)
        if len(coordinator.returned_ranks) > returned_before:
            open_round.returned_at = now
            self._observations.record()
            if coordinator.has_lost_save_at_end:
                self.fail(now)
        # The last rank to call its function: the entry of it is written.
        if running_before < len(coordinator.running_ranks) == coordinator.world_size:
            self._observations.record()
        # Other frames change no fact that a decision depends on: reports are too many for that.
        if coordinator.reports.ready_checkpoints:
            self._observations.record()

    def _record_rank_failure(
        self, open_round: OpenRound, rank: int, failure: RankFailure | None, *, now: float
    ) -> None:
        if failure is None:
            return
        returned = open_round.coordinator.returned_ranks - {rank}
        if returned and failure.kind == "raised":
            # The usual cause of "connection closed by peer" in a collective.
            text = f"({format_ranks(returned)} returned from the training function before)"
            failure = replace(failure, message=f"{text}\n{failure.message}")
        open_round.rank_failures.setdefault(rank, failure)
        if self.failing_since is None and self._may_have_other_cause(open_round):
            # Aborting kills the ranks that would still raise, and discards what they have raised.
            settle_s = self._ledger.view.spec.timing.failure_settle_s
            open_round.abort_at = min(open_round.abort_at, now + settle_s)
        else:
            self.fail(now)

    def _may_have_other_cause(self, open_round: OpenRound) -> bool:
        """Whether a rank that has not failed yet may have caused the failures, or refute theirs.

        So if all exceptions are about a lost peer: its failure may arrive later. Or if ranks on
        nodes with a notice have raised: it is an error of user code if others raise the same.
        """
        failed = open_round.rank_failures
        if any(one.kind != "raised" or one.is_permanent for one in failed.values()):
            return False
        view = self._ledger.view
        assignments = view.round.assignments if view.round else ()
        active = {rank for one in assignments for rank in one.ranks}
        active -= open_round.coordinator.returned_ranks
        if failed.keys() >= active:
            return False
        leaving = {rank for one in assignments if one.agent in view.notices for rank in one.ranks}
        primary = {rank for rank, one in failed.items() if not is_secondary(one)}
        return not primary or (primary <= leaving and bool(active - leaving))

    def on_agent_joined(self, agent: AgentId, join: Join, now: float) -> None:
        """Compare what an agent's `Join` on a new connection reports with the open round.

        Fails the round if the agent still runs workers of it: frames may have been lost. If the
        round has failed before, the agent receives `AbortRound` again.
        """
        if self._find_open_round(join.running_round) is not None:
            self.fail(now)  # frames of its workers may have been lost before it rejoined
        opened = self._ledger.view.round
        if self.failing_since is not None and opened and opened.assignment_of(agent):
            # It was not connected when the round was aborted.
            self._services.transport.send_to_agent(agent, AbortRound(round=opened.number))

    def on_agent_disconnected(self, agent: AgentId, now: float) -> None:
        """Fail the open round at `now` unless it may continue without the ranks of that agent.

        No effect if the agent is not part of the open round.
        """
        view = self._ledger.view
        assignment = view.round.assignment_of(agent) if view.round else None
        if assignment is None or self.open_round is None:
            return
        self.open_round.mark_disconnected(assignment.ranks)
        # All ranks have returned then: none is left that could save the last steps.
        has_lost_save = self.open_round.coordinator.has_lost_save_at_end
        if has_lost_save or not may_continue_without(view, assignment):
            self.fail(now)

    def fail(self, now: float) -> None:
        """Mark the open round as failing since `now`, and send `AbortRound` to all its agents.

        Only the first call for a round does this. The journal entry that closes the round follows
        from a later decision, once all workers have stopped.
        """
        self._observations.record()
        if self.failing_since is not None:
            return
        self.failing_since = now
        if self.open_round is not None:
            # The hook of a user's backend may wait for an answer of the workers that are killed.
            self.open_round.abandon_workers()
            self.open_round.abort_at = math.inf  # the event loop would not wait after that time
        opened = self._ledger.view.round
        if opened is not None:
            self._send_to_agents(opened, AbortRound(round=opened.number))

    def _send_to_agents(self, round_: Round, message: FromLeader) -> None:
        for assignment in round_.assignments:
            self._services.transport.send_to_agent(assignment.agent, message)

    # --- entries of the journal --------------------------------------------------------------

    def open(self, opened: Round, now: float) -> None:
        """Create the state of a round whose `RoundOpened` entry was applied to the view.

        Then processes the messages that arrived early. The round fails at once if one of its agents
        has disconnected or may not enter it any more.
        """
        self._deliver_counted_reports(opened.checkpoint_name, opened.memory_snapshot)
        self._previous_rounds.begin_round(opened.number)
        self.open_round = open_round = self._create_open_round(opened, now)
        self._checkpoint_gc.scan_for_debris(self._ledger.view, before_round=opened.number)
        self._roster.assign_round(opened.assignments, opened.number)
        self._describe_machines(opened)
        self.failing_since = None
        self._observations.record()
        for assignment in opened.assignments:
            if not self._roster.can_enter(assignment, opened.number):
                # The agent has left between the decision and the entry.
                open_round.mark_disconnected(assignment.ranks)
                self.fail(now)
        # After the reset above, which would discard a failure that these messages report.
        messages, self._early_messages = self._early_messages, []
        for agent, message in messages:
            if message.round == opened.number and agent in self._roster.members:
                self.on_message(agent, message, now)

    def _describe_machines(self, opened: Round) -> None:
        statuses = map(self._roster.members.get, (one.agent for one in opened.assignments))
        members = [status.member for status in statuses if status is not None]
        for text in (
            *self._machine_messages.describe_sizes(members),
            *self._machine_messages.warn_of_shared_instances(opened.assignments),
        ):
            self._services.node_services.write_run_log(text)

    def _create_open_round(self, opened: Round, now: float) -> OpenRound:
        spec, services = self._ledger.view.spec, self._services
        previous_rounds = self._previous_rounds
        coordinator = RoundCoordinator(
            opened.number,
            opened.world_size,
            default_checkpoint_name=services.node_services.default_checkpoint_name,
            # Evaluated per snapshot: ranks of this very round may find the latest one corrupt.
            parent_snapshot=lambda: previous_rounds.parent_snapshot(self._ledger.view, coordinator),
            latest_checkpoint_named=previous_rounds.latest_checkpoint_named,
            collective_timeout_s=spec.collective_timeout_s,
            collective_warn_s=spec.collective_warn_interval_s,
            keep_all_metrics=spec.has_callbacks,
            now=now,
        )
        hang_detector = HangDetector(
            coordinator,
            spec.hang_detection,
            request_stacks=partial(self._send_to_agents, opened),
            ledger=self._ledger,
            background_calls=services.node_services.background_calls(),
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
            callbacks=self.callbacks,
        )

    def close(self, closed: RoundClosed, now: float) -> None:
        """End a round whose `RoundClosed` entry was applied, keeping its complete checkpoints.

        Delivers its reports and failures to the callbacks, and aborts workers that still run. Works
        also for a round that another leader opened.
        """
        # Infinity if another leader opened the round: the time of its commits is unknown.
        uncommitted_work_s = math.inf
        if self.open_round is not None:
            # Reports whose checkpoint was committed by the entry before are delivered, too.
            self.open_round.deliver_matched_reports()
            self.open_round.record_assigned_names()
            self._previous_rounds.adopt_ready_checkpoints(self.open_round.coordinator)
            self._previous_rounds.keep_undelivered_reports(self.open_round.coordinator)
            commit = self.open_round.last_commit
            uncommitted_work_s = now - (
                commit.committed_at if commit else self.open_round.coordinator.opened_at
            )
        if self.callbacks is not None and closed.failures:
            self.callbacks.send_failure(
                {one.rank: one.pickle_key for one in closed.failures if one.pickle_key},
                {one.rank: one.message for one in closed.failures},
            )
        # An agent that misses earlier entries cannot apply this one: AbortRound needs no journal.
        if self.failing_since is None:
            self._roster.broadcast(AbortRound(round=closed.round_number))
        self._discard_open_round(
            NoRound(since=now, bucket_searched=False, uncommitted_work_s=uncommitted_work_s)
        )

    def end_training(self, now: float) -> None:
        """End the last round after the entry `TrainingEnded`; no round follows.

        Delivers its matched reports first, because no later call would.
        """
        if self.open_round is not None:
            self.open_round.deliver_matched_reports()
        self._deliver_final_reports()
        self._discard_open_round(replace(self._no_round, since=now))

    def end_fit(self, now: float) -> None:
        """Start, after the entry `FitEnded`, the time that agents have to exit by themselves.

        It counts from `now`; afterwards the leader releases machines whose agents still run.
        """
        self._deliver_final_reports()
        self._no_round = replace(self._no_round, since=now)
        self._observations.record()

    def end_term(self) -> None:
        """Deliver the reports that wait for an upload, because another leader follows.

        It decides which of them count. Those up to the latest snapshot do, unless that is lost.
        """
        if self.open_round is not None:
            self._previous_rounds.keep_undelivered_reports(self.open_round.coordinator)
        self._deliver_final_reports(self._previous_rounds.latest_snapshot)

    def _deliver_final_reports(self, memory_snapshot: SnapshotId | None = None) -> None:
        latest = self._ledger.view.latest_checkpoint
        self._deliver_counted_reports(latest.name if latest is not None else None, memory_snapshot)

    def _deliver_counted_reports(
        self, checkpoint_name: str | None, memory_snapshot: SnapshotId | None
    ) -> None:
        """Deliver the reports of closed rounds that their end has delayed, if they count."""
        counted = self._previous_rounds.take_counted_reports(
            self._ledger.view, checkpoint_name=checkpoint_name, memory_snapshot=memory_snapshot
        )
        for round_number, report in counted:
            _deliver_report(
                round_number,
                report,
                self._services.report_sink,
                self.callbacks,
            )

    def _discard_open_round(self, no_round: NoRound) -> None:
        """Keep what the result and later rounds need, and close the round."""
        self._no_round, self.failing_since = no_round, None
        self._observations.record(latest_metrics=self._latest_metrics())
        if self.open_round is not None:
            self._previous_rounds.absorb_round(self.open_round.coordinator)
            self.open_round.close()
            self.open_round = None

    def on_checkpoint_committed(self, event: CheckpointCommitted, now: float) -> None:
        """Record a committed checkpoint; confirm it to the workers if it is of the open round.

        Called for each `CheckpointCommitted` entry, which may be of an earlier round. All workers
        of the open round receive `CommitConfirmed`.
        """
        self._previous_rounds.mark_committed(event.name)
        # The state is the one that the commit was decided from, and still lists the checkpoint.
        ready_checkpoints = self._observations.state.ready_checkpoints
        taken_at = next(
            (
                ready.snapshot_taken_at
                for ready in ready_checkpoints
                if event.is_snapshot and ready.name == event.name
            ),
            None,
        )
        if self.open_round is not None:
            self.open_round.last_commit = RoundCommit(committed_at=now, snapshot_taken_at=taken_at)
        self._observations.record()
        if (open_round := self._find_open_round(event.round)) is not None:
            open_round.coordinator.reports.remove_committed(event.report_index)
            open_round.send_to_workers(
                [(None, CommitConfirmed(checkpoint_name=event.name, metrics=event.metrics))]
            )

    # --- tick --------------------------------------------------------------------------------

    def search_bucket(self, view: View, now: float) -> None:
        """Start or poll the search for complete but uncommitted checkpoints in the bucket.

        Does not block; errors of the store are retried. Call it at each tick between rounds until
        `is_bucket_searched`.
        """
        if self._previous_rounds.find_complete_checkpoints(view, now):
            self._no_round = replace(self._no_round, bucket_searched=True)
            self._observations.record()

    def deliver_reports(self) -> None:
        """Pass matched reports to callbacks and `ReportSink`, and run the hooks that are due.

        Called at each tick. No effect without an open round.
        """
        if self.open_round is not None:
            self.open_round.deliver_matched_reports()
            # Before the next flush: it then includes the reports that the commits wait for.
            reports, added = (
                self.open_round.coordinator.reports,
                self._services.report_sink.added_count,
            )
            for ready in reports.ready_checkpoints:
                self._reports_before.setdefault(ready.name, added)
            self._reports_before_saves = {
                name: self._reports_before_saves.get(name, added)
                for name in reports.uncommitted_names
            }
            # The end of the run then depends on callbacks and hooks, which cause no event.
            if self.open_round.coordinator.returned_ranks:
                self._observations.record()
            self.open_round.advance_hooks()

    def advance_callbacks(self, view: View, now: float) -> None:
        """Repeat the callbacks that were lost with an earlier leader; called at each tick."""
        if self.callbacks is None:
            return
        was_idle = self.callbacks.is_idle
        is_searched = self.open_round is not None or self._no_round.bucket_searched
        are_commits_known = view.fit_end is not None or (
            is_searched and not self._previous_rounds.uncommitted_checkpoints(view, None)
        )
        self.callbacks.advance(view, now, are_commits_known=are_commits_known)
        if self.callbacks.is_idle != was_idle:
            self._observations.record()

    def check_timeouts(self, view: View, now: float) -> None:
        """Abort collectives after their timeout, and fail the round if ranks hang.

        Called at each tick. The report of a hang is written to the run's log once; it fails the
        round only if the configuration requires that. No hang checks while the round is failing.
        """
        if self.open_round is None:
            return
        self.open_round.send_to_workers(self.open_round.coordinator.check_timeouts(now))
        # Ranks of a failing round are being killed: silence is expected.
        if self.failing_since is not None:
            return
        if now >= self.open_round.abort_at:
            self.fail(now)
            return
        report = self.open_round.check_for_hangs(view, now)
        if report is None:
            return
        self._services.node_services.write_run_log(report.text)
        for rank in report.hang.ranks if report.hang.ends_round else ():
            message = f"The worker of rank {rank} hung: {report.text}"
            failure = RankFailure(rank=rank, kind="timeout", message=message)
            self._record_rank_failure(self.open_round, rank, failure, now=now)

    def observed_facts(self, view: View) -> dict[str, Any]:
        """Return the fields of `LeaderState` that follow from the rounds, by field name.

        They are `phase`, `reports_delivered`, `latest_metrics` and `ready_checkpoints`. Called by
        the leader before each decision.
        """
        open_round, coordinator = self.open_round, self.coordinator
        reports = coordinator.reports if coordinator else None
        hooks = self._services.backend_hook_runner
        # An open round also has hooks that are not submitted yet.
        if open_round is not None and open_round.hook_gates is not None:
            are_hooks_done = open_round.hook_gates.is_done
        else:
            are_hooks_done = hooks is None or hooks.is_idle
        return {
            "phase": self._phase(view),
            "reports_delivered": (reports is None or reports.is_settled)
            and (self.callbacks is None or self.callbacks.is_idle)
            and are_hooks_done,
            "latest_metrics": self._latest_metrics(),
            "ready_checkpoints": self._committable_checkpoints(view),
        }

    @property
    def awaits_report_sink(self) -> bool:
        """Whether reports should be written now: the commit of a checkpoint waits for them.

        Or will wait for them once its files are uploaded.
        """
        sink = self._services.report_sink
        counts = (*self._reports_before.values(), *self._reports_before_saves.values())
        return any(count > sink.written_count for count in counts)

    def _committable_checkpoints(self, view: View) -> tuple[ReadyCheckpoint, ...]:
        """Return the ready checkpoints whose reports are in the bucket, oldest first.

        If the leader is lost after a commit, its report and those before are not made again.
        """
        sink = self._services.report_sink
        ready = self._previous_rounds.uncommitted_checkpoints(view, self.coordinator)
        for one in ready:
            # It may not have stored the report. Readers ignore the second one, as `sink` does here.
            if self._previous_rounds.is_of_lost_leader(one.round):
                metrics = (msgspec.Raw(encode(one.metrics)),)
                report = MatchedReport(one.report_index, metrics, one.name)
                sink.add(one.round, report)
                if self.callbacks is not None:
                    self.callbacks.adopt_report(one.round, report)
        # The next round must not be opened without a complete checkpoint of this one.
        if self.open_round is None or self.failing_since is not None:
            self._reports_before.clear()
            return ready
        self._reports_before = {
            one.name: self._reports_before.get(one.name, sink.added_count) for one in ready
        }
        return tuple(
            takewhile(lambda one: self._reports_before[one.name] <= sink.written_count, ready)
        )

    def _phase(self, view: View) -> RoundPhase:
        if view.round is None:
            return self._no_round
        workers_stopped = self._roster.are_all_stopped(view.round.assignments)
        if self.open_round is None:
            # Opened by another leader: its coordinator is lost, and the round fails since then.
            since = self._observations.state.leading_since
            return Failing(round=view.round, since=since, workers_stopped=workers_stopped)
        return self.open_round.phase(self.failing_since, workers_stopped=workers_stopped)

    def _latest_metrics(self) -> dict[str, Any] | None:
        latest = self.coordinator.reports.latest_metrics if self.coordinator else None
        return latest if latest is not None else self._observations.state.latest_metrics
