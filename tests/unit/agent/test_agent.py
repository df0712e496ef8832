"""Tests of several agents together: elections, rounds, losses, and store failures."""

from __future__ import annotations

import random

import msgspec
import pytest
from msgspec.structs import replace

from spotfit.checkpoint.manifest import Manifest
from spotfit.core.codec import encode
from spotfit.core.errors import QuotaError, StoreError, StorePermissionError
from spotfit.core.ids import Token
from spotfit.ledger import keys
from spotfit.model.events import (
    CheckpointCommitted,
    FailureCause,
    FitEnded,
    GroupPlanned,
    GroupRefused,
    GroupsReleased,
    LeaderElected,
    NodeLost,
    PreemptedNodes,
    PreemptionNoticed,
    RoundClosed,
    RoundOpened,
    TrainingEnded,
    ValidationEnded,
    ValidationRequest,
    ValidationStarted,
)
from spotfit.model.group import NodeState, NodeStatus
from spotfit.model.leader_state import ValidationReported
from spotfit.model.spec import FailureLimits, ValidationSpec
from spotfit.model.topology import PreemptionRisk
from spotfit.protocol.agent_leader import Join, JoinRejected
from spotfit.protocol.worker_agent import (
    CheckpointNamed,
    CommitConfirmed,
    FilesReport,
    MetricsReport,
    PreemptionUpdate,
    RankZeroBroadcast,
    RankZeroBroadcastResult,
    SaveCompleted,
    SuggestSave,
    ValidationFinished,
    WorkerRaised,
    WorkerReturned,
)
from spotfit.testing.builders import a_notice
from tests.unit.agent.simulated_cluster import TEMPO, FakeCluster, FakeNode, fake_seal

ANY_FAILURES = FailureLimits(worker=-1)
BRIEF = replace(TEMPO, validator_idle_timeout_s=2.0)


# --- a run without trouble -----------------------------------------------------------------------


def test_agents_that_join_elect_a_leader_and_start_all_ranks() -> None:
    world = FakeCluster()
    assert world.wait_for_round() == 1
    assert [one.epoch for one in world.events_of(LeaderElected)] == [1, 2]
    assert sorted(rank for node in world.nodes.values() for rank in node.ranks) == [0, 1]


def test_a_start_message_holds_rank_and_topology() -> None:
    world = FakeCluster()
    world.wait_for_round()
    for rank in (0, 1):
        node = world.node_of_rank(rank)
        start = node.worker_pool.workers[rank]
        assert (start.rank, start.world_size, start.node_rank, start.local_rank) == (
            rank,
            2,
            rank,
            0,
        )
        assert (start.host, start.round, start.checkpoint) == (node.member.host, 1, None)
        assert start.secret == "secret"
        assert node.worker_pool.spec == world.view.spec


def test_agents_publish_their_member_entries() -> None:
    world = FakeCluster()
    world.wait_for_round()
    offers = {one.agent for one in world.node_of_rank(0).ledger.list_members()}
    assert offers == {node.agent_id for node in world.nodes.values()}


def test_after_all_ranks_return_the_run_finishes_and_agents_exit() -> None:
    world = FakeCluster()
    world.wait_for_round()
    world.report(0, loss=0.5)
    world.finish_rank(1)
    assert world.view.is_active
    world.finish_rank(0, b"the result")
    world.advance_until(lambda: all(node.has_exited for node in world.nodes.values()))
    assert world.last_event(FitEnded) == FitEnded(
        outcome="finished", metrics={"rank": 0, "loss": 0.5}, result_key=keys.result(1, 0)
    )
    assert world.read_object(keys.result(1, 0)) == fake_seal(keys.result(1, 0), b"the result")
    assert world.last_event(GroupsReleased) is not None, "nothing is paid for any more"
    assert not any(node.agent.is_abandoned for node in world.nodes.values())


def test_a_committed_checkpoint_is_confirmed_to_all_workers() -> None:
    world = FakeCluster()
    world.wait_for_round()
    world.checkpoint(0, "c1", loss=0.5)
    committed = world.last_event(CheckpointCommitted)
    assert (committed.name, committed.report_index, committed.ranks) == ("c1", 0, (0,))
    for rank in (0, 1):
        assert world.messages_to(rank, CommitConfirmed) == [
            CommitConfirmed(checkpoint_name="c1", metrics={"rank": 0, "loss": 0.5})
        ]


# --- workers fail --------------------------------------------------------------------------------


def test_an_exception_closes_the_round_and_opens_the_next() -> None:
    world = FakeCluster(failure_limits=ANY_FAILURES)
    world.wait_for_round()
    world.checkpoint(0, "c1")
    failed = world.node_of_rank(1)
    world.fail_rank(1)
    world.advance_until(lambda: world.is_training)
    closed = world.last_event(RoundClosed)
    assert (closed.cause, closed.reason) == (FailureCause.WORKER, "rank 1 raised: ValueError: no")
    assert [(one.rank, one.pickle_key) for one in closed.failures] == [(1, keys.failure(1, 1))]
    assert world.read_object(keys.failure(1, 1)) == fake_seal(keys.failure(1, 1), b"pickle")
    assert world.view.round is not None
    assert (world.view.round.number, world.view.round.checkpoint_name) == (2, "c1")
    assert world.node_of_rank(1) is failed, "survivors keep their places"
    assert world.node_of_rank(0).worker_pool.workers[0].checkpoint_metrics == {"rank": 0}


def test_a_killed_worker_stops_its_peers_immediately() -> None:
    world = FakeCluster(failure_limits=ANY_FAILURES)
    world.wait_for_round()
    peer = world.node_of_rank(0)
    world.node_of_rank(1).worker_pool.end_worker(1, "was killed by SIGKILL")
    took_s = world.advance_until(lambda: world.is_training and peer.worker_pool.rounds == [1, 2])
    assert took_s < 0.2
    closed = world.last_event(RoundClosed)
    assert closed.failures[0].message == "The worker of rank 1 was killed by SIGKILL."


def test_exit_code_0_before_the_return_is_a_failure() -> None:
    world = FakeCluster()
    world.wait_for_round()
    world.node_of_rank(0).worker_pool.end_worker(0, "exited with code 0", clean=True)
    world.advance_until(lambda: world.view.fit_end)
    assert (
        "exited with code 0 before its function had returned" in world.last_event(FitEnded).reason
    )


