"""The wire between agents: ordered, slow, and sometimes cut, silent or full of old news.

A connection that is cut tells both ends. A wall tells nobody: what is sent into it waits, as TCP
lets it, and arrives in order once the wall is gone, if the connection still stands by then.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from spotfit.agent.ports import AgentLost, FromAgent, FromHub, HubLost, NetEvent
from spotfit.core.ids import AgentId
from spotfit.model.wire import FromLeader, Join, ToLeader
from spotfit_localsim.dice import Stream
from spotfit_localsim.engine import Engine, Process
from spotfit_localsim.faults import Span

DIAL_PATIENCE_S = 5.0
PORT = 7000


@dataclass(frozen=True)
class Wall:
    """Nothing gets from `host` to anybody, or from anybody to it, or both."""

    host: str
    outwards: bool = True
    inwards: bool = True

    def stops(self, sender: str, receiver: str) -> bool:
        """Whether that message ends here."""
        return (self.outwards and sender == self.host) or (self.inwards and receiver == self.host)


class Fabric:
    """All hosts, the hubs that listen there, and the ways between them."""

    def __init__(self, engine: Engine, stream: Stream, latency_s: Span = (0.0005, 0.003)) -> None:
        self.engine = engine
        self.hubs: dict[str, SimNet] = {}
        self.connections: dict[Connection, None] = {}
        self._stream = stream
        self._latency_s = latency_s
        self._walls: list[Wall] = []
        self._silent: set[str] = set()
        self._waiting: dict[Direction, None] = {}

    def latency_s(self) -> float:
        """How long the next message is under way."""
        return self._stream.between(self._latency_s)

    def blocked(self, sender: str, receiver: str) -> bool:
        """Whether nothing gets through from the one host to the other at present."""
        if sender in self._silent or receiver in self._silent:
            return True
        return bool(self._walls) and any(wall.stops(sender, receiver) for wall in self._walls)

    def build(self, wall: Wall) -> None:
        """From now on that host is not heard, or does not hear."""
        self._walls.append(wall)

    def tear_down(self, wall: Wall) -> None:
        """The way is open again, and what waited goes through."""
        self._walls.remove(wall)
        waiting, self._waiting = self._waiting, {}
        for direction in waiting:
            direction.flush()

    def silence(self, host: str) -> None:
        """The machine is gone without a word: nobody is told, now or ever."""
        self._silent.add(host)

    def hold(self, direction: Direction) -> None:
        """Something waits there for a wall to go."""
        self._waiting[direction] = None


class Direction:
    """One half of a connection: messages go in, and come out later, in order."""

    def __init__(self, fabric: Fabric, sender: str, receiver: str) -> None:
        self._fabric = fabric
        self._sender = sender
        self._receiver = receiver
        self._last = 0.0
        self._held: deque[Callable[[], None]] = deque()

    def carry(self, deliver: Callable[[], None]) -> None:
        """Deliver after a while, or once the way is open again."""
        if self._held or self._fabric.blocked(self._sender, self._receiver):
            self._held.append(deliver)
            self._fabric.hold(self)
        else:
            self._send(deliver)

    def flush(self) -> None:
        """A wall is gone: send what waits, if no other stands there."""
        if self._fabric.blocked(self._sender, self._receiver):
            self._fabric.hold(self)
            return
        while self._held:
            self._send(self._held.popleft())

    def _send(self, deliver: Callable[[], None]) -> None:
        engine = self._fabric.engine
        self._last = max(self._last, engine.now + self._fabric.latency_s())
        engine.at(self._last, deliver)


class Connection:
    """An agent's line to a hub. Each end learns that it is gone, unless it dropped it itself."""

    def __init__(self, fabric: Fabric, dialler: SimNet, address: str) -> None:
        self.agent = dialler.me
        self.address = address
        self.hub: SimNet | None = None
        self.answered = False
        self._fabric = fabric
        self._dialler = dialler
        self._below = True
        self._above = False
        host = address.rpartition(":")[0]
        self._up = Direction(fabric, dialler.host, host)
        self._down = Direction(fabric, host, dialler.host)

    def open(self, join: Join) -> None:
        """Knock at the hub with `join`."""
        self._fabric.connections[self] = None
        self._up.carry(lambda: self._arrive(join))
        self._fabric.engine.after(DIAL_PATIENCE_S, self._give_up)

    def send_up(self, message: ToLeader) -> None:
        """From the agent to the hub."""
        if self._below:
            self._up.carry(lambda: self._deliver_up(message))

    def send_down(self, message: FromLeader) -> None:
        """From the hub to the agent."""
        if self._above:
            self._down.carry(lambda: self._deliver_down(message))

    def drop_below(self) -> None:
        """The agent hangs up; the hub will learn of it."""
        self._below = False
        self._forget()
        self._up.carry(lambda: self.lose_above("it hung up"))

    def drop_above(self) -> None:
        """The hub hangs up; the agent will learn of it."""
        self._above = False
        self._forget()
        self._down.carry(lambda: self.lose_below("the hub closed the connection", vanished=True))

    def reset(self) -> None:
        """Something on the way cuts it; both ends are told."""
        self.lose_below("connection reset", vanished=True)
        self.lose_above("connection reset")

    def lose_below(self, why: str, *, vanished: bool) -> None:
        """The agent learns that its line is gone."""
        if self._below:
            self._below = False
            self._forget()
            self._dialler.hub_lost(self, HubLost(self.address, why, vanished))

    def lose_above(self, why: str) -> None:
        """The hub learns that the agent's line is gone."""
        if self._above and self.hub is not None:
            self._above = False
            self._forget()
            self.hub.agent_lost(self, AgentLost(self.agent, why))

    def _arrive(self, join: Join) -> None:
        hub = self._fabric.hubs.get(self.address)
        if hub is None:
            self._down.carry(lambda: self.lose_below("connection refused", vanished=True))
        elif self._below:
            self.hub = hub
            self._above = True
            hub.accept(self, FromAgent(self.agent, join))
            self._down.carry(self._hear)

    def _hear(self) -> None:
        self.answered = True

    def _give_up(self) -> None:
        if not self.answered and self._below:
            self._up.carry(lambda: self.lose_above("it hung up"))
            self.lose_below("no answer", vanished=False)

    def _deliver_up(self, message: ToLeader) -> None:
        if self._above and self.hub is not None:
            self.hub.take(FromAgent(self.agent, message))

    def _deliver_down(self, message: FromLeader) -> None:
        if self._below:
            self._dialler.take(FromHub(message))

    def _forget(self) -> None:
        if not self._above and not self._below:
            self._fabric.connections.pop(self, None)


