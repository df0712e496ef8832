"""One connection: frames over TLS over TCP, without ever waiting."""

from __future__ import annotations

import errno
import os
import socket
import ssl
from collections.abc import Callable

from spotfit.agent.loop import READ, WRITE, Loop
from spotfit.core.errors import IntegrityError
from spotfit.host.frames import FrameReader, framed

QUEUE_LIMIT_BYTES = 128 * 2**20
_CHUNK_BYTES = 256 * 1024
_CHUNKS_A_TURN = 16
_NOBODY_THERE = (errno.ECONNREFUSED, errno.ECONNRESET, errno.EPIPE, errno.ENOTCONN)


class Listener:
    """What a connection tells its owner. Overridden where it is used."""

    def __init__(self, heard: Callable[[bytes], None], lost: Callable[[str, bool], None]) -> None:
        self.heard = heard
        """A frame came."""
        self.lost = lost
        """The connection is gone: why, and whether the other side's machine said so."""


class Wire:
    """A connection being made, made, or gone; what is sent before it is made waits."""

    def __init__(
        self, loop: Loop, sock: socket.socket, tls: ssl.SSLContext, *, server: bool
    ) -> None:
        self._loop = loop
        self._sock = sock
        self._in, self._out = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = tls.wrap_bio(self._in, self._out, server_side=server)
        self._reader = FrameReader()
        self._unsent = bytearray()
        self._unsealed: list[bytes] = []
        self._connected = server
        self._shaken = False
        self._closed = False
        self.listener = Listener(lambda _: None, lambda _why, _gone: None)
        self._watching = READ if server else WRITE
        loop.watch(sock, self._watching, self._ready)

    @property
    def made(self) -> bool:
        """Whether both sides have shown their certificates."""
        return self._shaken

    def send(self, body: bytes) -> None:
        """Queue one frame and send what can be sent."""
        if self._closed:
            return
        if not self._shaken:
            self._unsealed.append(framed(body))
            return
        self._tls.write(framed(body))
        self._flush()

    def close(self) -> None:
        """Drop it; the listener hears no more. What the kernel took is still delivered."""
        if not self._closed:
            self._closed = True
            self._loop.forget(self._sock)
            self._sock.close()

    # --- events ------------------------------------------------------------------------------

    def _ready(self, mask: int) -> None:
        try:
            if not self._connected:
                self._see_if_connected()
            elif mask & READ:
                self._receive()
            self._flush()
        except ssl.SSLError as refused:
            self._flush_farewell()
            self._lose(f"TLS: {refused.reason or refused}", vanished=True)
        except IntegrityError as garbage:
            self._lose(garbage.what, vanished=False)
        except OSError as broken:
            self._lose(os.strerror(broken.errno or 0), vanished=broken.errno in _NOBODY_THERE)

    def _see_if_connected(self) -> None:
        code = self._sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            raise OSError(code, os.strerror(code))
        self._connected = True
        self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._shake()

    def _receive(self) -> None:
        for _ in range(_CHUNKS_A_TURN):
            try:
                received = self._sock.recv(_CHUNK_BYTES)
            except BlockingIOError:
                return
            if not received:
                self._lose("the other side closed the connection", vanished=True)
                return
            self._in.write(received)
            self._unseal()
            if self._closed:
                return

    def _unseal(self) -> None:
        if not self._shaken:
            self._shake()
        while self._shaken and not self._closed:
            try:
                body = self._tls.read(_CHUNK_BYTES)
            except ssl.SSLWantReadError:
                return
            except ssl.SSLZeroReturnError:
                body = b""
            if not body:
                self._lose("the other side closed the connection", vanished=True)
                return
            for frame in self._reader.feed(body):
                if not self._closed:
                    self.listener.heard(frame)

    def _shake(self) -> None:
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            return
        self._shaken = True
        for packet in self._unsealed:
            self._tls.write(packet)
        self._unsealed.clear()

    # --- sending -----------------------------------------------------------------------------

    def _flush(self) -> None:
        if self._closed:
            return
        self._unsent += self._out.read()
        try:
            while self._unsent:
                sent = self._sock.send(memoryview(self._unsent)[:_CHUNK_BYTES])
                del self._unsent[:sent]
        except BlockingIOError:
            pass
        except OSError as broken:
            self._lose(os.strerror(broken.errno or 0), vanished=broken.errno in _NOBODY_THERE)
            return
        if len(self._unsent) > QUEUE_LIMIT_BYTES:
            self._lose("it did not take what was sent", vanished=False)
        else:
            self._watch()

    def _flush_farewell(self) -> None:
        """A refusal is told, if it goes at once."""
        try:
            self._sock.send(self._out.read())
        except OSError:
            return

    def _watch(self) -> None:
        wanted = READ | (WRITE if self._unsent or not self._connected else 0)
        if wanted != self._watching:
            self._watching = wanted
            self._loop.watch(self._sock, wanted, self._ready)

    def _lose(self, why: str, *, vanished: bool) -> None:
        if not self._closed:
            self.close()
            self.listener.lost(why, vanished)
