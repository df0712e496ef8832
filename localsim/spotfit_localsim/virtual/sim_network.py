"""The simulated network between agents: ordered messages with latency, resets and partitions.

A reset connection is reported to both ends. A partition is not reported: messages are queued, as by
TCP retransmission, and are delivered in order after the partition if the connection still exists.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from spotfit.agent.ports import (
    AgentDisconnected,
    AgentMessageReceived,
    LeaderDisconnected,
    LeaderMessageReceived,
    TransportEvent,
)
from spotfit.core.ids import AgentId
from spotfit.protocol.agent_leader import FromLeader, Join, ToLeader
from spotfit_localsim.random_streams import RandomStream
from spotfit_localsim.virtual.engine import Engine, SimProcess
from spotfit_localsim.virtual.faults import FloatRange

# As the production transport.
CONNECT_TIMEOUT_S = 5.0
PORT = 7000


@dataclass(frozen=True)
class NetworkPartition:
    """Blocks messages from or to one host, or both."""

    host: str
    blocks_outbound: bool = True
    blocks_inbound: bool = True

    def blocks(self, sender: str, receiver: str) -> bool:
        """Return whether the partition blocks a message."""
        # One direction is enough to break the connection, but only one side notices at first.
        return (self.blocks_outbound and sender == self.host) or (
            self.blocks_inbound and receiver == self.host
        )


class SimNetwork:
    """All hosts, their endpoints and connections."""

    def __init__(
        self, engine: Engine, stream: RandomStream, latency_s: FloatRange | None = (0.0005, 0.003)
    ) -> None:
        """Without a latency, messages are delivered inside `send`: for tests without an engine."""
        self.engine = engine
        self.endpoints: dict[str, SimNet] = {}
        self.connections: dict[SimConnection, None] = {}
        self.stream = stream
        self.latency_s = latency_s
        self.is_firewalled = False
        """Whether packets between different hosts are dropped."""
        self._partitions: list[NetworkPartition] = []
        self.network_by_host: dict[str, str] = {}
        """Hosts of different networks cannot connect to each other."""
        self._silent_hosts: set[str] = set()
        self._blocked_channels: dict[SimChannel, None] = {}

    def is_connected(self, host: str, other: str) -> bool:
        """Return whether messages pass in both directions, as a TCP connection needs."""
        return not (self.is_blocked(host, other) or self.is_blocked(other, host))

    def is_blocked(self, sender: str, receiver: str) -> bool:
        """Return whether messages from `sender` to `receiver` are blocked at present."""
        if sender in self._silent_hosts or receiver in self._silent_hosts:
            return True
        if self.is_firewalled and sender != receiver:
            return True
        if self.network_by_host.get(sender, "") != self.network_by_host.get(receiver, ""):
            return True
        return bool(self._partitions) and any(
            partition.blocks(sender, receiver) for partition in self._partitions
        )

    def add_partition(self, partition: NetworkPartition) -> None:
        """Start a partition."""
        self._partitions.append(partition)

    def remove_partition(self, partition: NetworkPartition) -> None:
        """End a partition and deliver queued messages."""
        self._partitions.remove(partition)
        # A channel that another partition blocks registers itself again in `flush`.
        waiting, self._blocked_channels = self._blocked_channels, {}
        for channel in waiting:
            channel.flush()

    def silence_host(self, host: str) -> None:
        """Block the host permanently: the machine is lost without closing connections."""
        self._silent_hosts.add(host)

    def add_blocked(self, channel: SimChannel) -> None:
        """Register a channel with queued messages."""
        self._blocked_channels[channel] = None


class SimChannel:
    """One direction of a connection; messages are delivered in order."""

    def __init__(self, network: SimNetwork, sender: str, receiver: str) -> None:
        self._network = network
        self._sender = sender
        self._receiver = receiver
        self._last_delivery_at = 0.0
        self._blocked_deliveries: deque[Callable[[], None]] = deque()

    def send(self, deliver: Callable[[], None]) -> None:
        """Deliver after the latency, or after the partition."""
        # Behind queued messages, or the order would change at the end of the partition.
        if self._blocked_deliveries or self._network.is_blocked(self._sender, self._receiver):
            self._blocked_deliveries.append(deliver)
            self._network.add_blocked(self)
        else:
            self._schedule_delivery(deliver)

    def flush(self) -> None:
        """Deliver queued messages unless another partition blocks them."""
        if self._network.is_blocked(self._sender, self._receiver):
            self._network.add_blocked(self)
            return
        while self._blocked_deliveries:
            self._schedule_delivery(self._blocked_deliveries.popleft())

    def _schedule_delivery(self, deliver: Callable[[], None]) -> None:
        network = self._network
        if network.latency_s is None:
            deliver()
            return
        arrives_at = network.engine.now + network.stream.uniform_in(network.latency_s)
        # Not before the previous message: TCP keeps the order though latencies are random.
        self._last_delivery_at = max(self._last_delivery_at, arrives_at)
        network.engine.schedule_at(self._last_delivery_at, deliver)


class SimConnection:
    """A connection of an agent to the leader.

    Each end is notified when the connection is lost, unless it closed the connection itself.
    """

    def __init__(self, network: SimNetwork, agent_net: SimNet, address: str) -> None:
        self.agent = agent_net.agent_id
        self.address = address
        self.leader_net: SimNet | None = None
        self.is_accepted = False
        self._network = network
        self._agent_net = agent_net
        self._is_agent_end_open = True
        self._is_leader_end_open = False
        host = address.rpartition(":")[0]
        self._to_leader = SimChannel(network, agent_net.host, host)
        self._to_agent = SimChannel(network, host, agent_net.host)

    def open(self, join: Join) -> None:
        """Connect to the leader with a join request."""

        def confirm() -> None:
            self.is_accepted = True

        def accept() -> None:
            # Looked up on arrival: the leader may have exited since the agent sent the request.
            endpoint = self._network.endpoints.get(self.address)
            if endpoint is None:
                self._to_agent.send(
                    lambda: self.lose_agent_end("connection refused", vanished=True)
                )
            elif self._is_agent_end_open:
                self.leader_net = endpoint
                self._is_leader_end_open = True
                endpoint.accept(self, AgentMessageReceived(self.agent, join))
                self._to_agent.send(confirm)

        def time_out() -> None:
            if not self.is_accepted and self._is_agent_end_open:
                self._to_leader.send(lambda: self.lose_leader_end("closed by the agent"))
                # Nothing was heard from the leader: it may still be running.
                self.lose_agent_end("connect timeout", vanished=False)

        self._network.connections[self] = None
        self._to_leader.send(accept)
        self._network.engine.schedule_after(CONNECT_TIMEOUT_S, time_out)

    def send_to_leader(self, message: ToLeader) -> None:
        """Send from the agent to the leader."""

        def deliver() -> None:
            # Checked on arrival as well: a message in flight is lost with the connection.
            if self._is_leader_end_open and self.leader_net is not None:
                self.leader_net.receive(AgentMessageReceived(self.agent, message))

        if self._is_agent_end_open:
            self._to_leader.send(deliver)

    def send_to_agent(self, message: FromLeader) -> None:
        """Send from the leader to the agent."""

        def deliver() -> None:
            if self._is_agent_end_open:
                self._agent_net.receive(LeaderMessageReceived(message))

        if self._is_leader_end_open:
            self._to_agent.send(deliver)

    def close_agent_end(self) -> None:
        """Close from the agent's side; the leader is notified."""
        self._is_agent_end_open = False
        self._remove_if_closed()
        self._to_leader.send(lambda: self.lose_leader_end("closed by the agent"))

    def close_leader_end(self) -> None:
        """Close from the leader's side; the agent is notified."""
        self._is_leader_end_open = False
        self._remove_if_closed()
        self._to_agent.send(lambda: self.lose_agent_end("closed by the leader", vanished=True))

    def reset(self) -> None:
        """Reset the connection; both ends are notified."""
        # Both at once and not through the channels: a reset is local to each host.
        self.lose_agent_end("connection reset", vanished=True)
        self.lose_leader_end("connection reset")

    def lose_agent_end(self, reason: str, *, vanished: bool) -> None:
        """Notify the agent that the connection is lost."""
        if self._is_agent_end_open:
            self._is_agent_end_open = False
            self._remove_if_closed()
            self._agent_net.lose_leader_connection(
                self, LeaderDisconnected(self.address, reason, vanished)
            )

    def lose_leader_end(self, reason: str) -> None:
        """Notify the leader that the connection is lost."""
        if self._is_leader_end_open and self.leader_net is not None:
            self._is_leader_end_open = False
            self._remove_if_closed()
            self.leader_net.lose_agent_connection(self, AgentDisconnected(self.agent, reason))

    def _remove_if_closed(self) -> None:
        if not self._is_leader_end_open and not self._is_agent_end_open:
            self._network.connections.pop(self, None)


