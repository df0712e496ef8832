"""The checker says what is wrong, in words, and knows what is right."""

from collections.abc import Callable
from typing import Any

import pytest
from msgspec import structs

from spotfit.checkpoint.manifest import Manifest
from spotfit.core.codec import encode
from spotfit.core.ids import AgentId, RunId, Token
from spotfit.ledger import keys
from spotfit.ledger.snapshot import Snapshot
from spotfit.model.events import (
    Blame,
    CheckpointCommitted,
    CheckpointDropped,
    Entry,
    Event,
    FitEnded,
    FitStarted,
    Intended,
    LeaderElected,
    RoundClosed,
    RoundOpened,
    Submitted,
    TrainingEnded,
    ValidationAsked,
    ValidationBegun,
    ValidationEnded,
)
from spotfit.model.group import GroupHandle, GroupPlan, GroupRequest, Role
from spotfit.model.spec import RunSpec
from spotfit.model.view import View
from spotfit.model.world import Place, Round
from spotfit.store.transfer import FileRecord
from spotfit_localsim.bucket import Bucket
from spotfit_localsim.invariants import Checker
from spotfit_localsim.saves import Kept
from spotfit_localsim.workload import Training, Validations, Workload, score

RUN = RunId("r")
ONE, TWO = AgentId("a1"), AgentId("a2")
SPEC = RunSpec(run_id=RUN, name="run", fit_id="f", workers_min=1, workers_max=1)
PLAN = GroupPlan(Token("t1"), "sim", 1, 1)


class Desk:
    """A bucket with a checker beside it."""

    def __init__(self) -> None:
        self.bucket = Bucket()
        self.training = Training(Workload(steps=10))
        self.broke: list[str] = []
        self.checker = Checker(
            self.bucket.objects, self.training, broke=self.broke.append, wrote=lambda _: None
        )
        self.bucket.watchers.append(self.checker.written)

    def write(self, event: Event, by: AgentId = ONE, *, slot: int | None = None) -> None:
        at = self.checker.truth.next_slot if slot is None else slot
        self.bucket.write(by, keys.entry(at), encode(Entry(RUN, by, event)))

    def begin(self) -> None:
        """A fit with a leader, a machine and an open round."""
        self.write(FitStarted(SPEC))
        self.write(LeaderElected(ONE, 1, "a1:7000"))
        self.write(Intended(GroupRequest(Token("t1"), 1, 1), PLAN))
        self.write(Submitted(Token("t1"), GroupHandle(Token("t1"), "sim", "x")))
        self.write(RoundOpened(a_round(1)))
        assert not self.broke


def a_plan(token: str) -> GroupPlan:
    return GroupPlan(Token(token), "sim", 1, 1)


def a_request(token: str, role: Role) -> GroupRequest:
    return GroupRequest(Token(token), 1, 1, role=role)


def a_round(number: int, checkpoint: str | None = None) -> Round:
    return Round(number, (Place(ONE, 0, 0, 1, "a1", Token("t1"), 0),), checkpoint)


def test_a_good_run_is_good() -> None:
    desk = Desk()
    desk.begin()
    desk.write(RoundClosed(1, Blame.PREEMPTION, "gone"))
    desk.write(RoundOpened(a_round(2)))
    assert desk.checker.truth.round == a_round(2)
    assert desk.checker.broken is None


