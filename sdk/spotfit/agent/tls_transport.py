"""`TlsTransport`: the `AgentTransport` over TCP and TLS 1.3.

Every agent listens on one socket, because it may be elected leader, and holds one connection to the
current leader. A connection that was accepted is registered for an agent once its first frame is a
`Join` of this run; until then it is pending and limited in number and time.
"""

from __future__ import annotations

import errno
import os
import socket
from functools import partial
from typing import TypeVar

import msgspec

from spotfit.agent.ports import (
    AgentDisconnected,
    AgentMessageReceived,
    LeaderDisconnected,
    LeaderMessageReceived,
    TransportEvent,
)
from spotfit.agent.tls_connection import ConnectionCallbacks, ConnectionLoss, TlsConnection
from spotfit.core.codec import decoder, encode
from spotfit.core.errors import ConfigError, IntegrityError
from spotfit.core.ids import AgentId, RunId
from spotfit.host import log
from spotfit.host.event_loop import READ, EventLoop
from spotfit.protocol.agent_leader import FromLeader, Join, JoinRejected, ToLeader
from spotfit.security.tls_certificate import make_tls_contexts

MessageT = TypeVar("MessageT")
_to_leader_decoder: msgspec.json.Decoder[ToLeader] = decoder(ToLeader)  # type: ignore[arg-type]
_from_leader_decoder: msgspec.json.Decoder[FromLeader] = decoder(FromLeader)  # type: ignore[arg-type]
# Within 5 s the kernel sends two further SYN packets (after 1 s and 3 s) if the first is lost.
_CONNECT_TIMEOUT_S = 5.0
_JOIN_TIMEOUT_S = 5.0
# All agents of a run of 1,000 nodes reconnect within the same second after an election.
_LISTEN_BACKLOG = 1024
_MAX_PENDING_CONNECTIONS = 1024


