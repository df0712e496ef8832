"""Snapshots to test with: real segments, filled as a rank fills them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

from spotfit.checkpoint.bring import Brought, SnapshotParcel, bring_snapshot
from spotfit.checkpoint.manifest import Manifest
from spotfit.checkpoint.segment import Segment
from spotfit.checkpoint.snapshot import Index, Piece, chunks_of, starts
from spotfit.store.api import Store
from tests.unit.checkpoint.kept import part

BIG = 2**20
"""The size of a piece with chunks of its own."""


def bytes_of(n: int, size_bytes: int) -> bytes:
    return random.Random(n).randbytes(size_bytes)


def pieces_of(sizes_bytes: Sequence[int]) -> tuple[Piece, ...]:
    places = starts(sizes_bytes)
    return tuple(
        Piece(("model", f"w{n}"), "uint8", (size,), (0,), (size,), at, size)
        for n, (at, size) in enumerate(zip(places, sizes_bytes, strict=True))
    )


def filled(
    path: Path,
    bodies: Sequence[bytes],
    *,
    rank: int = 0,
    world_size: int = 1,
    step: int = 5,
    save: int = 0,
) -> Path:
    """A full segment with a piece of each."""
    pieces = pieces_of([len(body) for body in bodies])
    index = Index(rank, world_size, step, pieces, chunks=chunks_of(pieces), save=save)
    with Segment.create(path, index.size_bytes) as segment:
        for piece, body in zip(pieces, bodies, strict=True):
            segment.bytes[piece.start : piece.end] = body
        segment.finish(index)
    return path


def brought(
    store: Store,
    folder: Path,
    name: str,
    bodies: Sequence[bytes],
    *,
    base: str = "",
    rank: int = 0,
    world_size: int = 1,
    known: Brought | None = None,
) -> Manifest:
    """A committed snapshot of that rank."""
    folder.mkdir(exist_ok=True)
    path = filled(folder / f"{name}-{rank}", bodies, rank=rank, world_size=world_size)
    ranks = tuple(range(world_size))
    parcel = SnapshotParcel(str(path), part(name, rank=rank, ranks=ranks), base)
    return bring_snapshot(store, parcel, known)