def test_without_a_failure_budget_the_first_failure_ends_the_run() -> None:
    world = FakeCluster()
    world.wait_for_round()
    world.fail_rank(0)
    world.advance_until(lambda: all(node.has_exited for node in world.nodes.values()))
    ended = world.last_event(FitEnded)
    assert (ended.outcome, ended.cause) == ("failed", FailureCause.WORKER)
    assert len(world.events_of(RoundOpened)) == 1


def test_workers_that_survive_a_kill_cost_the_machine_but_not_the_run() -> None:
    world = FakeCluster(failure_limits=ANY_FAILURES)
    world.wait_for_round()
    stuck = world.node_of_rank(1)
    stuck.worker_pool.survives_kill = True
    world.fail_rank(0)
    world.advance_until(lambda: world.is_training, within_s=60)
    lost = world.last_event(NodeLost)
    assert (lost.agent, lost.reason) == (stuck.agent_id, "its workers did not stop in time")
    stuck.worker_pool.survives_kill = False
    world.advance_until(lambda: stuck.has_exited)
    assert stuck.agent.is_abandoned


def break_environment(node: FakeNode) -> None:
    node.worker_pool.break_environment(
        WorkerRaised(
            traceback_text="no such package",
            pickled_exception=b"pickle",
            cause=FailureCause.WORKER,
            is_permanent=True,
        )
    )


def test_an_unusable_node_ends_the_run_before_the_first_round() -> None:
    world = FakeCluster(failure_limits=ANY_FAILURES)
    world.boots_granted = False
    first = world.boot(Token("t-1"), 0)
    world.advance_until(lambda: world.leader is first)
    break_environment(first)
    world.advance_until(lambda: world.view.fit_end)
    ended = world.last_event(FitEnded)
    assert (ended.outcome, ended.cause) == ("failed", FailureCause.WORKER)
    assert ended.reason == "not retried, the failure is permanent: rank 0 raised: no such package"
    assert ended.failures[0].pickle_key == keys.agent_failure(first.agent_id)
    assert world.events_of(RoundOpened) == []


def test_a_join_reports_an_unusable_node_to_a_new_leader() -> None:
    world = FakeCluster(failure_limits=ANY_FAILURES)
    world.wait_for_round()
    leader, other = world.leader, world.node_of_rank(follower(world))
    break_environment(other)
    world.advance(0.2)
    assert world.is_training, "those at work need nothing more to be started"
    world.kill(leader)
    world.advance_until(lambda: world.view.fit_end)
    assert world.last_event(FitEnded).reason.endswith("no such package")


# --- machines go ---------------------------------------------------------------------------------


def lost_agents(world: FakeCluster) -> set[str | None]:
    """Return the agents whose nodes are lost according to the journal."""
    return {lost.agent for lost in world.events_of(NodeLost)}


def follower(world: FakeCluster) -> int:
    """A rank that does not live beside the leader."""
    return next(rank for rank in (0, 1) if world.node_of_rank(rank) is not world.leader)


def test_a_lost_machine_is_replaced_and_the_run_continues() -> None:
    world = FakeCluster()
    world.wait_for_round()
    world.checkpoint(0, "c1")
    gone = world.node_of_rank(follower(world))
    world.kill(gone)
    world.advance_until(lambda: world.is_training)
    closed = world.last_event(RoundClosed)
    assert closed.cause is FailureCause.PREEMPTION
    assert world.last_event(NodeLost).agent == gone.agent_id
    assert world.last_event(GroupPlanned).request.num_workers == 1
    assert world.view.round is not None
    assert world.view.round.checkpoint_name == "c1"
    assert world.view.failure_counts == {FailureCause.PREEMPTION: 1}


def test_a_lost_leader_is_replaced_within_a_second() -> None:
    world = FakeCluster()
    world.wait_for_round()
    world.checkpoint(0, "c1")
    old = world.leader
    world.kill(old)
    took_s = world.advance_until(lambda: world.leader is not old)
    assert took_s < 1.0
    world.advance_until(lambda: world.is_training)
    assert world.last_event(LeaderElected).lost_leader == old.agent_id
    assert world.last_event(RoundClosed).cause is FailureCause.PREEMPTION
    assert world.view.latest_checkpoint is not None


def test_a_new_leader_commits_a_complete_checkpoint_of_its_predecessor() -> None:
    world = FakeCluster()
    world.wait_for_round()
    part = Manifest(
        name="c9", round=1, report_index=0, rank=0, ranks=(0,), metrics={"loss": 0.1}, files=()
    )
    world.store.put(keys.manifest("c9", 1, 0), encode(part))
    world.kill(world.leader)
    world.advance_until(lambda: world.is_training)
    assert [one.name for one in world.events_of(CheckpointCommitted)] == ["c9"]
    assert world.view.round is not None
    assert world.view.round.checkpoint_name == "c9"


def test_a_late_checkpoint_of_an_old_round_does_not_roll_the_run_back() -> None:
    world = FakeCluster(failure_limits=ANY_FAILURES)
    world.wait_for_round()
    world.checkpoint(0, "old")
    world.checkpoint(1, "new")
    part = Manifest(name="late", round=1, report_index=0, rank=0, ranks=(0,), metrics={}, files=())
    world.store.put(keys.manifest("late", 1, 0), encode(part))
    world.fail_rank(0)
    world.advance_until(lambda: world.is_training)
    assert world.view.round is not None
    assert world.view.round.checkpoint_name == "new"


def test_a_broken_connection_is_retried_before_an_election() -> None:
    world = FakeCluster()
    world.wait_for_round()
    leader, other = world.leader, world.node_of_rank(follower(world))
    before = len(other.net.dialed)
    other.net.reset_connections()
    world.advance_until(lambda: world.is_training)
    assert other.net.dialed[before:] == [leader.net.address]
    assert world.leader is leader
    assert world.last_event(RoundClosed).round_number == 1


def test_a_broken_connection_is_not_a_lost_machine_while_its_backend_reports_it_running() -> None:
    world = FakeCluster(told_late_s=0.0, failure_limits=FailureLimits(preemption=0, platform=0))
    world.wait_for_round()
    slept = world.node_of_rank(follower(world))
    slept.process.freeze()
    slept.net.reset_connections()
    world.advance_until(lambda: world.last_event(RoundClosed))
    assert world.last_event(RoundClosed).cause is FailureCause.NETWORK
    slept.process.thaw()
    world.advance_until(lambda: world.is_training)
    assert world.view.failure_counts == {FailureCause.NETWORK: 1}
    assert world.events_of(NodeLost) == []


