"""Scenarios are immutable values without faults by default."""

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


def test_default_scenario_has_no_faults() -> None:
    scenario = Scenario("default")
    assert scenario.faults is NO_FAULTS
    assert scenario.events == ()
    assert scenario.expected_outcome == "finished"
    assert scenario == replace(scenario)


def test_scenario_is_immutable() -> None:
    with pytest.raises(FrozenInstanceError):
        Scenario("default").num_workers = 9  # type: ignore[misc]


@pytest.mark.parametrize("event", [ReclaimMachine, CrashAgent])
def test_event_is_triggered_by_a_time_or_a_step(event: type[ScenarioEvent]) -> None:
    assert event(AtTime(3.0)) != event(AtStep(3))  # type: ignore[call-arg]


def test_default_target_is_the_leader() -> None:
    assert FreezeAgent(AtTime(1.0), 2.0).target == "leader"
    assert IsolateHost(AtTime(1.0), 2.0).blocks_outbound
