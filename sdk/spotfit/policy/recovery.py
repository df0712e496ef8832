"""Recovery: the snapshot that the next round resumes from, and the source of each shard.

All ranks resume from the newest snapshot of which every shard is available, in the memory of any
node or in the bucket. A rank reads each shard from the nearest holder: its own node, a peer, the
bucket. If a shard turns out to be corrupt, the caller removes it from the input and plans again.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Literal, NamedTuple

from spotfit.core.ids import AgentId
from spotfit.model.events import CheckpointCommitted
from spotfit.model.leader_state import MemberStatus
from spotfit.model.topology import NodeAssignment, Round, SnapshotId, SnapshotShard
from spotfit.model.view import View

ShardLocation = Literal["local memory", "peer", "bucket"]

ShardHolder = AgentId | None
"""The agent that holds a shard in memory; None: the shard is in the bucket."""


class ShardSource(NamedTuple):
    """The source from which a rank reads one shard."""

    shard: SnapshotShard
    holder: ShardHolder
    location: ShardLocation


class RecoveryPlan(NamedTuple):
    """The snapshot that all ranks resume from, with the reason for choosing it."""

    snapshot_id: SnapshotId | None
    """None if no snapshot is complete."""
    sources_by_rank: Mapping[int, tuple[ShardSource, ...]]
    """By rank of the new round: the nearest source of every shard. Which shards a rank needs
    depends on the format: only its own for sharded state at an unchanged world size, otherwise
    several."""
    reason: str


def plan_recovery(
    assignments: Sequence[NodeAssignment],
    shards_by_holder: Mapping[ShardHolder, Iterable[SnapshotShard]],
) -> RecoveryPlan:
    """Choose the newest complete snapshot, and the nearest source of each shard for each rank.

    `assignments` are the nodes of the round that resumes, `shards_by_holder` the available shards
    by agent, or by None for those in the bucket. A snapshot is complete if every shard has a
    holder. The plan has `snapshot_id` None and no sources if none is complete. Equal inputs give
    equal plans on all nodes.
    """
    holders: dict[tuple[SnapshotId, int], dict[SnapshotShard, list[ShardHolder]]] = defaultdict(
        dict
    )
    # Sorted, so that all processes compute the same plan from the same input.
    for holder in sorted(shards_by_holder, key=lambda agent: agent or ""):
        for shard in shards_by_holder[holder]:
            holders[shard.snapshot_id, shard.world_size].setdefault(shard, []).append(holder)
    complete = [key for key, shards in holders.items() if len(shards) == key[1]]
    if not complete:
        incomplete = _format_incomplete(holders) or "there are no shards"
        return RecoveryPlan(None, {}, f"no snapshot is complete: {incomplete}")
    newest = max(complete)
    # Sorted once: all ranks read the shards in the same order.
    shards_of_newest = sorted(holders[newest].items())
    request_counts: Counter[AgentId] = Counter()
    sources = {
        rank: tuple(
            _nearest_source(shard, held_by, agent=assignment.agent, request_counts=request_counts)
            for shard, held_by in shards_of_newest
        )
        for assignment in assignments
        for rank in assignment.ranks
    }
    return RecoveryPlan(newest[0], sources, _recovery_reason(newest[0], sources, holders))


class MemoryRecovery(NamedTuple):
    """A snapshot that is completely in the memory of a round's nodes, for `Round`."""

    snapshot_id: SnapshotId
    shard_holders: tuple[tuple[AgentId, ...], ...]
    """The agents that hold each shard, by the rank that saved it."""


def plan_memory_recovery(
    view: View, assignments: Sequence[NodeAssignment], members: Iterable[MemberStatus]
) -> MemoryRecovery | None:
    """Return the newest snapshot that the assigned nodes hold completely in memory. Pure.

    Called by the leader for the round that it opens; `members` report their shards. Returns None if
    there is none, if the latest checkpoint is newer, or if a needed shard is on a node without a
    peer store. The round then resumes from the checkpoint.
    """
    agents = {assignment.agent for assignment in assignments}
    shards: dict[ShardHolder, tuple[SnapshotShard, ...]] = {
        status.member.agent: status.snapshot_shards
        for status in members
        if status.member.agent in agents
    }
    plan = plan_recovery(assignments, shards)
    latest = view.latest_checkpoint
    if plan.snapshot_id is None or (latest is not None and _is_newer(latest, plan.snapshot_id)):
        return None
    addresses = {one.agent: one.peer_store_address for one in assignments}
    peers = {
        source.holder
        for sources in plan.sources_by_rank.values()
        for source in sources
        if source.location == "peer"
    }
    if not all(peer is not None and addresses[peer] for peer in peers):
        return None
    all_shards = [source.shard for source in next(iter(plan.sources_by_rank.values()))]
    holders = (
        tuple(sorted(agent for agent in agents if shard in shards.get(agent, ())))
        for shard in all_shards
    )
    return MemoryRecovery(plan.snapshot_id, tuple(holders))


def _is_newer(committed: CheckpointCommitted, snapshot_id: SnapshotId) -> bool:
    """Whether the checkpoint is newer than the snapshot: a shard of its own snapshot may be
    lost."""
    if committed.round != snapshot_id.round or committed.step is None:
        return committed.round > snapshot_id.round
    return committed.step > snapshot_id.step


