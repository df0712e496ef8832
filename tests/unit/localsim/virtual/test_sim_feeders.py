"""Simulated feeders execute tasks one after the other, and connections break as real ones do."""

from typing import Any

import pytest

from spotfit.model.topology import FeederAddress
from spotfit.testing.builders import a_spec
from spotfit_localsim.random_streams import SeededStreams
from spotfit_localsim.virtual.engine import Engine
from spotfit_localsim.virtual.sim_feeders import SimFeederConnection, SimFeederNode
from spotfit_localsim.virtual.sim_threads import SimThreading, ThreadGroup
from spotfit_localsim.virtual.workload import FeederFaults


class Feeders:
    """One worker with a connection to one feeder; `log` has replies and errors with their times."""

    def __init__(self, **faults: Any) -> None:
        self.engine = Engine()
        self.threads = SimThreading(self.engine)
        self.worker = ThreadGroup(self.engine, "worker")
        self.is_connected = True
        self.nodes: dict[str, SimFeederNode] = {}
        self.node = SimFeederNode("feeder", self.nodes)
        self.node.start(a_spec())
        self.connection = SimFeederConnection(
            self.engine,
            self.threads,
            lambda: self.is_connected,
            lambda number, task: (number, task),  # type: ignore[arg-type, return-value]
            stream=SeededStreams(1).stream("feeders"),
            faults=FeederFaults(slice_s=(1.0, 1.0), **faults),
        )
        self.node.connections.append(self.connection)
        self.log: list[tuple[float, object]] = []

    def request(self, *tasks: str) -> list[tuple[float, object]]:
        """Send tasks, and receive as many replies."""

        def work() -> None:
            try:
                for number, task in enumerate(tasks):
                    self.connection.send(number, task)  # type: ignore[arg-type]
                for _ in tasks:
                    self.record(self.connection.receive())
            except OSError as error:
                self.record(type(error))

        self.threads.run(self.worker, work)
        self.engine.run(until=self.engine.now + 60.0)
        return self.log

    def record(self, value: object) -> None:
        self.log.append((self.engine.now, value))


def test_feeder_executes_tasks_one_after_the_other() -> None:
    assert Feeders().request("a", "b") == [(1.0, (0, "a")), (2.0, (1, "b"))]


def test_running_feeders_have_an_address() -> None:
    feeders = Feeders()
    assert feeders.node.feeder == FeederAddress(address="feeder")
    assert feeders.nodes == {"feeder": feeders.node}
    for _ in range(2):
        feeders.node.stop()
        assert not feeders.node.is_running


def test_lost_feeder_breaks_its_connections() -> None:
    feeders = Feeders()
    feeders.engine.schedule_at(1.5, lambda: feeders.node.close(closes_connections=True))
    assert feeders.request("a", "b") == [(1.0, (0, "a")), (1.5, ConnectionResetError)]
    with pytest.raises(ConnectionResetError):
        feeders.connection.check()


def test_silently_lost_feeder_returns_nothing_more_and_its_connection_stays() -> None:
    feeders = Feeders()
    feeders.engine.schedule_at(1.5, lambda: feeders.node.close(closes_connections=False))
    assert feeders.request("a", "b") == [(1.0, (0, "a"))]
    feeders.connection.check()


def test_feeder_that_hangs_returns_nothing() -> None:
    assert Feeders(hang_probability=1.0).request("a") == []


def test_worker_gets_replies_when_the_network_is_repaired() -> None:
    feeders = Feeders()
    feeders.is_connected = False
    feeders.engine.schedule_at(5.2, lambda: setattr(feeders, "is_connected", True))
    assert feeders.request("a") == [(5.5, (0, "a"))]


def test_connection_that_the_worker_closes_breaks() -> None:
    feeders = Feeders()
    feeders.engine.schedule_at(0.5, feeders.connection.close)
    assert feeders.request("a") == [(0.5, ConnectionResetError)]
