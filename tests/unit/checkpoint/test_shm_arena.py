"""An arena's snapshot is valid only after it is published."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from spotfit.checkpoint.format import SnapshotIndex, split_into_chunks
from spotfit.checkpoint.shm_segment import ShmSegment
from spotfit.core.errors import IntegrityError
from tests.unit.checkpoint.bytes_checkpointer import BytesArena, pieces_of


def arena_in(*folders: Path) -> BytesArena:
    count = itertools.count(1)
    return BytesArena(folders, lambda folder: folder / f"0-{next(count)}")


def save(arena: BytesArena, *values: bytes) -> None:
    pieces = pieces_of(values)
    arena.reserve(pieces)
    arena.copy(values)
    chunks = split_into_chunks(pieces)
    arena.publish(SnapshotIndex(rank=0, world_size=1, step=1, pieces=pieces, chunks=chunks))


def read(path: Path) -> list[bytes]:
    """Return the values as another process reads them."""
    with ShmSegment.open(path) as segment:
        return [bytes(segment.payload[one.start : one.end]) for one in segment.index().pieces]


def test_a_published_snapshot_has_the_copied_bytes(tmp_path: Path) -> None:
    arena = arena_in(tmp_path)
    save(arena, b"first", b"", b"third")
    assert read(arena.path) == [b"first", b"", b"third"]


def test_a_copy_invalidates_the_earlier_snapshot(tmp_path: Path) -> None:
    arena = arena_in(tmp_path)
    save(arena, b"first")
    arena.copy([b"other"])
    with pytest.raises(IntegrityError, match="not completed by its writer"):
        read(arena.path)


def test_equal_pieces_keep_the_segment_and_others_replace_it(tmp_path: Path) -> None:
    arena = arena_in(tmp_path)
    save(arena, b"first")
    first = arena.path
    save(arena, b"other")
    assert (arena.path, read(first)) == (first, [b"other"])
    save(arena, b"longer")
    assert (arena.path != first, first.exists()) == (True, False)


def test_a_closed_arena_has_no_file(tmp_path: Path) -> None:
    arena = arena_in(tmp_path)
    save(arena, b"first")
    arena.close()
    arena.close()
    assert not list(tmp_path.iterdir())


def test_without_shared_memory_the_disk_is_used(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    arena = arena_in(tmp_path / "file", tmp_path / "disk")
    save(arena, b"first")
    assert arena.path.parent.name == "disk"
