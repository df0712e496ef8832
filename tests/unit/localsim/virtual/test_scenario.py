"""Scenarios are facts: two alike are equal, and what is not said is calm."""

from dataclasses import FrozenInstanceError, replace

import pytest

from spotfit_localsim.virtual.faults import NO_FAULTS
from spotfit_localsim.virtual.scenario import (
    AtStep,
    AtTime,
    CrashAgent,
    FreezeAgent,
    IsolateHost,
    ReclaimMachine,
    Scenario,
    ScenarioEvent,
)


def test_a_scenario_that_says_nothing_is_a_calm_one() -> None:
    scenario = Scenario("calm")
    assert scenario.faults is NO_FAULTS
    assert scenario.events == ()
    assert scenario.expected_outcome == "finished"
    assert scenario == replace(scenario)


def test_a_scenario_is_not_changed_in_passing() -> None:
    with pytest.raises(FrozenInstanceError):
        Scenario("calm").num_workers = 9  # type: ignore[misc]


@pytest.mark.parametrize("act", [ReclaimMachine, CrashAgent])
def test_an_act_happens_at_a_time_or_at_a_step(act: type[ScenarioEvent]) -> None:
    assert act(AtTime(3.0)) != act(AtStep(3))  # type: ignore[call-arg]


def test_by_default_it_befalls_the_leader() -> None:
    assert FreezeAgent(AtTime(1.0), 2.0).target == "leader"
    assert IsolateHost(AtTime(1.0), 2.0).blocks_outbound
