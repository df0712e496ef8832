"""Mutants: the invariants detect designs that are known to be wrong; production passes."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
from msgspec import structs

import spotfit.agent.agent
import spotfit.agent.previous_rounds
import spotfit.agent.round_coordinator
import spotfit.control.reconciler
import spotfit.ledger.journal
import spotfit.model.view
import spotfit.policy.failure_detection
import spotfit_localsim.virtual.invariants
from spotfit.agent import round_lifecycle
from spotfit.agent.callback_delivery import CallbackDelivery
from spotfit.agent.checkpoint_cleanup import CheckpointGarbageCollector
from spotfit.agent.collectives import OutgoingFrame
from spotfit.agent.previous_rounds import PreviousRounds
from spotfit.agent.report_matching import MatchedReport, ReportMatcher, ReportSink, Saving
from spotfit.agent.validations import NodeValidation
from spotfit.checkpoint.replication import ReplicaStore
from spotfit.control.background_calls import BackgroundResult
from spotfit.control.journal_writer import JournalWriter
from spotfit.control.reconciler import Reconciler
from spotfit.control.settlement import GroupSettler
from spotfit.core.errors import StorePermissionError, TransientStoreError
from spotfit.core.ids import AgentId, RunId, Token
from spotfit.ledger.journal import JournalPage
from spotfit.model.events import (
    CheckpointCommitted,
    FailureCause,
    FitStarted,
    JournalEntry,
    JournalEvent,
    PreemptionNoticed,
    RoundClosed,
    RoundOpened,
)
from spotfit.model.group import GroupRequest
from spotfit.model.leader_state import LeaderState
from spotfit.model.topology import Round, SnapshotId
from spotfit.model.view import JournalView, UnsettledGroup, View, fold
from spotfit.policy import recovery, retention, retry_budget, validation_schedule
from spotfit.policy.actions import AppendEvent, RequestMachines
from spotfit.policy.save_at_end import NothingUnsaved
from spotfit.protocol.worker_agent import SaveCompleted
from spotfit.security.object_mac import ObjectMac
from spotfit_localsim.virtual.invariants import InvariantViolation
from spotfit_localsim.virtual.market import SimMarketConfig
from spotfit_localsim.virtual.scenario import AtStep, ReclaimMachine, Scenario
from spotfit_localsim.virtual.scenario_library import (
    agent_crash,
    backend_change,
    broken_machines,
    crash_loop,
    deposed_leader,
    elastic_machine_loss,
    flapping_network,
    hostile_bucket,
    late_replicas,
    lost_cloud_responses,
    no_agent_starts,
    plain,
    preemption_with_notice,
    random_save_scenario,
    random_scenario,
    rollback,
    save_at_end,
    silent_leader_loss,
    single_checkpoint_name,
    slow_bucket,
    spot_storm,
    validation_after_training,
    validation_under_faults,
)
from spotfit_localsim.virtual.sim_cloud import NonIdempotentProvisioner
from spotfit_localsim.virtual.sim_store import (
    CheckThenPutStore,
    ConflictAsTakenStore,
    ConflictAsWrittenStore,
    UnconditionalCreateStore,
)
from spotfit_localsim.virtual.sim_workers import SimWorkerPool
from spotfit_localsim.virtual.simulation import PRODUCTION_DESIGN, SimDesign, simulate

SEED_COUNT = 60
"""Number of seeds within which a wrong design must be detected."""

SimulationCase = tuple[Scenario, int]


def random_cases(seeds: range = range(SEED_COUNT)) -> list[SimulationCase]:
    return [(random_scenario(seed), seed) for seed in seeds]


def cases_of(*scenarios: Scenario) -> list[SimulationCase]:
    return [(scenario, seed) for seed in range(SEED_COUNT) for scenario in scenarios]


def find_violation(
    cases: Sequence[SimulationCase],
    design: SimDesign = PRODUCTION_DESIGN,
    *,
    may_raise: bool = False,
) -> tuple[SimulationCase, str]:
    """Return the first case that violates an invariant, and the violation.

    `may_raise`: that an agent ends with an exception is the violation which the mutant causes.
    """
    for scenario, seed in cases:
        try:
            simulate(scenario, seed, design)
        except InvariantViolation as error:
            violation = str(error).partition("\n")[0]
            # An outdated mutant does not test the checker.
            if " raised: Traceback" in violation and not may_raise:
                pytest.fail(str(error))
            return (scenario, seed), violation
    pytest.fail(f"no violation in {len(cases)} cases")


def check_production(case: SimulationCase) -> None:
    """Check that the production design passes the case that detected the wrong design."""
    assert simulate(*case).violation is None


@pytest.mark.parametrize(
    ("design", "cases"),
    [
        (SimDesign(store=CheckThenPutStore), cases_of(slow_bucket, deposed_leader)),
        (SimDesign(store=UnconditionalCreateStore), cases_of(slow_bucket, deposed_leader)),
        (SimDesign(store=ConflictAsWrittenStore), cases_of(hostile_bucket)),
        (SimDesign(provisioner=NonIdempotentProvisioner), cases_of(lost_cloud_responses)),
    ],
    ids=[
        "create reads and then writes",
        "create overwrites",
        "a conflict counts as success",
        "a new token per attempt",
    ],
)
def test_wrong_components_are_detected(design: SimDesign, cases: list[SimulationCase]) -> None:
    case, _ = find_violation(cases, design)
    check_production(case)


class AppendsAtHead(JournalWriter):
    """Appends after the latest entry instead of after the view of the decision."""

    def write(self, event: JournalEvent, now: float) -> None:
        with suppress(TransientStoreError):  # the fault is injected, not a defect of this variant
            self.ledger.catch_up()
        super().write(event, now)


class IgnoresConflicts(JournalWriter):
    """Counts its entry as written, whatever the store returns."""

    def _on_create_result(self, pending: Any, result: BackgroundResult, now: float) -> None:
        super()._on_create_result(pending, BackgroundResult(), now)


class AbandonsUnknownEntries(JournalWriter):
    """Reads after a failed call, and counts a missing entry as never sent."""

    def _on_create_result(self, pending: Any, result: BackgroundResult, now: float) -> None:
        super()._on_create_result(pending, result, now)
        self._read_requested = True

    def _apply_page(self, page: JournalPage, now: float) -> None:
        super()._apply_page(page, now)
        self._pending = None


class DecidesBeforeOutcome(JournalWriter):
    """Does not wait for the outcome of an entry."""

    def advance(self, now: float) -> None:
        self._pending = None
        super().advance(now)


@pytest.mark.parametrize(
    "journal_writer_type",
    [AppendsAtHead, IgnoresConflicts, AbandonsUnknownEntries, DecidesBeforeOutcome],
)
def test_wrong_journal_writers_are_detected(
    journal_writer_type: type[JournalWriter], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(spotfit.agent.agent, "JournalWriter", journal_writer_type)
        case, _ = find_violation([*cases_of(deposed_leader, slow_bucket), *random_cases()])
    check_production(case)


class NeverOffersTakenEntriesAgain(JournalWriter):
    """Waits for the entry of a slot that the store has called taken."""

    def _apply_page(self, page: JournalPage, now: float) -> None:
        was_taken = self._pending is not None and self._pending.slot_taken
        super()._apply_page(page, now)
        if self._pending is not None:
            self._pending.slot_taken = was_taken


def test_a_conflict_taken_for_an_existing_entry_is_detected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each of the two is harmless without the other: the entry is offered again, or in the end."""
    with monkeypatch.context() as patch:
        patch.setattr(spotfit.agent.agent, "JournalWriter", NeverOffersTakenEntriesAgain)
        case, violation = find_violation(
            cases_of(hostile_bucket), SimDesign(store=ConflictAsTakenStore)
        )
    assert "did not end" in violation
    check_production(case)
    assert simulate(*case, SimDesign(store=ConflictAsTakenStore)).violation is None