@pytest.mark.parametrize(
    ("told_late_s", "blame"), [(0.0, FailureCause.PLATFORM), (60.0, FailureCause.PREEMPTION)]
)
def test_a_lost_agent_is_charged_to_the_cause_that_its_backend_reports(
    told_late_s: float, blame: FailureCause
) -> None:
    """Without a report of the backend a silent agent counts as preempted, the most likely cause."""
    world = FakeCluster(told_late_s=told_late_s)
    world.wait_for_round()
    slept = world.node_of_rank(follower(world))
    slept.process.freeze()
    slept.net.reset_connections()
    world.advance_until(lambda: world.last_event(NodeLost))
    assert world.last_event(RoundClosed).cause is FailureCause.NETWORK
    assert world.last_event(NodeLost).cause is blame
    assert world.view.failure_counts == {blame: 1}
    assert world.view.last_round_closed is not None
    assert world.view.last_round_closed.cause is blame


def test_a_failure_budget_is_checked_once_the_cause_is_known() -> None:
    world = FakeCluster(told_late_s=0.0, failure_limits=FailureLimits(platform=0))
    world.wait_for_round()
    slept = world.node_of_rank(follower(world))
    slept.process.freeze()
    slept.net.reset_connections()
    world.advance_until(lambda: world.view.fit_end)
    ended = world.last_event(FitEnded)
    assert (ended.outcome, ended.cause) == ("failed", FailureCause.PLATFORM)
    assert "its agent did not reconnect within 1 s" in ended.reason


def test_a_leader_is_replaced_only_after_a_second_refused_connection() -> None:
    world = FakeCluster()
    world.wait_for_round()
    leader, other = world.leader, world.node_of_rank(follower(world))
    before = len(other.net.dialed)
    leader.net.stop_listening()
    leader.process.freeze()
    other.net.reset_connections()
    world.advance_until(lambda: world.leader is other)
    assert other.net.dialed[before:][:2] == [leader.net.address, other.net.address]
    assert world.last_event(LeaderElected).reason == "the previous leader's port is closed"


def test_a_silent_leader_is_replaced_only_after_its_lease_expired() -> None:
    world = FakeCluster()
    world.wait_for_round()
    leader, other = world.leader, world.node_of_rank(follower(world))
    leader.process.freeze()
    took_s = world.advance_until(lambda: world.leader is other, within_s=60)
    assert took_s > TEMPO.heartbeat_timeout_s
    assert world.last_event(LeaderElected).lost_leader is None


def test_a_deposed_leader_joins_its_successor() -> None:
    world = FakeCluster()
    world.wait_for_round()
    old = world.leader
    old.process.freeze()
    world.advance_until(lambda: world.leader is not old, within_s=60)
    written = len(world.entries)
    old.process.thaw()
    world.advance_until(lambda: world.is_training or old.has_exited, within_s=60)
    assert not any(entry.author == old.agent_id for entry in world.entries[written:])
    assert world.view.failure_counts.get(FailureCause.WORKER, 0) == 0
    assert old.node_services.resign_count == 1, "callbacks and hooks are its successor's"
    assert world.leader.node_services.resign_count == 0


def test_an_agent_declared_lost_exits_when_it_resumes() -> None:
    world = FakeCluster()
    world.wait_for_round()
    slept = world.node_of_rank(follower(world))
    slept.process.freeze()
    world.advance_until(lambda: slept.agent_id in lost_agents(world), within_s=60)
    slept.process.thaw()
    world.advance_until(lambda: slept.has_exited)
    assert slept.agent.is_abandoned
    assert not slept.worker_pool.has_workers, "its workers went first"


def test_an_agent_without_replacement_exits_at_its_deadline() -> None:
    """Its exit code differs: a scheduler that restarts it resumes a run without other agents."""
    world = FakeCluster()
    world.boots_granted = False
    for node in (0, 1):
        world.boot(Token("t-1"), node)
    world.wait_for_round()
    leaving = world.node_of_rank(follower(world))
    leaving.instance.notice = a_notice(seconds_left=20.0)
    took_s = world.advance_until(lambda: leaving.has_exited)
    assert took_s == pytest.approx(20.5, abs=1.0)
    assert leaving.agent.is_drained
    assert not leaving.worker_pool.has_workers, "its workers went first"
    assert not leaving.agent.is_abandoned


def test_an_agent_of_an_unknown_group_exits() -> None:
    """A leader was deposed while renting it; no other process would release it."""
    world = FakeCluster()
    world.wait_for_round()
    stray = world.boot(Token("t-unheard-of"), 0)
    world.advance_until(lambda: stray.has_exited)
    assert stray.agent.is_abandoned
    assert stray.worker_pool.rounds == []
    assert world.is_training


def test_a_restarted_machine_that_was_not_replaced_continues_with_its_new_agent() -> None:
    world = FakeCluster()
    world.boots_granted = False
    for node in (0, 1):
        world.boot(Token("t-1"), node)
    world.wait_for_round()
    lost = world.node_of_rank(follower(world))
    lost.process.kill()  # the backend restarts it before its groups are observed
    again = world.boot(lost.member.token, lost.member.node)
    world.advance_until(
        lambda: world.is_training and world.view.round and world.view.round.number == 2
    )
    assert again.worker_pool.rounds == [2]
    assert [one.request.num_workers for one in world.events_of(GroupPlanned)] == [2], (
        "nothing was ordered"
    )
    assert world.view.failure_counts == {FailureCause.PREEMPTION: 1}


def test_a_restarted_machine_that_was_replaced_exits() -> None:
    """A backend that requeues lost machines also restarts those that were replaced."""
    world = FakeCluster()
    world.wait_for_round()
    lost = world.node_of_rank(follower(world))
    world.kill(lost)
    world.advance_until(lambda: lost.agent_id in lost_agents(world) and world.is_training)
    again = world.boot(lost.member.token, lost.member.node)
    world.advance_until(lambda: again.has_exited)
    assert again.agent.is_abandoned
    assert again.worker_pool.rounds == []
    assert world.is_training


