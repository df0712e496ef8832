"""Who checks the checker? Designs known to be wrong must be caught, and the sound one passes."""

from collections.abc import Sequence
from typing import Any

import pytest

import spotfit.agent.agent
import spotfit.agent.previous_rounds
import spotfit.ledger.journal
from spotfit.agent.checkpoint_cleanup import CheckpointGarbageCollector
from spotfit.agent.collectives import OutgoingFrame
from spotfit.agent.report_matching import ReportMatcher, Saving
from spotfit.agent.validations import NodeValidation
from spotfit.checkpoint.replication import ReplicaStore
from spotfit.control.background_calls import BackgroundResult
from spotfit.control.journal_writer import JournalWriter
from spotfit.control.reconciler import Reconciler
from spotfit.core.ids import Token
from spotfit.ledger.journal import JournalPage
from spotfit.model.events import (
    CheckpointCommitted,
    FailureCause,
    JournalEntry,
    JournalEvent,
    PreemptionNoticed,
    RoundClosed,
)
from spotfit.model.group import GroupRequest
from spotfit.model.leader_state import LeaderState
from spotfit.model.topology import Round, SnapshotId
from spotfit.model.view import View, fold
from spotfit.policy import recovery, retention, retry_budget, validation_schedule
from spotfit.policy.actions import AppendEvent, RequestMachines
from spotfit.protocol.worker_agent import SaveCompleted
from spotfit_localsim.virtual.invariants import InvariantViolation
from spotfit_localsim.virtual.scenario import Scenario
from spotfit_localsim.virtual.scenario_library import (
    deposed_leader,
    flapping_network,
    late_replicas,
    lost_cloud_responses,
    plain,
    preemption_with_notice,
    random_scenario,
    rollback,
    single_checkpoint_name,
    slow_bucket,
    spot_storm,
    validation_after_training,
    validation_under_faults,
)
from spotfit_localsim.virtual.sim_cloud import NonIdempotentProvisioner
from spotfit_localsim.virtual.sim_store import CheckThenPutStore, UnconditionalCreateStore
from spotfit_localsim.virtual.sim_workers import SimWorkerPool
from spotfit_localsim.virtual.simulation import PRODUCTION_DESIGN, SimDesign, simulate

ENOUGH = 60
"""Seeds within which a wrong design must be caught."""

World = tuple[Scenario, int]


def storms(seeds: range = range(ENOUGH)) -> list[World]:
    return [(random_scenario(seed), seed) for seed in seeds]


def seeds_of(*scenarios: Scenario) -> list[World]:
    return [(scenario, seed) for seed in range(ENOUGH) for scenario in scenarios]


def caught(worlds: Sequence[World], design: SimDesign = PRODUCTION_DESIGN) -> tuple[World, str]:
    """The first of these worlds in which something did not hold, and what."""
    for scenario, seed in worlds:
        try:
            simulate(scenario, seed, design)
        except InvariantViolation as broken:
            violation = str(broken).partition("\n")[0]
            if " raised: Traceback" in violation:  # an outdated mutant says nothing of the checker
                pytest.fail(str(broken))
            return (scenario, seed), violation
    pytest.fail(f"not caught in {len(worlds)} worlds")


def sound_in(world: World) -> None:
    """The production design survives the very world that caught the wrong one."""
    assert simulate(*world).violation is None


@pytest.mark.parametrize(
    ("design", "worlds"),
    [
        (SimDesign(store=CheckThenPutStore), seeds_of(slow_bucket, deposed_leader)),
        (SimDesign(store=UnconditionalCreateStore), seeds_of(slow_bucket, deposed_leader)),
        (SimDesign(provisioner=NonIdempotentProvisioner), seeds_of(lost_cloud_responses)),
    ],
    ids=["create looks, then writes", "the bucket ignores create", "a fresh token each try"],
)
def test_wrong_components_are_detected(design: SimDesign, worlds: list[World]) -> None:
    world, _ = caught(worlds, design)
    sound_in(world)


class AppendsAtTheHead(JournalWriter):
    """Appends to what the journal is now, not to what the decision was made from."""

    def write(self, event: JournalEvent, now: float) -> None:
        self.ledger.catch_up()
        super().write(event, now)


class TrustsItself(JournalWriter):
    """Takes its own entry for written, whatever the store says."""

    def _on_create_result(self, pending: Any, result: BackgroundResult, now: float) -> None:
        super()._on_create_result(pending, BackgroundResult(), now)


class ThinksAgain(JournalWriter):
    """After a call that failed it reads, and takes what is not there for never sent."""

    def _on_create_result(self, pending: Any, result: BackgroundResult, now: float) -> None:
        super()._on_create_result(pending, result, now)
        self._read_requested = True

    def _apply_page(self, page: JournalPage, now: float) -> None:
        super()._apply_page(page, now)
        self._pending = None


class DecidesMeanwhile(JournalWriter):
    """Does not wait until it is known what became of an entry."""

    def advance(self, now: float) -> None:
        self._pending = None
        super().advance(now)


