"""Sweep: one look from outside, long enough to tell the dead from the living."""

from spotfit.control.sweep import sweep
from spotfit.core.ids import AgentId
from spotfit.model.events import FitEnded
from tests.unit.control.test_caretaker import AGENT_LEADS, started


def test_a_run_that_lives_is_left_alone() -> None:
    house = started()
    house.caretaker().tick(100.0)
    house.write(AGENT_LEADS)
    view = sweep(house.caretaker("cron"), house.clock, for_s=10.0)
    assert view.leads(AgentId("a0"))
    assert house.clock.now() == 110.0


def test_a_run_whose_leader_is_dead_is_taken_over() -> None:
    house = started()
    house.write(AGENT_LEADS)
    view = sweep(house.caretaker("cron"), house.clock, for_s=30.0)
    assert view.leads(AgentId("cron"))
    assert house.cloud.submits, "and gets its machines"


def test_what_is_over_and_let_go_takes_no_time() -> None:
    house = started()
    house.write(AGENT_LEADS, FitEnded("finished"))
    sweep(house.caretaker("cron"), house.clock, for_s=300.0)
    assert house.clock.now() == 100.0


def test_what_a_dead_leader_left_behind_is_let_go() -> None:
    house = started()
    house.caretaker().tick(100.0)
    house.write(AGENT_LEADS, FitEnded("finished"))
    view = sweep(house.caretaker("cron"), house.clock, for_s=300.0)
    assert all(group.released for group in view.groups.values())
    assert house.cloud.groups == {}
    assert house.clock.now() < 120.0, "it does not wait out its time"