def test_an_agent_that_does_not_lead_rejects_joins() -> None:
    world = FakeCluster()
    world.wait_for_round()
    other, leader = world.node_of_rank(follower(world)), world.leader
    caller = world.boot(Token("t-1"), 7)
    caller.process.freeze()
    caller.net.connect(
        other.net.address, Join(run_id=world.view.run_id or "", member=caller.member, next_slot=0)
    )
    world.settle()
    said = [getattr(event, "message", event) for event in caller.net.drain_events()]
    assert said[0] == JoinRejected(reason="not_leading")
    assert world.leader is leader


def test_a_join_of_another_run_is_rejected_by_the_leader() -> None:
    world = FakeCluster()
    world.wait_for_round()
    caller = world.boot(Token("t-1"), 7)
    caller.process.freeze()
    caller.net.connect(
        world.leader.net.address, Join(run_id="another", member=caller.member, next_slot=0)
    )
    world.settle()
    said = [getattr(event, "message", event) for event in caller.net.drain_events()]
    assert said[0] == JoinRejected(reason="other_run")
    assert world.view.round is not None


def test_a_final_refusal_stops_requests_for_machines() -> None:
    """A machine on its last life is replaced while it works, but not at any price."""
    world = FakeCluster(failure_limits=FailureLimits(worker=-1))
    world.boots_granted = False
    world.advance_until(lambda: world.cloud.groups)
    (token,) = world.cloud.groups
    world.cloud.groups[token][0] = NodeStatus(state=NodeState.RUNNING, is_last_attempt=True)
    world.advance(1.0)
    world.cloud.submit_results = [QuotaError("0 of 0")] * 99
    world.boot(token, 0)
    world.boot(token, 1)
    world.advance_until(lambda: world.events_of(GroupRefused))
    world.advance(30.0)
    assert len(world.events_of(GroupRefused)) == 1
    assert world.events_of(RoundClosed) == []
    world.fail_rank(0)
    world.advance_until(
        lambda: world.is_training and world.view.round and world.view.round.number == 2
    )
    world.kill(world.node_of_rank(0))
    world.advance_until(lambda: world.view.fit_end)
    assert world.last_event(FitEnded).reason == "0 of 0"


# --- machines that announce their end ------------------------------------------------------------


def test_a_notice_is_sent_to_all_workers_and_its_machine_replaced() -> None:
    world = FakeCluster()
    world.wait_for_round()
    leaving = world.node_of_rank(follower(world))
    leaving.instance.notice = a_notice(seconds_left=60.0, deadline_ms=77)
    world.advance_until(lambda: world.last_event(PreemptionNoticed))
    assert world.last_event(PreemptionNoticed).agent == leaving.agent_id
    for rank in (0, 1):
        warned = world.messages_to(rank, PreemptionUpdate)[-1]
        assert warned.deadline_ms == 77
        assert warned.node_to_ranks == {leaving.name: (follower(world),)}
    world.advance_until(lambda: world.last_event(GroupPlanned).request.num_workers == 1)
    world.advance(5.0)
    assert len(world.events_of(RoundClosed)) == 0, "a notice alone costs nothing"


def test_a_preemption_risk_is_sent_to_all_workers_once() -> None:
    world = FakeCluster()
    world.wait_for_round()
    world.node_of_rank(follower(world)).instance.notice = PreemptionRisk(reason="higher risk")
    world.advance_until(lambda: world.messages_to(0, SuggestSave))
    world.advance(5.0)
    for rank in (0, 1):
        assert world.messages_to(rank, SuggestSave) == [SuggestSave(reason="higher risk")]
        assert not world.messages_to(rank, PreemptionUpdate)
    assert not world.events_of(PreemptionNoticed)
    assert len(world.events_of(GroupPlanned)) == 1, "nothing is replaced"


def test_an_earlier_deadline_replaces_a_notice() -> None:
    world = FakeCluster()
    world.wait_for_round()
    leaving = world.node_of_rank(follower(world))
    leaving.instance.notice = a_notice(seconds_left=None)
    world.advance_until(lambda: world.last_event(PreemptionNoticed))
    world.advance(3.0)
    leaving.instance.notice = a_notice(seconds_left=15.0)
    world.advance_until(lambda: len(world.events_of(PreemptionNoticed)) == 2)
    told_at = world.engine.now
    world.advance(10.0)
    assert len(world.events_of(PreemptionNoticed)) == 2
    assert len(world.events_of(RoundClosed)) == 0
    world.advance_until(lambda: world.events_of(RoundClosed))
    assert world.last_event(RoundClosed).reason == "the preemption deadline has passed"
    assert world.engine.now - told_at < 20.0


def test_a_later_deadline_is_ignored() -> None:
    world = FakeCluster()
    world.wait_for_round()
    leaving = world.node_of_rank(follower(world))
    leaving.instance.notice = a_notice(seconds_left=30.0)
    world.advance_until(lambda: world.last_event(PreemptionNoticed))
    leaving.instance.notice = a_notice(seconds_left=60.0)
    world.advance(2.0)
    leaving.instance.notice = a_notice(seconds_left=None)
    world.advance(2.0)
    assert len(world.events_of(PreemptionNoticed)) == 1


def test_a_round_closes_once_state_is_saved_and_the_replacement_ready() -> None:
    world = FakeCluster()
    world.wait_for_round()
    leaving = world.node_of_rank(follower(world))
    leaving.instance.notice = a_notice(seconds_left=60.0)
    world.advance_until(lambda: len(world.nodes) == 3)
    world.checkpoint(0, "c1")
    world.advance_until(
        lambda: world.is_training and world.view.round and world.view.round.number == 2
    )
    closed = world.last_event(RoundClosed)
    assert (closed.cause, closed.reason) == (
        FailureCause.PREEMPTION,
        "checkpoint saved after the preemption notice; replacement ready",
    )
    assert leaving.ranks == []
    assert world.view.round is not None
    assert world.view.round.checkpoint_name == "c1"


def test_workers_are_informed_when_the_replacement_is_ready() -> None:
    world = FakeCluster()
    world.wait_for_round()
    world.boots_granted = False
    world.node_of_rank(follower(world)).instance.notice = a_notice(seconds_left=60.0)
    world.advance_until(lambda: world.last_event(GroupPlanned).request.num_workers == 1)
    assert not world.messages_to(0, PreemptionUpdate)[-1].replacement_ready
    world.boot(world.last_event(GroupPlanned).request.token, 0)
    world.advance_until(lambda: world.messages_to(0, PreemptionUpdate)[-1].replacement_ready)
    world.advance(5.0)
    told = [one.replacement_ready for one in world.messages_to(0, PreemptionUpdate)]
    assert told == sorted(told)
    assert told.count(True) == 1


