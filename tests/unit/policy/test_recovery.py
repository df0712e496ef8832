"""Recovery: the newest complete snapshot and the nearest source of each shard."""

from __future__ import annotations

from collections import defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from spotfit.model.leader_state import MemberStatus
from spotfit.model.topology import Round, SnapshotId, SnapshotShard
from spotfit.model.view import View
from spotfit.policy.recovery import (
    MemoryRecovery,
    RecoveryPlan,
    ShardHolder,
    assign_replica_peers,
    peer_store_addresses,
    plan_memory_recovery,
    plan_recovery,
)
from spotfit.testing.builders import (
    a_committed_checkpoint,
    a_member,
    a_member_status,
    a_round,
    a_view,
    an_agent_id,
)

OLD, NEW = SnapshotId(round=4, step=100), SnapshotId(round=4, step=120)
Held = dict[ShardHolder, list[SnapshotShard]]


def group(machines: int) -> Round:
    """Agents a0, a1, … with one rank each."""
    return a_round(5, members=map(a_member, range(machines)))


def shards_of(state: SnapshotId, *ranks: int) -> list[SnapshotShard]:
    """Shards of a group of two."""
    return [SnapshotShard(snapshot_id=state, rank=rank, world_size=2) for rank in ranks]


def locations(found: RecoveryPlan) -> list[list[str]]:
    return [
        [fetch.location for fetch in found.sources_by_rank[rank]]
        for rank in sorted(found.sources_by_rank)
    ]


A0, A1, A2, A3 = map(an_agent_id, range(4))

# --- scenarios -----------------------------------------------------------------------------------


def test_restarted_workers_use_their_local_memory() -> None:
    alone = a_round(5, members=[a_member(0, slots=2)])
    found = plan_recovery(alone.assignments, {A0: shards_of(NEW, 0, 1), None: shards_of(OLD, 0, 1)})
    assert found.snapshot_id == NEW
    assert locations(found) == [["local memory", "local memory"]] * 2
    assert found.reason == (
        "step 120 of round 4 is the newest complete snapshot; shard reads: 4 from local memory"
    )


def test_the_shards_of_a_lost_node_are_on_its_peer() -> None:
    """a1 is lost and replaced by a2; a0 holds the replica."""
    round_ = a_round(5, members=[a_member(0), a_member(2)])
    found = plan_recovery(
        round_.assignments, {A0: shards_of(NEW, 0, 1), None: shards_of(OLD, 0, 1)}
    )
    assert found.snapshot_id == NEW
    assert locations(found) == [["local memory", "local memory"], ["peer", "peer"]]


def test_an_incomplete_snapshot_is_not_used_and_reported() -> None:
    found = plan_recovery(group(2).assignments, {A0: shards_of(NEW, 0), None: shards_of(OLD, 0, 1)})
    assert found.snapshot_id == OLD
    assert locations(found) == [["bucket", "bucket"]] * 2
    assert "newer but incomplete: step 120 of round 4 (1 of 2 shards)" in found.reason


def test_shards_in_the_bucket_complete_those_in_memory() -> None:
    found = plan_recovery(group(2).assignments, {A0: shards_of(NEW, 0), None: shards_of(NEW, 1)})
    assert found.snapshot_id == NEW
    assert locations(found) == [["local memory", "bucket"], ["peer", "bucket"]]


def test_a_later_round_is_newer_whatever_its_steps() -> None:
    resumed = SnapshotId(round=5, step=105)
    held: Held = {A0: shards_of(resumed, 0), A1: shards_of(resumed, 1), None: shards_of(NEW, 0, 1)}
    assert plan_recovery(group(2).assignments, held).snapshot_id == resumed


def test_another_world_size_reads_the_same_shards() -> None:
    found = plan_recovery(group(3).assignments, {A0: shards_of(NEW, 0), A1: shards_of(NEW, 1)})
    assert found.snapshot_id == NEW
    assert [[one.shard.rank for one in found.sources_by_rank[rank]] for rank in range(3)] == [
        [0, 1]
    ] * 3


def test_replicas_are_requested_evenly() -> None:
    both = shards_of(NEW, 0, 1)
    found = plan_recovery(group(6).assignments, {A0: both, A1: both})
    request = [one.holder for rank in range(2, 6) for one in found.sources_by_rank[rank]]
    assert sorted(request, key=str) == [A0] * 4 + [A1] * 4


