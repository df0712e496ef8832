"""Scenarios are facts: two alike are equal, and what is not said is calm."""

from dataclasses import FrozenInstanceError, replace

import pytest

from spotfit_localsim.faults import CALM
from spotfit_localsim.scenario import Act, At, Crash, Freeze, Isolate, Reclaim, Scenario, Step


def test_a_scenario_that_says_nothing_is_a_calm_one() -> None:
    scenario = Scenario("calm")
    assert scenario.faults is CALM
    assert scenario.acts == ()
    assert scenario.outcome == "finished"
    assert scenario == replace(scenario)


def test_a_scenario_is_not_changed_in_passing() -> None:
    with pytest.raises(FrozenInstanceError):
        Scenario("calm").workers = 9  # type: ignore[misc]


@pytest.mark.parametrize("act", [Reclaim, Crash])
def test_an_act_happens_at_a_time_or_at_a_step(act: type[Act]) -> None:
    assert act(At(3.0)) != act(Step(3))  # type: ignore[call-arg]


def test_by_default_it_befalls_the_leader() -> None:
    assert Freeze(At(1.0), 2.0).whom == "leader"
    assert Isolate(At(1.0), 2.0).outwards
