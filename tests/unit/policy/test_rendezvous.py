"""Rendezvous: who is in the next round, and in which place."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spotfit.core.ids import AgentId, Token
from spotfit.model.holding import Part, State
from spotfit.model.spec import Tempo
from spotfit.model.view import View
from spotfit.model.watch import Watch
from spotfit.model.world import Round
from spotfit.policy.actions import Wait
from spotfit.policy.rendezvous import next_round
from spotfit.testing.builders import (
    TOKEN,
    a_commit,
    a_group,
    a_last_life,
    a_member,
    a_notice,
    a_round,
    a_seat,
    a_spec,
    a_view,
    a_watch,
    an_agent,
    seats,
)

NOW = 1000.0


def formed(view: View, watch: Watch, now: float = NOW) -> Round:
    round_ = next_round(view, watch, now)
    assert isinstance(round_, Round), round_
    return round_


def waited(view: View, watch: Watch, now: float = NOW) -> Wait:
    wait = next_round(view, watch, now)
    assert isinstance(wait, Wait), wait
    assert wait.until > now
    return wait


def test_the_first_round_starts_from_nothing() -> None:
    round_ = formed(a_view(), a_watch())
    assert (round_.number, round_.checkpoint, round_.world_size) == (1, None, 2)


def test_the_next_starts_from_the_latest_checkpoint_and_has_the_next_number() -> None:
    view = a_view(last_round=a_round(6), checkpoints=(a_commit("c1"), a_commit("c2")))
    round_ = formed(view, a_watch())
    assert (round_.number, round_.checkpoint) == (7, "c2")


def test_a_range_of_one_size_waits_for_all_of_it_and_takes_no_more() -> None:
    only = a_spec(workers_min=2, workers_max=2, elastic=True)
    assert waited(a_view(spec=only), a_watch(seats=seats(a_seat(0))), NOW + 999.0)
    three = a_watch(seats=seats(a_seat(0), a_seat(1), a_seat(2, member=a_member(2, node=2))))
    group = a_group(nodes=3)
    assert formed(a_view(spec=only, groups={TOKEN: group}), three).world_size == 2


def test_nobody_starts_beside_workers_that_are_still_ending() -> None:
    watch = a_watch(seats=seats(a_seat(0), a_seat(1, running=1)))
    assert "still end on 1 nodes" in waited(a_view(), watch).why


def test_with_too_few_it_waits() -> None:
    assert waited(a_view(), a_watch(seats=seats(a_seat(0)))).why == (
        "1 of at least 2 workers have a place"
    )


def test_a_round_is_never_empty() -> None:
    view = a_view(spec=a_spec(workers_min=0, workers_max=2), groups={})
    assert waited(view, a_watch(seats={})).why.startswith("0 of at least")


def test_a_few_rounds_that_saved_nothing_hold_nobody_up() -> None:
    assert formed(a_view(fruitless=5), a_watch(turned_at=NOW)).world_size == 2


@pytest.mark.parametrize(
    ("fruitless", "pause_s"), [(6, 0.2), (7, 0.4), (13, 25.6), (14, 30.0), (10**6, 30.0)]
)
def test_rounds_that_save_nothing_follow_each_other_ever_more_slowly(
    fruitless: int, pause_s: float
) -> None:
    view, watch = a_view(fruitless=fruitless), a_watch(turned_at=NOW)
    wait = waited(view, watch)
    assert wait.until == pytest.approx(NOW + pause_s)
    assert wait.why == f"{fruitless} rounds in a row ended before they saved anything"
    assert formed(view, watch, wait.until).world_size == 2


def test_who_will_not_be_brought_back_gets_a_place_where_nobody_else_is_there() -> None:
    spare = Token("t-2")
    groups = {TOKEN: a_group(), spare: a_group(token=spare, nodes=1)}
    fresh = a_seat(2, member=a_member(2, token=spare, node=0))
    last: dict[str, Any] = {"statuses": {TOKEN: a_last_life(0)}}
    three = a_watch(seats=seats(a_seat(0), a_seat(1), fresh), **last)
    places = formed(a_view(groups=groups), three).places
    assert [place.agent for place in places] == [an_agent(1), an_agent(2)]
    both = formed(a_view(groups=groups), a_watch(**last)).places
    assert [place.agent for place in both] == [an_agent(0), an_agent(1)]


def test_who_leaves_gets_no_place() -> None:
    view = a_view(spec=a_spec(workers_min=1, workers_max=2), notices={an_agent(0): a_notice()})
    assert [place.agent for place in formed(view, a_watch()).places] == [an_agent(1)]


# --- an elastic group ----------------------------------------------------------------------------

ELASTIC: dict[str, Any] = {
    "spec": a_spec(workers_min=1, workers_max=2, tempo=Tempo(form_patience_s=60.0))
}
ONE = seats(a_seat(0))


def test_it_waits_for_more_while_more_may_come() -> None:
    wait = waited(a_view(**ELASTIC), a_watch(seats=ONE, turned_at=NOW - 10))
    assert wait.until == NOW + 50
    assert "more may come" in wait.why


@pytest.mark.parametrize(
    ("view", "watch"),
    [
        (a_view(**ELASTIC), a_watch(seats=ONE, turned_at=NOW - 60)),
        (a_view(**ELASTIC, groups={TOKEN: a_group(nodes=1)}), a_watch(seats=ONE, turned_at=NOW)),
        (
            a_view(**ELASTIC, last_refusal="full", refusals=1),
            a_watch(seats=ONE, turned_at=NOW, refused_at=NOW - 0.5),
        ),
    ],
    ids=["waited long enough", "nobody is expected", "the market refuses"],
)
def test_it_goes_on_smaller(view: View, watch: Watch) -> None:
    assert formed(view, watch).world_size == 1


# --- places --------------------------------------------------------------------------------------


def test_survivors_keep_their_order_and_newcomers_follow() -> None:
    order = [a_member(n) for n in (2, 0, 1)]
    view = a_view(
        spec=a_spec(workers_max=4),
        groups={TOKEN: a_group(nodes=4)},
        last_round=a_round(1, members=order),
    )
    watch = a_watch(seats=seats(*(a_seat(n) for n in range(4))))
    assert [place.agent for place in formed(view, watch).places] == [
        an_agent(2),
        an_agent(0),
        an_agent(1),
        an_agent(3),
    ]


def test_a_machine_too_wide_for_what_is_left_is_used_in_part() -> None:
    view = a_view(spec=a_spec(workers_max=3), groups={TOKEN: a_group(slots=2)})
    wide = seats(*(a_seat(member=a_member(n, slots=2)) for n in (0, 1)))
    places = formed(view, a_watch(seats=wide)).places
    assert [(place.node_rank, list(place.ranks)) for place in places] == [(0, [0, 1]), (1, [2])]


@given(
    st.integers(1, 12),
    st.lists(st.tuples(st.integers(1, 4), st.integers(0, 2)), min_size=1, max_size=8),
    st.permutations(range(8)),
    st.integers(0, 8),
)
def test_ranks_are_neither_doubled_nor_left_out(
    wanted: int, nodes: list[tuple[int, int]], order: list[int], survivors: int
) -> None:
    members = [
        a_member(n, slots=slots, token=Token(f"t-{group}"), node=n)
        for n, (slots, group) in enumerate(nodes)
    ]
    groups = {Token(f"t-{g}"): a_group(token=Token(f"t-{g}"), nodes=8, slots=1) for g in range(3)}
    before = a_round(
        3, members=[members[n] for n in order if n < min(survivors, len(members))] or ()
    )
    view = a_view(spec=a_spec(workers_min=1, workers_max=wanted), groups=groups, last_round=before)
    round_ = formed(view, a_watch(seats=seats(*(a_seat(member=one) for one in members))), 1e9)
    ranks = [rank for place in round_.places for rank in place.ranks]
    assert ranks == list(range(min(wanted, sum(slots for slots, _ in nodes))))
    assert [place.node_rank for place in round_.places] == list(range(len(round_.places)))
    agents: list[AgentId] = [place.agent for place in round_.places]
    assert len(set(agents)) == len(agents)
    by_agent = {one.agent: one for one in members}
    assert all(0 < place.workers <= by_agent[place.agent].slots for place in round_.places)


def test_a_round_begins_from_memory_where_its_machine_has_all_of_a_newer_state() -> None:
    state, alone = State(1, 9), a_member(0, slots=2)
    held = tuple(Part(state, rank, 2) for rank in range(2))
    view = a_view(last_round=a_round(members=[alone]), checkpoints=(a_commit("c1"),))
    round_ = formed(view, a_watch(seats=seats(a_seat(0, member=alone, held=held))))
    assert (round_.checkpoint, round_.memory) == ("c1", state)
    assert round_.holders == ((an_agent(0),), (an_agent(0),))
    torn = a_watch(seats=seats(a_seat(0, member=alone, held=held[:1])))
    assert formed(view, torn).memory is None