class SimNet:
    """The `AgentTransport` of one agent."""

    def __init__(
        self, network: SimNetwork, process: SimProcess, *, host: str, agent_id: AgentId
    ) -> None:
        self.host = host
        self.agent_id = agent_id
        self.dialed: list[str] = []
        """The addresses of all connection attempts."""
        self._network = network
        self._process = process
        self._events: list[TransportEvent] = []
        self._leader_connection: SimConnection | None = None
        self._is_own_leader = False
        self._agent_connections: dict[AgentId, SimConnection] = {}
        network.endpoints[self.address] = self

    @property
    def address(self) -> str:
        return f"{self.host}:{PORT}"

    def connect(self, address: str, join: Join) -> None:
        self._process.simulate_call()
        self.dialed.append(address)
        self.disconnect()
        # In memory: the leader is also an agent, and its messages to itself are never lost.
        if address == self.address:
            self._is_own_leader = True
            self.receive(AgentMessageReceived(self.agent_id, join))
        else:
            self._leader_connection = SimConnection(self._network, self, address)
            self._leader_connection.open(join)

    def disconnect(self) -> None:
        self._is_own_leader = False
        if self._leader_connection is not None:
            self._leader_connection.close_agent_end()
            self._leader_connection = None

    def send_to_leader(self, message: ToLeader) -> None:
        self._process.simulate_call()
        if self._is_own_leader:
            self.receive(AgentMessageReceived(self.agent_id, message))
        elif self._leader_connection is not None:
            self._leader_connection.send_to_leader(message)

    def send_to_agent(self, agent: AgentId, message: FromLeader) -> None:
        self._process.simulate_call()
        if agent == self.agent_id and self._is_own_leader:
            self.receive(LeaderMessageReceived(message))
        elif agent in self._agent_connections:
            self._agent_connections[agent].send_to_agent(message)

    def disconnect_agent(self, agent: AgentId) -> None:
        self._process.simulate_call()
        if agent == self.agent_id:
            if self._is_own_leader:
                self._is_own_leader = False
                self.receive(
                    LeaderDisconnected(
                        self.address, "removed by the leader on this node", closed_by_peer=True
                    )
                )
        elif agent in self._agent_connections:
            # Removed first: the leader gets no event for a connection that it closed itself.
            self._agent_connections.pop(agent).close_leader_end()

    def drain_events(self) -> list[TransportEvent]:
        self._process.simulate_call()
        events, self._events = self._events, []
        return events

    def receive(self, event: TransportEvent) -> None:
        """Queue an event for the next tick of the process."""
        # The socket of a dead process receives nothing.
        if self._process.is_alive:
            self._events.append(event)
            self._process.wake()

    def accept(self, connection: SimConnection, join: AgentMessageReceived) -> None:
        """Accept a connection; it replaces an earlier one of the same agent."""
        previous = self._agent_connections.get(connection.agent)
        if previous is not None:
            # The leader must see the end of the old connection before the new join.
            previous.lose_leader_end("the agent reconnected")
        self._agent_connections[connection.agent] = connection
        self.receive(join)

    def lose_leader_connection(self, connection: SimConnection, event: LeaderDisconnected) -> None:
        """Handle the loss of the connection to the leader."""
        # An event of a connection that was replaced meanwhile is dropped, as by closing its socket.
        if connection is self._leader_connection:
            self._leader_connection = None
            self.receive(event)

    def lose_agent_connection(self, connection: SimConnection, event: AgentDisconnected) -> None:
        """Handle the loss of an agent's connection."""
        # The agent may have reconnected already.
        if self._agent_connections.get(connection.agent) is connection:
            del self._agent_connections[connection.agent]
            self.receive(event)

    def reset_connections(self) -> None:
        """Reset all connections of this agent to others, and of others to it."""
        for connection in list(self._network.connections):
            if connection.agent == self.agent_id or connection.leader_net is self:
                connection.reset()

    def stop_listening(self) -> None:
        """Refuse new connections."""
        self._network.endpoints.pop(self.address, None)

    def close(self) -> None:
        """Close all sockets, as the kernel does for a dead process."""
        self.stop_listening()
        self.disconnect()
        for connection in self._agent_connections.values():
            connection.close_leader_end()
        self._agent_connections = {}