@pytest.mark.parametrize(
    ("event", "words"),
    [
        (FitStarted(SPEC), "while another goes on"),
        (LeaderElected(ONE, 3), "epoch 3 follows 1"),
        (LeaderElected(ONE, 1), "epoch 1 follows 1"),
        (Intended(GroupRequest(Token("t1"), 1, 1), PLAN), "used before"),
        (Submitted(Token("t1"), GroupHandle(Token("t1"), "sim", "x")), "not pending"),
        (RoundOpened(a_round(2)), "beside round 1"),
        (RoundClosed(7, Blame.NETWORK, ""), "not open"),
        (RoundClosed(1, Blame.WORKER, ""), "the user is blamed 1 times, for 0 mistakes"),
        (CheckpointCommitted("c", 1, 0, {"step": 1}, (0,)), "no files of rank 0"),
        (CheckpointCommitted("c", 2, 0, {"step": 1}, (0,)), "has not begun"),
        (CheckpointDropped("c", ""), "not there to be dropped"),
        (FitEnded("finished", result_key="nowhere"), "not that of the undisturbed run"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_a_wrong_decision_is_named(event: Event, words: str) -> None:
    desk = Desk()
    desk.begin()
    desk.write(event)
    assert [words in broken for broken in desk.broke] == [True]


def validating() -> Desk:
    """A fit with two checkpoints to be validated, and one that is not."""
    desk = Desk()
    desk.begin()
    desk.training.load = Workload(steps=10, validations=Validations())
    for report, step in ((0, 1), (1, 2)):
        state = desk.training.chain.at(step)
        name = f"c{step}"
        body = encode(Kept(step, state.link))
        file = FileRecord("state", len(body), "")
        told = {"step": step}
        part = Manifest(name, 1, report, 0, (0,), told, (file,))
        desk.bucket.write("w", f"{name}/state", body)
        desk.bucket.write("w", keys.manifest(name, 1, 0), encode(part))
        desk.write(CheckpointCommitted(name, 1, report, told, (0,), validation=ValidationAsked()))
    assert not desk.broke
    return desk


BEGUN = ValidationBegun("c1", "1-0", 1, ONE, Token("t1"), 0)
FOUND = ValidationEnded("c1", "1-0", "validated", {"score": score(1)})


def test_validations_one_after_the_other_are_good() -> None:
    desk = validating()
    desk.write(BEGUN)
    desk.write(FOUND)
    desk.write(ValidationBegun("c2", "1-1", 2, ONE, Token("t1"), 0))
    desk.write(ValidationEnded("c2", "1-1", "failed"))
    assert desk.checker.broken is None


@pytest.mark.parametrize(
    ("events", "words"),
    [
        ([ValidationBegun("c2", "1-1", 1, ONE, Token("t1"), 0)], "1-0 is next"),
        ([structs.replace(BEGUN, attempt=3)], "attempt 3 follows 0"),
        ([structs.replace(BEGUN, token=Token("t9"))], "cannot validate"),
        ([BEGUN, structs.replace(BEGUN, attempt=2)], "validates 1-0 already"),
        ([structs.replace(FOUND, metrics={"score": -1})], "is the score"),
        ([structs.replace(FOUND, status="failed")], "that did not succeed"),
        ([FOUND, FOUND], "was not to be validated"),
        ([CheckpointDropped("c1", "")], "still to be validated"),
        ([FitEnded("finished", result_key="r")], "2 checkpoints are still to be validated"),
        ([TrainingEnded(FitEnded("finished", result_key="r"))], "not that of the undisturbed"),
        ([TrainingEnded(FitEnded("failed")), RoundOpened(a_round(2))], "after the training"),
        ([TrainingEnded(FitEnded("failed", "a")), FitEnded("failed", "b")], "was to end failed: a"),
        (
            [TrainingEnded(FitEnded("failed")), Intended(a_request("t2", "train"), a_plan("t2"))],
            "after the training",
        ),
        (
            [
                Intended(a_request("t2", "validate"), a_plan("t2")),
                Intended(a_request("t3", "validate"), a_plan("t3")),
            ],
            "1 machines for validations stand already",
        ),
    ],
)
def test_a_wrong_validation_is_named(events: list[Event], words: str) -> None:
    desk = validating()
    for event in events:
        assert not desk.broke
        desk.write(event)
    assert [words in broken for broken in desk.broke] == [True], desk.broke


def test_a_machine_with_nothing_to_validate_is_a_waste() -> None:
    desk = Desk()
    desk.begin()
    desk.write(Intended(a_request("t2", "validate"), a_plan("t2")))
    assert "nothing is to be validated" in desk.broke[0]


def test_a_validation_that_was_forgotten_is_noticed_at_the_end() -> None:
    desk = validating()
    desk.checker.truth = structs.replace(desk.checker.truth, unvalidated=())
    result = encode(desk.training.result.link)[1:-1]
    desk.bucket.write("w", "r", result)
    desk.write(FitEnded("finished", result_key="r"))
    desk.checker.at_the_end("finished")
    assert "to be validated were ['1-0', '1-1'], and these were: []" in desk.broke[0]


def test_only_the_leader_decides_and_only_it_names_an_heir() -> None:
    desk = Desk()
    desk.begin()
    desk.write(RoundClosed(1, Blame.NETWORK, ""), by=TWO)
    assert "decided RoundClosed while a1 leads" in desk.broke[0]
    desk = Desk()
    desk.begin()
    desk.write(LeaderElected(TWO, 2, "a2:7000"))
    assert not desk.broke
    desk.write(LeaderElected(TWO, 3), by=AgentId("a3"))
    assert "name an heir" in desk.broke[0]


def test_nothing_is_decided_after_the_end() -> None:
    desk = Desk()
    desk.begin()
    desk.write(FitEnded("failed"))
    desk.write(FitEnded("failed"))
    assert "after the end" in desk.broke[0]


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (lambda desk: desk.write(LeaderElected(TWO, 2), by=TWO, slot=9), "a hole"),
        (lambda desk: desk.bucket.write("a1", keys.entry(0), b"{}"), "which is fixed"),
        (lambda desk: desk.bucket.remove("a1", keys.entry(0)), "was deleted"),
        (lambda desk: desk.bucket.write("a1", keys.beat(TWO), b"1"), "somebody else"),
        (lambda desk: desk.checker.heard("a2", 0, b"rumour", View()), "never written"),
        (lambda desk: desk.checker.heard("a2", 99, b"rumour", View()), "never written"),
        (lambda desk: desk.checker.requested(GroupPlan(Token("x"), "sim", 1, 1)), "nothing"),
        (lambda desk: photograph(desk, View()), "shows another run"),
    ],
)
def test_wrong_objects_and_machines_are_named(wrong: Callable[[Desk], Any], words: str) -> None:
    desk = Desk()
    desk.begin()
    wrong(desk)
    assert words in desk.broke[0]


def test_what_is_committed_may_not_be_written_anew() -> None:
    desk = validating()
    desk.bucket.write("w", "c1/state", desk.bucket.objects["c1/state"])
    desk.bucket.write("w", "c/state", b"1")
    desk.bucket.write("w", "c/state", b"2")
    assert not desk.broke
    desk.bucket.write("w", "c1/state", b"of another step")
    assert "changed c1/state of the committed checkpoint c1" in desk.broke[0]


def photograph(desk: Desk, view: View) -> None:
    body = encode(Snapshot(view))
    desk.bucket.write("a1", keys.snapshot(4), body)


def test_a_true_snapshot_and_a_true_view_are_right() -> None:
    desk = Desk()
    desk.begin()
    photograph(desk, desk.checker.views[4])
    desk.checker.heard("a2", 3, desk.checker.bodies[3], desk.checker.views[4])
    assert not desk.broke
    desk.checker.heard("a2", 3, desk.checker.bodies[3], desk.checker.views[3])
    assert "another run" in desk.broke[0]


def test_the_first_complaint_counts() -> None:
    desk = Desk()
    desk.checker.complain("first")
    desk.checker.complain("second")
    assert desk.broke == ["first"]


def test_in_the_end_the_run_has_ended_as_it_should() -> None:
    desk = Desk()
    desk.begin()
    desk.checker.at_the_end("finished")
    assert desk.broke == ["the run did not end"]
    desk = Desk()
    desk.begin()
    desk.write(FitEnded("failed", "no luck"))
    desk.checker.at_the_end("finished")
    assert "no luck" in desk.broke[0]
