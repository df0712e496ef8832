"""Length-prefixed frames on a byte stream.

A frame is its body's length as a 4-byte big-endian unsigned integer, followed by the body.
"""

from __future__ import annotations

import socket
import struct

from spotfit.core.errors import IntegrityError

# Bounds the memory that a peer can make us allocate; the largest legal bodies are training results
# (32 MiB pickled, 43 MiB as base64 in JSON).
MAX_FRAME_BYTES = 64 * 2**20
_HEADER = struct.Struct(">I")
_MAX_RECV_BYTES = 256 * 1024


def encode_frame(body: bytes, *, limit_bytes: int = MAX_FRAME_BYTES) -> bytes:
    """Return the frame of `body`: its length in 4 bytes, then the body.

    Raises `IntegrityError` if the body exceeds `limit_bytes`. Does not send anything.
    """
    if len(body) > limit_bytes:
        raise _frame_too_large(len(body), limit_bytes)
    return _HEADER.pack(len(body)) + body


class FrameReader:
    """Splits the byte stream of one connection into frames, independent of the received chunks.

    Does no I/O: the caller passes what it has received. `limit_bytes` is the largest body.
    """

    def __init__(self, *, limit_bytes: int = MAX_FRAME_BYTES) -> None:
        self._limit_bytes = limit_bytes
        self._buffer = bytearray()
        self.received_bytes = 0
        """The total number of bytes passed to `feed`."""

    def feed(self, received: bytes) -> list[bytes]:
        """Append received bytes; return the bodies of the frames that are now complete, in order.

        Returns an empty list while the first frame is incomplete. Raises `IntegrityError` as soon
        as the header of a frame exceeds the limit; the connection must then be closed.
        """
        self._buffer += received
        self.received_bytes += len(received)
        frames: list[bytes] = []
        start = 0
        while (end := self._end_of_frame(start)) is not None and end <= len(self._buffer):
            frames.append(bytes(self._buffer[start + _HEADER.size : end]))
            start = end
        # Once per call: deleting after every frame would copy the rest of the buffer each time.
        del self._buffer[:start]
        return frames

    @property
    def missing_bytes(self) -> int:
        """The number of bytes until the current header or, once that is read, frame is complete.

        For a caller that must not receive beyond the frame. Raises `IntegrityError` like `feed`.
        """
        end = self._end_of_frame(0)
        return (_HEADER.size if end is None else end) - len(self._buffer)

    def _end_of_frame(self, start: int) -> int | None:
        if len(self._buffer) < start + _HEADER.size:
            return None
        # Checked as soon as the header is there, before any of the body is buffered.
        (size,) = _HEADER.unpack_from(self._buffer, start)
        if size > self._limit_bytes:
            raise _frame_too_large(size, self._limit_bytes)
        return start + _HEADER.size + int(size)


def write_frame(sock: socket.socket, body: bytes) -> None:
    """Send one frame on a blocking socket; blocks while the send buffer is full.

    Raises `OSError` if the connection is closed or its timeout expires (part of the frame may be
    sent), and `IntegrityError` if the body exceeds `MAX_FRAME_BYTES`.
    """
    sock.sendall(encode_frame(body))


def read_frame(sock: socket.socket) -> bytes | None:
    """Wait for one frame on a blocking socket and return its body, without reading beyond it.

    Returns None if the peer closes the connection before the frame is complete. Raises `OSError` if
    the connection breaks or the socket's timeout expires, and `IntegrityError` for a frame above
    `MAX_FRAME_BYTES`.
    """
    # Never reads beyond the frame: the next call starts with an empty buffer.
    reader = FrameReader()
    missing = _HEADER.size
    while True:
        received = sock.recv(min(missing, _MAX_RECV_BYTES))
        if not received:
            return None
        if frames := reader.feed(received):
            return frames[0]
        missing = reader.missing_bytes


def _frame_too_large(size: int, limit: int) -> IntegrityError:
    return IntegrityError(
        f"A message between processes of the run has {size} bytes, which exceeds the limit of "
        f"{limit} bytes.",
        do="Report smaller values, and save large ones in a checkpoint.",
    )