def test_a_replica_on_a_peer_suffices_to_change_machines() -> None:
    world = FakeCluster()
    world.wait_for_round()
    leaving, staying = world.node_of_rank(follower(world)), world.node_of_rank(1 - follower(world))
    leaving.worker_pool.confirm_replica(follower(world), 3, staying.member.peer_store_address)
    world.advance(1.0)
    leaving.instance.notice = a_notice(seconds_left=60.0)
    world.advance_until(lambda: len(world.nodes) == 3)
    world.advance(2.0)
    assert world.events_of(RoundClosed) == [], "that was saved before the notice"
    leaving.worker_pool.confirm_replica(follower(world), 9, "10.9.9.9:7001")
    world.advance(2.0)
    assert world.events_of(RoundClosed) == []
    leaving.worker_pool.confirm_replica(follower(world), 9, staying.member.peer_store_address)
    world.advance_until(
        lambda: world.is_training and world.view.round and world.view.round.number == 2
    )
    assert world.last_event(RoundClosed).state_replicated
    assert leaving.ranks == []
    assert world.view.checkpoints == ()


def test_a_save_before_the_replacement_was_ready_does_not_close_the_round() -> None:
    """Its upload is still in progress. Workers save again for the change of machines, and that
    snapshot is replicated to a peer at once."""
    world = FakeCluster()
    world.wait_for_round()
    for rank in (0, 1):
        world.send_from_worker(
            rank, FilesReport(report_index=0, metrics=msgspec.Raw(b"{}"), incremental=True)
        )
    name = world.messages_to(0, CheckpointNamed)[-1].checkpoint_name
    leaving = world.node_of_rank(follower(world))
    leaving.instance.notice = a_notice(seconds_left=60.0)
    world.advance_until(
        lambda: (
            world.messages_to(0, PreemptionUpdate)
            and world.messages_to(0, PreemptionUpdate)[-1].replacement_ready
        )
    )
    world.advance(1.0)
    for rank in (0, 1):
        world.send_from_worker(
            rank, SaveCompleted(report_index=0, checkpoint_name=name, size_bytes=10, step=120)
        )
    world.advance_until(lambda: world.view.checkpoints)
    world.advance(2.0)
    assert world.events_of(RoundClosed) == [], "much may have been done since step 120"
    for rank in (0, 1):
        world.send_from_worker(
            rank, FilesReport(report_index=1, metrics=msgspec.Raw(b"{}"), incremental=True)
        )
    name = world.messages_to(0, CheckpointNamed)[-1].checkpoint_name
    for rank in (0, 1):
        world.send_from_worker(
            rank, SaveCompleted(report_index=1, checkpoint_name=name, size_bytes=10, step=150)
        )
    world.advance_until(
        lambda: world.is_training and world.view.round and world.view.round.number == 2
    )
    assert world.last_event(RoundClosed).reason == (
        "checkpoint saved after the preemption notice; replacement ready"
    )
    assert world.view.round is not None
    assert world.view.round.checkpoint_name == name


def test_a_replacement_is_used_once_it_is_warm() -> None:
    world = FakeCluster()
    world.wait_for_round()
    world.boots_granted = False
    leaving = world.node_of_rank(follower(world))
    leaving.instance.notice = a_notice(seconds_left=60.0)
    world.advance_until(lambda: world.last_event(GroupPlanned).request.num_workers == 1)
    cold = world.boot(world.last_event(GroupPlanned).request.token, 0)
    cold.worker_pool.is_warm = False
    world.advance_until(lambda: cold.agent_id in {one.agent for one in cold.ledger.list_members()})
    world.checkpoint(0, "c1")
    world.advance(2.0)
    assert world.events_of(RoundClosed) == []
    cold.worker_pool.is_warm = True
    world.advance(0.2)
    world.checkpoint(1, "c2")
    world.advance_until(
        lambda: world.is_training and world.view.round and world.view.round.number == 2
    )
    assert cold.ranks != []


def test_a_drained_machine_is_declared_lost_by_the_next_round() -> None:
    world = FakeCluster()
    world.wait_for_round()
    leaving = world.node_of_rank(follower(world))
    leaving.instance.notice = a_notice(seconds_left=60.0)
    world.advance_until(lambda: len(world.nodes) == 3)
    world.checkpoint(0, "c1")
    world.advance_until(lambda: leaving.has_exited)
    assert leaving.agent.is_abandoned
    assert world.last_event(NodeLost).reason == "it was replaced after its preemption notice"
    assert world.events_of(RoundClosed)[1:] == []


def test_without_a_replacement_training_continues_until_the_deadline() -> None:
    world = FakeCluster()
    world.boots_granted = False
    for node in (0, 1):
        world.boot(Token("t-1"), node)
    world.wait_for_round()
    leaving = world.node_of_rank(follower(world))
    leaving.instance.notice = a_notice(seconds_left=20.0)
    took_s = world.advance_until(lambda: world.last_event(RoundClosed))
    assert took_s == pytest.approx(20.0, abs=0.5)
    assert world.last_event(RoundClosed).reason == "the preemption deadline has passed"


def test_workers_running_at_the_deadline_are_reported_with_their_machines() -> None:
    world = FakeCluster(failure_limits=FailureLimits(preemption=0))
    world.boots_granted = False
    for node in (0, 1):
        world.boot(Token("t-1"), node)
    world.wait_for_round()
    assert follower(world) == 1
    world.node_of_rank(1).instance.notice = a_notice(seconds_left=5.0, deadline_ms=77)
    world.advance_until(lambda: world.view.fit_end)
    ended = world.last_event(FitEnded)
    assert ended.cause is FailureCause.PREEMPTION
    assert ended.preempted == PreemptedNodes(
        node_to_ranks={"t-1/1": (1,)}, deadline_ms=77, drain_timed_out=True
    )


def lose_noticed_machine(world: FakeCluster) -> None:
    """The machine that does not lead gets a notice and is lost a second later."""
    leaving = world.node_of_rank(follower(world))
    assert leaving is world.node_of_rank(1)
    leaving.instance.notice = a_notice(seconds_left=60.0, deadline_ms=77)
    world.advance_until(lambda: world.last_event(PreemptionNoticed))
    world.advance(1.0)
    world.kill(leaving)


