"""The worker's end of its socket: frames out from any thread, frames in."""

from __future__ import annotations

import os
import select
import socket
import threading
from typing import NoReturn

import msgspec

from spotfit.core.codec import decoder, encode
from spotfit.host import process
from spotfit.host.frames import FrameReader, framed
from spotfit.model.wire import FromWorker, ToWorker

_frames: msgspec.json.Decoder[ToWorker] = decoder(ToWorker)  # type: ignore[arg-type]
_CHUNK_BYTES = 256 * 1024
_text = msgspec.json.Encoder().encode


class Talk:
    """Speaks with this node's agent. Without an agent there is no worker: the process ends."""

    def __init__(self, wire: socket.socket) -> None:
        self._wire = wire
        wire.settimeout(None)
        self._writing = threading.Lock()
        self._reading = threading.Lock()
        self._reader = FrameReader()
        self._waiting: list[ToWorker] = []
        self._readable = select.poll()
        self._readable.register(wire, select.POLLIN)

    def send(self, frame: FromWorker) -> None:
        """Tell the agent; from any thread. Blocks only while the agent is behind by a buffer."""
        self._send(encode(frame))

    def send_report(self, n: int, metrics: bytes, dir_name: str | None = None) -> None:
        """As `send(Report(...))`, for metrics that are JSON already: the path that must be fast."""
        name = b"" if dir_name is None else b',"dir_name":' + _text(dir_name)
        self._send(b'{"type":"report","n":%d,"metrics":%b%b}' % (n, metrics, name))

    def pending(self) -> list[ToWorker]:
        """What came and was not read yet; at once. Empty while another thread is in `next`."""
        if not self._reading.acquire(blocking=False):
            return []
        try:
            while self._readable.poll(0):
                self._receive()
            frames, self._waiting = self._waiting, []
            return frames
        finally:
            self._reading.release()

    def next(self, timeout_s: float | None) -> ToWorker | None:
        """Wait for a frame; None when none came within `timeout_s`."""
        with self._reading:
            while not self._waiting:
                if not self._readable.poll(None if timeout_s is None else timeout_s * 1000):
                    return None
                self._receive()
            return self._waiting.pop(0)

    def _send(self, body: bytes) -> None:
        packet = framed(body)
        with self._writing:
            try:
                self._wire.sendall(packet)
            except OSError:
                _end()

    def _receive(self) -> None:
        try:
            received = self._wire.recv(_CHUNK_BYTES)
        except OSError:
            received = b""
        if not received:
            _end()
        self._waiting += [_frames.decode(body) for body in self._reader.feed(received)]


def _end() -> NoReturn:
    """The agent is gone: end, with whatever this worker has started."""
    if os.getpgrp() == os.getpid():
        process.kill_group(os.getpid())
    os._exit(1)
