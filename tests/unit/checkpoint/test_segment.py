"""A segment holds a whole snapshot or none, whoever opens it, and whenever its writer died."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from spotfit.checkpoint.segment import Segment
from spotfit.checkpoint.snapshot import Index
from spotfit.core.errors import IntegrityError
from tests.unit.checkpoint.snapshots import bytes_of, filled


def test_another_process_finds_what_was_written(tmp_path: Path) -> None:
    bodies = [bytes_of(1, 100), bytes_of(2, 9000)]
    with Segment.open(filled(tmp_path / "s", bodies, step=7)) as segment:
        index = segment.index()
        assert index.step == 7
        found = [bytes(segment.bytes[piece.start : piece.end]) for piece in index.pieces]
    assert found == bodies


def test_a_writer_that_died_leaves_none(tmp_path: Path) -> None:
    path = filled(tmp_path / "s", [b"old"])
    index = Segment.open(path).index()
    writer = Segment.create(tmp_path / "t", 10)
    with pytest.raises(IntegrityError, match="never finished"):
        Segment.open(tmp_path / "t")
    writer.finish(index)
    writer.begin()
    writer.bytes[:3] = b"new"
    with pytest.raises(IntegrityError, match="never finished"):
        Segment.open(tmp_path / "t")


def test_a_damaged_index_is_found(tmp_path: Path) -> None:
    path = filled(tmp_path / "s", [b"body"])
    torn = bytearray(path.read_bytes())
    at = torn.index(b'"step"')
    torn[at + 7] ^= 1
    path.write_bytes(torn)
    with pytest.raises(IntegrityError, match="never finished"):
        Segment.open(path).index()


def test_what_is_no_segment_is_told(tmp_path: Path) -> None:
    (tmp_path / "s").write_bytes(b"x" * 5000)
    for path in (tmp_path / "s", tmp_path / "absent"):
        with pytest.raises(IntegrityError):
            Segment.open(path)


def test_an_index_that_grew_too_big_is_refused(tmp_path: Path) -> None:
    with Segment.create(tmp_path / "s", 10) as segment:
        index = Index(0, 1, 1, ())
        segment.finish(index)
        with pytest.raises(OSError, match="more than"):
            segment.finish(replace(index, own=bytes(segment.index_bytes)))


def test_where_there_is_no_room_nothing_is_left(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="Errno"):
        Segment.create(tmp_path / "s", 2**50)
    assert not list(tmp_path.iterdir())
