"""A world from its first event to its last."""

from dataclasses import replace

import pytest

from spotfit_localsim.cloud import Forgetful
from spotfit_localsim.invariants import InvariantBroken
from spotfit_localsim.library import cloud_that_forgets_to_answer, plain
from spotfit_localsim.run import Design, World, simulate
from spotfit_localsim.scenario import (
    Act,
    At,
    Crash,
    Freeze,
    Isolate,
    Laptop,
    Reclaim,
    Scenario,
    Step,
)
from spotfit_localsim.workload import Workload


def test_a_calm_world_needs_one_round_and_repeats_nothing() -> None:
    story = simulate(plain, 1)
    assert (story.outcome, story.rounds, story.steps_repeated) == ("finished", 1, 0)
    assert story.machine_seconds > 0
    assert 0 < story.agent_seconds <= story.machine_seconds
    assert story.requests["create"] >= len(story.entries)


def test_what_did_not_hold_is_raised_with_the_story() -> None:
    wrong = Design(provisioner=Forgetful)
    worlds = (World(cloud_that_forgets_to_answer, seed, wrong) for seed in range(40))
    seed = next(world.story.seed for world in worlds if world.live().broken)
    with pytest.raises(InvariantBroken, match=r"(?s)knows nothing.*fit started.*CHECKER"):
        simulate(cloud_that_forgets_to_answer, seed, wrong)


@pytest.mark.parametrize(
    ("act", "words"),
    [
        (Reclaim(Step(10), "leader"), "reclaimed"),
        (Reclaim(Step(10), "follower", notice=True), "s left"),
        (Freeze(Step(10), 5.0), "is frozen for 5.0 s"),
        (Crash(At(25.0), "anybody"), "dies"),
        (Isolate(Step(10), 3.0, outwards=False), "is cut off for 3.0 s, but is heard"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_is_written_in_a_scenario_happens(act: Act, words: str) -> None:
    story = simulate(replace(plain, acts=(act,)), 1)
    assert any(words in line.what for line in story.lines)


def test_a_world_that_never_gets_anywhere_is_not_waited_for() -> None:
    endless = Scenario("endless", load=Workload(steps=10**6), storm_s=10.0, patience_s=60.0)
    story = World(endless, 1).live()
    assert story.broken == "the run did not end"
    assert story.lasted_s <= 70.0


def test_when_the_laptop_is_closed_sweeps_come_by() -> None:
    gone = replace(
        plain,
        laptop=Laptop(dies_at_s=0.05, sweep_every_s=30.0),
    )
    story = simulate(gone, 1)
    assert any(line.who == "laptop" and line.what == "is closed" for line in story.lines)
    assert any(line.who.startswith("sweep") for line in story.lines)