def test_trusting_a_changed_read_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(ObjectMac, "is_valid", lambda *_: True)
        # The changed bytes of most entries cannot be decoded.
        case, _ = find_violation(cases_of(hostile_bucket), may_raise=True)
    check_production(case)


def test_one_read_of_a_damaged_entry_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """A damaged read would count as a forged entry, and break the chain of hashes."""
    with monkeypatch.context() as patch:
        patch.setattr(spotfit.ledger.journal, "MAX_READS", 1)
        case, _ = find_violation(cases_of(hostile_bucket), may_raise=True)
    check_production(case)


def test_agents_that_end_at_a_denied_create_are_detected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def advance_unless_denied(self: JournalWriter, now: float) -> None:
        try:
            advance(self, now)
        except StorePermissionError as error:
            raise RuntimeError("denied") from error

    advance = JournalWriter.advance
    with monkeypatch.context() as patch:
        patch.setattr(JournalWriter, "advance", advance_unless_denied)
        case, violation = find_violation(cases_of(hostile_bucket), may_raise=True)
    assert violation.endswith("raised: Traceback (most recent call last):")
    check_production(case)


def test_effect_before_its_intent_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    def submit_before_plan(self: Reconciler, request: RequestMachines, now: float) -> None:
        spec = self._journal_writer.view.spec
        token = Token(self._new_token())
        plan = self._provisioner.plan(
            GroupRequest(
                token=token, num_workers=request.num_workers, total_workers=spec.max_workers
            )
        )
        self._provisioner.submit(plan, self._launch)
        plan_group(self, request, now)

    plan_group = Reconciler._plan_group
    with monkeypatch.context() as patch:
        patch.setattr(Reconciler, "_plan_group", submit_before_plan)
        case, violation = find_violation(cases_of(plain))
    assert "not in the journal" in violation
    check_production(case)


