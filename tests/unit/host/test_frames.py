"""Frames survive any cut of the stream, and a length that lies is refused."""

import random
import socket

import pytest

from spotfit.core.errors import IntegrityError
from spotfit.host import frames
from spotfit.host.frames import FrameReader, framed


def test_frames_come_out_whole_however_the_bytes_arrive(dice: random.Random) -> None:
    bodies = [dice.randbytes(dice.choice([0, 1, 3, 1000])) for _ in range(200)]
    stream = b"".join(map(framed, bodies))
    reader, came = FrameReader(), []
    while stream:
        cut = dice.randint(1, 1500)
        came += reader.feed(stream[:cut])
        stream = stream[cut:]
    assert came == bodies
    assert reader.between_frames


def test_an_oversized_frame_is_refused_by_its_length_alone() -> None:
    reader = FrameReader(limit_bytes=10)
    assert reader.feed(framed(b"x" * 10)) == [b"x" * 10]
    with pytest.raises(IntegrityError, match="11 bytes"):
        reader.feed(framed(b"x" * 11)[:4])


def test_blocking_ends_understand_each_other() -> None:
    here, there = socket.socketpair()
    with here, there:
        frames.write(here, b"one")
        frames.write(here, b"")
        here.shutdown(socket.SHUT_WR)
        assert [frames.read(there), frames.read(there), frames.read(there)] == [b"one", b"", None]


def test_a_stream_cut_within_a_frame_is_an_end() -> None:
    here, there = socket.socketpair()
    with there:
        with here:
            here.sendall(framed(b"whole")[:-1])
        assert frames.read(there) is None
