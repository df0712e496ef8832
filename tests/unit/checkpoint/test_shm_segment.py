"""A segment holds a complete snapshot or none, whenever its writer dies."""

from __future__ import annotations

import mmap
import os
import sys
from pathlib import Path

import pytest
from msgspec.structs import replace

from spotfit.checkpoint import shm_segment
from spotfit.checkpoint.format import SnapshotIndex
from spotfit.checkpoint.shm_segment import ShmSegment
from spotfit.core.errors import IntegrityError
from spotfit.host.memory import MemoryUsage
from tests.unit.checkpoint.snapshots import random_bytes, write_segment


def test_another_process_reads_the_published_snapshot(tmp_path: Path) -> None:
    bodies = [random_bytes(1, 100), random_bytes(2, 9000)]
    with ShmSegment.open(write_segment(tmp_path / "s", bodies, step=7)) as segment:
        index = segment.index()
        assert index.step == 7
        found = [bytes(segment.payload[piece.start : piece.end]) for piece in index.pieces]
    assert found == bodies


def test_a_dead_writer_leaves_no_snapshot(tmp_path: Path) -> None:
    path = write_segment(tmp_path / "s", [b"old"])
    index = ShmSegment.open(path).index()
    writer = ShmSegment.create(tmp_path / "t", 10)
    with pytest.raises(IntegrityError, match="not completed by its writer"):
        ShmSegment.open(tmp_path / "t")
    writer.publish(index)
    writer.invalidate()
    writer.payload[:3] = b"new"
    with pytest.raises(IntegrityError, match="not completed by its writer"):
        ShmSegment.open(tmp_path / "t")


def test_a_corrupt_index_is_detected(tmp_path: Path) -> None:
    path = write_segment(tmp_path / "s", [b"body"])
    torn = bytearray(path.read_bytes())
    at = torn.index(b'"step"')
    torn[at + 7] ^= 1
    path.write_bytes(torn)
    with pytest.raises(IntegrityError, match="not completed by its writer"):
        ShmSegment.open(path).index()


def test_a_file_that_is_not_a_segment_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "s").write_bytes(b"x" * 5000)
    for path in (tmp_path / "s", tmp_path / "absent"):
        with pytest.raises(IntegrityError):
            ShmSegment.open(path)


def test_an_index_that_does_not_fit_is_rejected(tmp_path: Path) -> None:
    with ShmSegment.create(tmp_path / "s", 10) as segment:
        index = SnapshotIndex(rank=0, world_size=1, step=1, pieces=())
        segment.publish(index)
        with pytest.raises(OSError, match="has room for"):
            segment.publish(replace(index, encoded_rank_state=bytes(segment.index_bytes)))


def test_without_memory_no_file_is_left(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="Errno"):
        ShmSegment.create(tmp_path / "s", 2**50)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("used", "is_refused"), [(85, False), (94, True)])
def test_a_segment_in_shared_memory_leaves_memory_free(
    used: int, is_refused: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The snapshot is then written to the disk, and the container is not killed."""
    mib = 2**20
    usage = MemoryUsage(used * mib, 100 * mib)
    monkeypatch.setattr(shm_segment, "read_memory_usage", lambda: usage)
    ShmSegment.create(tmp_path / "on-disk", 4 * mib).close()
    monkeypatch.setattr(shm_segment, "SHARED_MEMORY_DIR", tmp_path)
    if is_refused:
        with pytest.raises(OSError, match=r"5.0 MiB are needed, and 1.0 MiB of the memory may be"):
            ShmSegment.create(tmp_path / "s", 4 * mib)
        assert not (tmp_path / "s").exists()
    else:
        ShmSegment.create(tmp_path / "s", 4 * mib).close()


def test_a_segment_is_allocated_without_posix_fallocate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.delattr(os, "posix_fallocate")
    monkeypatch.delattr(mmap, "MAP_POPULATE")
    monkeypatch.setattr(shm_segment, "_ZEROS_BYTES", 1000)
    with ShmSegment.create(tmp_path / "s", 5000, 100) as segment:
        size_bytes = (tmp_path / "s").stat().st_size
        assert len(segment.buffer) == size_bytes
        # Allocated, not sparse: a full disk is noticed here and not by SIGBUS.
        assert (tmp_path / "s").stat().st_blocks * 512 >= size_bytes