def test_without_a_complete_snapshot_there_is_no_plan() -> None:
    assert plan_recovery(group(2).assignments, {}) == RecoveryPlan(
        None, {}, "no snapshot is complete: there are no shards"
    )
    incomplete = plan_recovery(group(2).assignments, {A0: shards_of(NEW, 0)})
    assert incomplete.snapshot_id is None
    assert "step 120 of round 4 (1 of 2 shards)" in incomplete.reason


def test_each_node_replicates_to_the_next_that_stays() -> None:
    places = group(4).assignments
    assert assign_replica_peers(places) == {A0: A1, A1: A2, A2: A3, A3: A0}
    assert assign_replica_peers(places, leaving={A2}) == {A0: A1, A1: A3, A2: A3, A3: A0}
    assert assign_replica_peers(places, leaving={A0, A2, A3}) == {A0: A1, A2: A1, A3: A1}
    assert assign_replica_peers(group(1).assignments) == {}


def peers_on(*instances: str) -> dict[int, int]:
    """The number of the peer of each node; the nodes are on these instances."""
    members = [a_member(n, instance=instance) for n, instance in enumerate(instances)]
    peers = assign_replica_peers(a_round(5, members=members).assignments)
    return {int(agent[1:]): int(peer[1:]) for agent, peer in peers.items()}


def test_replicas_are_on_another_instance() -> None:
    assert peers_on("i", "i", "j", "j") == {0: 2, 2: 1, 1: 3, 3: 0}, "one replica on each node"
    assert peers_on("i", "i", "i", "j") == {0: 3, 3: 1, 1: 3, 2: 3}
    assert peers_on("i", "j", "k") == peers_on("", "", "") == {0: 1, 1: 2, 2: 0}


def test_nodes_that_all_share_an_instance_replicate_to_each_other() -> None:
    """Against the loss of one of its containers."""
    assert peers_on("i", "i", "i") == {0: 1, 1: 2, 2: 0}


@given(st.lists(st.sampled_from("ijk"), min_size=1, max_size=8))
def test_a_replica_shares_the_instance_only_if_there_is_no_other(instances: list[str]) -> None:
    peers = peers_on(*instances)
    for node, peer in peers.items():
        assert peer != node
        assert instances[peer] != instances[node] or len(set(instances)) == 1


# --- memory recovery -----------------------------------------------------------------------------


def a_group_of(
    *held: list[SnapshotShard], has_peer_stores: bool = True
) -> tuple[Round, list[MemberStatus]]:
    """Agents a0, a1, … with one rank each that hold the given shards."""
    members = [
        a_member(n, peer_store_address=f"10.0.0.{n}:9" if has_peer_stores else "")
        for n in range(len(held))
    ]
    connected = zip(members, held, strict=True)
    statuses = [
        a_member_status(n, member=one, snapshot_shards=tuple(node_shards))
        for n, (one, node_shards) in enumerate(connected)
    ]
    return a_round(5, members=members), statuses


def recover_from_memory(
    view: View, *held: list[SnapshotShard], has_peer_stores: bool = True
) -> MemoryRecovery | None:
    round_, statuses = a_group_of(*held, has_peer_stores=has_peer_stores)
    return plan_memory_recovery(view, round_.assignments, statuses)


def test_memory_suffices_if_a_snapshot_is_complete() -> None:
    assert recover_from_memory(a_view(), shards_of(NEW, 0, 1)) == MemoryRecovery(
        NEW, ((A0,), (A0,))
    )
    assert recover_from_memory(a_view(), shards_of(NEW, 0), shards_of(NEW, 1)) == MemoryRecovery(
        NEW, ((A0,), (A1,))
    )
    assert recover_from_memory(a_view(), shards_of(NEW, 0), shards_of(NEW, 0)) is None


def test_a_node_without_a_peer_store_is_not_a_source() -> None:
    assert (
        recover_from_memory(a_view(), shards_of(NEW, 0), shards_of(NEW, 1), has_peer_stores=False)
        is None
    )
    both = shards_of(NEW, 0, 1)
    assert recover_from_memory(a_view(), both, both, has_peer_stores=False) == MemoryRecovery(
        NEW, ((A0, A1), (A0, A1))
    )


def test_shards_of_unassigned_nodes_are_ignored() -> None:
    round_, statuses = a_group_of(shards_of(NEW, 0), shards_of(NEW, 1))
    assert plan_memory_recovery(a_view(), round_.assignments[:1], statuses) is None


@pytest.mark.parametrize(("committed_in", "found"), [(3, True), (4, True), (5, False)])
def test_a_checkpoint_of_a_later_round_is_newer(committed_in: int, found: bool) -> None:
    """A committed snapshot of the same round is at most as new as the one in memory."""
    view = a_view(checkpoints=(a_committed_checkpoint(round=committed_in),))
    assert (recover_from_memory(view, shards_of(NEW, 0, 1)) is not None) == found


