"""Pending replicas of snapshot segments, for tests."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from spotfit.checkpoint.replication import PendingReplica, ReplicaId
from spotfit.checkpoint.shm_segment import ShmSegment


def make_pending_replica(
    segment: Path, target: str, *, report: int = 0, ranks: Sequence[int] = ()
) -> PendingReplica:
    """Return a pending replica of a complete segment; its name starts with round and rank."""
    round_, rank, *_ = map(int, segment.stem.split("-"))
    with ShmSegment.open(segment) as opened:
        seal = opened.version_stamp
    return PendingReplica(
        ReplicaId(round_, report, rank), segment, seal, tuple(ranks) or (rank,), target
    )