class SimNet:
    """The `Net` of one agent."""

    def __init__(self, fabric: Fabric, process: Process, *, host: str, me: AgentId) -> None:
        self.host = host
        self.me = me
        self._fabric = fabric
        self._process = process
        self._events: list[NetEvent] = []
        self._uplink: Connection | None = None
        self._at_home = False
        self._seats: dict[AgentId, Connection] = {}
        fabric.hubs[self.hub] = self

    @property
    def hub(self) -> str:
        return f"{self.host}:{PORT}"

    def dial(self, address: str, join: Join) -> None:
        self._process.touch()
        self.hang_up()
        if address == self.hub:
            self._at_home = True
            self.take(FromAgent(self.me, join))
        else:
            self._uplink = Connection(self._fabric, self, address)
            self._uplink.open(join)

    def hang_up(self) -> None:
        self._at_home = False
        if self._uplink is not None:
            self._uplink.drop_below()
            self._uplink = None

    def send_up(self, message: ToLeader) -> None:
        self._process.touch()
        if self._at_home:
            self.take(FromAgent(self.me, message))
        elif self._uplink is not None:
            self._uplink.send_up(message)

    def send_down(self, agent: AgentId, message: FromLeader) -> None:
        self._process.touch()
        if agent == self.me and self._at_home:
            self.take(FromHub(message))
        elif agent in self._seats:
            self._seats[agent].send_down(message)

    def dismiss(self, agent: AgentId) -> None:
        self._process.touch()
        if agent == self.me:
            if self._at_home:
                self._at_home = False
                self.take(HubLost(self.hub, "our own hub dismissed us", vanished=True))
        elif agent in self._seats:
            self._seats.pop(agent).drop_above()

    def events(self) -> list[NetEvent]:
        self._process.touch()
        events, self._events = self._events, []
        return events

    def take(self, event: NetEvent) -> None:
        """Something came; the process will see it at its next tick."""
        if self._process.alive:
            self._events.append(event)
            self._process.wake()

    def accept(self, connection: Connection, join: FromAgent) -> None:
        """An agent knocked at our hub."""
        former = self._seats.get(connection.agent)
        if former is not None:
            former.lose_above("it dialled again")
        self._seats[connection.agent] = connection
        self.take(join)

    def hub_lost(self, connection: Connection, lost: HubLost) -> None:
        """A line of ours is gone."""
        if connection is self._uplink:
            self._uplink = None
            self.take(lost)

    def agent_lost(self, connection: Connection, lost: AgentLost) -> None:
        """A line to our hub is gone."""
        if self._seats.get(connection.agent) is connection:
            del self._seats[connection.agent]
            self.take(lost)

    def close(self) -> None:
        """The process is gone: its kernel closes what it had open."""
        del self._fabric.hubs[self.hub]
        self.hang_up()
        for connection in self._seats.values():
            connection.drop_above()
        self._seats = {}
