"""One non-blocking connection: length-prefixed frames over TLS over TCP.

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
from typing import NamedTuple

from spotfit.core.errors import IntegrityError
from spotfit.host.event_loop import READ, WRITE, EventLoop
from spotfit.protocol.framing import FrameReader, encode_frame

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
    """A client (`server=False`) or server end of a connection. No method blocks."""

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
        """Whether both sides have verified the certificate of the other."""
        return self._is_handshake_done

    def send(self, body: bytes) -> None:
        """Queue one frame and send as much as the socket accepts. Ignored after `close()`."""
        if self._is_closed:
            return
        if not self._is_handshake_done:
            self._pending_frames.append(encode_frame(body))
            return
        self._tls.write(encode_frame(body))
        self._flush()

    def close(self) -> None:
        """Close without a callback. Data that the kernel has accepted is still delivered."""
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
