"""The uplink: called twice when lost; and what the wire and the lease tell of the leader's life."""

from __future__ import annotations

from typing import Any

from spotfit.agent.ports import FromAgent, HubLost
from spotfit.agent.uplink import Uplink
from spotfit.control.errands import Inline
from spotfit.ledger.run import Ledger
from spotfit.model.events import LeaderElected
from spotfit.model.spec import Tempo
from spotfit.model.view import View
from spotfit.model.wire import Beat, Join
from spotfit.store.memory import MemoryStore
from spotfit.testing.builders import RUN, a_member, a_view, an_agent
from tests.unit.agent.world import FakeNet, Wire

TEMPO = Tempo(beat_s=1.0, silent_s=6.0)
JOIN = Join(RUN, a_member(1), 0)
HUB = a_member(0).hub
LED = a_view()
OTHER = a_view(leader=LeaderElected(an_agent(2), 2, a_member(2).hub))


class Line:
    """a1's uplink to a0, which leads."""

    def __init__(self) -> None:
        self.wire = Wire()
        self.store = MemoryStore()
        self.net = FakeNet(self.wire, a_member(1))
        self.peer = FakeNet(self.wire, a_member(0))
        self.leader = Ledger(self.store, RUN, an_agent(0))
        self.uplink = Uplink(self.net, Ledger(self.store, RUN, an_agent(1)), Inline())

    def reach(self, now: float, view: View = LED) -> None:
        self.uplink.reach(view, JOIN, TEMPO, now)

    def watch(self, now: float, view: View = LED, *, read_lease: bool = True) -> Any:
        self.uplink.watch(view, TEMPO, now, read_lease=read_lease)
        return self.uplink.sighting(now)

    def hear(self, now: float) -> bool:
        """Take in what the net says; whether the connection was lost."""
        lost = [event for event in self.net.events() if isinstance(event, HubLost)]
        return [self.uplink.lose(event, now) for event in lost].count(True) > 0


def test_it_dials_whoever_leads_and_stays() -> None:
    line = Line()
    line.reach(1.0)
    line.reach(2.0)
    assert (line.net.dialled, line.uplink.hub) == ([HUB], HUB)
    assert line.peer.events() == [FromAgent(an_agent(1), JOIN)]


def test_it_goes_where_the_lead_goes_and_nowhere_while_nobody_leads() -> None:
    line = Line()
    line.reach(1.0, a_view(leader=None))
    line.reach(2.0, a_view(leader=LeaderElected(an_agent(9), 1, hub=None)))
    assert line.net.dialled == []
    line.reach(3.0)
    line.reach(4.0, OTHER)
    assert line.net.dialled == [HUB, a_member(2).hub]


def test_it_greets_the_hub_every_beat() -> None:
    line = Line()
    line.reach(1.0)
    line.peer.events()
    for now in (1.5, 2.0, 2.5, 3.0):
        line.uplink.heard(now)
        line.uplink.breathe(TEMPO, now, leading=False)
    assert line.peer.events() == [FromAgent(an_agent(1), Beat())] * 2


def test_a_hub_that_is_silent_is_given_up_and_dialled_again() -> None:
    line = Line()
    line.reach(1.0)
    line.uplink.heard(2.0)
    assert not line.uplink.breathe(TEMPO, 8.0, leading=False)
    assert line.uplink.breathe(TEMPO, 9.0, leading=False)
    assert line.uplink.hub is None
    line.reach(9.0)
    assert line.net.dialled == [HUB, HUB]


def test_a_leader_does_not_give_up_itself() -> None:
    line = Line()
    line.reach(1.0)
    assert not line.uplink.breathe(TEMPO, 99.0, leading=True)


# --- lost connections ----------------------------------------------------------------------------


def test_one_broken_connection_says_nothing_and_a_second_call_is_made_at_once() -> None:
    line = Line()
    line.reach(1.0)
    line.uplink.heard(1.0)
    line.net.cut()
    assert line.hear(2.0)
    assert line.uplink.sighting(2.0).vanished_at is None
    line.reach(2.0)
    assert line.net.dialled == [HUB, HUB]


