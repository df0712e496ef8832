"""On a simulated machine lives the real agent, and by the laptop the real caretaker."""

from spotfit.model.events import FitStarted, LeaderElected
from spotfit_localsim.virtual.scenario import AtTime, CancelRun, Scenario
from spotfit_localsim.virtual.scenario_library import plain
from spotfit_localsim.virtual.simulation import SimWorld


def test_the_laptop_begins_the_fit_and_hands_the_lead_to_a_machine() -> None:
    entries = SimWorld(plain, 1).run().entries
    assert isinstance(entries[0].event, FitStarted)
    leaders = [one.event.leader for one in entries if isinstance(one.event, LeaderElected)]
    assert leaders[0].startswith("laptop")
    assert leaders[1].startswith("a")


def test_a_machine_that_is_evicted_is_heard_of_or_falls_silent() -> None:
    for told in (True, False):
        world = SimWorld(plain, 1)
        world.schedule_events()
        world.engine.run(until=30.0)
        machine = next(iter(world.nodes.values()))
        machine.terminate(closes_connections=told)
        world.engine.run(until=30.1)
        assert machine.host not in world.nodes
        assert world.network.is_blocked(machine.host, "elsewhere") is not told
        assert not machine.worker_pool.has_workers


def test_a_run_that_is_cancelled_before_it_has_a_machine_ends() -> None:
    early = Scenario("early", events=(CancelRun(AtTime(0.2)),), expected_outcome="cancelled")
    story = SimWorld(early, 1).run()
    assert story.violation is None
    assert story.outcome == "cancelled"
