"""Each violated invariant is reported with its text; correct runs are accepted."""

from collections.abc import Callable
from typing import Any, Literal

import pytest
from msgspec import structs

from spotfit.checkpoint.manifest import Manifest
from spotfit.core.codec import encode
from spotfit.core.ids import AgentId, RunId, Token
from spotfit.ledger import keys
from spotfit.ledger.journal import CachedView
from spotfit.model.events import (
    CheckpointCommitted,
    CheckpointDropped,
    FailureCause,
    FitEnded,
    FitStarted,
    GroupPlanned,
    GroupSubmitted,
    JournalEntry,
    JournalEvent,
    LeaderElected,
    RoundClosed,
    RoundOpened,
    TrainingEnded,
    ValidationEnded,
    ValidationRequest,
    ValidationStarted,
)
from spotfit.model.group import GroupHandle, GroupPlan, GroupRequest, Role
from spotfit.model.spec import RunSpec
from spotfit.model.topology import NodeAssignment, Round
from spotfit.model.view import JournalView, View
from spotfit.store.transfer import FileRecord
from spotfit.testing.builders import a_view
from spotfit_localsim.virtual.invariants import InvariantChecker
from spotfit_localsim.virtual.scenario import AtTime, IsolateHost, Scenario
from spotfit_localsim.virtual.sim_snapshots import SimSavedState
from spotfit_localsim.virtual.sim_store import SimBucket
from spotfit_localsim.virtual.workload import (
    SimTraining,
    ValidationWorkload,
    Workload,
    validation_score,
)

RUN = RunId("r")
ONE, TWO = AgentId("a1"), AgentId("a2")
SPEC = RunSpec(run_id=RUN, name="run", fit_id="f", min_workers=1, max_workers=1)
PLAN = GroupPlan(token=Token("t1"), provisioner="sim", num_nodes=1, slots_per_node=1)


class CheckerHarness:
    """A bucket and an invariant checker that observes it."""

    def __init__(self) -> None:
        self.bucket = SimBucket()
        self.training = SimTraining(Workload(steps=10))
        self.violations: list[str] = []
        self.checker = InvariantChecker(
            self.bucket.objects,
            self.training,
            on_violation=self.violations.append,
            on_entry=lambda _: None,
        )
        self.bucket.listeners.append(self.checker.on_object_changed)

    def write(self, event: JournalEvent, by: AgentId = ONE, *, slot: int | None = None) -> None:
        at = self.checker.reference_view.next_slot if slot is None else slot
        self.bucket.write(
            by, keys.entry(at), encode(JournalEntry(run_id=RUN, author=by, event=event))
        )

    def begin(self) -> None:
        """Write a fit with a leader, a machine and an open round."""
        self.write(FitStarted(spec=SPEC))
        self.write(LeaderElected(leader=ONE, epoch=1, coordinator_address="a1:7000"))
        self.write(
            GroupPlanned(
                request=GroupRequest(token=Token("t1"), num_workers=1, total_workers=1), plan=PLAN
            )
        )
        self.write(
            GroupSubmitted(
                token=Token("t1"),
                handle=GroupHandle(token=Token("t1"), provisioner="sim", name="x"),
            )
        )
        self.write(RoundOpened(round=a_round(1)))
        assert not self.violations


def a_plan(token: str) -> GroupPlan:
    return GroupPlan(token=Token(token), provisioner="sim", num_nodes=1, slots_per_node=1)


def a_request(token: str, role: Role) -> GroupRequest:
    return GroupRequest(token=Token(token), num_workers=1, total_workers=1, role=role)


def a_round(number: int, checkpoint: str | None = None) -> Round:
    return Round(
        number=number,
        assignments=(
            NodeAssignment(
                agent=ONE,
                node_rank=0,
                first_rank=0,
                num_workers=1,
                host="a1",
                token=Token("t1"),
                node=0,
            ),
        ),
        checkpoint_name=checkpoint,
    )


def test_good_run_has_no_violation() -> None:
    harness = CheckerHarness()
    harness.begin()
    harness.write(RoundClosed(round_number=1, cause=FailureCause.PREEMPTION, reason="gone"))
    harness.write(RoundOpened(round=a_round(2)))
    assert harness.checker.reference_view.round == a_round(2)
    assert harness.checker.violation is None


