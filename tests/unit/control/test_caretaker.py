"""The caretaker: asks for the first machines, and steps in when nobody is left who could."""

from __future__ import annotations

from typing import Any

import pytest

from spotfit.control.caretaker import Caretaker
from spotfit.control.conductor import Conductor
from spotfit.control.errands import Inline
from spotfit.control.scribe import Scribe
from spotfit.core.errors import TransientStoreError
from spotfit.core.ids import AgentId, Token
from spotfit.ledger.run import Ledger
from spotfit.model.events import (
    CancelRequested,
    Event,
    FitEnded,
    FitStarted,
    LeaderElected,
    RoundOpened,
)
from spotfit.model.spec import Tempo
from spotfit.policy.election import LEFTOVERS_S
from spotfit.store.memory import MemoryStore
from spotfit.testing.builders import RUN, TOKEN, a_member, a_round, a_spec, an_agent
from spotfit.testing.clock import ManualClock
from tests.unit.control.paper import LAUNCH, PaperCloud, tokens

TEMPO = Tempo(lease_s=5.0, lease_patience_s=20.0, poll_s=1.0, observe_s=2.0)
SPEC = a_spec(tempo=TEMPO)
AGENT_LEADS = LeaderElected(an_agent(0), 2, a_member(0).hub)


class House:
    """A run with its cloud, and caretakers to look after it."""

    def __init__(self, **traits: Any) -> None:
        self.store = MemoryStore()
        self.cloud = PaperCloud(**traits)
        self.clock = ManualClock(100.0)
        self.agent = Ledger(self.store, RUN, an_agent(0))
        self._tokens = tokens()

    def caretaker(self, name: str = "driver") -> Caretaker:
        ledger = Ledger(self.store, RUN, AgentId(name))
        scribe = Scribe(ledger, Inline())
        conductor = Conductor(scribe, self.cloud, LAUNCH, Inline(), self._tokens)
        return Caretaker(scribe, conductor, self.clock.now())

    def write(self, *events: Event) -> None:
        """As the agents of the run."""
        for event in events:
            self.agent.append(event, after=self.agent.catch_up())

    def mind(self, *caretakers: Caretaker, for_s: float = 60.0) -> None:
        """Until all of them have nothing left to mind, or the time is over."""
        end = self.clock.now() + for_s
        while (now := self.clock.now()) < end:
            wakes = [wake for one in caretakers if (wake := one.tick(now)) is not None]
            if not wakes:
                return
            self.clock.wait(min(max(min(wakes) - now, 0.01), end - now))


def started() -> House:
    house = House()
    house.write(FitStarted(SPEC))
    return house


def test_the_first_look_takes_the_lead_and_asks_for_machines() -> None:
    house = started()
    driver = house.caretaker()
    driver.tick(house.clock.now())
    assert driver.view.leads(AgentId("driver"))
    assert driver.view.leader is not None
    assert driver.view.leader.hub is None, "any agent may take over from it"
    assert house.cloud.submits == [TOKEN]


def test_before_there_is_a_run_it_only_looks() -> None:
    house = House()
    driver = house.caretaker()
    assert driver.tick(100.0) == 101.0
    assert list(house.store.list()) == []


def test_it_stands_by_while_the_leader_renews_its_lease() -> None:
    house = started()
    driver = house.caretaker()
    driver.tick(100.0)
    house.write(AGENT_LEADS)
    for _ in range(10):
        house.agent.renew_lease()
        house.mind(driver, for_s=10.0)
    assert driver.view.leads(an_agent(0))
    assert house.cloud.submits == [TOKEN]


def test_it_steps_in_when_the_lease_stands_still() -> None:
    house = started()
    driver = house.caretaker()
    driver.tick(100.0)
    house.write(AGENT_LEADS, RoundOpened(a_round()))
    house.agent.renew_lease()
    house.mind(driver, for_s=19.0)
    assert driver.view.leads(an_agent(0))
    house.mind(driver, for_s=3.0)
    assert driver.view.leads(AgentId("driver"))
    assert driver.view.epoch == 3


class Hanging(MemoryStore):
    """Fails every call while it hangs."""

    hangs = False

    def get(self, key: str) -> bytes:
        if self.hangs:
            raise TransientStoreError("no answer")
        return super().get(key)


def test_a_leader_is_not_deposed_for_a_bucket_that_hung() -> None:
    """While nobody can read the lease, its owner cannot renew it either."""
    house = started()
    house.store = store = Hanging()
    house.agent = Ledger(store, RUN, an_agent(0))
    house.write(FitStarted(SPEC))
    driver = house.caretaker()
    driver.tick(100.0)
    house.write(AGENT_LEADS, RoundOpened(a_round()))
    house.agent.renew_lease()
    house.mind(driver, for_s=4.0)
    store.hangs = True
    for _ in range(60):
        house.clock.wait(1.0)
        with pytest.raises(TransientStoreError):
            driver.tick(house.clock.now())
    store.hangs = False
    house.mind(driver, for_s=10.0)
    house.agent.renew_lease()
    house.mind(driver, for_s=15.0)
    assert driver.view.leads(an_agent(0))
    house.mind(driver, for_s=10.0)
    assert driver.view.leads(AgentId("driver")), "but for a lease that stands still later on"


