"""Simulated machines run the production agent; the laptop runs the production headless leader."""

from spotfit.model.events import FitStarted, LeaderElected
from spotfit_localsim.virtual.scenario import AtTime, CancelRun, Scenario
from spotfit_localsim.virtual.scenario_library import plain
from spotfit_localsim.virtual.simulation import SimWorld


def test_laptop_starts_the_fit_and_a_machine_becomes_leader() -> None:
    entries = SimWorld(plain, 1).run().entries
    assert isinstance(entries[0].event, FitStarted)
    leaders = [one.event.leader for one in entries if isinstance(one.event, LeaderElected)]
    assert leaders[0].startswith("laptop")
    assert leaders[1].startswith("a")


def test_terminated_machine_closes_its_connections_or_is_silent() -> None:
    for closes_connections in (True, False):
        world = SimWorld(plain, 1)
        world.schedule_events()
        world.engine.run(until=30.0)
        machine = next(iter(world.nodes.values()))
        machine.terminate(closes_connections=closes_connections)
        world.engine.run(until=30.1)
        assert machine.host not in world.nodes
        assert world.network.is_blocked(machine.host, "other") is not closes_connections
        assert not machine.worker_pool.has_workers


def test_run_without_machines_can_be_cancelled() -> None:
    early = Scenario("early", events=(CancelRun(AtTime(0.2)),), expected_outcome="cancelled")
    result = SimWorld(early, 1).run()
    assert result.violation is None
    assert result.outcome == "cancelled"