@pytest.mark.parametrize(
    ("event", "text"),
    [
        (FitStarted(spec=SPEC), "while another one is active"),
        (LeaderElected(leader=ONE, epoch=3), "epoch 3 follows 1"),
        (LeaderElected(leader=ONE, epoch=1), "epoch 1 follows 1"),
        (
            GroupPlanned(
                request=GroupRequest(token=Token("t1"), num_workers=1, total_workers=1), plan=PLAN
            ),
            "used before",
        ),
        (
            GroupSubmitted(
                token=Token("t1"),
                handle=GroupHandle(token=Token("t1"), provisioner="sim", name="x"),
            ),
            "not pending",
        ),
        (RoundOpened(round=a_round(2)), "while round 1 is open"),
        (RoundClosed(round_number=7, cause=FailureCause.NETWORK, reason=""), "not open"),
        (
            RoundClosed(round_number=1, cause=FailureCause.WORKER, reason=""),
            "1 worker failures recorded, but 0 occurred",
        ),
        (
            CheckpointCommitted(name="c", round=1, report_index=0, metrics={"step": 1}, ranks=(0,)),
            "no files of rank 0",
        ),
        (
            CheckpointCommitted(name="c", round=2, report_index=0, metrics={"step": 1}, ranks=(0,)),
            "has not started",
        ),
        (CheckpointDropped(name="c", reason=""), "does not exist"),
        (FitEnded(outcome="finished", result_key="nowhere"), "differs from the reference run"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_wrong_decision_is_reported(event: JournalEvent, text: str) -> None:
    harness = CheckerHarness()
    harness.begin()
    harness.write(event)
    assert [text in violation for violation in harness.violations] == [True]


def validating() -> CheckerHarness:
    """A fit with two checkpoints to validate and one without validation."""
    harness = CheckerHarness()
    harness.begin()
    harness.training.workload = Workload(steps=10, validations=ValidationWorkload())
    for report, step in ((0, 1), (1, 2)):
        state = harness.training.reference.state_at(step)
        name = f"c{step}"
        body = encode(SimSavedState(step, state.link))
        file = FileRecord("state", len(body), "")
        metrics = {"step": step}
        part = Manifest(
            name=name,
            round=1,
            report_index=report,
            rank=0,
            ranks=(0,),
            metrics=metrics,
            files=(file,),
        )
        harness.bucket.write("w", f"{name}/state", body)
        harness.bucket.write("w", keys.manifest(name, 1, 0), encode(part))
        harness.write(
            CheckpointCommitted(
                name=name,
                round=1,
                report_index=report,
                metrics=metrics,
                ranks=(0,),
                validation=ValidationRequest(),
            )
        )
    assert not harness.violations
    return harness


BEGUN = ValidationStarted(
    checkpoint_name="c1", checkpoint_uid="1-0", attempt=1, agent=ONE, token=Token("t1"), node=0
)
FOUND = ValidationEnded(
    checkpoint_name="c1",
    checkpoint_uid="1-0",
    status="validated",
    metrics={"score": validation_score(1)},
)


def test_validations_one_after_the_other_are_good() -> None:
    harness = validating()
    harness.write(BEGUN)
    harness.write(FOUND)
    harness.write(
        ValidationStarted(
            checkpoint_name="c2",
            checkpoint_uid="1-1",
            attempt=2,
            agent=ONE,
            token=Token("t1"),
            node=0,
        )
    )
    harness.write(ValidationEnded(checkpoint_name="c2", checkpoint_uid="1-1", status="failed"))
    assert harness.checker.violation is None


@pytest.mark.parametrize(
    ("events", "text"),
    [
        (
            [
                ValidationStarted(
                    checkpoint_name="c2",
                    checkpoint_uid="1-1",
                    attempt=1,
                    agent=ONE,
                    token=Token("t1"),
                    node=0,
                )
            ],
            "1-0 is next",
        ),
        ([structs.replace(BEGUN, attempt=3)], "attempt 3 follows 0"),
        ([structs.replace(BEGUN, token=Token("t9"))], "cannot validate"),
        ([BEGUN, structs.replace(BEGUN, attempt=2)], "already validates 1-0"),
        ([structs.replace(FOUND, metrics={"score": -1})], "but the score is"),
        ([structs.replace(FOUND, status="failed")], "of a failed validation"),
        ([FOUND, FOUND], "was not to be validated"),
        ([CheckpointDropped(name="c1", reason="")], "not validated yet"),
        ([FitEnded(outcome="finished", result_key="r")], "2 checkpoints are not validated yet"),
        (
            [TrainingEnded(fit_end=FitEnded(outcome="finished", result_key="r"))],
            "differs from the reference run",
        ),
        (
            [TrainingEnded(fit_end=FitEnded(outcome="failed")), RoundOpened(round=a_round(2))],
            "after the training",
        ),
        (
            [
                TrainingEnded(fit_end=FitEnded(outcome="failed", reason="a")),
                FitEnded(outcome="failed", reason="b"),
            ],
            "expected outcome failed: a",
        ),
        (
            [
                TrainingEnded(fit_end=FitEnded(outcome="failed")),
                GroupPlanned(request=a_request("t2", "train"), plan=a_plan("t2")),
            ],
            "after the training",
        ),
        (
            [
                GroupPlanned(request=a_request("t2", "validate"), plan=a_plan("t2")),
                GroupPlanned(request=a_request("t3", "validate"), plan=a_plan("t3")),
            ],
            "1 machines for validation are active already",
        ),
    ],
)
def test_wrong_validation_is_reported(events: list[JournalEvent], text: str) -> None:
    harness = validating()
    for event in events:
        assert not harness.violations
        harness.write(event)
    assert [text in violation for violation in harness.violations] == [True], harness.violations


def test_machine_without_pending_validation_is_a_violation() -> None:
    harness = CheckerHarness()
    harness.begin()
    harness.write(GroupPlanned(request=a_request("t2", "validate"), plan=a_plan("t2")))
    assert "without a pending validation" in harness.violations[0]


def test_missing_validation_is_a_violation_at_the_end() -> None:
    harness = validating()
    harness.checker.reference_view = structs.replace(
        harness.checker.reference_view, unvalidated_checkpoints=()
    )
    training = harness.training
    result = encode(training.reference.state_at(training.workload.steps).link)[1:-1]
    harness.bucket.write("w", "r", result)
    harness.write(FitEnded(outcome="finished", result_key="r"))
    harness.checker.check_end(Scenario("finishes"))
    assert "validations requested: ['1-0', '1-1'], ended: []" in harness.violations[0]


def test_entry_of_another_agent_is_a_violation() -> None:
    harness = CheckerHarness()
    harness.begin()
    harness.write(RoundClosed(round_number=1, cause=FailureCause.NETWORK, reason=""), by=TWO)
    assert "appended RoundClosed while a1 is the leader" in harness.violations[0]
    harness = CheckerHarness()
    harness.begin()
    harness.write(LeaderElected(leader=TWO, epoch=2, coordinator_address="a2:7000"))
    assert not harness.violations
    harness.write(LeaderElected(leader=TWO, epoch=3), by=AgentId("a3"))
    assert "without being the leader" in harness.violations[0]


def test_entry_after_the_end_is_a_violation() -> None:
    harness = CheckerHarness()
    harness.begin()
    harness.write(FitEnded(outcome="failed"))
    harness.write(FitEnded(outcome="failed"))
    assert "after the end" in harness.violations[0]


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        (
            lambda harness: harness.write(LeaderElected(leader=TWO, epoch=2), by=TWO, slot=9),
            "a gap",
        ),
        (lambda harness: harness.bucket.write("a1", keys.entry(0), b"{}"), "which is immutable"),
        (lambda harness: harness.bucket.remove("a1", keys.entry(0)), "was deleted"),
        (lambda harness: harness.bucket.write("a1", keys.lease(TWO), b"1"), "another writer"),
        (
            lambda harness: harness.checker.on_entry_applied("a2", 0, b"rumour", JournalView()),
            "never written",
        ),
        (
            lambda harness: harness.checker.on_entry_applied("a2", 99, b"rumour", JournalView()),
            "never written",
        ),
        (
            lambda harness: harness.checker.on_machines_requested(
                GroupPlan(token=Token("x"), provisioner="sim", num_nodes=1, slots_per_node=1)
            ),
            "not in the journal",
        ),
        (lambda harness: write_cached_view(harness, a_view()), "differs from the reference view"),
    ],
)
def test_wrong_objects_and_machines_are_reported(
    wrong: Callable[[CheckerHarness], Any], text: str
) -> None:
    harness = CheckerHarness()
    harness.begin()
    wrong(harness)
    assert text in harness.violations[0]


def test_overwriting_a_committed_checkpoint_is_a_violation() -> None:
    harness = validating()
    harness.bucket.write("w", "c1/state", harness.bucket.objects["c1/state"])
    harness.bucket.write("w", "c/state", b"1")
    harness.bucket.write("w", "c/state", b"2")
    assert not harness.violations
    harness.bucket.write("w", "c1/state", b"of another step")
    assert "changed c1/state of the committed checkpoint c1" in harness.violations[0]


def write_cached_view(harness: CheckerHarness, view: View) -> None:
    body = encode(CachedView(view=view, previous="0" * 64))
    harness.bucket.write("a1", keys.cached_view(4), body)


def test_correct_cached_view_is_no_violation() -> None:
    harness = CheckerHarness()
    harness.begin()
    view = harness.checker.views[4]
    assert isinstance(view, View)
    write_cached_view(harness, view)
    harness.checker.on_entry_applied(
        "a2", 3, harness.checker.entry_bodies[3], harness.checker.views[4]
    )
    assert not harness.violations
    harness.checker.on_entry_applied(
        "a2", 3, harness.checker.entry_bodies[3], harness.checker.views[3]
    )
    assert "differs from the reference view" in harness.violations[0]


def test_first_violation_counts() -> None:
    harness = CheckerHarness()
    harness.checker.report_violation("first")
    harness.checker.report_violation("second")
    assert harness.violations == ["first"]


def test_unexpected_outcome_is_a_violation() -> None:
    harness = CheckerHarness()
    harness.begin()
    harness.checker.check_end(Scenario("finishes"))
    assert harness.violations == ["the run did not end"]
    harness = CheckerHarness()
    harness.begin()
    harness.write(FitEnded(outcome="failed", reason="no luck"))
    harness.checker.check_end(Scenario("finishes"))
    assert "no luck" in harness.violations[0]


@pytest.mark.parametrize("events", [(), (IsolateHost(AtTime(1.0), 50.0),)])
def test_only_interruptions_of_the_network_may_look_like_a_firewall(
    events: tuple[IsolateHost, ...],
) -> None:
    harness = CheckerHarness()
    harness.begin()
    harness.write(FitEnded(outcome="failed", reason="2 machines could not reach the leader"))
    before_rounds = structs.replace(harness.checker.reference_view, last_round=None)
    harness.checker.reference_view = before_rounds
    harness.checker.check_end(Scenario("interrupted", events=events))
    assert len(harness.violations) == (not events)


@pytest.mark.parametrize(
    ("may_exceed", "reason", "expected"),
    [(True, "the time budget", 0), (True, "ctrl-c", 1), (False, "the time budget", 1)],
)
def test_only_a_scenario_with_a_time_budget_may_end_by_it(
    may_exceed: bool, reason: str, expected: int
) -> None:
    harness = CheckerHarness()
    harness.begin()
    harness.write(FitEnded(outcome="cancelled", reason=reason))
    scenario = Scenario("ends early", time_budget_s=20.0, may_exceed_time_budget=may_exceed)
    harness.checker.check_end(scenario)
    assert len(harness.violations) == expected


@pytest.mark.parametrize(
    ("outcome", "reason", "expected"),
    [("cancelled", "the budget is used up", 0), ("failed", "the budget", 1), ("failed", "", 1)],
)
def test_scenario_with_a_small_budget_may_end_by_it_but_not_fail(
    outcome: Literal["cancelled", "failed"], reason: str, expected: int
) -> None:
    harness = CheckerHarness()
    harness.begin()
    harness.write(FitEnded(outcome=outcome, reason=reason))
    harness.checker.check_end(Scenario("ends early", may_exhaust_budget=True))
    assert len(harness.violations) == expected
