"""The simulated network: message order, reported disconnects and silent partitions."""

from spotfit.agent.ports import (
    AgentDisconnected,
    AgentMessageReceived,
    LeaderDisconnected,
    LeaderMessageReceived,
)
from spotfit.core.ids import AgentId, RunId, Token
from spotfit.model.topology import Member
from spotfit.protocol.agent_leader import AbortRound, ConnectionHeartbeat, Join, WorkersStopped
from spotfit_localsim.virtual.engine import SimProcess
from spotfit_localsim.virtual.sim_network import (
    CONNECT_TIMEOUT_S,
    NetworkPartition,
    SimNet,
    SimNetwork,
)
from tests.unit.localsim.sim_harness import SimHarness


class NetworkHarness:
    """Idle agents with one network endpoint each."""

    def __init__(self, *names: str) -> None:
        self.sim = SimHarness()
        self.network = SimNetwork(self.sim.engine, self.sim.rng.stream("network"))
        self.processes: dict[str, SimProcess] = {}
        self.nets: dict[str, SimNet] = {}
        for name in names:
            process = self.processes[name] = self.sim.idle(name)
            self.nets[name] = SimNet(self.network, process, host=name, agent_id=AgentId(name))

    def join(self, name: str) -> Join:
        member = Member(
            agent=AgentId(name),
            host=name,
            coordinator_address=f"{name}:7000",
            slots=1,
            token=Token("t"),
            node=0,
        )
        return Join(run_id=RunId("r"), member=member, next_slot=0)

    def connect(self, name: str, leader: str) -> None:
        self.nets[name].connect(f"{leader}:7000", self.join(name))
        self.advance()

    def advance(self, seconds: float = 1.0) -> None:
        """Advance the virtual time."""
        self.sim.engine.run(until=self.sim.engine.now)
        self.sim.engine.schedule_at(self.sim.engine.now + seconds, lambda: None)
        self.sim.engine.run(until=self.sim.engine.now + seconds)

    def events(self, name: str) -> list[object]:
        return list(self.nets[name].drain_events())


def test_messages_arrive_in_order_after_the_join() -> None:
    harness = NetworkHarness("leader", "one")
    harness.nets["one"].connect("leader:7000", harness.join("one"))
    for number in range(20):
        harness.nets["one"].send_to_leader(WorkersStopped(round=number))
    harness.advance()
    messages = [
        event.message
        for event in harness.events("leader")
        if isinstance(event, AgentMessageReceived)
    ]
    assert messages == [
        harness.join("one"),
        *(WorkersStopped(round=number) for number in range(20)),
    ]
    for number in range(20):
        harness.nets["leader"].send_to_agent(AgentId("one"), AbortRound(round=number))
    harness.advance()
    assert harness.events("one") == [
        LeaderMessageReceived(AbortRound(round=number)) for number in range(20)
    ]


def test_connection_to_itself_bypasses_the_network() -> None:
    harness = NetworkHarness("one")
    net = harness.nets["one"]
    net.connect("one:7000", harness.join("one"))
    net.send_to_leader(ConnectionHeartbeat())
    net.send_to_agent(AgentId("one"), AbortRound(round=1))
    assert [type(event) for event in net.drain_events()] == [
        AgentMessageReceived,
        AgentMessageReceived,
        LeaderMessageReceived,
    ]
    net.disconnect_agent(AgentId("one"))
    assert [type(event) for event in net.drain_events()] == [LeaderDisconnected]


def test_connection_without_listener_is_refused() -> None:
    harness = NetworkHarness("one")
    harness.connect("one", "absent")
    assert harness.events("one") == [
        LeaderDisconnected("absent:7000", "connection refused", closed_by_peer=True)
    ]


def test_connect_to_a_silent_host_times_out() -> None:
    harness = NetworkHarness("leader", "one")
    harness.network.silence_host("leader")
    harness.connect("one", "leader")
    assert harness.events("one") == []
    harness.advance(CONNECT_TIMEOUT_S)
    assert harness.events("one") == [
        LeaderDisconnected("leader:7000", "connect timeout", closed_by_peer=False)
    ]


def test_dead_leader_is_reported_and_silent_leader_is_not() -> None:
    for silent in (False, True):
        harness = NetworkHarness("leader", "one")
        harness.connect("one", "leader")
        if silent:
            harness.network.silence_host("leader")
        harness.nets["leader"].close()
        harness.advance()
        assert [type(event) for event in harness.events("one")] == (
            [] if silent else [LeaderDisconnected]
        )


def test_disconnected_agent_is_reported_once() -> None:
    harness = NetworkHarness("leader", "one")
    harness.connect("one", "leader")
    harness.events("leader")
    harness.nets["one"].close()
    harness.advance()
    assert harness.events("leader") == [AgentDisconnected(AgentId("one"), "closed by the agent")]


def test_removed_agent_is_notified_and_its_messages_are_ignored() -> None:
    harness = NetworkHarness("leader", "one")
    harness.connect("one", "leader")
    harness.events("leader")
    harness.nets["leader"].disconnect_agent(AgentId("one"))
    harness.nets["one"].send_to_leader(ConnectionHeartbeat())
    harness.advance()
    assert harness.events("leader") == []
    assert [type(event) for event in harness.events("one")] == [LeaderDisconnected]


def test_second_connection_replaces_the_first() -> None:
    harness = NetworkHarness("leader", "one")
    harness.connect("one", "leader")
    harness.connect("one", "leader")
    kinds = [type(event) for event in harness.events("leader")]
    assert kinds == [AgentMessageReceived, AgentDisconnected, AgentMessageReceived]
    harness.nets["leader"].send_to_agent(AgentId("one"), AbortRound(round=1))
    harness.advance()
    assert harness.events("one") == [LeaderMessageReceived(AbortRound(round=1))]


def test_partition_delays_messages_in_order() -> None:
    harness = NetworkHarness("leader", "one")
    harness.connect("one", "leader")
    harness.events("leader")
    partition = NetworkPartition("leader", blocks_outbound=False, blocks_inbound=True)
    harness.network.add_partition(partition)
    harness.nets["one"].send_to_leader(WorkersStopped(round=1))
    harness.nets["one"].send_to_leader(WorkersStopped(round=2))
    harness.nets["leader"].send_to_agent(AgentId("one"), AbortRound(round=9))
    harness.advance(30.0)
    assert harness.events("leader") == []
    assert harness.events("one") == [LeaderMessageReceived(AbortRound(round=9))]
    harness.network.remove_partition(partition)
    harness.advance()
    messages = [
        event.message
        for event in harness.events("leader")
        if isinstance(event, AgentMessageReceived)
    ]
    assert messages == [WorkersStopped(round=1), WorkersStopped(round=2)]


def test_reset_connection_is_reported_to_both_ends() -> None:
    harness = NetworkHarness("leader", "one")
    harness.connect("one", "leader")
    harness.events("leader")
    next(iter(harness.network.connections)).reset()
    assert [type(event) for event in harness.events("one")] == [LeaderDisconnected]
    assert [type(event) for event in harness.events("leader")] == [AgentDisconnected]
    assert not harness.network.connections


def test_hosts_of_different_networks_cannot_connect() -> None:
    harness = NetworkHarness("leader", "one", "two")
    harness.network.network_by_host.update(leader="east", one="west", two="east")
    assert harness.network.is_blocked("one", "leader")
    assert harness.network.is_blocked("leader", "one")
    assert not harness.network.is_blocked("two", "leader")