@pytest.mark.parametrize(("step", "found"), [(119, True), (120, True), (121, False), (None, True)])
def test_a_later_checkpoint_is_newer_than_memory(step: int | None, found: bool) -> None:
    """Found with seed 1000: a node was lost with its shard of the committed snapshot, and its peer
    held a replica of the previous snapshot."""
    view = a_view(checkpoints=(a_committed_checkpoint(round=NEW.round, step=step),))
    assert (recover_from_memory(view, shards_of(NEW, 0, 1)) is not None) == found


def test_peer_store_addresses_name_the_source_of_each_missing_shard() -> None:
    round_, _ = a_group_of([], [], [])
    round_ = replace(round_, memory_snapshot=NEW, shard_holders=((A0, A1), (A1,)))
    assert peer_store_addresses(round_, A0) == ("", "10.0.0.1:9")
    assert peer_store_addresses(round_, A1) == ("", "")
    assert peer_store_addresses(round_, A2) in (
        ("10.0.0.0:9", "10.0.0.1:9"),
        ("10.0.0.1:9", "10.0.0.1:9"),
    )


# --- arbitrary holders ---------------------------------------------------------------------------

HELD = st.lists(
    st.tuples(
        st.sampled_from([None, A0, A1, A2, A3]),
        st.builds(
            lambda number, step, rank: SnapshotShard(
                snapshot_id=SnapshotId(round=number, step=step), rank=rank, world_size=3
            ),
            st.integers(1, 2),
            st.integers(1, 3),
            st.integers(0, 2),
        ),
    ),
    max_size=16,
)
GROUPS = st.integers(1, 4).map(group)


def by_holder(pairs: list[tuple[ShardHolder, SnapshotShard]]) -> Held:
    held: Held = defaultdict(list)
    for holder, part in pairs:
        held[holder].append(part)
    return held


@given(GROUPS, HELD)
@settings(max_examples=200)
def test_all_ranks_use_the_newest_complete_snapshot(
    round_: Round, pairs: list[tuple[ShardHolder, SnapshotShard]]
) -> None:
    found = plan_recovery(round_.assignments, by_holder(pairs))
    ranks: dict[SnapshotId, set[int]] = defaultdict(set)
    for _, part in pairs:
        ranks[part.snapshot_id].add(part.rank)
    complete = [state for state, there in ranks.items() if there == {0, 1, 2}]
    assert found.snapshot_id == max(complete, default=None)
    assert {one.shard.snapshot_id for each in found.sources_by_rank.values() for one in each} <= {
        found.snapshot_id
    }


@given(GROUPS, HELD)
@settings(max_examples=200)
def test_every_rank_reads_every_shard_from_the_nearest_holder(
    round_: Round, pairs: list[tuple[ShardHolder, SnapshotShard]]
) -> None:
    found = plan_recovery(round_.assignments, by_holder(pairs))
    assert set(found.sources_by_rank) == (
        set(range(round_.world_size)) if found.snapshot_id else set()
    )
    for rank, fetches in found.sources_by_rank.items():
        agent = round_.assignment_for_rank(rank).agent
        assert [one.shard.rank for one in fetches] == [0, 1, 2]
        for part, holder, way in fetches:
            having = {agents for agents, one in pairs if one == part}
            assert holder in having
            peers = "peer" if having - {None} else "bucket"
            assert way == ("local memory" if agent in having else peers)
            assert (holder == agent) == (way == "local memory")


@given(GROUPS, HELD, st.data())
def test_the_order_of_the_holders_is_irrelevant(
    round_: Round, pairs: list[tuple[ShardHolder, SnapshotShard]], data: st.DataObject
) -> None:
    shuffled = data.draw(st.permutations(pairs))
    before, after = (plan_recovery(round_.assignments, by_holder(one)) for one in (pairs, shuffled))
    assert before == after


@given(GROUPS, HELD, st.integers(0, 15))
def test_a_corrupt_shard_never_leads_to_a_newer_snapshot(
    round_: Round, pairs: list[tuple[ShardHolder, SnapshotShard]], bad: int
) -> None:
    before = plan_recovery(round_.assignments, by_holder(pairs))
    after = plan_recovery(round_.assignments, by_holder(pairs[:bad] + pairs[bad + 1 :]))
    assert after.snapshot_id is None or (
        before.snapshot_id is not None and after.snapshot_id <= before.snapshot_id
    )
