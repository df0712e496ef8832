"""Absence: whose connection is gone, and what the backend's word is worth."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from spotfit.model.events import LeaderElected
from spotfit.model.group import NodeState
from spotfit.policy.absence import Word, absent_since, backend_says, taken_away, unexplained
from spotfit.testing.builders import (
    TOKEN,
    a_notice,
    a_round,
    a_seat,
    a_status,
    a_view,
    a_watch,
    an_agent,
    seats,
)

VIEW = a_view(round=a_round())
PLACE = a_round().places[1]
GONE_AT_3 = a_watch(seats=seats(a_seat(0)), gone={an_agent(1): 3.0}, led_since=1.0)
LED = replace(VIEW, leader=LeaderElected(an_agent(0), 2, "h:1", "", lost=an_agent(1)))


def saying(state: NodeState, seen: float) -> dict[str, Any]:
    return {"statuses": {TOKEN: a_status(NodeState.RUNNING, state)}, "seen": {TOKEN: seen}}


def test_who_is_connected_is_not_absent() -> None:
    assert absent_since(VIEW, a_watch(), an_agent(1)) is None
    assert absent_since(LED, a_watch(), an_agent(1)) is None, "it led, and is back"


def test_absence_begins_with_the_break_or_with_the_election_of_a_successor() -> None:
    assert absent_since(VIEW, GONE_AT_3, an_agent(1)) == 3.0
    watch = a_watch(seats=seats(a_seat(0)), led_since=1.0)
    assert absent_since(LED, watch, an_agent(1)) == 1.0
    assert absent_since(VIEW, watch, an_agent(1)) is None, "nobody saw it break off"


@pytest.mark.parametrize(
    ("state", "seen", "word"),
    [
        (NodeState.GONE, 2.0, Word.GONE),
        (NodeState.FAILED, 2.0, Word.GONE),
        (NodeState.RUNNING, 2.9, Word.NOTHING),
        (NodeState.RUNNING, 3.0, Word.RUNS),
        (NodeState.WAITING, 3.0, Word.GONE),
    ],
)
def test_a_backend_says_late_that_a_machine_is_gone_but_never_too_early(
    state: NodeState, seen: float, word: Word
) -> None:
    watch = a_watch(**saying(state, seen))
    assert backend_says(watch, TOKEN, 1, since=3.0) is word


def test_of_machines_it_does_not_tell_of_it_says_nothing() -> None:
    assert backend_says(a_watch(), TOKEN, 1, since=3.0) is Word.NOTHING
    few = a_watch(statuses={TOKEN: a_status(NodeState.GONE)}, seen={TOKEN: 9.0})
    assert backend_says(few, TOKEN, 1, since=3.0) is Word.NOTHING


@pytest.mark.parametrize(
    ("given", "taken", "open_"),
    [
        ({}, False, True),
        (saying(NodeState.GONE, 0.0), True, False),
        (saying(NodeState.RUNNING, 3.0), False, False),
    ],
    ids=["nobody said", "it is gone", "it runs"],
)
def test_only_a_machine_that_is_gone_was_taken_away(
    given: dict[str, Any], *, taken: bool, open_: bool
) -> None:
    watch = replace(GONE_AT_3, **given)
    assert taken_away(VIEW, watch, PLACE) is taken
    assert unexplained(VIEW, watch, PLACE) is open_


def test_one_that_announced_its_end_needs_no_witness() -> None:
    view = replace(VIEW, notices={an_agent(1): a_notice()})
    assert taken_away(view, GONE_AT_3, PLACE)
    assert not unexplained(view, GONE_AT_3, PLACE)


def test_what_the_journal_says_is_so() -> None:
    view = replace(VIEW, lost_agents=frozenset({an_agent(1)}))
    assert taken_away(view, GONE_AT_3, PLACE)
    assert not unexplained(view, GONE_AT_3, PLACE)
    assert not taken_away(replace(view, outages=view.lost_agents), GONE_AT_3, PLACE)