def test_groups_that_go_over_into_the_next_fit_are_detected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Their tokens are submitted to the backend of that fit."""

    def keep_groups(view: JournalView, event: FitStarted, *, run_id: RunId) -> View:
        started = start_fit(view, event, run_id=run_id)
        kept = {token: group for token, group in view.groups.items() if not group.is_released}
        return structs.replace(started, groups=kept, unsettled_groups={})

    start_fit = spotfit.model.view._start_fit
    with monkeypatch.context() as patch:
        patch.setattr(spotfit.model.view, "_start_fit", keep_groups)
        case, violation = find_violation(cases_of(backend_change))
    assert "was sent to sim-b, but was planned for sim" in violation
    check_production(case)


def test_settling_with_the_backend_of_the_running_fit_is_detected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def release_at_own_backend(self: GroupSettler, unsettled: UnsettledGroup) -> Any:
        own = self._journal_writer.view.spec.provisioner
        return release(self, structs.replace(unsettled, provisioner=own))

    release = GroupSettler._release
    with monkeypatch.context() as patch:
        patch.setattr(GroupSettler, "_release", release_at_own_backend)
        case, violation = find_violation(cases_of(backend_change))
    assert "was sent to sim-b, but was planned for sim" in violation
    check_production(case)


def test_forgetting_groups_of_an_earlier_fit_is_detected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Machines whose agent never starts are then paid indefinitely."""
    with monkeypatch.context() as patch:
        patch.setattr(spotfit.model.view, "_unsettled_groups", lambda _view: {})
        case, violation = find_violation(cases_of(backend_change))
    assert "not released long after the end" in violation
    check_production(case)


def test_commit_before_all_ranks_saved_is_detected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def record_with_all_ranks_done(
        self: ReportMatcher, rank: int, number: int, upload: SaveCompleted
    ) -> list[OutgoingFrame]:
        report = self._reports.get(number)
        if isinstance(report, Saving):
            report.done_ranks.update(report.ranks)
        return record_upload(self, rank, number, upload)

    record_upload = ReportMatcher.record_upload
    with monkeypatch.context() as patch:
        patch.setattr(ReportMatcher, "record_upload", record_with_all_ranks_done)
        case, violation = find_violation(cases_of(plain))
    assert "has no files of rank" in violation
    check_production(case)


def test_reused_checkpoint_name_is_detected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(
            ReportMatcher, "_assign_requested_name", lambda _, requested, __: (requested, "")
        )
        case, violation = find_violation(cases_of(single_checkpoint_name))
    assert "of the committed checkpoint last" in violation or "no complete set" in violation
    check_production(case)


def test_starting_workers_beside_old_ones_is_detected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(SimWorkerPool, "has_workers", property(lambda _: False))
        case, violation = find_violation(cases_of(spot_storm))
    assert "while earlier ones are running" in violation
    check_production(case)


def test_incomplete_fold_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    def fold_without_notices(view: View, entry: JournalEntry) -> View:
        return fold(view, entry) if not isinstance(entry.event, PreemptionNoticed) else after(view)

    def after(view: View) -> View:
        return View(next_slot=view.next_slot + 1, run_id=view.run_id, spec=view.spec)

    with monkeypatch.context() as patch:
        patch.setattr(spotfit.ledger.journal, "fold", fold_without_notices)
        case, violation = find_violation(cases_of(preemption_with_notice))
    assert "differs from the reference view" in violation
    check_production(case)