def test_with_relaxed_collectives_the_remaining_ranks_save() -> None:
    world = FakeCluster(relax_collectives=True)
    world.wait_for_round()
    lose_noticed_machine(world)
    world.advance(5.0)
    assert world.events_of(RoundClosed) == []
    world.send_from_worker(
        0, FilesReport(report_index=0, metrics=msgspec.Raw(b"{}"), checkpoint_dir_name="c1")
    )
    assert world.messages_to(0, CheckpointNamed)[-1].ranks == (0,)
    world.send_from_worker(0, SaveCompleted(report_index=0, checkpoint_name="c1", size_bytes=10))
    world.advance_until(lambda: world.last_event(RoundClosed))
    closed = world.last_event(RoundClosed)
    assert (closed.cause, closed.preempted) == (
        FailureCause.PREEMPTION,
        PreemptedNodes(node_to_ranks={"t-1/1": (1,)}, deadline_ms=77),
    )
    world.advance_until(lambda: world.is_training)
    assert world.view.round is not None
    assert world.view.round.checkpoint_name == "c1"


def test_with_relaxed_collectives_a_save_does_not_wait_for_a_lost_part() -> None:
    world = FakeCluster(relax_collectives=True)
    world.wait_for_round()
    for rank in (1, 0):
        world.send_from_worker(
            rank, FilesReport(report_index=0, metrics=msgspec.Raw(b"{}"), checkpoint_dir_name="c0")
        )
    world.send_from_worker(0, SaveCompleted(report_index=0, checkpoint_name="c0", size_bytes=10))
    lose_noticed_machine(world)
    world.send_from_worker(
        0,
        FilesReport(report_index=1, metrics=msgspec.Raw(b"{}"), checkpoint_dir_name="c1"),
        SaveCompleted(report_index=1, checkpoint_name="c1", size_bytes=10),
    )
    assert world.advance_until(lambda: world.last_event(RoundClosed)) < 10.0, (
        "long before its time is over"
    )
    assert [one.name for one in world.view.checkpoints] == ["c1"]


def test_with_a_grace_period_the_remaining_ranks_finish_their_uploads() -> None:
    world = FakeCluster(failure_limits=FailureLimits(preemption_grace_s=30.0))
    world.wait_for_round()
    world.send_from_worker(1, MetricsReport(report_index=0, metrics=msgspec.Raw(b"{}")))
    world.send_from_worker(
        0, FilesReport(report_index=0, metrics=msgspec.Raw(b"{}"), checkpoint_dir_name="c1")
    )
    lose_noticed_machine(world)
    world.advance(5.0)
    assert world.events_of(RoundClosed) == []
    world.send_from_worker(0, SaveCompleted(report_index=0, checkpoint_name="c1", size_bytes=10))
    world.advance_until(lambda: world.last_event(RoundClosed))
    assert [kept.name for kept in world.view.checkpoints] == ["c1"]


def test_without_grace_or_relaxed_collectives_a_lost_machine_closes_the_round() -> None:
    world = FakeCluster()
    world.wait_for_round()
    world.send_from_worker(1, MetricsReport(report_index=0, metrics=msgspec.Raw(b"{}")))
    world.send_from_worker(
        0, FilesReport(report_index=0, metrics=msgspec.Raw(b"{}"), checkpoint_dir_name="c1")
    )
    lose_noticed_machine(world)
    assert world.advance_until(lambda: world.last_event(RoundClosed)) < 1.0
    assert world.last_event(RoundClosed).cause is FailureCause.PREEMPTION


def test_errors_that_follow_a_preemption_are_charged_to_it() -> None:
    world = FakeCluster(relax_collectives=True)
    world.wait_for_round()
    lose_noticed_machine(world)
    world.advance(1.0)
    world.fail_rank(0, "ConnectionError: closed by peer")
    world.advance_until(lambda: world.last_event(RoundClosed))
    assert world.last_event(RoundClosed).cause is FailureCause.PREEMPTION


# --- the end -------------------------------------------------------------------------------------


def test_a_cancelled_run_stops_its_workers() -> None:
    world = FakeCluster()
    world.wait_for_round()
    world.cancel()
    took_s = world.advance_until(lambda: all(node.has_exited for node in world.nodes.values()))
    assert took_s < 3.0
    assert world.last_event(FitEnded).outcome == "cancelled"
    assert not any(node.worker_pool.has_workers for node in world.nodes.values())


def test_an_agent_that_starts_after_the_end_exits() -> None:
    world = FakeCluster()
    world.wait_for_round()
    world.finish_rank(1)
    world.finish_rank(0)
    world.advance_until(lambda: world.view.fit_end)
    late = world.boot(Token("t-1"), 1)
    world.advance_until(lambda: late.has_exited)
    assert late.worker_pool.rounds == []


# --- a store that fails now and then -------------------------------------------------------------


@pytest.mark.parametrize("seed", range(6))
def test_a_run_finishes_although_store_calls_fail_randomly(seed: int) -> None:
    rng = random.Random(seed)
    world = FakeCluster(failure_limits=ANY_FAILURES)
    world.store.should_fail = lambda: rng.random() < 0.3
    world.wait_for_round()
    world.report(0)
    world.checkpoint(1, "c1", loss=0.5)
    world.advance_until(lambda: world.view.latest_checkpoint)
    world.fail_rank(1)
    world.advance_until(
        lambda: world.is_training and world.view.round and world.view.round.number == 2
    )
    world.finish_rank(1)
    world.finish_rank(0, b"the result")
    world.advance_until(lambda: world.view.fit_end)
    assert world.store.failure_count > 0
    assert [one.cause for one in world.events_of(RoundClosed)] == [FailureCause.WORKER]
    ended = world.last_event(FitEnded)
    assert ended.outcome == "finished"
    assert world.read_object(ended.result_key) == fake_seal(ended.result_key, b"the result")


@pytest.mark.parametrize("trouble", [StorePermissionError, StoreError])
def test_agents_survive_every_store_error(trouble: type[StoreError]) -> None:
    world = FakeCluster()
    world.wait_for_round()
    world.store.error_type = trouble
    world.store.should_fail = lambda: True
    world.checkpoint(0, "c1")
    world.advance(3.0)
    world.store.should_fail = lambda: False
    world.advance_until(lambda: world.last_event(CheckpointCommitted))
    assert world.events_of(RoundClosed) == []


