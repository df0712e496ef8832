"""A node's validations: as the journal assigns them, told to every leader, and never too long."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from spotfit.agent.ports import ORPHANED, UNBORN, FromAgent
from spotfit.agent.validation import LiveAssessor, Validation
from spotfit.core.codec import decoder, encode
from spotfit.core.ids import AgentId, Token
from spotfit.model.assessment import Assessment, Verdict
from spotfit.model.events import FitEnded, ValidationAsked, ValidationBegun
from spotfit.model.spec import ValidationSpec
from spotfit.model.view import View
from spotfit.model.wire import Assessed, Join
from spotfit.testing.builders import RUN, a_commit, a_member, a_spec, a_view, an_agent
from tests.unit.agent.world import FakeAssessor, FakeNet, Wire

ME = an_agent(1)
KEPT = a_commit("c1", validation=ValidationAsked({"batches": 2}, timeout_s=60.0))


def assigned(
    attempt: int = 1, agent: AgentId = ME, kept: Any = KEPT, timeout_s: float | None = None
) -> View:
    begun = ValidationBegun(kept.name, kept.mark, attempt, agent, Token("t-v"), 0)
    spec = a_spec(validation=ValidationSpec(timeout_s=timeout_s))
    return a_view(spec=spec, checkpoints=(kept,), unvalidated=(kept,), validation=begun)


class Node:
    """An agent's validations, and a leader that listens."""

    def __init__(self) -> None:
        wire = Wire()
        self.leader, self.net = FakeNet(wire, a_member(0)), FakeNet(wire, a_member(1))
        self.assessor = FakeAssessor()
        self.validation = Validation(ME, self.net, self.assessor)
        self.dial()

    def dial(self) -> None:
        self.net.dial(a_member(0).hub, Join(RUN, a_member(1), 0))
        self.leader.events()

    def told(self, *, anew: bool = False) -> list[Any]:
        """What the leader hears."""
        self.validation.tell(anew=anew)
        return [event.message for event in self.leader.events() if isinstance(event, FromAgent)]


@pytest.fixture
def node() -> Node:
    return Node()


def test_what_the_journal_assigns_is_begun_once(node: Node) -> None:
    for _ in range(3):
        node.validation.follow(assigned(), 0.0)
    assert node.assessor.begun == ["c1"]
    node.assessor.find(acc=1.0)
    node.validation.hear(1.0)
    node.validation.follow(assigned(), 1.0)
    assert node.assessor.begun == ["c1"], "the same attempt"
    node.validation.follow(assigned(2), 1.0)
    assert node.assessor.begun == ["c1", "c1"]


def test_what_is_another_s_is_left_to_it(node: Node) -> None:
    node.validation.follow(assigned(agent=an_agent(0)), 0.0)
    assert not node.validation.busy


@pytest.mark.parametrize(
    "after",
    [
        replace(assigned(), validation=None),
        replace(assigned(), validation=None, ended=FitEnded("cancelled")),
        assigned(2, agent=an_agent(0)),
    ],
    ids=["it is over", "the fit is", "it is another's now"],
)
def test_what_is_assigned_no_more_is_stopped(node: Node, after: View) -> None:
    node.validation.follow(assigned(), 0.0)
    node.validation.follow(after, 1.0)
    assert not node.validation.busy
    assert node.told() == []


def test_the_leader_hears_what_was_found_once_and_a_new_one_again(node: Node) -> None:
    node.validation.follow(assigned(), 0.0)
    assert node.told() == []
    node.assessor.find(acc=1.0)
    node.validation.hear(1.0)
    found = Assessed(1, "validated", {"acc": 1.0})
    assert (node.told(), node.told()) == ([found], [])
    node.dial()
    assert node.told(anew=True) == [found]


@pytest.mark.parametrize(
    ("verdict", "assessed"),
    [
        (Verdict(told="ValueError: no"), Assessed(1, "failed", why="ValueError: no")),
        (Verdict(told="no bucket", again=True), Assessed(1, "lost", why="no bucket")),
        (Verdict({}), Assessed(1, "validated")),
    ],
)
def test_how_it_ended_is_told(node: Node, verdict: Verdict, assessed: Assessed) -> None:
    node.validation.follow(assigned(), 0.0)
    node.assessor.kept, node.assessor._verdict = None, verdict
    node.validation.hear(1.0)
    assert node.told() == [assessed]


def test_when_its_time_is_over_it_is_stopped(node: Node) -> None:
    node.validation.follow(assigned(), 100.0)
    assert node.validation.wake_at == 160.0
    node.validation.hear(159.0)
    assert node.told() == []
    node.validation.hear(160.0)
    assert node.told() == [Assessed(1, "timeout", why="it took longer than 60 s")]
    assert not node.validation.busy
    assert node.validation.wake_at == float("inf")