@pytest.mark.parametrize("scribe", [AppendsAtTheHead, TrustsItself, ThinksAgain, DecidesMeanwhile])
def test_wrong_journal_writers_are_detected(
    scribe: type[JournalWriter], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(spotfit.agent.agent, "JournalWriter", scribe)
        world, _ = caught([*seeds_of(deposed_leader, slow_bucket), *storms()])
    sound_in(world)


def test_effect_before_its_intent_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    def buys_first(self: Reconciler, order: RequestMachines, now: float) -> None:
        spec = self._journal_writer.view.spec
        token = Token(self._new_token())
        plan = self._provisioner.plan(
            GroupRequest(token=token, num_workers=order.num_workers, total_workers=spec.max_workers)
        )
        self._provisioner.submit(plan, self._launch)
        intend(self, order, now)

    intend = Reconciler._plan_group
    with monkeypatch.context() as patch:
        patch.setattr(Reconciler, "_plan_group", buys_first)
        world, why = caught(seeds_of(plain))
    assert "not in the journal" in why
    sound_in(world)


def test_commit_before_all_ranks_saved_is_detected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def hasty(
        self: ReportMatcher, rank: int, number: int, upload: SaveCompleted
    ) -> list[OutgoingFrame]:
        report = self._reports.get(number)
        if isinstance(report, Saving):
            report.done_ranks.update(report.ranks)
        return record_upload(self, rank, number, upload)

    record_upload = ReportMatcher.record_upload
    with monkeypatch.context() as patch:
        patch.setattr(ReportMatcher, "record_upload", hasty)
        world, why = caught(seeds_of(plain))
    assert "has no files of rank" in why
    sound_in(world)


def test_reused_checkpoint_name_is_detected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(
            ReportMatcher, "_assign_requested_name", lambda _, requested, __: (requested, "")
        )
        world, why = caught(seeds_of(single_checkpoint_name))
    assert "of the committed checkpoint last" in why or "no complete set" in why
    sound_in(world)


def test_starting_workers_beside_old_ones_is_detected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(SimWorkerPool, "has_workers", property(lambda _: False))
        world, why = caught(seeds_of(spot_storm))
    assert "while earlier ones are running" in why
    sound_in(world)


def test_incomplete_fold_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    def forgetful(view: View, entry: JournalEntry) -> View:
        return fold(view, entry) if not isinstance(entry.event, PreemptionNoticed) else after(view)

    def after(view: View) -> View:
        return View(next_slot=view.next_slot + 1, run_id=view.run_id, spec=view.spec)

    with monkeypatch.context() as patch:
        patch.setattr(spotfit.ledger.journal, "fold", forgetful)
        world, why = caught(seeds_of(preemption_with_notice))
    assert "differs from the reference view" in why
    sound_in(world)


def test_deposed_leader_that_appends_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    led: set[str] = set()

    def leads(self: View, agent: str) -> bool:
        if self.epoch == 0:
            led.clear()  # another world has begun
        if self.leader is not None and self.leader.leader == agent:
            led.add(agent)
        return agent in led

    with monkeypatch.context() as patch:
        patch.setattr(View, "is_leader", leads)
        world, why = caught(seeds_of(deposed_leader, flapping_network))
    assert "appended" in why
    sound_in(world)


def test_lost_peers_counted_as_worker_failures_are_detected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def closing(view: View, watch: LeaderState, round_: Round, failures: Any = ()) -> RoundClosed:
        if failures:
            return RoundClosed(
                round_number=round_.number, cause=FailureCause.WORKER, reason="somebody raised"
            )
        return judged(view, watch, round_, failures)

    judged = retry_budget.round_closed_by_failure
    with monkeypatch.context() as patch:
        patch.setattr(retry_budget, "round_closed_by_failure", closing)
        world, why = caught(seeds_of(spot_storm, flapping_network))
    assert "worker failures recorded" in why
    sound_in(world)


def test_dropping_an_unvalidated_checkpoint_is_detected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def hasty(checkpoints: Any, keep: Any, *, protected: Any = ()) -> Any:
        return expendable(checkpoints, keep)

    expendable = retention.checkpoints_to_drop
    with monkeypatch.context() as patch:
        patch.setattr(retention, "checkpoints_to_drop", hasty)
        world, why = caught(seeds_of(validation_under_faults))
    assert "not validated yet" in why
    sound_in(world)


def test_concurrent_validation_is_detected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(
            validation_schedule,
            "_is_lost",
            lambda _view, watch: watch.phase.since == watch.leading_since,
        )
        world, why = caught(seeds_of(validation_under_faults))
    assert "already" in why
    sound_in(world)


def test_validation_result_sent_only_once_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    def once(self: NodeValidation, *, is_reconnected: bool) -> None:
        tell(self, is_reconnected=False)

    tell = NodeValidation.send_report
    with monkeypatch.context() as patch:
        patch.setattr(NodeValidation, "send_report", once)
        world, why = caught(storms(range(200)))
    assert "did not end" in why
    sound_in(world)


def test_end_before_validations_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(
            validation_schedule, "fit_end_action", lambda _view, ended: AppendEvent(ended)
        )
        world, why = caught(seeds_of(validation_after_training))
    assert "are not validated yet" in why
    sound_in(world)


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
        world, _ = caught(storms())  # it takes a rare coincidence all the same
    sound_in(world)


def test_restoring_an_older_snapshot_is_detected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def by_rounds_alone(committed: CheckpointCommitted, state: SnapshotId) -> bool:
        return committed.round > state.round

    with monkeypatch.context() as patch:
        patch.setattr(recovery, "_is_newer", by_rounds_alone)
        world, why = caught(seeds_of(late_replicas))
    assert "in memory, but step" in why
    sound_in(world)


def test_keeping_rolled_back_snapshots_is_detected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(ReplicaStore, "roll_back", lambda *_: None)
        world, why = caught(seeds_of(rollback))
    assert "which was rolled back" in why
    sound_in(world)