def peer_store_addresses(round_: Round, agent: AgentId) -> tuple[str, ...]:
    """Return the address that the agent's node reads each shard of `memory_snapshot` from.

    One "host:port" of a peer store per shard, by the rank that saved it; '' for shards in the
    node's own memory. Called by each agent when it enters the round. Requires that the round
    has a `memory_snapshot` with `shard_holders`, and assigns the agent.
    """
    assert round_.memory_snapshot is not None
    shards: dict[ShardHolder, list[SnapshotShard]] = defaultdict(list)
    for rank, holders in enumerate(round_.shard_holders):
        for holder in holders:
            shards[holder].append(
                SnapshotShard(
                    snapshot_id=round_.memory_snapshot,
                    rank=rank,
                    world_size=len(round_.shard_holders),
                )
            )
    assignment = round_.assignment_of(agent)
    assert assignment is not None
    sources = plan_recovery(round_.assignments, shards).sources_by_rank[assignment.first_rank]
    addresses = {one.agent: one.peer_store_address for one in round_.assignments}
    return tuple(
        "" if source.holder in (None, agent) else addresses[source.holder] for source in sources
    )


def assign_replica_peers(
    assignments: Sequence[NodeAssignment], *, leaving: Collection[AgentId] = ()
) -> dict[AgentId, AgentId]:
    """Return by agent the peer that stores the replicas of its snapshots: the next one in a ring.

    The ring is ordered by node rank. Agents in `leaving`, those with a preemption notice, and the
    agents of the same instance store no replicas; the latter do if there is no other peer. An agent
    without a peer, as on a single node, is missing in the result. Every node computes the same
    result.
    """
    # A ring gives every node one replica to store, so that memory and bandwidth are balanced.
    ring = _order_ring(assignments)
    peers: dict[AgentId, AgentId] = {}
    for n, assignment in enumerate(ring):
        staying = [one for one in (*ring[n + 1 :], *ring[:n]) if one.agent not in leaving]
        elsewhere = (one for one in staying if not one.shares_instance(assignment))
        # A replica on the same instance survives the loss of a container, but not of the instance.
        peer = next(elsewhere, next(iter(staying), None))
        if peer is not None:
            peers[assignment.agent] = peer.agent
    return peers


def _order_ring(assignments: Iterable[NodeAssignment]) -> list[NodeAssignment]:
    """Order by node rank, except that instances with several nodes take turns.

    Then the next node is on another instance, so that no node stores two replicas.
    """
    seen: Counter[str] = Counter()
    turns: list[tuple[int, NodeAssignment]] = []
    for one in sorted(assignments, key=lambda one: one.node_rank):
        turns.append((seen[one.instance] if one.instance else 0, one))
        seen[one.instance] += 1
    return [one for _, one in sorted(turns, key=lambda turn: turn[0])]  # stable


def _nearest_source(
    shard: SnapshotShard,
    holders: Sequence[ShardHolder],
    *,
    agent: AgentId,
    request_counts: Counter[AgentId],
) -> ShardSource:
    """The agent's own memory, else the peer with the fewest requests so far, else the bucket."""
    if agent in holders:
        return ShardSource(shard, agent, "local memory")
    peers = [holder for holder in holders if holder is not None]
    if not peers:
        return ShardSource(shard, None, "bucket")
    nearest = min(peers, key=lambda peer: request_counts[peer])
    request_counts[nearest] += 1
    return ShardSource(shard, nearest, "peer")


HoldersBySnapshot = Mapping[tuple[SnapshotId, int], Mapping[SnapshotShard, Sequence[ShardHolder]]]


def _recovery_reason(
    snapshot_id: SnapshotId,
    sources_by_rank: Mapping[int, tuple[ShardSource, ...]],
    holders: HoldersBySnapshot,
) -> str:
    counts = Counter(source.location for sources in sources_by_rank.values() for source in sources)
    reads = ", ".join(
        f"{counts[location]} from {text}"
        for location, text in _LOCATION_TEXTS.items()
        if counts[location]
    )
    newer = {key: shards for key, shards in holders.items() if key[0] > snapshot_id}
    incomplete = f"; newer but incomplete: {_format_incomplete(newer)}" if newer else ""
    name = _format_snapshot_id(snapshot_id)
    return f"{name} is the newest complete snapshot; shard reads: {reads}{incomplete}"


_LOCATION_TEXTS: Mapping[ShardLocation, str] = {
    "local memory": "local memory",
    "peer": "peer memory",
    "bucket": "the bucket",
}


def _format_incomplete(holders: HoldersBySnapshot) -> str:
    """The number of available shards of the two newest snapshots."""
    newest = sorted(holders, reverse=True)[:2]
    return ", ".join(
        f"{_format_snapshot_id(key[0])} ({len(holders[key])} of {key[1]} shards)" for key in newest
    )


def _format_snapshot_id(snapshot_id: SnapshotId) -> str:
    return f"step {snapshot_id.step} of round {snapshot_id.round}"