@pytest.mark.parametrize(
    ("asked", "usual_s", "limit_s"),
    [
        (ValidationAsked(), 10.0, 10.0),
        (ValidationAsked(), None, float("inf")),
        (ValidationAsked({}, timeout_s=5.0), 10.0, 5.0),
        (ValidationAsked({}), 10.0, float("inf")),
    ],
    ids=["the trainer's", "none", "the report's", "the report's: none"],
)
def test_whose_time_limit_counts(
    node: Node, asked: ValidationAsked, usual_s: float | None, limit_s: float
) -> None:
    kept = a_commit("c1", validation=asked)
    node.validation.follow(assigned(kept=kept, timeout_s=usual_s), 0.0)
    assert node.validation.wake_at == limit_s


def test_the_next_waits_until_the_one_before_is_gone(node: Node) -> None:
    node.validation.follow(assigned(), 0.0)
    node.assessor.stop = lambda: None  # type: ignore[method-assign]  # SIGKILL takes a moment
    node.validation.follow(assigned(2), 1.0)
    assert node.assessor.begun == ["c1"]
    node.assessor.kept = None
    node.validation.follow(assigned(2), 2.0)
    assert node.assessor.begun == ["c1", "c1"]


# --- the process -----------------------------------------------------------------------------


class Process:
    """A process that the test speaks for."""

    def __init__(self) -> None:
        self.told: list[Assessment] = []
        self.killed = False
        self.say: Callable[[list[bytes]], None]
        self.end: Callable[[str, bool], None]

    def begin(
        self, hear: Callable[[list[bytes]], None], ended: Callable[[str, bool], None]
    ) -> Process:
        self.say, self.end = hear, ended
        return self

    def send(self, body: bytes) -> None:
        self.told.append(decoder(Assessment).decode(body))

    def kill(self) -> None:
        self.killed = True


def an_assessor(devices: tuple[str, ...] = (), gpus: float = 0) -> tuple[LiveAssessor, Process]:
    process = Process()
    assessor = LiveAssessor(
        process.begin, secret="hush", run_id=RUN, scratch="/scratch", devices=devices
    )
    resources = {"GPU": gpus} if gpus else {"CPU": 1.0}
    spec = a_spec(storage_url="/run", validation=ValidationSpec(resources=resources))
    assessor.begin(spec, KEPT)
    return assessor, process


def test_the_process_is_told_what_and_with_what() -> None:
    assessor, process = an_assessor()
    assert process.told == [
        Assessment("/run", {}, "hush", RUN, "c1", {"batches": 2}, (), "/scratch", "digits")
    ]
    assert assessor.busy
    assert "hush" not in repr(process.told)


@pytest.mark.parametrize(
    ("gpus", "seen"), [(0, ()), (0.5, ("cuda:0",)), (1, ("cuda:0",)), (2, ("cuda:0", "cuda:1"))]
)
def test_it_sees_the_accelerators_it_asked_for(gpus: float, seen: tuple[str, ...]) -> None:
    _, process = an_assessor(("cuda:0", "cuda:1"), gpus)
    assert process.told[0].devices == seen


def test_its_verdict_counts_when_it_is_gone() -> None:
    assessor, process = an_assessor()
    process.say([encode(Verdict({"acc": 1}))])
    assert (assessor.busy, assessor.verdict()) == (True, None)
    process.end("exited with code 0", True)
    assert (assessor.busy, assessor.verdict()) == (False, Verdict({"acc": 1}))
    assert assessor.verdict() is None, "told once"


@pytest.mark.parametrize(
    ("how", "again"),
    [("was killed by SIGKILL", False), (ORPHANED, True), (f"{UNBORN}: no memory", True)],
)
def test_one_that_ends_without_a_word_has_failed_unless_we_killed_it(how: str, again: bool) -> None:
    assessor, process = an_assessor()
    process.end(how, False)
    told = f"The process of the validation {how}."
    assert assessor.verdict() == Verdict(told=told, again=again)


def test_of_one_that_was_stopped_nothing_is_told() -> None:
    assessor, process = an_assessor()
    process.say([encode(Verdict({"acc": 1}))])
    assessor.stop()
    assert process.killed
    assert assessor.busy, "until it is gone"
    process.end("was killed by SIGKILL", False)
    assert (assessor.busy, assessor.verdict()) == (False, None)


def test_a_stopped_one_is_not_taken_for_the_next() -> None:
    assessor, process = an_assessor()
    assessor.stop()
    process.end("was killed by SIGKILL", False)
    assessor.begin(a_spec(), KEPT)
    process.end("exited with code 3", False)
    assert assessor.verdict() == Verdict(told="The process of the validation exited with code 3.")
    assert msgspec.json.decode(encode(process.told[-1]))["checkpoint"] == "c1"
