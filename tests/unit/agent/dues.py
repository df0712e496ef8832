"""Copies to be made of segments, for tests."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from spotfit.agent.copies import Copy, Due
from spotfit.checkpoint.segment import Segment


def due(segment: Path, to: str, *, report: int = 0, fellows: Sequence[int] = ()) -> Due:
    """Of a segment that is full, called after its round and its rank."""
    round_, rank, *_ = map(int, segment.stem.split("-"))
    with Segment.open(segment) as opened:
        seal = opened.seal
    return Due(Copy(round_, report, rank), segment, seal, tuple(fellows) or (rank,), to)