class TlsTransport:
    """`AgentTransport` over TCP. The TLS handshake fails for peers without the run's key."""

    def __init__(
        self, loop: EventLoop, *, secret: str, run_id: RunId, host: str, port: int = 0
    ) -> None:
        """Start to listen. Raises `ConfigError` if `host` is not an address of this machine."""
        self._loop = loop
        self._run_id = run_id
        self._tls = make_tls_contexts(secret, run_id)
        self._events: list[TransportEvent] = []
        self._pending_connections: dict[TlsConnection, None] = {}
        self._agent_connections: dict[AgentId, TlsConnection] = {}
        self._leader_connection: TlsConnection | None = None
        self._loopback_agent: AgentId | None = None
        """This agent's own ID while it is connected to itself as the leader; otherwise None."""
        self._listener = listen(host, port)
        address, own_port = self._listener.getsockname()[:2]
        self._own_address = f"[{address}]:{own_port}" if ":" in address else f"{address}:{own_port}"
        loop.register(self._listener, READ, self._accept)

    @property
    def address(self) -> str:
        return self._own_address

    def drain_events(self) -> list[TransportEvent]:
        events, self._events = self._events, []
        return events

    @property
    def has_events(self) -> bool:
        """Whether `drain_events` would return any. Loopback messages do not wake the event loop."""
        return bool(self._events)

    def close(self) -> None:
        """Close the listening socket and all connections."""
        # Agents see a closed socket, so that they look for another leader at once (0012).
        self.disconnect()
        for connection in [*self._pending_connections, *self._agent_connections.values()]:
            connection.close()
        self._loop.unregister(self._listener)
        self._listener.close()

    # --- connection to the leader ------------------------------------------------------------

    def connect(self, address: str, join: Join) -> None:
        self.disconnect()
        if address == self._own_address:
            # Without TCP: messages of a node to itself must not fail when its network does.
            self._loopback_agent = join.member.agent
            self._events.append(AgentMessageReceived(join.member.agent, join))
            return
        try:
            sock = _start_connect(address)
        except OSError as error:
            is_refused = error.errno == errno.ECONNREFUSED
            self._events.append(LeaderDisconnected(address, str(error), is_refused))
            return
        connection = self._leader_connection = TlsConnection(
            self._loop, sock, self._tls.client, server=False
        )
        connection.callbacks = ConnectionCallbacks(
            lambda frame: self._events.append(
                LeaderMessageReceived(_decode(_from_leader_decoder, frame))
            ),
            partial(self._on_leader_disconnected, connection, address),
        )
        connection.send(encode(join))  # queued until the handshake is complete
        self._loop.call_later(
            _CONNECT_TIMEOUT_S, partial(self._on_connect_timeout, connection, address)
        )

    def disconnect(self) -> None:
        self._loopback_agent = None
        if self._leader_connection is not None:
            self._leader_connection.close()
            self._leader_connection = None

    def send_to_leader(self, message: ToLeader) -> None:
        if self._loopback_agent is not None:
            self._events.append(AgentMessageReceived(self._loopback_agent, message))
        elif self._leader_connection is not None:
            self._leader_connection.send(encode(message))

    def _on_leader_disconnected(
        self, connection: TlsConnection, address: str, loss: ConnectionLoss
    ) -> None:
        if connection is self._leader_connection:
            self._leader_connection = None
            self._events.append(LeaderDisconnected(address, loss.reason, loss.closed_by_peer))

    def _on_connect_timeout(self, connection: TlsConnection, address: str) -> None:
        if not connection.is_established:
            connection.close()
            # A timeout does not prove that the leader is gone: its machine may be overloaded.
            loss = ConnectionLoss(
                f"no answer within {_CONNECT_TIMEOUT_S:.0f} s", closed_by_peer=False
            )
            self._on_leader_disconnected(connection, address, loss)

    # --- connections of agents to this leader ------------------------------------------------

    def send_to_agent(self, agent: AgentId, message: FromLeader) -> None:
        if agent == self._loopback_agent:
            self._events.append(LeaderMessageReceived(message))
        elif agent in self._agent_connections:
            self._agent_connections[agent].send(encode(message))

    def disconnect_agent(self, agent: AgentId) -> None:
        if agent == self._loopback_agent:
            self._loopback_agent = None
            self._events.append(
                LeaderDisconnected(
                    self._own_address, "this agent disconnected itself", closed_by_peer=True
                )
            )
        elif agent in self._agent_connections:
            self._agent_connections.pop(agent).close()

    def _accept(self, _: int) -> None:
        try:
            sock, _address = self._listener.accept()
        except OSError as error:  # closed by the peer meanwhile, or no file descriptors are left
            log.debug("net.accept_failed", reason=str(error))
            return
        sock.settimeout(0)  # the event loop must not block on it
        # Messages are small and urgent: do not wait to fill a segment.
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection = TlsConnection(self._loop, sock, self._tls.server, server=True)
        connection.callbacks = ConnectionCallbacks(
            partial(self._on_first_frame, connection),
            lambda loss: self._reject_connection(connection, loss.reason),
        )
        self._pending_connections[connection] = None
        if len(self._pending_connections) > _MAX_PENDING_CONNECTIONS:
            # The oldest one: a port scanner must not displace agents that have just connected.
            oldest = next(iter(self._pending_connections))
            self._reject_connection(oldest, f"more than {_MAX_PENDING_CONNECTIONS} are pending")
        self._loop.call_later(
            _JOIN_TIMEOUT_S,
            partial(self._reject_connection, connection, f"no join within {_JOIN_TIMEOUT_S:.0f} s"),
        )

    def _reject_connection(self, connection: TlsConnection, reason: str) -> None:
        if connection in self._pending_connections:
            del self._pending_connections[connection]
            connection.close()
            log.debug("net.connection_rejected", reason=reason)

    def _on_first_frame(self, connection: TlsConnection, frame: bytes) -> None:
        """Register the connection if its first frame is a `Join` for this run; else reject it."""
        join = _decode(_to_leader_decoder, frame)
        if not isinstance(join, Join):
            self._reject_connection(connection, "the first message is not a join")
            return
        if join.run_id != self._run_id:
            # The address of this machine was in the journal of a run that used it before.
            connection.send(encode(JoinRejected(reason="other_run")))
            self._reject_connection(connection, f"the agent belongs to run {join.run_id}")
            return
        agent = join.member.agent
        del self._pending_connections[connection]
        if agent in self._agent_connections:
            # The end of the previous connection was not noticed yet, for example after a timeout.
            self._agent_connections.pop(agent).close()
            self._events.append(AgentDisconnected(agent, "the agent opened a new connection"))
        self._agent_connections[agent] = connection
        connection.callbacks = ConnectionCallbacks(
            lambda frame: self._events.append(
                AgentMessageReceived(agent, _decode(_to_leader_decoder, frame))
            ),
            partial(self._on_agent_disconnected, connection, agent),
        )
        self._events.append(AgentMessageReceived(agent, join))

    def _on_agent_disconnected(
        self, connection: TlsConnection, agent: AgentId, loss: ConnectionLoss
    ) -> None:
        # Not if the agent has connected again: that has reported the end of this connection.
        if self._agent_connections.get(agent) is connection:
            del self._agent_connections[agent]
            self._events.append(AgentDisconnected(agent, loss.reason))


def listen(host: str, port: int) -> socket.socket:
    """Return a non-blocking socket that listens on `host`; port 0 lets the kernel choose.

    Raises `ConfigError` if the address is not this machine's or the port is taken.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        sock = socket.create_server(address[:2], family=family, backlog=_LISTEN_BACKLOG)
    except OSError as error:
        raise ConfigError(
            f"This machine cannot listen on {host!r}, port {port}: {error}",
            do="Set SPOTFIT_HOST to an address of this machine and SPOTFIT_PORT to a free port.",
        ) from error
    sock.settimeout(0)
    return sock


def _decode(decoder: msgspec.json.Decoder[MessageT], frame: bytes) -> MessageT:
    """Decode a frame. Raises `IntegrityError`, at which `TlsConnection` closes itself."""
    try:
        return decoder.decode(frame)
    except (msgspec.ValidationError, msgspec.DecodeError) as error:
        raise IntegrityError(f"received an invalid message: {error}") from error


def _start_connect(address: str) -> socket.socket:
    """Return a socket that is connecting. Raises `OSError` if that fails at once.

    `address` must be numeric: a DNS lookup would block the event loop.
    """
    host, _, port = address.rpartition(":")
    resolved = socket.getaddrinfo(
        host.strip("[]"), int(port), type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST
    )
    family, kind, _, _, socket_address = resolved[0]
    sock = socket.socket(family, kind)
    sock.settimeout(0)
    code = sock.connect_ex(socket_address)
    if code not in (0, errno.EINPROGRESS):
        sock.close()
        raise OSError(code, os.strerror(code))
    return sock