def test_when_every_machine_is_lost_at_once_it_asks_for_new_ones() -> None:
    house = started()
    driver = house.caretaker()
    driver.tick(100.0)
    house.write(AGENT_LEADS, RoundOpened(a_round()))
    for node in (0, 1):
        house.cloud.lose(TOKEN, node)
    house.mind(driver, for_s=4.0)
    view = driver.view
    assert view.round is None, "it was not the lease that told"
    assert view.lost_agents == {an_agent(0), an_agent(1)}
    assert house.cloud.submits == [TOKEN, Token("t-2")]
    assert view.groups[TOKEN].released, "and lets the dead group go; no lease need run out"


def test_who_takes_over_is_not_deposed_for_what_befell_the_leader_before() -> None:
    """Seen live on a loaded machine: it cost the new leader's first round."""
    house = started()
    driver = house.caretaker()
    driver.tick(100.0)
    house.write(AGENT_LEADS, RoundOpened(a_round()))
    house.mind(driver, for_s=3.0)
    for node in (0, 1):
        house.cloud.lose(TOKEN, node)
    while driver.view.epoch < AGENT_LEADS.epoch + 1:
        house.clock.wait(0.05)
        driver.tick(house.clock.now())
    newcomer = an_agent(5)
    house.write(LeaderElected(newcomer, driver.view.epoch + 1, "127.0.0.1:5"))
    for _ in range(3):  # looks within the same second
        driver.tick(house.clock.now())
        house.clock.wait(0.02)
    assert driver.view.leads(newcomer)


def test_a_machine_that_is_left_is_given_the_time_to_lead() -> None:
    house = started()
    driver = house.caretaker()
    driver.tick(100.0)
    house.write(AGENT_LEADS, RoundOpened(a_round()))
    house.cloud.lose(TOKEN, 0)
    house.mind(driver, for_s=19.0)
    assert driver.view.leads(an_agent(0))


def test_machines_that_are_well_are_left_alone_even_without_a_leader() -> None:
    house = started()
    driver = house.caretaker()
    driver.tick(100.0)
    house.write(AGENT_LEADS, RoundOpened(a_round()))
    house.mind(driver, for_s=60.0)
    assert driver.view.leads(AgentId("driver")), "its agents may take over again"
    assert driver.view.round == a_round()
    assert house.cloud.submits == [TOKEN]
    assert house.cloud.cancelled == []


def test_it_is_done_when_the_run_is_over_and_everything_let_go() -> None:
    house = started()
    driver = house.caretaker()
    driver.tick(100.0)
    house.write(AGENT_LEADS, FitEnded("finished"))
    house.mind(driver)
    assert house.clock.now() < 100.0 + LEFTOVERS_S + 2.0
    assert driver.view.groups[TOKEN].released
    assert driver.tick(house.clock.now()) is None


def test_machines_that_may_have_been_granted_are_seen_to_after_the_end() -> None:
    house = started()
    driver = house.caretaker()
    house.cloud.answers = [ConnectionError("no answer")]
    driver.tick(100.0)
    assert driver.view.groups[TOKEN].pending
    house.write(AGENT_LEADS, FitEnded("cancelled"))
    assert driver.tick(101.0) is not None, "nobody knows what became of them"
    house.mind(driver)
    assert driver.view.groups[TOKEN].released
    assert house.cloud.groups == {}


def test_after_the_end_the_leader_is_given_time_to_let_go_itself() -> None:
    house = started()
    driver = house.caretaker()
    driver.tick(100.0)
    house.write(AGENT_LEADS, FitEnded("finished"))
    for _ in range(8):
        house.agent.renew_lease()
        house.mind(driver, for_s=1.0)
    assert driver.view.leads(an_agent(0))
    assert house.cloud.cancelled == []


def test_a_run_that_nobody_but_a_caretaker_minds_can_be_cancelled() -> None:
    house = started()
    driver = house.caretaker()
    driver.tick(100.0)
    house.write(CancelRequested("Ctrl-C"))
    house.mind(driver)
    ended = driver.view.ended
    assert ended is not None
    assert ended.outcome == "cancelled"
    assert house.cloud.groups == {}


def test_of_two_caretakers_one_asks() -> None:
    house = started()
    one, two = house.caretaker("one"), house.caretaker("two")
    house.mind(one, two, for_s=60.0)
    assert one.view.leads(AgentId("one"))
    assert one.view.epoch == 1, "its lease tells the other that it is awake"
    assert house.cloud.submits == [TOKEN]
    house.mind(two, for_s=60.0)
    assert two.view.leads(AgentId("two")), "and the other takes over where it fell asleep"
    assert house.cloud.submits == [TOKEN]