def test_deposed_leader_that_appends_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    past_leaders: set[str] = set()

    def was_ever_leader(self: View, agent: str) -> bool:
        if self.epoch == 0:
            past_leaders.clear()  # another simulation has started
        if self.leader is not None and self.leader.leader == agent:
            past_leaders.add(agent)
        return agent in past_leaders

    with monkeypatch.context() as patch:
        patch.setattr(View, "is_leader", was_ever_leader)
        case, violation = find_violation(cases_of(deposed_leader, flapping_network))
    assert "appended" in violation
    check_production(case)


def test_lost_peers_counted_as_worker_failures_are_detected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def close_as_worker_failure(
        view: View, watch: LeaderState, round_: Round, failures: Any = ()
    ) -> RoundClosed:
        if failures:
            return RoundClosed(
                round_number=round_.number, cause=FailureCause.WORKER, reason="a rank raised"
            )
        return round_closed_by_failure(view, watch, round_, failures)

    round_closed_by_failure = retry_budget.round_closed_by_failure
    with monkeypatch.context() as patch:
        patch.setattr(retry_budget, "round_closed_by_failure", close_as_worker_failure)
        case, violation = find_violation(cases_of(spot_storm, flapping_network))
    assert "worker failures recorded" in violation
    check_production(case)


def test_dropping_an_unvalidated_checkpoint_is_detected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def drop_unprotected(checkpoints: Any, keep: Any, *, protected: Any = ()) -> Any:
        return checkpoints_to_drop(checkpoints, keep)

    checkpoints_to_drop = retention.checkpoints_to_drop
    with monkeypatch.context() as patch:
        patch.setattr(retention, "checkpoints_to_drop", drop_unprotected)
        case, violation = find_violation(cases_of(validation_under_faults))
    assert "not validated yet" in violation
    check_production(case)


def test_concurrent_validation_is_detected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(
            validation_schedule,
            "_is_lost",
            lambda _view, watch: watch.phase.since == watch.leading_since,
        )
        case, violation = find_violation(cases_of(validation_under_faults))
    assert "already" in violation
    check_production(case)


def test_validation_result_sent_only_once_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    def send_report_once(self: NodeValidation, *, is_reconnected: bool) -> None:
        send_report(self, is_reconnected=False)

    send_report = NodeValidation.send_report
    cases = [case for case in random_cases(range(200)) if case[0].workload.validations is not None]
    with monkeypatch.context() as patch:
        patch.setattr(NodeValidation, "send_report", send_report_once)
        case, violation = find_violation(cases)
    assert "did not end" in violation
    check_production(case)


def test_end_before_validations_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(
            validation_schedule, "fit_end_action", lambda _view, ended: AppendEvent(ended)
        )
        case, violation = find_violation(cases_of(validation_after_training))
    assert "are not validated yet" in violation
    check_production(case)


def test_adopting_an_abandoned_round_is_detected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(
            spotfit.agent.previous_rounds, "_is_newer_than_committed", lambda _view, _found: True
        )
        patch.setattr(
            CheckpointGarbageCollector, "scan_for_debris", lambda *_, **__: None
        )  # deleted checkpoints cannot be restored
        # A rare sequence of events: about one of a hundred.
        case, _ = find_violation(random_cases(range(200, 800)))
    check_production(case)


def test_restoring_an_older_snapshot_is_detected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def compare_rounds_only(committed: CheckpointCommitted, state: SnapshotId) -> bool:
        return committed.round > state.round

    with monkeypatch.context() as patch:
        patch.setattr(recovery, "_is_newer", compare_rounds_only)
        case, violation = find_violation(cases_of(late_replicas))
    assert "in memory, but step" in violation
    check_production(case)


def test_keeping_rolled_back_snapshots_is_detected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(ReplicaStore, "roll_back", lambda *_: None)
        case, violation = find_violation(cases_of(rollback))
    assert "which was rolled back" in violation
    check_production(case)


def test_charging_only_broken_connections_to_a_loss_is_detected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(spotfit.model.view, "_UNKNOWN_CAUSES", (FailureCause.NETWORK,))
        # Without it, the successor does not know that the former leader is missing.
        patch.setattr(spotfit.policy.failure_detection, "disconnected_since", _since_disconnect)
        case, violation = find_violation(cases_of(silent_leader_loss))
    assert "charged to no loss" in violation
    check_production(case)


def _since_disconnect(view: View, state: LeaderState, agent: AgentId) -> float | None:
    return None if agent in state.members else state.disconnected_since.get(agent)


