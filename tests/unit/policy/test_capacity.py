"""Capacity: what is missing, what is expected, and which machines are lost for good."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from spotfit.core.ids import AgentId, Token
from spotfit.model.events import Blame, LeaderElected
from spotfit.model.group import NodeState, NodeStatus
from spotfit.model.spec import Tempo
from spotfit.model.view import View
from spotfit.model.watch import Watch
from spotfit.model.world import Notice
from spotfit.policy.capacity import (
    expected_slots,
    hopeless,
    lasting,
    lost_machines,
    may_ask_at,
    missing_workers,
    usable_seats,
    workers_to_order,
)
from spotfit.testing.builders import (
    TOKEN,
    a_group,
    a_last_life,
    a_member,
    a_notice,
    a_round,
    a_seat,
    a_spec,
    a_status,
    a_view,
    a_watch,
    an_agent,
    seats,
)

TEMPO = Tempo(rejoin_s=5.0, boot_patience_s=900.0, stop_patience_s=10.0)
NOW = 1000.0


def usable(view: View, watch: Watch) -> list[str]:
    return [seat.member.agent for seat in usable_seats(view, watch)]


def losses(view: View, watch: Watch, now: float = NOW) -> dict[int, str]:
    return {lost.node: lost.why for lost in lost_machines(view, watch, now)}


# --- who may be given work -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("view", "seat"),
    [
        (a_view(lost_agents=frozenset({an_agent(1)})), a_seat(1)),
        (a_view(notices={an_agent(1): a_notice()}), a_seat(1)),
        (a_view(), a_seat(1, notice=a_notice())),
        (a_view(groups={TOKEN: a_group(lost=frozenset({1}))}), a_seat(1)),
        (a_view(), a_seat(1, member=a_member(1, token=Token("t-unknown")))),
    ],
    ids=["lost", "noticed", "notice not yet written", "machine given up", "of no group"],
)
def test_who_may_not_be_given_work(view: View, seat: Any) -> None:
    watch = a_watch(seats=seats(a_seat(0), seat))
    assert usable(view, watch) == [an_agent(0)]


def test_of_a_group_let_go_nobody_works() -> None:
    assert usable(a_view(groups={TOKEN: a_group(released=True)}), a_watch()) == []


# --- what is missing -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("groups", "seated", "missing"),
    [
        ({}, [], 4),
        ({TOKEN: a_group(nodes=4)}, [], 0),
        ({TOKEN: a_group(nodes=4)}, [0, 1], 0),
        ({TOKEN: a_group(nodes=4, lost=frozenset({3}))}, [0, 1, 2], 1),
        ({TOKEN: a_group(nodes=4, handle=None)}, [], 0),
        ({TOKEN: a_group(nodes=4, handle=None, refused="full")}, [], 4),
        ({TOKEN: a_group(nodes=2, slots=2)}, [], 0),
        ({TOKEN: a_group(nodes=3)}, [], 1),
    ],
    ids=["nothing", "all granted", "half joined", "one lost", "asked", "refused", "wide", "few"],
)
def test_what_is_missing(groups: Any, seated: list[int], missing: int) -> None:
    view = a_view(spec=a_spec(workers_max=4), groups=groups)
    watch = a_watch(seats=seats(*(a_seat(n) for n in seated)))
    assert missing_workers(view, watch) == missing


def test_whoever_leaves_is_replaced_before_it_is_gone() -> None:
    view = a_view(notices={an_agent(1): a_notice()})
    assert missing_workers(view, a_watch()) == 1


def test_a_caretaker_counts_what_the_journal_knows() -> None:
    caretaker = a_watch(seats={}, caretaker=True)
    assert missing_workers(a_view(), caretaker) == 0
    leaving = a_view(round=a_round(), notices={an_agent(1): a_notice()})
    assert missing_workers(leaving, caretaker) == 1


@given(
    st.integers(1, 6),
    st.lists(
        st.tuples(st.integers(1, 3), st.integers(1, 3), st.sets(st.integers(0, 2))), max_size=4
    ),
    st.data(),
)
def test_nothing_is_ordered_while_enough_is_here_or_expected(
    wanted: int, shapes: list[tuple[int, int, set[int]]], data: st.DataObject
) -> None:
    groups = {
        Token(f"t-{n}"): a_group(
            token=Token(f"t-{n}"), nodes=nodes, slots=slots, lost=frozenset(lost)
        )
        for n, (nodes, slots, lost) in enumerate(shapes)
    }
    machines = [(token, node) for token, group in groups.items() for node in group.standing]
    joined = [one for one in machines if data.draw(st.booleans())]
    watch = a_watch(
        seats=seats(
            *(
                a_seat(member=a_member(n, token=token, node=node, slots=groups[token].plan.slots))
                for n, (token, node) in enumerate(joined)
            )
        )
    )
    view = a_view(spec=a_spec(workers_max=wanted), groups=groups)
    standing = sum(groups[token].plan.slots for token, _ in machines)
    assert missing_workers(view, watch) == wanted - standing
    assert expected_slots(view, watch) == standing - sum(
        seat.member.slots for seat in watch.seats.values()
    )


# --- how often the market is asked ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("refusals", "wait_s"), [(1, 1.0), (2, 2.0), (5, 16.0), (7, 60.0), (5000, 60.0)]
)
def test_the_market_is_asked_ever_more_rarely(refusals: int, wait_s: float) -> None:
    asked = may_ask_at(a_view(refusals=refusals), a_watch(refused_at=100.0))
    assert asked == 100.0 + wait_s


def test_machines_that_die_at_birth_disappoint_as_much_as_a_refusal() -> None:
    assert may_ask_at(a_view(stillborn=3), a_watch(refused_at=100.0)) == 104.0


def test_far_too_many_of_them_in_a_row_are_hopeless() -> None:
    assert hopeless(a_view(stillborn=40)) is None, "20 for each of the two"
    assert hopeless(a_view(stillborn=41)) is not None
    assert hopeless(a_view(groups={}, stillborn=21)) is not None


def test_who_was_not_refused_may_ask_at_once() -> None:
    assert may_ask_at(a_view(refusals=3), a_watch(refused_at=None)) == float("-inf")
    assert may_ask_at(a_view(refusals=0), a_watch(refused_at=NOW)) == float("-inf")


# --- which machines are lost ---------------------------------------------------------------------

IN_ROUND = a_view(spec=a_spec(tempo=TEMPO), round=a_round())
FORMING = a_view(spec=a_spec(tempo=TEMPO))
ONE_SEAT = seats(a_seat(0))


def test_as_long_as_all_are_here_nobody_is_lost() -> None:
    assert losses(IN_ROUND, a_watch()) == {}


def test_the_backend_knows_best() -> None:
    status = a_status(NodeState.RUNNING, NodeState.GONE)
    watch = a_watch(seats=ONE_SEAT, statuses={TOKEN: status})
    assert losses(IN_ROUND, watch) == {1: "the backend says it is gone"}
    told = replace(status, nodes=(status.nodes[0], NodeStatus(NodeState.FAILED, "disk full")))
    assert losses(IN_ROUND, a_watch(seats=ONE_SEAT, statuses={TOKEN: told})) == {1: "disk full"}


def test_a_connected_agent_lives_whatever_the_backend_says() -> None:
    status = a_status(NodeState.RUNNING, NodeState.GONE)
    assert losses(IN_ROUND, a_watch(statuses={TOKEN: status})) == {}


def test_an_agent_may_come_back_for_a_while() -> None:
    watch = a_watch(seats=ONE_SEAT, gone={an_agent(1): NOW})
    assert losses(IN_ROUND, watch, NOW + 5.0) == {}
    assert losses(IN_ROUND, watch, NOW + 5.1) == {1: "its agent was not heard again for 5 s"}


def test_a_new_leader_waits_for_all_to_dial_in() -> None:
    watch = a_watch(seats=ONE_SEAT, led_since=NOW)
    assert losses(IN_ROUND, watch, NOW + 5.0) == {}
    assert 1 in losses(IN_ROUND, watch, NOW + 5.1)


def test_a_machine_that_was_promised_and_is_refused_is_the_markets_doing() -> None:
    view = a_view(groups={TOKEN: a_group(nodes=2)})
    watch = a_watch(seats={}, statuses={TOKEN: a_status(NodeState.REFUSED, NodeState.FAILED)})
    found = {one.node: one.blame for one in lost_machines(view, watch, NOW)}
    assert found == {0: Blame.PREEMPTION, 1: None}


def test_a_leader_that_vanished_is_lost_at_once() -> None:
    view = replace(IN_ROUND, leader=LeaderElected(an_agent(0), 2, "h:1", "", lost=an_agent(1)))
    watch = a_watch(seats=ONE_SEAT, led_since=NOW)
    assert losses(view, watch, NOW + 0.5) == {}, "the backend may know whether it was taken away"
    assert losses(view, watch, NOW + 0.6) == {1: "it led, and its connections broke"}
    runs = replace(watch, statuses={TOKEN: a_status()}, seen={TOKEN: NOW})
    assert losses(view, runs, NOW) == {1: "it led, and its connections broke"}


@pytest.mark.parametrize(
    ("state", "seen", "notices", "blame"),
    [
        (NodeState.GONE, 0.0, {}, Blame.PREEMPTION),
        (NodeState.RUNNING, NOW - 1, {}, Blame.PREEMPTION),
        (NodeState.RUNNING, NOW, {}, Blame.PLATFORM),
        (NodeState.RUNNING, NOW, {an_agent(1): a_notice()}, Blame.PREEMPTION),
    ],
    ids=["it is gone", "the backend may be late", "it runs", "it announced its end"],
)
def test_a_machine_that_runs_on_was_not_taken_away(
    state: NodeState, seen: float, notices: dict[AgentId, Notice], blame: Blame
) -> None:
    watch = a_watch(
        seats=ONE_SEAT,
        gone={an_agent(1): NOW},
        statuses={TOKEN: a_status(NodeState.RUNNING, state)},
        seen={TOKEN: seen},
    )
    view = replace(IN_ROUND, notices=notices, noticed_slots=dict.fromkeys(notices, 9))
    (lost,) = lost_machines(view, watch, NOW + 5.1)
    assert (lost.agent, lost.blame) == (an_agent(1), blame)


def test_a_machine_that_never_had_an_agent_is_charged_to_nobody() -> None:
    watch = a_watch(seats=ONE_SEAT, statuses={TOKEN: a_status(NodeState.RUNNING, NodeState.GONE)})
    (lost,) = lost_machines(FORMING, watch, NOW)
    assert (lost.agent, lost.blame) == (None, None)


def test_a_machine_that_never_joins_is_given_up_late_and_counted_from_its_start() -> None:
    never = a_watch(seats=ONE_SEAT)
    assert losses(FORMING, never, NOW * 10) == {}, "nobody said that it runs"
    granted = a_watch(seats=ONE_SEAT, granted={TOKEN: NOW})
    assert losses(FORMING, granted, NOW + 900) == {}
    assert losses(FORMING, granted, NOW + 901) == {1: "its agent did not join within 900 s"}


def test_workers_that_will_not_end_cost_their_machine() -> None:
    watch = a_watch(seats=seats(a_seat(0), a_seat(1, running=1)), turned_at=NOW)
    assert losses(FORMING, watch, NOW + 10.0) == {}
    assert losses(FORMING, watch, NOW + 10.1) == {1: "its workers would not end"}
    assert losses(IN_ROUND, watch, NOW + 99) == {}, "in a round they are meant to run"


WITHOUT_A1 = replace(
    IN_ROUND,
    round=a_round(2, members=[a_member(0)]),
    round_slot=8,
    notices={an_agent(1): a_notice()},
    noticed_slots={an_agent(1): 7},
)


def test_a_machine_that_announced_its_end_is_given_up_once_a_round_goes_on_without_it() -> None:
    assert losses(WITHOUT_A1, a_watch()) == {1: "it announced its end, and was replaced"}


def test_a_machine_that_its_backend_brought_back_has_lost_its_agent_only() -> None:
    """Kubernetes replaces a pod, AWS Batch tries a job again: the same machine, another agent."""
    newcomer = a_seat(1, member=a_member(1, agent=AgentId("newcomer")))
    watch = a_watch(seats=seats(a_seat(0), newcomer))
    view = a_view(last_round=a_round())
    (lost,) = lost_machines(view, watch, NOW)
    assert (lost.node, lost.agent, lost.comes_back) == (1, an_agent(1), True)
    assert lost.blame is Blame.PREEMPTION
    known = replace(view, lost_agents=frozenset({an_agent(1)}))
    assert list(lost_machines(known, watch, NOW)) == []


@pytest.mark.parametrize(
    "view",
    [
        replace(WITHOUT_A1, round=a_round(2)),
        replace(WITHOUT_A1, round=None),
        replace(WITHOUT_A1, noticed_slots={an_agent(1): 9}),
        replace(WITHOUT_A1, notices={}, noticed_slots={}),
    ],
    ids=["it has a place", "no round yet", "it spoke later", "it announced nothing"],
)
def test_until_then_it_stays(view: View) -> None:
    assert losses(view, a_watch()) == {}


def test_who_sat_on_a_machine_is_remembered_even_without_a_place() -> None:
    watch = a_watch(seats=ONE_SEAT, known={(TOKEN, 1): an_agent(1)}, gone={an_agent(1): NOW})
    assert losses(FORMING, watch, NOW + 5.0) == {}
    (lost,) = lost_machines(FORMING, watch, NOW + 5.1)
    assert lost.agent == an_agent(1)


def test_a_caretaker_believes_the_backend_until_nobody_takes_the_lead_for_too_long() -> None:
    caretaker = a_watch(seats={}, caretaker=True, statuses={TOKEN: a_status()})
    assert losses(IN_ROUND, caretaker, NOW * 10) == {}
    granted = replace(caretaker, granted={TOKEN: NOW}, led_since=NOW + 100)
    assert losses(IN_ROUND, granted, NOW + 1000) == {}
    late = losses(IN_ROUND, granted, NOW + 1001)
    assert late == dict.fromkeys((0, 1), "nobody on it took the lead within 900 s")
    gone = replace(caretaker, statuses={TOKEN: a_status(NodeState.GONE, NodeState.GONE)})
    assert losses(IN_ROUND, gone).keys() == {0, 1}


def test_a_backend_that_tells_of_fewer_machines_than_asked_says_nothing_of_the_rest() -> None:
    watch = a_watch(seats=ONE_SEAT, statuses={TOKEN: a_status(NodeState.RUNNING)})
    assert losses(FORMING, watch) == {}


# --- how many to ask for -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("refusals", "missing", "ordered"),
    [(0, 8, 8), (1, 8, 4), (2, 8, 3), (9, 8, 3), (0, 4, 4), (2, 4, 1), (9, 4, 1)],
)
def test_an_elastic_group_asks_for_less_with_every_refusal_but_for_what_it_needs(
    refusals: int, missing: int, ordered: int
) -> None:
    spec = a_spec(workers_min=3, workers_max=8, elastic=True)
    assert workers_to_order(a_view(spec=spec, refusals=refusals), missing) == ordered


def test_a_range_of_one_size_is_never_asked_for_in_part() -> None:
    only = a_spec(workers_min=4, workers_max=4, elastic=True)
    for refusals in range(4):
        assert workers_to_order(a_view(spec=only, refusals=refusals), 4) == 4


def test_a_group_of_fixed_size_asks_for_all_it_misses_however_often_it_was_refused() -> None:
    spec = a_spec(workers_min=8, workers_max=8)
    assert workers_to_order(a_view(spec=spec, refusals=5), 6) == 6


# --- machines that will not be brought back once more --------------------------------------------

SPARE = Token("t-2")


def test_a_machine_on_its_last_life_works_on_while_another_is_asked_for() -> None:
    watch = a_watch(statuses={TOKEN: a_last_life(1)})
    assert usable(a_view(), watch) == [an_agent(0), an_agent(1)]
    assert [seat.member.agent for seat in lasting(a_view(), watch)] == [an_agent(0)]
    assert missing_workers(a_view(), watch) == 1
    asked = a_view(groups={TOKEN: a_group(), SPARE: a_group(token=SPARE, nodes=1)})
    assert missing_workers(asked, watch) == 0, "once"


def relieved(view: View, **given: Any) -> list[Any]:
    three = seats(a_seat(0), a_seat(1), a_seat(2, member=a_member(2, token=SPARE, node=0)))
    watch = a_watch(seats=three, **{"statuses": {TOKEN: a_last_life(1)}, **given})
    return [(lost.agent, lost.blame) for lost in lost_machines(view, watch, NOW)]


def test_it_is_given_up_once_a_full_round_works_without_it() -> None:
    groups = {TOKEN: a_group(), SPARE: a_group(token=SPARE, nodes=1)}
    fresh = a_member(2, token=SPARE, node=0)
    without = a_view(round=a_round(members=[a_member(0), fresh]), groups=groups)
    assert relieved(without) == [(an_agent(1), None)], "and nobody is to blame"
    assert relieved(without, statuses={TOKEN: a_last_life()}) == [], "it would come back"
    within = a_view(round=a_round(members=[a_member(0), a_member(1)]), groups=groups)
    assert relieved(within) == []
    assert relieved(a_view(groups=groups)) == [], "between rounds"
    small = a_view(
        spec=a_spec(workers_min=1, workers_max=2),
        round=a_round(members=[a_member(0)]),
        groups=groups,
    )
    assert relieved(small) == [], "a round that could grow needs it still"
