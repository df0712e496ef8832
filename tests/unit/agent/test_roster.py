"""Tests of the roster: connected, lost and running agents."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from spotfit.agent.ports import LeaderMessageReceived
from spotfit.agent.roster import Roster
from spotfit.core.ids import AgentId
from spotfit.model.events import RankFailure
from spotfit.model.topology import FeederAddress, SnapshotId, SnapshotShard
from spotfit.protocol.agent_leader import AbortRound, ConnectionHeartbeat, Join
from spotfit.testing.builders import RUN_ID, TOKEN, a_member, a_notice, a_round, an_agent_id
from spotfit_localsim.virtual.sim_network import SimNet
from tests.unit.agent.simulated_cluster import Infrastructure

A, B = an_agent_id(0), an_agent_id(1)


def make_join(n: int, **fields: object) -> Join:
    return Join(run_id=RUN_ID, member=a_member(n), next_slot=0, **fields)  # type: ignore[arg-type]  # keyword arguments of the test


def make_roster() -> tuple[Roster, SimNet, SimNet]:
    """A roster of the leader a0 and agent a1, joined at 10 s; with both network endpoints."""
    infrastructure = Infrastructure()
    leader_net, agent_net = (infrastructure.open_transport(a_member(n)) for n in (0, 1))
    roster = Roster(A, leader_net)
    for n, net in enumerate((leader_net, agent_net)):
        net.connect(leader_net.address, make_join(n))
        roster.join(an_agent_id(n), make_join(n), 10.0)
    leader_net.drain_events()
    return roster, leader_net, agent_net


def test_a_joined_agent_is_idle_by_default() -> None:
    roster, _, _ = make_roster()
    assert roster.members[B].running_round is None
    roster.join(B, make_join(1, running_round=3, notice=a_notice()), 12.0)
    status = roster.members[B]
    assert (status.running_round, status.notice, roster.noticed_at[B]) == (3, a_notice(), 12.0)


def test_a_disconnected_agent_is_missing_until_it_rejoins() -> None:
    roster, _, _ = make_roster()
    assert roster.mark_disconnected(B, 20.0)
    assert (B in roster.members, roster.disconnected_since) == (False, {B: 20.0})
    assert not roster.mark_disconnected(B, 21.0), "it was removed before"
    roster.join(B, make_join(1), 22.0)
    assert roster.disconnected_since == {}
    assert roster.disconnected_in_round == {B}, "its connection broke in this round"
    roster.assign_round(a_round().assignments, 2)
    assert roster.disconnected_in_round == set(), "a new round resets the set"


def test_the_last_agent_of_a_machine_is_known() -> None:
    roster, _, _ = make_roster()
    roster.mark_disconnected(B, 20.0)
    assert roster.last_agent_by_node == {(TOKEN, 0): A, (TOKEN, 1): B}


def test_uploads_are_known_until_they_are_drained() -> None:
    roster, _, _ = make_roster()
    roster.mark_stopped(A, 4, is_uploading=True)
    assert roster.members[A].uploading_round == 4
    roster.mark_uploads_drained(A, 3)
    assert roster.members[A].uploading_round == 4, "the report is of another round"
    roster.mark_uploads_drained(A, 4)
    assert roster.members[A].uploading_round is None


def test_snapshot_shards_are_recorded_when_workers_stop() -> None:
    roster, _, _ = make_roster()
    held = (SnapshotShard(snapshot_id=SnapshotId(round=4, step=9), rank=0, world_size=1),)
    roster.mark_stopped(A, 4, snapshot_shards=held)
    assert roster.members[A].snapshot_shards == held


def test_an_assigned_agent_is_running_until_it_stops() -> None:
    roster, _, _ = make_roster()
    places = a_round().assignments
    assert roster.are_all_stopped(places)
    roster.assign_round(places, 4)
    roster.mark_stopped(A, 4)
    assert not roster.are_all_stopped(places)
    roster.mark_stopped(B, 3)
    assert not roster.are_all_stopped(places), "the report is of an earlier round"
    roster.mark_stopped(B, 4)
    assert roster.are_all_stopped(places)


def test_an_agent_cannot_enter_a_round_that_it_left() -> None:
    roster, _, _ = make_roster()
    leader_node, agent_node = a_round().assignments
    assert roster.can_enter(agent_node, 4)
    roster.mark_stopped(B, 4)
    assert not roster.can_enter(agent_node, 4)
    assert roster.can_enter(agent_node, 5)
    assert roster.can_enter(leader_node, 4)
    roster.mark_stopped(B, 3)
    assert not roster.can_enter(agent_node, 4)


def test_a_join_holds_the_last_entered_round() -> None:
    roster, _, _ = make_roster()
    _, agent_node = a_round().assignments
    roster.join(B, make_join(1, last_entered_round=4), 12.0)
    assert (roster.can_enter(agent_node, 4), roster.can_enter(agent_node, 5)) == (False, True)
    roster.mark_disconnected(B, 13.0)
    assert not roster.can_enter(agent_node, 5)


def test_a_node_is_marked_warm() -> None:
    roster, _, _ = make_roster()
    roster.join(B, make_join(1, is_warm=False), 12.0)
    assert not roster.members[B].is_warm
    roster.mark_warm(B)
    assert roster.members[B].is_warm


def test_a_lost_machine_is_forgotten() -> None:
    roster, _, _ = make_roster()
    roster.mark_disconnected(B, 20.0)
    roster.forget(TOKEN, 1, B, now=1.0)
    assert (roster.last_agent_by_node, roster.disconnected_since) == ({(TOKEN, 0): A}, {})
    roster.forget(TOKEN, 7, None, now=1.0)  # one that never joined


@pytest.mark.parametrize("agent", [B, None], ids=["replaced", "unusable"])
def test_an_agent_that_exits_after_its_recorded_loss_is_not_awaited(agent: AgentId | None) -> None:
    roster, _, _ = make_roster()
    roster.forget(TOKEN, 1, agent, now=7.0)
    assert roster.mark_disconnected(B, 8.0)
    assert roster.disconnected_since == {}


def test_disconnected_agents_count_as_stopped() -> None:
    roster, _, _ = make_roster()
    roster.assign_round(a_round().assignments, 4)
    roster.mark_stopped(A, 4)
    roster.mark_disconnected(B, 20.0)
    assert roster.are_all_stopped(a_round().assignments)


def test_unresponsive_agents_exclude_the_leader_itself() -> None:
    roster, _, _ = make_roster()
    assert roster.find_unresponsive(6.0, 16.0) == []
    assert roster.find_unresponsive(6.0, 16.1) == [B]
    roster.touch(B, 16.0)
    assert roster.find_unresponsive(6.0, 16.1) == []
    assert roster.touch(an_agent_id(9), 16.0) is None


def test_a_repeated_notice_keeps_its_first_time() -> None:
    roster, _, _ = make_roster()
    roster.record_notice(B, a_notice(), 17.0)
    assert (roster.members[B].notice, roster.noticed_at[B]) == (a_notice(), 17.0)
    roster.mark_disconnected(B, 18.0)
    roster.join(B, make_join(1, notice=a_notice()), 19.0)
    assert roster.noticed_at[B] == 17.0, "a reconnection does not extend the deadline"


def test_an_earlier_deadline_gets_a_new_time() -> None:
    roster, _, _ = make_roster()
    roster.record_notice(B, a_notice(seconds_left=None), 17.0)
    roster.record_notice(B, a_notice(seconds_left=10.0), 25.0)
    assert roster.noticed_at[B] == 25.0
    roster.join(B, make_join(1, notice=a_notice(seconds_left=10.0)), 26.0)
    assert roster.noticed_at[B] == 25.0


def test_heartbeats_are_sent_to_all_members() -> None:
    roster, leader_net, agent_net = make_roster()
    roster.broadcast(AbortRound(round=3))
    roster.send_heartbeats()
    for net in (leader_net, agent_net):
        assert net.drain_events() == [
            LeaderMessageReceived(AbortRound(round=3)),
            LeaderMessageReceived(ConnectionHeartbeat()),
        ]


def test_impossible_shards_are_not_recorded() -> None:
    roster, _, _ = make_roster()
    snapshot_id = SnapshotId(round=1, step=2)
    shards = tuple(
        SnapshotShard(snapshot_id=snapshot_id, rank=rank, world_size=2) for rank in (-1, 1, 2)
    )
    roster.join(B, make_join(1, snapshot_shards=shards), 12.0)
    joined_with = roster.members[B].snapshot_shards
    roster.mark_stopped(B, 3, snapshot_shards=shards)
    assert joined_with == roster.members[B].snapshot_shards == (shards[1],)


def test_a_failure_of_a_node_has_no_other_rank() -> None:
    roster, _, _ = make_roster()
    failure = RankFailure(rank=7, kind="raised", message="no disk")
    roster.mark_unusable(B, failure)
    assert roster.members[B].node_failure == replace(failure, rank=0)


def test_a_recorded_loss_is_dated() -> None:
    roster, _, _ = make_roster()
    roster.forget(TOKEN, 1, B, now=7.0)
    assert roster.loss_recorded_at == roster.agent_lost_at == {TOKEN: 7.0}


def test_the_loss_of_a_machine_without_agent_is_not_that_of_an_agent() -> None:
    roster, _, _ = make_roster()
    roster.forget(TOKEN, 1, None, now=7.0)
    assert (roster.loss_recorded_at, roster.agent_lost_at) == ({TOKEN: 7.0}, {})


def test_an_impossible_address_of_feeders_counts_as_none() -> None:
    roster, _, _ = make_roster()
    feeder = FeederAddress(address="10.0.0.1:4000", connections=2)
    roster.record_feeder(B, feeder, 7.0)
    assert roster.members[B].feeder == feeder
    for invalid in (FeederAddress(address="http://10.0.0.1/"), FeederAddress(address=""), None):
        roster.record_feeder(B, invalid, 8.0)
        assert roster.members[B].feeder is None


def test_the_time_since_when_feeders_listen_is_kept_until_the_end_of_the_term() -> None:
    roster, _, _ = make_roster()
    feeder = FeederAddress(address="10.0.0.1:4000", connections=2)
    roster.record_feeder(B, None, 6.0)
    for now in (7.0, 8.0):
        roster.record_feeder(B, feeder, now)
    roster.mark_disconnected(B, 9.0)
    assert roster.feeding_since == {B: 7.0}
