"""The wire between agents: one hub that listens, one connection to the hub that leads."""

from __future__ import annotations

import errno
import os
import socket
from functools import partial

import msgspec

from spotfit.agent.loop import READ, Loop
from spotfit.agent.ports import AgentLost, FromAgent, FromHub, HubLost, NetEvent
from spotfit.agent.wire import Listener, Wire
from spotfit.core.codec import decoder, encode
from spotfit.core.errors import ConfigError
from spotfit.core.ids import AgentId, RunId
from spotfit.host import log
from spotfit.model.wire import FromLeader, Join, Rejected, ToLeader
from spotfit.ship.certificate import contexts

_up: msgspec.json.Decoder[ToLeader] = decoder(ToLeader)  # type: ignore[arg-type]
_down: msgspec.json.Decoder[FromLeader] = decoder(FromLeader)  # type: ignore[arg-type]
_DIAL_PATIENCE_S = 5.0
_JOIN_PATIENCE_S = 5.0
_BACKLOG = 1024
_STRANGERS = 1024


class TlsNet:
    """`Net` over TCP and TLS 1.3. Whoever does not hold the run's key is not heard."""

    def __init__(self, loop: Loop, *, secret: str, run_id: RunId, host: str, port: int = 0) -> None:
        """Listens on `host` from now on. Raises `ConfigError` where that is no address of ours."""
        self._loop = loop
        self._run_id = run_id
        self._tls = contexts(secret, run_id)
        self._events: list[NetEvent] = []
        self._strangers: dict[Wire, None] = {}
        self._agents: dict[AgentId, Wire] = {}
        self._uplink: Wire | None = None
        self._own_agent: AgentId | None = None
        """Who we are, while our uplink is our own hub."""
        self._listener = listen(host, port)
        self._hub = _address(self._listener)
        loop.watch(self._listener, READ, self._accept)

    @property
    def hub(self) -> str:
        return self._hub

    def events(self) -> list[NetEvent]:
        events, self._events = self._events, []
        return events

    @property
    def waiting(self) -> bool:
        """Whether something came since `events` was called last; of our own hub no wire tells."""
        return bool(self._events)

    def close(self) -> None:
        """Listen and speak no more."""
        self.hang_up()
        for wire in [*self._strangers, *self._agents.values()]:
            wire.close()
        self._loop.forget(self._listener)
        self._listener.close()

    # --- up ----------------------------------------------------------------------------------

    def dial(self, address: str, join: Join) -> None:
        self.hang_up()
        if address == self._hub:
            self._own_agent = join.member.agent
            self._events.append(FromAgent(join.member.agent, join))
            return
        try:
            sock = _begin_connecting(address)
        except OSError as refused:
            gone = refused.errno == errno.ECONNREFUSED
            self._events.append(HubLost(address, str(refused), gone))
            return
        wire = self._uplink = Wire(self._loop, sock, self._tls.client, server=False)
        lost = partial(self._lose_hub, wire, address)
        wire.listener = Listener(partial(self._hear_hub, wire, address), lost)
        wire.send(encode(join))
        self._loop.after(_DIAL_PATIENCE_S, partial(self._give_up, wire, lost))

    def hang_up(self) -> None:
        self._own_agent = None
        if self._uplink is not None:
            self._uplink.close()
            self._uplink = None

    def send_up(self, message: ToLeader) -> None:
        if self._own_agent is not None:
            self._events.append(FromAgent(self._own_agent, message))
        elif self._uplink is not None:
            self._uplink.send(encode(message))

    def _hear_hub(self, wire: Wire, address: str, frame: bytes) -> None:
        try:
            message = _down.decode(frame)
        except (msgspec.ValidationError, msgspec.DecodeError) as garbage:
            wire.close()
            self._lose_hub(wire, address, f"it speaks another tongue: {garbage}", vanished=False)
            return
        self._events.append(FromHub(message))

    def _lose_hub(self, wire: Wire, address: str, why: str, vanished: bool) -> None:  # noqa: FBT001 - as `Listener.lost` wants it
        if wire is self._uplink:
            self._uplink = None
            self._events.append(HubLost(address, why, vanished))

    def _give_up(self, wire: Wire, lost: partial[None]) -> None:
        if wire is self._uplink and not wire.made:
            wire.close()
            lost(f"no answer within {_DIAL_PATIENCE_S:.0f} s", False)  # noqa: FBT003 - not vanished

    # --- down --------------------------------------------------------------------------------

    def send_down(self, agent: AgentId, message: FromLeader) -> None:
        if agent == self._own_agent:
            self._events.append(FromHub(message))
        elif agent in self._agents:
            self._agents[agent].send(encode(message))

    def dismiss(self, agent: AgentId) -> None:
        if agent == self._own_agent:
            self._own_agent = None
            self._events.append(HubLost(self._hub, "our own hub dismissed us", vanished=True))
        elif agent in self._agents:
            self._agents.pop(agent).close()

    def _accept(self, _: int) -> None:
        try:
            sock, _address = self._listener.accept()
        except OSError as failed:  # it hung up before we came, or we have no descriptors left
            log.debug("net.accept", why=str(failed))
            return
        sock.settimeout(0)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        wire = Wire(self._loop, sock, self._tls.server, server=True)
        wire.listener = Listener(partial(self._hear_stranger, wire), partial(self._shut_out, wire))
        self._strangers[wire] = None
        if len(self._strangers) > _STRANGERS:
            self._shut_out(next(iter(self._strangers)), "too many strangers")
        self._loop.after(_JOIN_PATIENCE_S, partial(self._shut_out, wire, "it did not join in time"))

    def _shut_out(self, wire: Wire, why: str, _vanished: bool = False) -> None:  # noqa: FBT001, FBT002 - as `Listener.lost` wants it
        if wire in self._strangers:
            del self._strangers[wire]
            wire.close()
            log.debug("net.stranger", why=why)

    def _hear_stranger(self, wire: Wire, frame: bytes) -> None:
        """The first frame must be a Join for this run."""
        try:
            join = _up.decode(frame)
        except (msgspec.ValidationError, msgspec.DecodeError) as garbage:
            self._shut_out(wire, f"it speaks another tongue: {garbage}")
            return
        if not isinstance(join, Join):
            self._shut_out(wire, "it did not begin with a join")
        elif join.run_id != self._run_id:
            wire.send(encode(Rejected("other_run")))
            self._shut_out(wire, f"it belongs to run {join.run_id}")
        else:
            self._take_in(wire, join)

    def _take_in(self, wire: Wire, join: Join) -> None:
        agent = join.member.agent
        del self._strangers[wire]
        if agent in self._agents:
            self._agents.pop(agent).close()
            self._events.append(AgentLost(agent, "it dialled again"))
        self._agents[agent] = wire
        wire.listener = Listener(
            partial(self._hear_agent, wire, agent), partial(self._lose_agent, wire, agent)
        )
        self._events.append(FromAgent(agent, join))

    def _hear_agent(self, wire: Wire, agent: AgentId, frame: bytes) -> None:
        try:
            message = _up.decode(frame)
        except (msgspec.ValidationError, msgspec.DecodeError) as garbage:
            wire.close()
            self._lose_agent(wire, agent, f"it speaks another tongue: {garbage}")
            return
        self._events.append(FromAgent(agent, message))

    def _lose_agent(self, wire: Wire, agent: AgentId, why: str, _vanished: bool = False) -> None:  # noqa: FBT001, FBT002 - as `Listener.lost` wants it
        if self._agents.get(agent) is wire:
            del self._agents[agent]
            self._events.append(AgentLost(agent, why))


def listen(host: str, port: int) -> socket.socket:
    """Where other machines call this one. Raises `ConfigError` where that is no address of ours."""
    try:
        family, _, _, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        sock = socket.create_server(place[:2], family=family, backlog=_BACKLOG)
    except OSError as refused:
        raise ConfigError(
            f"This machine cannot listen on {host!r}, port {port}: {refused}",
            do="Set SPOTFIT_HOST to one of its own addresses, and SPOTFIT_PORT to a free port.",
        ) from refused
    sock.settimeout(0)
    return sock


def _address(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _begin_connecting(address: str) -> socket.socket:
    """A socket on its way; raises `OSError` where it cannot even begin. Asks no resolver."""
    host, _, port = address.rpartition(":")
    found = socket.getaddrinfo(
        host.strip("[]"), int(port), type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST
    )
    family, kind, _, _, place = found[0]
    sock = socket.socket(family, kind)
    sock.settimeout(0)
    code = sock.connect_ex(place)
    if code not in (0, errno.EINPROGRESS):
        sock.close()
        raise OSError(code, os.strerror(code))
    return sock
