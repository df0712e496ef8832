"""Framing: frames are independent of chunking, and oversized frames are rejected."""

import random
import socket

import pytest

from spotfit.core.errors import IntegrityError
from spotfit.protocol import framing
from spotfit.protocol.framing import FrameReader, encode_frame


def test_a_randomly_chunked_stream_yields_all_frames(rng: random.Random) -> None:
    bodies = [rng.randbytes(rng.choice([0, 1, 3, 1000])) for _ in range(200)]
    stream = b"".join(map(encode_frame, bodies))
    reader, received = FrameReader(), []
    while stream:
        chunk_bytes = rng.randint(1, 1500)
        received += reader.feed(stream[:chunk_bytes])
        stream = stream[chunk_bytes:]
    assert received == bodies
    assert reader.missing_bytes == len(encode_frame(b""))


def test_an_oversized_frame_is_rejected_by_its_header() -> None:
    reader = FrameReader(limit_bytes=10)
    assert reader.feed(encode_frame(b"x" * 10)) == [b"x" * 10]
    with pytest.raises(IntegrityError, match="11 bytes"):
        reader.feed(encode_frame(b"x" * 11)[:4])


def test_read_frame_returns_what_write_frame_sent() -> None:
    writer, reader = socket.socketpair()
    with writer, reader:
        framing.write_frame(writer, b"one")
        framing.write_frame(writer, b"")
        writer.shutdown(socket.SHUT_WR)
        assert [framing.read_frame(reader) for _ in range(3)] == [b"one", b"", None]


def test_a_stream_that_ends_within_a_frame_yields_none() -> None:
    writer, reader = socket.socketpair()
    with reader:
        with writer:
            writer.sendall(encode_frame(b"complete")[:-1])
        assert framing.read_frame(reader) is None