def test_forgetting_missing_agents_at_the_next_round_is_detected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fold_and_forget(view: View, entry: JournalEntry) -> JournalView:
        after = fold(view, entry)
        is_opened = isinstance(entry.event, RoundOpened)
        return structs.replace(after, missing_agents={}) if is_opened else after

    with monkeypatch.context() as patch:
        patch.setattr(spotfit.ledger.journal, "fold", fold_and_forget)
        patch.setattr(spotfit_localsim.virtual.invariants, "fold", fold_and_forget)
        case, violation = find_violation(cases_of(elastic_machine_loss))
    assert "charged to no loss" in violation
    check_production(case)


def test_crash_counted_as_preemption_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(spotfit.control.reconciler, "with_crash", lambda _view, lost, _crash: lost)
        case, violation = find_violation(cases_of(agent_crash))
    assert "is charged to preemption" in violation
    check_production(case)


def test_retrying_equal_crashes_without_limit_is_detected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(retry_budget, "fit_ended_by_crashes", lambda _: None)
        case, violation = find_violation(cases_of(crash_loop))
    assert "expected failed" in violation or "did not end" in violation
    check_production(case)


def test_retrying_failed_starts_without_limit_is_detected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(retry_budget, "fit_ended_by_failed_starts", lambda _: None)
        case, violation = find_violation(cases_of(no_agent_starts))
    assert "expected failed" in violation or "did not end" in violation
    check_production(case)


def test_ending_a_run_for_a_broken_machine_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Failed starts must not count while other machines start."""
    with monkeypatch.context() as patch:
        patch.setattr(
            spotfit.model.view,
            "_elect_leader",
            lambda view, event: structs.replace(view, leader=event, epoch=event.epoch),
        )
        patch.setattr(retry_budget, "MAX_FAILED_STARTS", 0)
        case, violation = find_violation(cases_of(broken_machines))
    assert "expected finished" in violation
    check_production(case)


def test_ending_a_run_for_a_first_crash_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(retry_budget, "MAX_EQUAL_CRASHES", 0)
        case, violation = find_violation(cases_of(agent_crash))
    assert "expected finished" in violation
    check_production(case)


class CallsTwice(CallbackDelivery):
    """Calls the callbacks twice for each report."""

    def send_report(self, round_number: int, report: MatchedReport) -> None:
        for _ in range(2):
            super().send_report(round_number, report)


class SkipsCheckpoints(CallbackDelivery):
    """Calls the callbacks only for reports without a checkpoint."""

    def send_report(self, round_number: int, report: MatchedReport) -> None:
        if report.checkpoint is None:
            super().send_report(round_number, report)


@pytest.mark.parametrize("delivery", [CallsTwice, SkipsCheckpoints])
def test_wrong_deliveries_to_callbacks_are_detected(
    monkeypatch: pytest.MonkeyPatch, delivery: type[CallbackDelivery]
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(round_lifecycle, "CallbackDelivery", delivery)
        case, violation = find_violation(cases_of(plain))
    assert "did not receive report" in violation
    check_production(case)


def test_not_storing_reports_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(ReportSink, "add", lambda *_: None)
        case, violation = find_violation(cases_of(plain))
    assert "is not in the history" in violation
    check_production(case)


def test_forgetting_the_last_reports_of_a_closed_round_is_detected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cases = [(random_save_scenario(seed), seed) for seed in range(SEED_COUNT)]
    with monkeypatch.context() as patch:
        patch.setattr(PreviousRounds, "take_counted_reports", lambda *_, **__: [])
        case, violation = find_violation(cases)
    assert "is not in the history" in violation
    check_production(case)


LOST_AT_END = replace(
    save_at_end,
    market=SimMarketConfig(notice_s=3.0),
    workload=replace(save_at_end.workload, save_every=0, upload_s=(8.0, 12.0)),
    events=(ReclaimMachine(AtStep(11), "follower", with_notice=True),),
)
"""A machine is lost while the snapshots that were taken after the return are uploaded."""


def test_discarding_the_last_steps_silently_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    def discard(*_: Any, **__: Any) -> NothingUnsaved:
        return NothingUnsaved()

    with monkeypatch.context() as patch:
        patch.setattr(spotfit.agent.round_coordinator, "decide_save_at_end", discard)
        case, violation = find_violation(cases_of(save_at_end))
    assert "was saved last" in violation
    check_production(case)


def test_ending_training_before_the_last_steps_are_saved_is_detected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(ReportMatcher, "is_saving_at_end", False)
        case, _ = find_violation(cases_of(LOST_AT_END))
    check_production(case)