def test_a_repeated_store_error_is_logged_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    world = FakeCluster()
    world.wait_for_round()
    node = world.leader
    world.store.should_fail = lambda: True
    for _ in range(5):
        node.agent.tick(world.engine.now)
        world.engine.now += 1.0
    told = capsys.readouterr().err.count("the store fails")
    assert 1 <= told <= 3


# --- a store that hangs --------------------------------------------------------------------------


def test_while_the_bucket_hangs_the_round_continues_and_entries_are_written_once() -> None:
    world = FakeCluster()
    world.wait_for_round()
    world.report(0)
    world.hang_store()
    for n in range(1, 30):
        world.report(n, loss=n)
        world.advance(1.0)
    assert world.is_training
    world.checkpoint(30, "c1", loss=0.5)
    for rank in (0, 1):
        world.send_from_worker(rank, RankZeroBroadcast(kind="barrier", seq=0))
    assert [len(world.messages_to(rank, RankZeroBroadcastResult)) for rank in (0, 1)] == [1, 1]
    world.advance(5.0)
    assert world.events_of(CheckpointCommitted) == []
    world.restore_store()
    world.advance_until(lambda: world.last_event(CheckpointCommitted))
    world.advance(20.0)
    assert [one.name for one in world.events_of(CheckpointCommitted)] == ["c1"]
    assert world.events_of(RoundClosed) == []
    assert len(world.events_of(LeaderElected)) == 2
    world.finish_rank(1)
    world.finish_rank(0)
    world.advance_until(lambda: all(node.has_exited for node in world.nodes.values()))
    keys_there = [key for (key, _) in world.store.list(".spotfit/reports")]
    lines = b"".join(world.read_object(key) for key in keys_there).splitlines()
    assert [msgspec.json.decode(line)["report_index"] for line in lines] == list(range(31))


def test_an_exception_is_stored_with_the_ranks_that_had_returned_before() -> None:
    world = FakeCluster()
    world.wait_for_round()
    world.finish_rank(0)
    world.fail_rank(1, "RuntimeError: connection closed by peer")
    world.advance_until(lambda: world.view.fit_end)
    ended = world.last_event(FitEnded)
    assert ended.reason.endswith("rank 1 raised: RuntimeError: connection closed by peer")
    assert ended.failures[0].message == (
        "(Ranks that had returned from the training function before: 0)\n"
        "Traceback\nRuntimeError: connection closed by peer"
    )


def test_while_the_bucket_hangs_a_worker_exit_stops_the_round() -> None:
    world = FakeCluster(failure_limits=ANY_FAILURES)
    world.wait_for_round()
    peer = world.node_of_rank(0)
    world.hang_store()
    world.advance(10.0)
    world.fail_rank(1)
    assert not peer.worker_pool.has_workers, "halted in the same moment"
    world.advance(10.0)
    assert world.events_of(RoundClosed) == []
    world.restore_store()
    took_s = world.advance_until(lambda: world.is_training)
    assert took_s < 1.0
    closed = world.last_event(RoundClosed)
    assert closed.reason == "rank 1 raised: ValueError: no"
    assert world.read_object(keys.failure(1, 1)) == fake_seal(keys.failure(1, 1), b"pickle")
    assert len(world.events_of(RoundOpened)) == 2


@pytest.mark.parametrize("deeds", [True, False])
def test_a_write_that_timed_out_is_stored_exactly_once(*, deeds: bool) -> None:
    world = FakeCluster(failure_limits=ANY_FAILURES)
    world.wait_for_round()
    world.hang_store()
    world.checkpoint(0, "c1", loss=0.5)
    world.advance(2.0)
    for _ in range(3):
        world.time_out_store_calls(executed=deeds)
        world.advance(5.0)
    assert world.is_training
    world.restore_store()
    world.advance(5.0)
    assert [one.name for one in world.events_of(CheckpointCommitted)] == ["c1"]
    assert world.events_of(RoundClosed) == []


def test_a_leader_lost_while_the_bucket_hangs_is_replaced_afterwards() -> None:
    world = FakeCluster()
    world.wait_for_round()
    world.checkpoint(0, "c1")
    old = world.leader
    world.hang_store()
    world.advance(3.0)
    world.kill(old)
    world.advance(10.0)
    assert len(world.events_of(LeaderElected)) == 2
    world.restore_store()
    world.advance_until(lambda: world.is_training)
    assert len(world.events_of(LeaderElected)) == 3
    assert world.leader is not old
    assert world.last_event(RoundClosed).cause is FailureCause.PREEMPTION


def test_a_result_being_written_delays_only_the_end_of_the_run() -> None:
    world = FakeCluster(failure_limits=ANY_FAILURES)
    world.wait_for_round()
    world.hang_store()
    world.finish_rank(0, b"the result")
    world.advance(10.0)
    assert world.is_training is False
    assert world.node_of_rank(1).ranks == [1]
    world.finish_rank(1)
    world.restore_store()
    world.advance_until(lambda: world.view.fit_end)
    assert world.last_event(FitEnded).outcome == "finished"
    assert world.events_of(RoundClosed) == []
    assert world.read_object(keys.result(1, 0)) == fake_seal(keys.result(1, 0), b"the result")


PATIENT_FOR_20_S = msgspec.structs.replace(TEMPO, orphan_timeout_s=20.0)


def test_an_agent_without_leader_and_bucket_exits_after_the_orphan_timeout() -> None:
    world = FakeCluster(timing=PATIENT_FOR_20_S)
    world.wait_for_round()
    alone = world.node_of_rank(follower(world))
    world.boots_granted = False
    world.store.should_fail = lambda: True
    world.kill(world.node_of_rank(1 - follower(world)))
    took_s = world.advance_until(lambda: alone.has_exited)
    assert took_s == pytest.approx(20.0, abs=1.0)
    assert alone.agent.is_abandoned
    assert not alone.worker_pool.has_workers


def test_an_agent_with_a_leader_survives_any_bucket_outage() -> None:
    world = FakeCluster(timing=PATIENT_FOR_20_S)
    world.wait_for_round()
    world.store.should_fail = lambda: True
    world.advance(30.0)
    assert not any(node.has_exited for node in world.nodes.values())
    assert world.is_training


