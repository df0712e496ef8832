"""Identifiers of training-state snapshots and of the shard that each rank saved."""

from __future__ import annotations

import msgspec


class SnapshotId(msgspec.Struct, frozen=True, kw_only=True, order=True):
    """The training state of the whole group after `step` of `round`.

    Ordered by round, then step: a later round resumed from one snapshot and thereby discarded every
    other snapshot of earlier rounds, even one with a higher step.
    """

    round: int
    step: int


class SnapshotShard(msgspec.Struct, frozen=True, kw_only=True, order=True):
    """The part of a snapshot that one rank saved."""

    snapshot_id: SnapshotId
    rank: int
    world_size: int
    """World size of the round that saved it, which is the number of shards of a complete
    snapshot."""
