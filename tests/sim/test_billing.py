"""The record of machine-hours in simulations: how exact it is, and how many entries it takes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from spotfit.model.events import MachinesObserved
from spotfit.model.spec import FeederSpec
from spotfit.model.usage import bill_of
from spotfit_localsim.virtual.scenario_library import (
    dataset_scenario,
    plain,
    random_scenario,
    spot_storm,
)
from spotfit_localsim.virtual.simulation import SimWorld
from tests.sim.results import simulated


@pytest.mark.parametrize("seed", range(2))
def test_the_bill_of_a_run_with_preemptions_and_crashes_equals_the_books(seed: int) -> None:
    world = SimWorld(spot_storm, seed)
    result = world.run()
    assert result.violation is None
    bill = bill_of(result.view, 2**60)
    assert bill.is_final
    assert result.view.usage.groups == {}
    tolerance_s = 1.0 * result.machine_count
    assert bill.machine_s == pytest.approx(result.machine_seconds, abs=tolerance_s)
    assert bill.usd == pytest.approx(result.machine_seconds * 3.6 / 3600, abs=tolerance_s / 1000)
    assert bill.boot_s + bill.repeated_s + bill.idle_s < bill.machine_s


def test_without_times_the_bill_is_within_the_observation_interval_and_the_lag() -> None:
    world = SimWorld(replace(plain, market=replace(plain.market, reports_times=False)), 1)
    result = world.run()
    assert result.violation is None
    bill = bill_of(result.view, 2**60)
    assert bill.is_final
    (line,) = bill.offers
    timing, lag_s = world.scenario.timing, world.scenario.market.status_lag_s[1]
    # The start by one interval; the end by one interval of the client, and the age of a report.
    width_s = 2 * (timing.observe_interval_s + lag_s) + 10 * timing.observe_interval_s
    assert 0 < line.max_machine_s - line.machine_s < width_s * result.machine_count


def test_without_times_the_wait_for_a_restart_is_not_certain() -> None:
    """No leader records that the machine was lost before its next agent trains."""
    assert simulated(dataset_scenario(23), 23).violation is None


def test_without_times_a_restart_without_a_leader_is_in_the_maximum() -> None:
    """The machine was restarted and lost before the next leader observed it."""
    assert simulated(random_scenario(720013), 720013).violation is None


def test_a_run_without_losses_has_few_entries_about_its_machines() -> None:
    result = SimWorld(plain, 1).run()
    entries = [one for one in result.entries if isinstance(one.event, MachinesObserved)]
    # Its machines start together; those of the leader's group end after the last decision.
    assert len(entries) <= 3


def test_machines_for_feeders_are_in_the_bill_and_are_no_waste() -> None:
    feeders = FeederSpec(min_nodes=2, max_nodes=2, resources={"CPU": 1.0})
    result, without = (SimWorld(replace(plain, feeders=one), 1).run() for one in (feeders, None))
    assert result.violation is None
    bill, expected = bill_of(result.view, 2**60), bill_of(without.view, 2**60)
    assert result.machine_count == without.machine_count + 2
    assert bill.machine_s == pytest.approx(result.machine_seconds, abs=1.0 * result.machine_count)
    wasted_s = expected.boot_s + expected.idle_s
    assert bill.boot_s + bill.idle_s == pytest.approx(wasted_s, abs=2.0 * result.machine_count)
