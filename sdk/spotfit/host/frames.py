"""Frames: a length in four bytes, the highest first, then so many bytes."""

from __future__ import annotations

import socket
import struct

from spotfit.core.errors import IntegrityError

LIMIT_BYTES = 64 * 2**20
_HEAD = struct.Struct(">I")
_CHUNK_BYTES = 256 * 1024


def framed(body: bytes) -> bytes:
    """The body with its length in front. Raises `IntegrityError` above the limit."""
    if len(body) > LIMIT_BYTES:
        raise _too_big(len(body), LIMIT_BYTES)
    return _HEAD.pack(len(body)) + body


class FrameReader:
    """Cuts a stream of bytes into frames, however the bytes arrive."""

    def __init__(self, *, limit_bytes: int = LIMIT_BYTES) -> None:
        self._limit_bytes = limit_bytes
        self._rest = bytearray()
        self.taken_bytes = 0
        """How many bytes were fed so far."""

    def feed(self, received: bytes) -> list[bytes]:
        """The frames that are complete now.

        Raises `IntegrityError` as soon as a frame says that it is bigger than the limit.
        """
        self._rest += received
        self.taken_bytes += len(received)
        frames: list[bytes] = []
        start = 0
        while (end := self._end_of_frame(start)) is not None and end <= len(self._rest):
            frames.append(bytes(self._rest[start + _HEAD.size : end]))
            start = end
        del self._rest[:start]
        return frames

    @property
    def between_frames(self) -> bool:
        """Whether all that came was whole: a stream may end here."""
        return not self._rest

    @property
    def missing_bytes(self) -> int:
        """How many bytes the frame under way, or its length, still lacks."""
        end = self._end_of_frame(0)
        return (_HEAD.size if end is None else end) - len(self._rest)

    def _end_of_frame(self, start: int) -> int | None:
        if len(self._rest) < start + _HEAD.size:
            return None
        (size,) = _HEAD.unpack_from(self._rest, start)
        if size > self._limit_bytes:
            raise _too_big(size, self._limit_bytes)
        return start + _HEAD.size + int(size)


def write(wire: socket.socket, body: bytes) -> None:
    """Send one frame; blocks until the other side has room."""
    wire.sendall(framed(body))


def read(wire: socket.socket) -> bytes | None:
    """Wait for one frame; None when the stream ended before it."""
    reader = FrameReader()
    wanted = _HEAD.size
    while True:
        received = wire.recv(min(wanted, _CHUNK_BYTES))
        if not received:
            return None
        if frames := reader.feed(received):
            return frames[0]
        wanted = reader.missing_bytes


def _too_big(size: int, limit: int) -> IntegrityError:
    return IntegrityError(
        f"A frame of {size} bytes is over the limit of {limit}.",
        do="Report smaller values; big things belong into a checkpoint.",
    )
