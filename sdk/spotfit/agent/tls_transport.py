"""`TlsTransport`: the `AgentTransport` over TCP and TLS 1.3.

Every agent listens on one socket, because it may be elected leader, and holds one connection to the
current leader. A connection that was accepted is registered for an agent once its first frame is a
`Join` of this run; until then it is pending and limited in number and time.

One non-blocking connection: length-prefixed frames over TLS over TCP.

`TlsConnection` is driven by the event loop and reports to its owner by `ConnectionCallbacks`:

| state       | event                                   | next        |
|-------------|-----------------------------------------|-------------|
| connecting  | socket writable without error           | handshaking |
| handshaking | TLS handshake complete                  | established |
| any         | error, end of stream, full send buffer  | closed      |
| any         | `close()`                               | closed      |

An accepted socket starts in "handshaking". Frames sent before "established" are queued.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import ssl
from collections.abc import Callable
from functools import partial
from typing import NamedTuple, TypeVar

import msgspec

from spotfit.agent.ports import (
    AgentDisconnected,
    AgentMessageReceived,
    LeaderDisconnected,
    LeaderMessageReceived,
    TransportEvent,
)
from spotfit.core.codec import DECODE_ERRORS, decoder, encode
from spotfit.core.errors import ConfigError, IntegrityError
from spotfit.core.ids import AgentId, RunId
from spotfit.host import log, machine, process
from spotfit.host.event_loop import READ, WRITE, EventLoop
from spotfit.protocol.agent_leader import FromLeader, Join, JoinRejected, ToLeader
from spotfit.protocol.framing import FrameReader, encode_frame
from spotfit.security.run_key import make_tls_contexts

# --- One non-blocking connection ------------------------------------------------------------------


# Twice the largest frame (64 MiB): a slow peer may have one being sent and one queued.
MAX_SEND_BUFFER_BYTES = 128 * 2**20
_CHUNK_BYTES = 256 * 1024
# At most 4 MiB per turn of the event loop, so that one busy peer cannot starve heartbeats.
_MAX_CHUNKS_PER_TURN = 16
# The remote kernel answered: no process holds the other end any more.
_PEER_CLOSED_ERRNOS = (errno.ECONNREFUSED, errno.ECONNRESET, errno.EPIPE, errno.ENOTCONN)


class ConnectionLoss(NamedTuple):
    """Why a connection ended."""

    reason: str
    closed_by_peer: bool
    """Whether the remote host reported the end; False if it may still be running."""


class ConnectionCallbacks(NamedTuple):
    """Callbacks from a connection to its owner."""

    on_frame: Callable[[bytes], None]
    """Raises `IntegrityError` if the frame is invalid: that ends the connection."""
    on_lost: Callable[[ConnectionLoss], None]
    """Called at most once, and not after `close()`."""


class TlsConnection:
    """A client (`server=False`) or server end of a connection. No method blocks.

    The owner assigns `callbacks` after the construction.
    """

    def __init__(
        self, loop: EventLoop, sock: socket.socket, tls: ssl.SSLContext, *, server: bool
    ) -> None:
        self._loop = loop
        self._sock = sock
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = tls.wrap_bio(self._incoming, self._outgoing, server_side=server)
        self._reader = FrameReader()
        self._unsent = bytearray()
        self._pending_frames: list[bytes] = []
        self._is_connected = server
        self._is_handshake_done = False
        self._is_closed = False
        self.callbacks = ConnectionCallbacks(lambda _frame: None, lambda _loss: None)
        self._registered_events = READ if server else WRITE
        loop.register(sock, self._registered_events, self._ready)

    @property
    def is_established(self) -> bool:
        """Whether the TLS handshake is complete: both sides have verified the other's certificate.

        Stays True after the connection was closed.
        """
        return self._is_handshake_done

    def send(self, body: bytes) -> None:
        """Queue one frame and send as much as the socket accepts. Ignored once closed.

        Frames sent before the handshake is complete follow it. An error, a body that is too large
        for a frame, or more than `MAX_SEND_BUFFER_BYTES` unsent, closes the connection: `on_lost`
        is called, possibly before this returns.
        """
        if self._is_closed:
            return
        try:
            frame = encode_frame(body)
        except IntegrityError as error:
            self._fail(error.message, closed_by_peer=False)
            return
        if not self._is_handshake_done:
            self._pending_frames.append(frame)
            return
        self._tls.write(frame)
        self._flush()

    def close(self) -> None:
        """Close without calling `on_lost`. Harmless if repeated.

        Data that the kernel has accepted is still delivered; queued frames are dropped.
        """
        if not self._is_closed:
            self._is_closed = True
            self._loop.unregister(self._sock)
            self._sock.close()

    # --- events ------------------------------------------------------------------------------

    def _ready(self, mask: int) -> None:
        if not self._is_connected and (
            code := self._sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        ):
            self._fail_with_os_error(OSError(code, os.strerror(code)))
            return
        try:
            if not self._is_connected:
                self._is_connected = True
                # Messages are small and urgent: do not wait to fill a segment.
                self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._do_handshake()
            elif mask & READ:
                self._receive()
            self._flush()
        except ssl.SSLError as error:
            # The alert contains the reason for the peer; without it the peer sees a closed socket.
            with contextlib.suppress(OSError):
                self._sock.send(self._outgoing.read())
            self._fail(f"TLS handshake failed: {error.reason or error}", closed_by_peer=True)
        except IntegrityError as error:
            self._fail(error.message, closed_by_peer=False)
        except OSError as error:
            self._fail_with_os_error(error)

    def _receive(self) -> None:
        for _ in range(_MAX_CHUNKS_PER_TURN):
            try:
                received = self._sock.recv(_CHUNK_BYTES)
            except BlockingIOError:
                return
            if not received:
                self._fail("the peer closed the connection", closed_by_peer=True)
                return
            self._incoming.write(received)
            self._decrypt()
            if self._is_closed:
                return

    def _decrypt(self) -> None:
        if not self._is_handshake_done:
            self._do_handshake()
        while self._is_handshake_done and not self._is_closed:
            try:
                body = self._tls.read(_CHUNK_BYTES)
            except ssl.SSLWantReadError:
                return
            except ssl.SSLZeroReturnError:  # close_notify: treated like the end of the stream
                body = b""
            if not body:
                self._fail("the peer closed the connection", closed_by_peer=True)
                return
            for frame in self._reader.feed(body):
                if not self._is_closed:  # a callback may have closed the connection
                    self.callbacks.on_frame(frame)

    def _do_handshake(self) -> None:
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            return
        self._is_handshake_done = True
        # TLS cannot encrypt before the handshake: these were sent while it was in progress.
        for frame in self._pending_frames:
            self._tls.write(frame)
        self._pending_frames.clear()

    # --- sending -----------------------------------------------------------------------------

    def _flush(self) -> None:
        if self._is_closed:
            return
        self._unsent += self._outgoing.read()
        try:
            while self._unsent:
                sent = self._sock.send(memoryview(self._unsent)[:_CHUNK_BYTES])
                del self._unsent[:sent]
        except BlockingIOError:
            pass
        except OSError as error:
            self._fail_with_os_error(error)
            return
        if len(self._unsent) > MAX_SEND_BUFFER_BYTES:
            self._fail(
                f"the peer does not read: over {MAX_SEND_BUFFER_BYTES >> 20} MiB are unsent",
                closed_by_peer=False,
            )
            return
        # Writability is only watched while data wait: an idle socket is always writable.
        events = READ | (WRITE if self._unsent or not self._is_connected else 0)
        if events != self._registered_events:
            self._registered_events = events
            self._loop.register(self._sock, events, self._ready)

    def _fail_with_os_error(self, error: OSError) -> None:
        self._fail(os.strerror(error.errno or 0), closed_by_peer=error.errno in _PEER_CLOSED_ERRNOS)

    def _fail(self, reason: str, *, closed_by_peer: bool) -> None:
        if not self._is_closed:
            # Closed first: the callback may use this connection again, and is called once.
            self.close()
            self.callbacks.on_lost(ConnectionLoss(reason, closed_by_peer))


MessageT = TypeVar("MessageT")
_to_leader_decoder: msgspec.json.Decoder[ToLeader] = decoder(ToLeader)  # type: ignore[arg-type]
_from_leader_decoder: msgspec.json.Decoder[FromLeader] = decoder(FromLeader)  # type: ignore[arg-type]
# Within 5 s the kernel sends two further SYN packets (after 1 s and 3 s) if the first is lost.
_CONNECT_TIMEOUT_S = 5.0
_JOIN_TIMEOUT_S = 5.0
# All agents of a run of 1,000 nodes reconnect within the same second after an election.
_LISTEN_BACKLOG = 1024
_MAX_PENDING_CONNECTIONS = 1024
# The other descriptors are for workers, files and agents that have joined.
_PENDING_SHARE_OF_DESCRIPTORS = 8
_ACCEPT_PAUSE_S = 1.0


class TlsTransport:
    """`AgentTransport` over TCP, for one agent. Handshakes fail for peers without the run's key."""

    def __init__(
        self, loop: EventLoop, *, secret: str, run_id: RunId, host: str, port: int = 0
    ) -> None:
        """Start to listen. Raises `ConfigError` if `host` is not an address of this machine."""
        self._loop = loop
        self._run_id = run_id
        self._tls = make_tls_contexts(secret, run_id)
        self._events: list[TransportEvent] = []
        self._pending_connections: dict[TlsConnection, None] = {}
        self._max_pending = min(
            _MAX_PENDING_CONNECTIONS, process.descriptor_limit() // _PENDING_SHARE_OF_DESCRIPTORS
        )
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
        """Whether `drain_events` would return any event.

        The driver then must not wait: messages of an agent to itself do not wake the event loop.
        """
        return bool(self._events)

    def close(self) -> None:
        """Close the listening socket and all connections, without events.

        Peers observe a closed socket and look for another leader at once.
        """
        # Agents see a closed socket, so that they look for another leader at once (0012).
        self.disconnect()
        for connection in [*self._pending_connections, *self._agent_connections.values()]:
            connection.close()
        self._loop.unregister(self._listener)
        self._listener.close()

    # --- connection to the leader ------------------------------------------------------------

    def connect(self, address: str, join: Join) -> None:
        """Start to connect to the leader at `address` and send `join` first; see `AgentTransport`.

        After 5 s without a TLS session, `LeaderDisconnected` reports a timeout (not closed by the
        peer).
        """
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
        """Close an agent's connection without an `AgentDisconnected` event.

        For this agent itself, connected in memory, a `LeaderDisconnected` event follows.
        """
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
        except OSError as error:
            if error.errno in process.OUT_OF_DESCRIPTORS:
                self._free_descriptor(str(error))
            else:
                log.debug("net.accept_failed", reason=str(error))  # closed by the peer meanwhile
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
        if len(self._pending_connections) > self._max_pending:
            self._reject_oldest(f"more than {self._max_pending} are pending")
        self._loop.call_later(
            _JOIN_TIMEOUT_S,
            partial(self._reject_connection, connection, f"no join within {_JOIN_TIMEOUT_S:.0f} s"),
        )

    def _free_descriptor(self, reason: str) -> None:
        """Make it possible to accept a connection, or pause: the event loop would not wait."""
        log.warning("net.accept_failed", reason=reason, pending=len(self._pending_connections))
        if self._pending_connections:
            self._reject_oldest("no file descriptors are left")
            return
        self._loop.unregister(self._listener)
        self._loop.call_later(_ACCEPT_PAUSE_S, self._resume_accepting)

    def _resume_accepting(self) -> None:
        if self._listener.fileno() >= 0:  # not closed meanwhile
            self._loop.register(self._listener, READ, self._accept)

    def _reject_oldest(self, reason: str) -> None:
        # The oldest one: a port scanner must not displace agents that have just connected.
        self._reject_connection(next(iter(self._pending_connections)), reason)

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

    Raises `ConfigError` if `host` (name or IP address) does not belong to this machine, cannot be
    resolved, or the port is taken.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        sock = socket.create_server(address[:2], family=family, backlog=_LISTEN_BACKLOG)
    except OSError as error:
        raise ConfigError(
            f"The agent on {machine.hostname()} cannot listen on {host!r}, port {port}: {error}",
            do="Set SPOTFIT_HOST to an address of the machine and SPOTFIT_PORT to a free port.",
        ) from error
    sock.settimeout(0)
    return sock


def _decode(decoder: msgspec.json.Decoder[MessageT], frame: bytes) -> MessageT:
    """Decode a frame. Raises `IntegrityError`, at which `TlsConnection` closes itself."""
    try:
        return decoder.decode(frame)
    except DECODE_ERRORS as error:
        raise IntegrityError(f"A process of the run sent an invalid message: {error}") from error


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
