"""A run told as a timeline, with a line for every kind of entry."""

import typing

import pytest

from spotfit.core.ids import AgentId, RunId, Token
from spotfit.model.events import (
    Blame,
    CancelRequested,
    CheckpointCommitted,
    CheckpointDropped,
    Event,
    FitEnded,
    FitStarted,
    Intended,
    LeaderElected,
    NodeLost,
    Noticed,
    Refused,
    Released,
    RoundClosed,
    RoundOpened,
    Submitted,
    TrainingEnded,
    ValidationBegun,
    ValidationEnded,
)
from spotfit.model.group import GroupHandle, GroupPlan, GroupRequest
from spotfit.model.spec import RunSpec
from spotfit.model.world import Notice, Place, Round
from spotfit_localsim.story import Line, Story, tell

A1, T1 = AgentId("a1"), Token("t1")
EVENTS: tuple[tuple[Event, str], ...] = (
    (FitStarted(RunSpec(RunId("r"), "run", "f", 2, 4)), "2..4 workers"),
    (LeaderElected(A1, 3, lost=AgentId("a0"), why="it fell"), "epoch 3: it fell (lost a0)"),
    (Intended(GroupRequest(T1, 1, 1), GroupPlan(T1, "sim", 2, 1), "two"), "2 machines (two)"),
    (Submitted(T1, GroupHandle(T1, "sim", "x")), "submitted t1"),
    (Refused(T1, "none left", final=True), "for good: none left"),
    (NodeLost(T1, 1, A1, "gone"), "lost t1.1 (a1): gone"),
    (Released(T1), "released t1"),
    (Noticed(A1, Notice("spot", 30.0)), "30.0 s"),
    (RoundOpened(Round(1, (Place(A1, 0, 0, 2, "h", T1, 0),), "c")), "from c: a1:0+2"),
    (RoundClosed(1, Blame.NETWORK, "cut"), "blame network: cut"),
    (CheckpointCommitted("c", 1, 4, {"step": 5}, (0,)), "round 1, report 4"),
    (CheckpointDropped("c", "old"), "dropped c: old"),
    (
        Intended(GroupRequest(T1, 1, 1, role="validate"), GroupPlan(T1, "sim", 1, 1)),
        "1 machine for validations",
    ),
    (
        ValidationBegun("c", "1-4", 2, A1, T1, 0, "here"),
        "validates c (1-4), attempt 2, by a1: here",
    ),
    (ValidationEnded("c", "1-4", "failed", why="no"), "failed c (1-4): {} no"),
    (TrainingEnded(FitEnded("finished", "all")), "training ended: finished all"),
    (CancelRequested("enough"), "enough"),
    (FitEnded("failed", "why not"), "failed why not"),
)


@pytest.mark.parametrize(("event", "words"), EVENTS, ids=lambda value: type(value).__name__)
def test_every_event_is_told(event: Event, words: str) -> None:
    assert words in tell(event)


def test_no_kind_of_event_is_left_out_here() -> None:
    assert {type(event) for event, _ in EVENTS} == set(typing.get_args(Event))


def test_a_story_begins_with_how_it_ended() -> None:
    story = Story("storm", 7, lines=[Line(1.5, "a1", "begins"), Line(2.0, "a1", "dies")])
    assert str(story).splitlines()[0] == "storm, seed 7: no end"
    assert str(story).splitlines()[2].split() == ["2.000", "a1", "dies"]
    story.broken = "a hole"
    assert "seed 7: a hole" in str(story)
    assert story.outcome is None
