"""On a simulated machine lives the real agent, and by the laptop the real caretaker."""

from spotfit.model.events import FitStarted, LeaderElected
from spotfit_localsim.library import plain
from spotfit_localsim.run import World
from spotfit_localsim.scenario import At, Cancel, Scenario


def test_the_laptop_begins_the_fit_and_hands_the_lead_to_a_machine() -> None:
    entries = World(plain, 1).live().entries
    assert isinstance(entries[0].event, FitStarted)
    leaders = [one.event.leader for one in entries if isinstance(one.event, LeaderElected)]
    assert leaders[0].startswith("laptop")
    assert leaders[1].startswith("a")


def test_a_machine_that_is_evicted_is_heard_of_or_falls_silent() -> None:
    for told in (True, False):
        world = World(plain, 1)
        world.begin()
        world.engine.run(until=30.0)
        machine = next(iter(world.machines.values()))
        machine.evict(told=told)
        world.engine.run(until=30.1)
        assert machine.host not in world.machines
        assert world.fabric.blocked(machine.host, "elsewhere") is not told
        assert not machine.crew.busy


def test_a_run_that_is_cancelled_before_it_has_a_machine_ends() -> None:
    early = Scenario("early", acts=(Cancel(At(0.2)),), outcome="cancelled")
    story = World(early, 1).live()
    assert story.broken is None
    assert story.outcome == "cancelled"
