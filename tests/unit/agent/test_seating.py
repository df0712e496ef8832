"""Seating: who sits at the leader's table, who vanished, and who is still busy."""

from __future__ import annotations

from spotfit.agent.ports import FromHub
from spotfit.agent.seating import Seating
from spotfit.model.holding import Part, State
from spotfit.model.wire import Beat, Halt, Join
from spotfit.testing.builders import RUN, TOKEN, a_member, a_notice, a_round, an_agent
from tests.unit.agent.world import FakeNet, Wire

A, B = an_agent(0), an_agent(1)


def join_of(n: int, **given: object) -> Join:
    return Join(RUN, a_member(n), 0, **given)  # type: ignore[arg-type]  # a test's own words


def a_table() -> tuple[Seating, FakeNet, FakeNet]:
    """The leader a0 and its guest a1, seated since 10."""
    wire = Wire()
    mine, theirs = FakeNet(wire, a_member(0)), FakeNet(wire, a_member(1))
    seating = Seating(A, mine)
    for n, net in enumerate((mine, theirs)):
        net.dial(mine.hub, join_of(n))
        seating.join(an_agent(n), join_of(n), 10.0)
    mine.events()
    return seating, mine, theirs


def test_who_joins_is_idle_unless_it_says_otherwise() -> None:
    seating, _, _ = a_table()
    assert seating.seats[B].running is None
    seating.join(B, join_of(1, running=3, notice=a_notice()), 12.0)
    seat = seating.seats[B]
    assert (seat.running, seat.notice, seating.noticed_at[B]) == (3, a_notice(), 12.0)


def test_who_is_lost_is_missed_until_it_comes_back() -> None:
    seating, _, _ = a_table()
    assert seating.lose(B, 20.0)
    assert (B in seating.seats, seating.gone) == (False, {B: 20.0})
    assert not seating.lose(B, 21.0), "it had no seat any more"
    seating.join(B, join_of(1), 22.0)
    assert seating.gone == {}
    assert seating.broken == {B}, "but its connection did break in this round"
    seating.occupy(a_round().places, 2)
    assert seating.broken == set(), "the next round is another matter"


def test_who_sat_on_a_machine_is_remembered() -> None:
    seating, _, _ = a_table()
    seating.lose(B, 20.0)
    assert seating.known == {(TOKEN, 0): A, (TOKEN, 1): B}


def test_who_still_uploads_is_known_until_it_has_delivered() -> None:
    seating, _, _ = a_table()
    seating.stopped(A, 4, carrying=True)
    assert seating.seats[A].carrying == 4
    seating.delivered(A, 3)
    assert seating.seats[A].carrying == 4, "that was another round's"
    seating.delivered(A, 4)
    assert seating.seats[A].carrying is None


def test_what_lies_in_a_machines_memory_is_known_when_its_workers_are_gone() -> None:
    seating, _, _ = a_table()
    held = (Part(State(4, 9), 0, 1),)
    seating.stopped(A, 4, held=held)
    assert seating.seats[A].held == held


def test_whoever_has_a_place_is_busy_until_it_has_stopped() -> None:
    seating, _, _ = a_table()
    places = a_round().places
    assert seating.stopped_all(places)
    seating.occupy(places, 4)
    seating.stopped(A, 4)
    assert not seating.stopped_all(places)
    seating.stopped(B, 3)
    assert not seating.stopped_all(places), "that was an older round"
    seating.stopped(B, 4)
    assert seating.stopped_all(places)


def test_who_has_left_a_round_behind_cannot_enter_it() -> None:
    seating, _, _ = a_table()
    mine, theirs = a_round().places
    assert seating.can_enter(theirs, 4)
    seating.stopped(B, 4)
    assert not seating.can_enter(theirs, 4), "it was halted before it had heard of it"
    assert seating.can_enter(theirs, 5)
    assert seating.can_enter(mine, 4)
    seating.stopped(B, 3)
    assert not seating.can_enter(theirs, 4), "an old word takes nothing back"


def test_who_dials_in_says_what_it_has_left_behind() -> None:
    seating, _, _ = a_table()
    _, theirs = a_round().places
    seating.join(B, join_of(1, entered=4), 12.0)
    assert (seating.can_enter(theirs, 4), seating.can_enter(theirs, 5)) == (False, True)
    seating.lose(B, 13.0)
    assert not seating.can_enter(theirs, 5), "nobody sits there"


def test_a_cold_machine_warms_up() -> None:
    seating, _, _ = a_table()
    seating.join(B, join_of(1, warm=False), 12.0)
    assert not seating.seats[B].warm
    seating.warmed(B)
    assert seating.seats[B].warm


def test_a_machine_that_is_given_up_is_forgotten() -> None:
    seating, _, _ = a_table()
    seating.lose(B, 20.0)
    seating.forget(TOKEN, 1, B)
    assert (seating.known, seating.gone) == ({(TOKEN, 0): A}, {})
    seating.forget(TOKEN, 7, None)  # one that never joined


def test_nobody_waits_for_those_whose_connection_is_gone() -> None:
    seating, _, _ = a_table()
    seating.occupy(a_round().places, 4)
    seating.stopped(A, 4)
    seating.lose(B, 20.0)
    assert seating.stopped_all(a_round().places)


def test_who_has_not_been_heard_for_too_long_is_silent_but_never_the_leader_itself() -> None:
    seating, _, _ = a_table()
    assert seating.silent(6.0, 16.0) == []
    assert seating.silent(6.0, 16.1) == [B]
    seating.heard(B, 16.0)
    assert seating.silent(6.0, 16.1) == []
    assert seating.heard(an_agent(9), 16.0) is None


def test_a_warning_is_noted_with_the_time_it_was_first_heard() -> None:
    seating, _, _ = a_table()
    seating.warned(B, a_notice(), 17.0)
    assert (seating.seats[B].notice, seating.noticed_at[B]) == (a_notice(), 17.0)
    seating.lose(B, 18.0)
    seating.join(B, join_of(1, notice=a_notice()), 19.0)
    assert seating.noticed_at[B] == 17.0, "a connection that broke buys no time"


def test_a_nearer_end_is_noted_anew() -> None:
    seating, _, _ = a_table()
    seating.warned(B, a_notice(seconds_left=None), 17.0)
    seating.warned(B, a_notice(seconds_left=10.0), 25.0)
    assert seating.noticed_at[B] == 25.0
    seating.join(B, join_of(1, notice=a_notice(seconds_left=10.0)), 26.0)
    assert seating.noticed_at[B] == 25.0


def test_all_are_told() -> None:
    seating, mine, theirs = a_table()
    seating.tell_all(Halt(3))
    seating.greet_all()
    for net in (mine, theirs):
        assert net.events() == [FromHub(Halt(3)), FromHub(Beat())]