def test_a_second_call_that_nobody_answers_says_that_the_leader_is_gone() -> None:
    line = Line()
    line.reach(1.0)
    line.watch(1.0)
    line.peer.die()
    line.hear(2.0)
    line.reach(2.0)
    line.hear(2.1)
    sighting = line.uplink.sighting(2.1)
    assert (sighting.vanished_at, sighting.in_touch) == (2.1, False)
    line.reach(3.0)
    assert line.net.dialled == [HUB, HUB], "only an election helps"


def test_a_second_call_that_is_answered_clears_everything() -> None:
    line = Line()
    line.reach(1.0)
    line.uplink.heard(1.0)
    line.net.cut()
    line.hear(2.0)
    line.reach(2.0)
    line.uplink.heard(2.2)
    assert line.watch(2.3).in_touch
    line.net.cut()
    line.hear(5.0)
    assert line.uplink.sighting(5.0).vanished_at is None, "the count begins anew"


def test_an_address_that_does_not_answer_is_called_again_after_a_pause() -> None:
    line = Line()
    line.wire.broken.add(HUB)
    line.reach(1.0)
    line.hear(1.0)
    assert line.uplink.sighting(1.0).vanished_at is None, "it may live behind a broken wire"
    line.reach(1.2)
    assert line.net.dialled == [HUB]
    line.reach(1.6)
    assert line.net.dialled == [HUB, HUB]


def test_news_of_a_connection_long_given_up_is_no_news() -> None:
    line = Line()
    line.reach(1.0)
    assert not line.uplink.lose(HubLost("10.9.9.9:1", "reset", vanished=True), 2.0)
    assert line.uplink.hub == HUB


def test_who_is_turned_away_calls_again_a_little_later() -> None:
    line = Line()
    line.reach(1.0)
    line.uplink.rejected(1.0)
    line.reach(1.1)
    assert line.net.dialled == [HUB]
    line.reach(1.5)
    assert line.net.dialled == [HUB, HUB]


# --- the leader's life ---------------------------------------------------------------------------


def test_while_the_hub_speaks_the_lease_is_not_read() -> None:
    line = Line()
    line.reach(1.0)
    line.uplink.heard(1.0)
    line.store.get = _unread  # type: ignore[method-assign]
    sighting = line.watch(3.0)
    assert (sighting.in_touch, sighting.lease_changed_at) == (True, 3.0)


def _unread(key: str) -> bytes:
    raise AssertionError(f"{key} was read")


def test_without_the_wire_a_lease_that_changes_shows_that_the_leader_lives() -> None:
    line = Line()
    line.wire.broken.add(HUB)
    line.watch(1.0)
    line.leader.renew_lease()
    assert line.watch(5.0).lease_changed_at == 5.0
    assert line.watch(7.0).lease_changed_at == 5.0
    line.leader.renew_lease()
    assert line.watch(8.0, read_lease=False).lease_changed_at == 5.0, "it did not look"
    assert line.watch(9.0).lease_changed_at == 9.0


def test_a_frozen_leader_lets_itself_be_dialled_but_that_is_no_sign_of_life() -> None:
    line = Line()
    line.reach(1.0)
    line.uplink.heard(1.0)
    line.watch(1.0)
    for now in range(2, 23):
        line.uplink.breathe(TEMPO, now, leading=False)
        line.reach(now)
        line.watch(now + 0.1)
    sighting = line.uplink.sighting(22.1)
    assert not sighting.in_touch
    assert sighting.lease_changed_at < 8.0


def test_what_was_seen_of_one_leader_says_nothing_of_the_next() -> None:
    line = Line()
    line.leader.renew_lease()
    line.watch(1.0)
    line.reach(2.0)
    line.peer.die()
    line.hear(2.0)
    line.reach(2.0)
    line.hear(2.1)
    sighting = line.watch(50.0, OTHER)
    assert (sighting.lease_changed_at, sighting.vanished_at) == (50.0, None)
