"""Messages to a peer store: the server in which an agent shares in-memory snapshots with peers.

The transport is framed TLS. The server sends `ADMITTED` once it serves the connection. The client
then sends one request, its first frame; the frames after it are raw bytes.
"""

from __future__ import annotations

import msgspec

from spotfit.model.topology import SnapshotShard

# Replication shares the network with the gradient all-reduce of training, so it is throttled.
REPLICATION_BYTES_PER_S = 256 * 2**20
"""The rate at which one node sends replicas to its peer, for all its ranks together."""

ADMITTED = b"admitted"
"""The first frame of the server. The client waits for it as long as others are served."""

# Not empty: an empty frame requests the data.
ALREADY_STORED = b"kept"


class StoreReplica(msgspec.Struct, frozen=True, kw_only=True, tag="store_replica"):
    """Store a replica of the segment that `rank` saved with a report.

    The peer answers `ALREADY_STORED`, or an empty frame to request the data. Then the bytes follow
    in frames, terminated by an empty frame, which the peer acknowledges with an empty frame.
    """

    round: int
    report_index: int
    rank: int
    local_ranks: tuple[int, ...]
    """All ranks of the sender's node. The replica of a save is complete once it has all of them."""
    size_bytes: int


class ReadShardIndex(msgspec.Struct, frozen=True, kw_only=True, tag="read_shard_index"):
    """Read the index of a shard. The answer is an empty frame if the shard is missing."""

    shard: SnapshotShard


class ReadShardBytes(msgspec.Struct, frozen=True, kw_only=True, tag="read_shard_bytes"):
    """Read a byte range of a shard. The answer is an empty frame if the shard is missing."""

    shard: SnapshotShard
    offset: int
    size_bytes: int


ToPeerStore = StoreReplica | ReadShardIndex | ReadShardBytes
