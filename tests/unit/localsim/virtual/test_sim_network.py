"""The wire keeps its order, tells of what broke, and says nothing of a wall."""

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


class Party:
    """Some agents that live and do nothing but have a net each."""

    def __init__(self, *names: str) -> None:
        self.ground = SimHarness()
        self.fabric = SimNetwork(self.ground.engine, self.ground.rng.stream("wire"))
        self.processes: dict[str, SimProcess] = {}
        self.nets: dict[str, SimNet] = {}
        for name in names:
            process = self.processes[name] = self.ground.idle(name)
            self.nets[name] = SimNet(self.fabric, process, host=name, agent_id=AgentId(name))

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

    def dial(self, name: str, hub: str) -> None:
        self.nets[name].connect(f"{hub}:7000", self.join(name))
        self.rest()

    def rest(self, seconds: float = 1.0) -> None:
        """Let time pass."""
        self.ground.engine.run(until=self.ground.engine.now)
        self.ground.engine.schedule_at(self.ground.engine.now + seconds, lambda: None)
        self.ground.engine.run(until=self.ground.engine.now + seconds)

    def heard(self, name: str) -> list[object]:
        return list(self.nets[name].drain_events())


def test_messages_arrive_in_order_after_the_join() -> None:
    party = Party("hub", "one")
    party.nets["one"].connect("hub:7000", party.join("one"))
    for number in range(20):
        party.nets["one"].send_to_leader(WorkersStopped(round=number))
    party.rest()
    messages = [
        event.message for event in party.heard("hub") if isinstance(event, AgentMessageReceived)
    ]
    assert messages == [party.join("one"), *(WorkersStopped(round=number) for number in range(20))]
    for number in range(20):
        party.nets["hub"].send_to_agent(AgentId("one"), AbortRound(round=number))
    party.rest()
    assert party.heard("one") == [
        LeaderMessageReceived(AbortRound(round=number)) for number in range(20)
    ]


def test_connection_to_itself_bypasses_the_network() -> None:
    party = Party("one")
    net = party.nets["one"]
    net.connect("one:7000", party.join("one"))
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
    party = Party("one")
    party.dial("one", "nobody")
    assert party.heard("one") == [
        LeaderDisconnected("nobody:7000", "connection refused", closed_by_peer=True)
    ]


def test_connect_to_a_silent_host_times_out() -> None:
    party = Party("hub", "one")
    party.fabric.silence_host("hub")
    party.dial("one", "hub")
    assert party.heard("one") == []
    party.rest(CONNECT_TIMEOUT_S)
    assert party.heard("one") == [
        LeaderDisconnected("hub:7000", "connect timeout", closed_by_peer=False)
    ]


def test_dead_leader_is_reported_and_silent_leader_is_not() -> None:
    for silent in (False, True):
        party = Party("hub", "one")
        party.dial("one", "hub")
        if silent:
            party.fabric.silence_host("hub")
        party.nets["hub"].close()
        party.rest()
        assert [type(event) for event in party.heard("one")] == (
            [] if silent else [LeaderDisconnected]
        )


def test_disconnected_agent_is_reported_once() -> None:
    party = Party("hub", "one")
    party.dial("one", "hub")
    party.heard("hub")
    party.nets["one"].close()
    party.rest()
    assert party.heard("hub") == [AgentDisconnected(AgentId("one"), "closed by the agent")]


def test_removed_agent_is_notified_and_no_longer_heard() -> None:
    party = Party("hub", "one")
    party.dial("one", "hub")
    party.heard("hub")
    party.nets["hub"].disconnect_agent(AgentId("one"))
    party.nets["one"].send_to_leader(ConnectionHeartbeat())
    party.rest()
    assert party.heard("hub") == []
    assert [type(event) for event in party.heard("one")] == [LeaderDisconnected]


def test_second_connection_replaces_the_first() -> None:
    party = Party("hub", "one")
    party.dial("one", "hub")
    party.dial("one", "hub")
    kinds = [type(event) for event in party.heard("hub")]
    assert kinds == [AgentMessageReceived, AgentDisconnected, AgentMessageReceived]
    party.nets["hub"].send_to_agent(AgentId("one"), AbortRound(round=1))
    party.rest()
    assert party.heard("one") == [LeaderMessageReceived(AbortRound(round=1))]


def test_partition_delays_messages_in_order() -> None:
    party = Party("hub", "one")
    party.dial("one", "hub")
    party.heard("hub")
    wall = NetworkPartition("hub", blocks_outbound=False, blocks_inbound=True)
    party.fabric.add_partition(wall)
    party.nets["one"].send_to_leader(WorkersStopped(round=1))
    party.nets["one"].send_to_leader(WorkersStopped(round=2))
    party.nets["hub"].send_to_agent(AgentId("one"), AbortRound(round=9))
    party.rest(30.0)
    assert party.heard("hub") == []
    assert party.heard("one") == [LeaderMessageReceived(AbortRound(round=9))]
    party.fabric.remove_partition(wall)
    party.rest()
    told = [
        event.message for event in party.heard("hub") if isinstance(event, AgentMessageReceived)
    ]
    assert told == [WorkersStopped(round=1), WorkersStopped(round=2)]


def test_reset_connection_is_reported_to_both_ends() -> None:
    party = Party("hub", "one")
    party.dial("one", "hub")
    party.heard("hub")
    next(iter(party.fabric.connections)).reset()
    assert [type(event) for event in party.heard("one")] == [LeaderDisconnected]
    assert [type(event) for event in party.heard("hub")] == [AgentDisconnected]
    assert not party.fabric.connections
