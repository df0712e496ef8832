"""`OpenRound`: the round that this leader has opened, with everything that belongs to it.

It carries frames between agents and the round coordinator, and passes the coordinator's results to
the report sink, the callbacks, the backend hooks and the garbage collector.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from spotfit.agent.checkpoint_cleanup import CheckpointGarbageCollector
from spotfit.agent.collectives import OutgoingFrame
from spotfit.agent.hang_detector import HangDetector, HangReport
from spotfit.agent.hook_gates import BackendHookGates
from spotfit.agent.ports import AgentTransport, CallbackRunner
from spotfit.agent.report_sink import ReportSink
from spotfit.agent.round_coordinator import RoundCoordinator
from spotfit.core.codec import DECODE_ERRORS
from spotfit.core.ids import AgentId
from spotfit.ledger import keys
from spotfit.model.events import RankFailure
from spotfit.model.leader_state import (
    Failing,
    LeaderState,
    ReplicaLocation,
    Returned,
    RoundCommit,
    RoundPhase,
    Training,
)
from spotfit.model.topology import Round
from spotfit.model.view import View
from spotfit.policy.preemption import is_replacement_ready
from spotfit.policy.retry_budget import preempted_nodes
from spotfit.policy.validation_schedule import pending_validations
from spotfit.protocol.agent_leader import LeaderToWorker, WorkerToLeader
from spotfit.protocol.worker_agent import PreemptionUpdate

# A hang check that is overdue is repeated at most ten times a second.
_RECHECK_INTERVAL_S = 0.1


class OpenRound:
    """State of one round, discarded when the round ends.

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
        callback_runner: CallbackRunner | None,
    ) -> None:
        self.coordinator = coordinator
        self.hang_detector = hang_detector
        self.hook_gates = hook_gates
        self._round = round_
        self._transport = transport
        self._checkpoint_gc = checkpoint_gc
        self._report_sink = report_sink
        self._callback_runner = callback_runner
        self.replacement_ready_at: float | None = None
        """When workers were informed that a replacement is ready; None before."""
        self.last_commit: RoundCommit | None = None
        self.replica_locations: dict[int, ReplicaLocation] = {}
        self.rank_failures: dict[int, RankFailure] = {}
        """The first failure of each rank: its cause; later ones follow from the abort."""
        self.returned_at = coordinator.opened_at
        """When the last rank returned."""

    def phase(self, failing_since: float | None, *, workers_stopped: bool) -> RoundPhase:
        """The phase of the round, from which the policies decide."""
        coordinator, reports = self.coordinator, self.coordinator.reports
        # Before failures: a machine that is lost after its function returned does not matter.
        if len(coordinator.returned_ranks) == self._round.world_size:
            return Returned(
                round=self._round,
                since=self.returned_at,
                opened_at=coordinator.opened_at,
                result_key=keys.result(self._round.number, 0),
                last_save_error=reports.last_save_error,
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
        )

    # --- frames ------------------------------------------------------------------------------

    def on_worker_message(
        self, agent: AgentId, message: WorkerToLeader, now: float
    ) -> RankFailure | None:
        """Process the frames of a worker and send the answers.

        Returns a failure if a frame is invalid. Ignores frames of ranks that are not the agent's.
        """
        assignment = self._round.assignment_of(agent)
        # A frame counts only if its rank runs on the node of the agent that sent it.
        if assignment is None or message.rank not in assignment.ranks:
            return None
        failure: RankFailure | None = None
        for frame in message.frames:
            try:
                self.send_to_workers(self.coordinator.handle_frame(message.rank, frame, now))
            # Only this rank fails: the valid frames of the same message count.
            except DECODE_ERRORS as error:
                text = f"The worker of rank {message.rank} sent an invalid message: {error}"
                failure = failure or RankFailure(rank=message.rank, kind="died", message=text)
        return failure

    def send_to_workers(self, frames: Sequence[OutgoingFrame]) -> None:
        """Send frames to workers; rank None means all workers of the round."""
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
        """Ignore later frames of these ranks; answer the others if they need not wait for them."""
        self.send_to_workers(self.coordinator.mark_disconnected(ranks))

    def announce_preemption(self, view: View, state: LeaderState, now: float) -> None:
        """Send all workers the nodes with preemption notices.

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
        """Write a marker for every checkpoint name that was assigned since the last call."""
        while self.coordinator.reports.assigned_names:
            assigned = self.coordinator.reports.assigned_names.popleft()
            self._checkpoint_gc.record_name(
                assigned.name, self.coordinator.round, is_generated=assigned.is_generated
            )

    def deliver_matched_reports(self) -> None:
        """Pass matched reports to the callbacks and to the metrics file in the bucket.

        Reports stay in order: one with an uncommitted checkpoint delays those after it.
        """
        # A callback may read the checkpoint: only committed ones are protected from deletion.
        uncommitted = {ready.name for ready in self.coordinator.reports.ready_checkpoints}
        reports = self.coordinator.reports.matched_reports
        while reports and reports[0].checkpoint not in uncommitted:
            report = reports.popleft()
            self._report_sink.add(self.coordinator.round, report)
            if self._callback_runner is not None:
                self._callback_runner.send_report(report.metrics_by_rank, report.checkpoint)

    def advance_hooks(self) -> None:
        """Run the backend hooks that are due and send their frames."""
        if self.hook_gates is not None:
            self.send_to_workers(self.hook_gates.advance())

    def check_for_hangs(self, view: View, now: float) -> HangReport | None:
        """Return the report of a hang whose stacks were collected, once."""
        # A rank that waits for a validation makes no progress, and does not hang.
        self.coordinator.set_validation_pending(is_pending=bool(pending_validations(view)), now=now)
        return self.hang_detector.check(now)

    def next_wake(self, now: float) -> float:
        """When the next timeout or hang check is due."""
        timeout_check_at = self.coordinator.next_timeout_check()
        hang_check_at = max(self.hang_detector.next_check(), now + _RECHECK_INTERVAL_S)
        return min(hang_check_at, math.inf if timeout_check_at is None else timeout_check_at)

    # --- end of the round --------------------------------------------------------------------

    def abandon_workers(self) -> None:
        """Fail the hook that waits for workers of this failed round."""
        if self.hook_gates is not None:
            self.hook_gates.abandon_workers()

    def close(self) -> None:
        """End the round; the backend is shut down."""
        if self.hook_gates is not None:
            self.hook_gates.close()
