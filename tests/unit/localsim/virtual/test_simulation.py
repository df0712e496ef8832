"""A world from its first event to its last."""

from dataclasses import replace

import pytest

from spotfit_localsim.virtual.invariants import InvariantViolation
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
    story = simulate(plain, 1)
    assert (story.outcome, story.rounds, story.steps_repeated) == ("finished", 1, 0)
    assert story.machine_seconds > 0
    assert 0 < story.agent_seconds <= story.machine_seconds
    assert story.requests["create"] >= len(story.entries)


def test_violation_is_raised_with_the_timeline() -> None:
    wrong = SimDesign(provisioner=NonIdempotentProvisioner)
    worlds = (SimWorld(lost_cloud_responses, seed, wrong) for seed in range(40))
    seed = next(world.result.seed for world in worlds if world.run().violation)
    with pytest.raises(InvariantViolation, match=r"(?s)not in the journal.*fit started.*CHECKER"):
        simulate(lost_cloud_responses, seed, wrong)


@pytest.mark.parametrize(
    ("act", "words"),
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
def test_scenario_events_are_applied(act: ScenarioEvent, words: str) -> None:
    story = simulate(replace(plain, events=(act,)), 1)
    assert any(words in line.text for line in story.timeline)


def test_run_without_progress_times_out() -> None:
    endless = Scenario(
        "endless", workload=Workload(steps=10**6), faults_duration_s=10.0, completion_timeout_s=60.0
    )
    story = SimWorld(endless, 1).run()
    assert story.violation == "the run did not end"
    assert story.duration_s <= 70.0


def test_sweeps_run_after_the_laptop_is_off() -> None:
    gone = replace(
        plain,
        laptop=LaptopConfig(dies_at_s=0.05, sweep_interval_s=30.0),
    )
    story = simulate(gone, 1)
    assert any(line.actor == "laptop" and line.text == "is switched off" for line in story.timeline)
    assert any(line.actor.startswith("sweep") for line in story.timeline)
