"""Helpers that write and upload snapshots with the production code."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

from spotfit.checkpoint.format import SnapshotIndex, TensorPiece, aligned_offsets, split_into_chunks
from spotfit.checkpoint.manifest import Manifest
from spotfit.checkpoint.shm_segment import ShmSegment
from spotfit.checkpoint.writer import SnapshotUploadJob, UploadedManifests, upload_snapshot
from spotfit.store.api import Store
from tests.unit.checkpoint.saved_checkpoints import make_manifest

LARGE_PIECE_BYTES = 2**20
"""Minimum size of a piece with chunks of its own."""


def random_bytes(n: int, size_bytes: int) -> bytes:
    return random.Random(n).randbytes(size_bytes)


def make_pieces(sizes_bytes: Sequence[int]) -> tuple[TensorPiece, ...]:
    places = aligned_offsets(sizes_bytes)
    return tuple(
        TensorPiece(
            key=("model", f"w{n}"),
            dtype="uint8",
            shape=(size,),
            offsets=(0,),
            sizes=(size,),
            start=at,
            size_bytes=size,
        )
        for n, (at, size) in enumerate(zip(places, sizes_bytes, strict=True))
    )


def write_segment(
    path: Path,
    bodies: Sequence[bytes],
    *,
    rank: int = 0,
    world_size: int = 1,
    step: int = 5,
    save: int = 0,
) -> Path:
    """Write a published segment with one piece per body."""
    pieces = make_pieces([len(body) for body in bodies])
    index = SnapshotIndex(
        rank=rank,
        world_size=world_size,
        step=step,
        pieces=pieces,
        chunks=split_into_chunks(pieces),
        save_number=save,
    )
    with ShmSegment.create(path, index.size_bytes) as segment:
        for piece, body in zip(pieces, bodies, strict=True):
            segment.payload[piece.start : piece.end] = body
        segment.publish(index)
    return path


def upload_test_snapshot(
    store: Store,
    folder: Path,
    name: str,
    bodies: Sequence[bytes],
    *,
    base: str = "",
    rank: int = 0,
    world_size: int = 1,
    known: UploadedManifests | None = None,
) -> Manifest:
    """Upload a snapshot of that rank."""
    folder.mkdir(exist_ok=True)
    path = write_segment(folder / f"{name}-{rank}", bodies, rank=rank, world_size=world_size)
    ranks = tuple(range(world_size))
    job = SnapshotUploadJob(str(path), make_manifest(name, rank=rank, ranks=ranks), base)
    return upload_snapshot(store, job, known)