def test_an_agent_that_never_finds_its_run_exits() -> None:
    world = FakeCluster()
    lost = world.boot(Token("t-1"), 0)
    world.store.should_fail = lambda: True
    assert lost.agent.tick(100.0) is not None
    assert lost.agent.tick(100.0 + TEMPO.orphan_timeout_s) is not None
    assert lost.agent.tick(100.1 + TEMPO.orphan_timeout_s) is None


def test_a_result_that_cannot_be_stored_does_not_block_the_agent() -> None:
    world = FakeCluster()
    world.wait_for_round()
    world.finish_rank(1)
    node = world.node_of_rank(0)
    world.store.should_fail = lambda: True
    node.worker_pool.send_from_worker(0, WorkerReturned(report_count=0, pickled_value=b"precious"))
    node.worker_pool.end_worker(0, clean=True)
    world.advance(3.0)
    world.store.should_fail = lambda: False
    assert world.view.is_active
    world.advance_until(lambda: world.view.fit_end)
    assert world.read_object(keys.result(1, 0)) == fake_seal(keys.result(1, 0), b"precious")


def test_an_unnamed_checkpoint_gets_a_generated_name() -> None:
    world = FakeCluster()
    world.wait_for_round()
    world.send_from_worker(1, MetricsReport(report_index=0, metrics=msgspec.Raw(b"{}")))
    world.send_from_worker(0, FilesReport(report_index=0, metrics=msgspec.Raw(b"{}")))
    assert world.messages_to(0, CheckpointNamed)[0].checkpoint_name == "made-0"


# --- validations ---------------------------------------------------------------------------------


def start_validation(own_machine: bool | None = None) -> FakeCluster:
    """A world in which a checkpoint is being validated."""
    world = FakeCluster(validation=ValidationSpec(own_machine=own_machine), timing=BRIEF)
    world.wait_for_round()
    world.checkpoint(0, "c1", validation=ValidationRequest(), loss=1)
    world.advance_until(lambda: world.validating_node)
    return world


def test_a_validation_machine_is_released_after_the_validation() -> None:
    world = start_validation()
    busy = world.validating_node
    assert busy is not None
    asked = world.last_event(GroupPlanned).request
    assert (asked.role, asked.num_workers, asked.total_workers) == ("validate", 1, 1)
    assert busy.member.token == asked.token
    assert busy.ranks == []
    assert world.is_training
    busy.validator.finish(acc=0.5)
    world.advance_until(
        lambda: (
            world.messages_to(0, ValidationFinished) and world.messages_to(1, ValidationFinished)
        )
    )
    assert world.view.metrics_of("c1") == {"rank": 0, "loss": 1, "acc": 0.5}
    world.advance_until(lambda: world.last_event(GroupsReleased))
    assert world.last_event(GroupsReleased).token == asked.token
    assert world.is_training


def test_a_validation_beside_workers_survives_the_end_of_their_round() -> None:
    world = start_validation(own_machine=False)
    beside = world.validating_node
    assert beside is world.leader
    world.fail_rank(1)
    assert world.last_event(FitEnded) is None
    assert world.last_event(TrainingEnded).fit_end.outcome == "failed"
    world.advance_until(lambda: len([n for n in world.nodes.values() if not n.has_exited]) == 1)
    assert world.validating_node is beside
    beside.validator.finish(error_text="no")
    world.advance_until(lambda: world.last_event(FitEnded))
    assert world.last_event(FitEnded) == world.last_event(TrainingEnded).fit_end
    assert world.events_of(ValidationEnded)[0].reason == "no"


def test_a_validation_result_is_repeated_to_a_new_leader() -> None:
    world = start_validation()
    busy = world.validating_node
    assert busy is not None
    dead = world.leader
    world.kill(dead)
    busy.validator.finish(acc=0.5)
    world.advance_until(lambda: world.last_event(ValidationEnded))
    assert world.leader is not dead
    assert world.last_event(ValidationEnded).metrics == {"acc": 0.5}
    assert len(world.events_of(ValidationStarted)) == 1


def test_a_repeated_result_does_not_hide_a_later_attempt() -> None:
    world = start_validation()
    busy = world.validating_node
    assert busy is not None
    busy.validator.finish(acc=0.5)
    world.advance_until(lambda: world.last_event(ValidationEnded))
    world.checkpoint(1, "c2", validation=ValidationRequest(), loss=1)
    world.advance_until(lambda: world.validating_node)
    for attempt in (2, 1):  # the first is repeated by an agent that reconnected
        busy.net.send_to_leader(
            ValidationReported(attempt=attempt, status="validated", metrics={"acc": attempt})
        )
    world.advance_until(lambda: len(world.events_of(ValidationEnded)) == 2)
    assert world.last_event(ValidationEnded).metrics == {"acc": 2}


def test_a_validation_restarts_after_its_machine_was_lost() -> None:
    world = start_validation()
    first = world.validating_node
    assert first is not None
    world.kill(first)
    world.advance_until(lambda: world.validating_node)
    again = world.validating_node
    assert again is not None
    assert again.member.token != first.member.token
    assert [one.attempt for one in world.events_of(ValidationStarted)] == [1, 2]


def test_after_training_only_the_validating_agent_stays() -> None:
    world = start_validation()
    busy = world.validating_node
    assert busy is not None
    for rank in (0, 1):
        world.finish_rank(rank, b"42" if rank == 0 else b"")
    world.advance_until(lambda: [n for n in world.nodes.values() if not n.has_exited] == [busy])
    assert world.leader is busy
    assert world.view.is_active
    busy.validator.finish(acc=0.5)
    world.advance_until(lambda: busy.has_exited)
    ended = world.last_event(FitEnded)
    assert (ended.outcome, ended.metrics) == ("finished", {"rank": 0, "loss": 1})
    assert world.read_object(ended.result_key) == fake_seal(ended.result_key, b"42")
    assert not world.cloud.groups or all(group.is_closed for group in world.view.groups.values())


def test_a_cancelled_run_does_not_wait_for_validations() -> None:
    world = start_validation()
    world.cancel()
    world.advance_until(lambda: all(node.has_exited for node in world.nodes.values()))
    assert world.last_event(FitEnded).outcome == "cancelled"
    assert world.events_of(ValidationEnded) == []
    assert [one.name for one in world.view.unvalidated_checkpoints] == ["c1"]
