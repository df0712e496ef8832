"""A complete simulation, from its first event to its last."""

from dataclasses import replace

import pytest

from spotfit_localsim.virtual.engine import wall_ms
from spotfit_localsim.virtual.invariants import InvariantViolation
from spotfit_localsim.virtual.market import SimMarketConfig, SimOfferConfig
from spotfit_localsim.virtual.scenario import (
    AtStep,
    AtTime,
    CrashAgent,
    FreezeAgent,
    IsolateHost,
    LaptopConfig,
    ReclaimMachine,
    Scenario,
    ScenarioEvent,
)
from spotfit_localsim.virtual.scenario_library import lost_cloud_responses, plain
from spotfit_localsim.virtual.sim_cloud import NonIdempotentProvisioner
from spotfit_localsim.virtual.simulation import SimDesign, SimWorld, simulate
from spotfit_localsim.virtual.workload import Workload


def test_run_without_faults_needs_one_round() -> None:
    result = simulate(plain, 1)
    assert (result.outcome, result.rounds, result.steps_repeated) == ("finished", 1, 0)
    assert result.machine_seconds > 0
    assert 0 < result.agent_seconds <= result.machine_seconds
    assert result.requests["create"] >= len(result.entries)


def test_violation_is_raised_with_the_timeline() -> None:
    design = SimDesign(provisioner=NonIdempotentProvisioner)
    simulations = (SimWorld(lost_cloud_responses, seed, design) for seed in range(40))
    seed = next(simulation.result.seed for simulation in simulations if simulation.run().violation)
    with pytest.raises(InvariantViolation, match=r"(?s)not in the journal.*fit started.*CHECKER"):
        simulate(lost_cloud_responses, seed, design)


@pytest.mark.parametrize(
    ("event", "text"),
    [
        (ReclaimMachine(AtStep(10), "leader"), "reclaimed"),
        (ReclaimMachine(AtStep(10), "follower", with_notice=True), "s left"),
        (FreezeAgent(AtStep(10), 5.0), "is frozen for 5.0 s"),
        (CrashAgent(AtTime(25.0), "any"), "is killed"),
        (
            IsolateHost(AtStep(10), 3.0, blocks_outbound=False),
            "is isolated for 3.0 s (inbound only)",
        ),
    ],
    ids=lambda value: type(value).__name__,
)
def test_scenario_events_are_applied(event: ScenarioEvent, text: str) -> None:
    result = simulate(replace(plain, events=(event,)), 1)
    assert any(text in line.text for line in result.timeline)


def test_run_without_progress_times_out() -> None:
    endless = Scenario(
        "endless", workload=Workload(steps=10**6), faults_duration_s=10.0, completion_timeout_s=60.0
    )
    result = SimWorld(endless, 1).run()
    assert result.violation == "the run did not end"
    assert result.duration_s <= 70.0


def test_sweeps_run_after_the_laptop_is_off() -> None:
    switched_off = replace(
        plain,
        laptop=LaptopConfig(dies_at_s=0.05, sweep_interval_s=30.0),
    )
    result = simulate(switched_off, 1)
    assert any(
        line.actor == "laptop" and line.text == "is switched off" for line in result.timeline
    )
    assert any(line.actor.startswith("sweep") for line in result.timeline)


def test_record_of_the_cost_has_machines_rounds_and_releases() -> None:
    offers = (SimOfferConfig(name="spot", prices=((0.0, 3.6), (20.0, 7.2))),)
    scenario = replace(
        plain, market=SimMarketConfig(offers=offers), events=(ReclaimMachine(AtStep(9), "leader"),)
    )
    world = SimWorld(scenario, 1)
    result = world.run()
    record = result.cost
    assert result.violation is None
    assert record.finished_at_s is not None
    assert record.finished_at_s <= record.ended_at_s
    assert len(record.machines) == result.machine_count == 3
    assert sum(one.billed_s(record.ended_at_s) for one in record.machines) == pytest.approx(
        result.machine_seconds
    )
    assert 3.6 < record.total_usd / result.machine_seconds * 3600 < 7.2
    assert [one.number for one in record.rounds] == [1, 2]
    assert [record.is_lost(one) for one in record.machines].count(True) == 1
    assert set(world.network.network_by_host.values()) == {"sim-east"}
    assert {one.token for one in record.requests} == {token for token, _ in record.released_at_s}


def test_wall_clocks_of_processes_differ_by_the_error_of_the_scenario() -> None:
    still = simulate(plain, 1)
    latest_ms = still.duration_s * 1000
    assert all(0 <= one.written_at_ms - wall_ms(0.0) <= latest_ms + 2000 for one in still.entries)
    result = simulate(replace(plain, wall_clock_error_s=500.0), 1)
    written_ms = [entry.written_at_ms - wall_ms(0.0) for entry in result.entries]
    assert len({one // 100_000 for one in written_ms}) > 1
    assert max(map(abs, written_ms)) <= (500.0 + result.duration_s) * 1000
    assert result.duration_s == still.duration_s
