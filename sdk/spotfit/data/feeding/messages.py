"""Messages between a worker and a feeder, on a blocking socket, with or without TLS.

| sender | frame   | body                                                                         |
|--------|---------|------------------------------------------------------------------------------|
| worker | request | JSON of a `FeederRequest`: a number that the reply repeats, and the task     |
| feeder | reply   | 8 bytes number, 8 bytes kind, then an Arrow IPC stream, or a traceback       |

A frame is its body's length in 4 bytes, then the body, as in `protocol.framing`. A body is received
into one buffer of its size: Arrow maps it without a further copy.
"""

from __future__ import annotations

import socket
import struct
from typing import NamedTuple

import msgspec
import pyarrow as pa

from spotfit.core.codec import DECODE_ERRORS, decoder, encode
from spotfit.core.errors import IntegrityError
from spotfit.data.loading.slice_tasks import SliceTask
from spotfit.protocol import framing

MAX_REPLY_BYTES = 2**31
"""Bounds the memory that a feeder can make a worker allocate for one slice."""
_MAX_REQUEST_BYTES = 64 * 1024
_LENGTH = struct.Struct(">I")
# 16 bytes, so that the columns in the buffer are aligned.
_REPLY_HEADER = struct.Struct(">QQ")
_SLICE, _FAILURE = 0, 1


class FeederRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request of a worker to a feeder."""

    number: int
    task: SliceTask


class SliceReply(NamedTuple):
    """The rows of a slice."""

    number: int
    table: pa.Table
    size_bytes: int


class FailureReply(NamedTuple):
    """The task raised an exception in the feeder."""

    number: int
    traceback_text: str


_request_decoder = decoder(FeederRequest)


def send_bytes(sock: socket.socket, body: bytes) -> None:
    """Send one frame of up to `MAX_REPLY_BYTES`. Raises `OSError`, and `IntegrityError` above."""
    if len(body) > MAX_REPLY_BYTES:
        raise _too_large(len(body), MAX_REPLY_BYTES)
    sock.sendall(_LENGTH.pack(len(body)))
    sock.sendall(body)


def receive_bytes(sock: socket.socket) -> bytes | None:
    """Wait for one frame of `send_bytes`; None if the peer has closed the connection."""
    body = _receive(sock, MAX_REPLY_BYTES)
    return None if body is None else body.to_pybytes()


def send_request(sock: socket.socket, request: FeederRequest) -> None:
    """Send a request; blocks while the buffer of the socket is full. Raises `OSError`."""
    framing.write_frame(sock, encode(request))


def receive_request(sock: socket.socket) -> FeederRequest | None:
    """Wait for a request; None if the worker has closed the connection.

    Raises `OSError`, and `IntegrityError` for an invalid frame.
    """
    body = _receive(sock, _MAX_REQUEST_BYTES)
    if body is None:
        return None
    try:
        return _request_decoder.decode(memoryview(body))
    except DECODE_ERRORS as error:
        raise IntegrityError(f"A worker sent an invalid request to a feeder: {error}") from error


def send_slice(sock: socket.socket, number: int, table: pa.Table) -> None:
    """Send the rows of a slice. Raises `OSError`, and `IntegrityError` above `MAX_REPLY_BYTES`."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    body = sink.getvalue()
    size_bytes = _REPLY_HEADER.size + body.size
    if size_bytes > MAX_REPLY_BYTES:
        raise _too_large(size_bytes, MAX_REPLY_BYTES)
    sock.sendall(_LENGTH.pack(size_bytes) + _REPLY_HEADER.pack(number, _SLICE))
    sock.sendall(memoryview(body))


def send_failure(sock: socket.socket, number: int, traceback_text: str) -> None:
    """Send the traceback of a task that has raised an exception. Raises `OSError`."""
    body = _REPLY_HEADER.pack(number, _FAILURE) + traceback_text.encode(errors="replace")
    framing.write_frame(sock, body)


def receive_reply(sock: socket.socket) -> SliceReply | FailureReply | None:
    """Wait for a reply; None if the feeder has closed the connection.

    Raises `OSError`, and `IntegrityError` for an invalid frame.
    """
    body = _receive(sock, MAX_REPLY_BYTES)
    if body is None:
        return None
    try:
        number, kind = _REPLY_HEADER.unpack_from(body)
        content = body[_REPLY_HEADER.size :]
        if kind == _FAILURE:
            return FailureReply(number, content.to_pybytes().decode())
        with pa.ipc.open_stream(content) as reader:
            return SliceReply(number, reader.read_all(), content.size)
    except (struct.error, UnicodeDecodeError, pa.ArrowException) as error:
        raise IntegrityError(f"A feeder sent an invalid reply: {error}") from error


def _receive(sock: socket.socket, limit_bytes: int) -> pa.Buffer | None:
    header = _receive_exactly(sock, _LENGTH.size)
    if header is None:
        return None
    (size_bytes,) = _LENGTH.unpack(header)
    if size_bytes > limit_bytes:
        raise _too_large(size_bytes, limit_bytes)
    return _receive_exactly(sock, size_bytes)


def _receive_exactly(sock: socket.socket, size_bytes: int) -> pa.Buffer | None:
    """Return that many bytes; None if the peer closes the connection before."""
    body = pa.allocate_buffer(size_bytes)
    view = memoryview(body)
    while view:
        count = sock.recv_into(view)
        if count == 0:
            return None
        view = view[count:]
    return body


def _too_large(size_bytes: int, limit_bytes: int) -> IntegrityError:
    return IntegrityError(
        f"A message between a worker and a feeder has {size_bytes} bytes; the limit is "
        f"{limit_bytes}.",
        do="Use smaller batches, or let the transforms return less.",
    )
