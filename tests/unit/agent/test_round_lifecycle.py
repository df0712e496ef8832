"""Tests of the round lifecycle: early messages, failures, collectives, and hangs."""

from __future__ import annotations

import msgspec
import pytest

from spotfit.agent.ports import AgentMessageReceived, WorkerFramesReceived
from spotfit.core.codec import encode
from spotfit.core.ids import Token
from spotfit.ledger import keys
from spotfit.model.events import (
    FailureCause,
    FitEnded,
    LeaderElected,
    RoundClosed,
)
from spotfit.model.spec import FailureLimits, HangDetectionConfig
from spotfit.protocol.agent_leader import WorkerToLeader
from spotfit.protocol.worker_agent import (
    CollectiveWaiting,
    FunctionStarted,
    RankZeroBroadcast,
    RankZeroBroadcastResult,
)
from tests.unit.agent.simulated_cluster import FakeCluster

ANY_FAILURES = FailureLimits(worker=-1)


def started(world: FakeCluster) -> None:
    world.wait_for_round()
    for rank in (0, 1):
        world.send_from_worker(rank, FunctionStarted())


def test_an_unresponsive_worker_fails_its_round_and_names_its_stack_dump() -> None:
    world = FakeCluster(failure_limits=FailureLimits(worker=1))
    started(world)
    world.node_of_rank(1).worker_pool.mark_unresponsive(1, 601.0)
    took_s = world.advance_until(lambda: world.last_event(RoundClosed))
    assert took_s < 2.0
    closed = world.last_event(RoundClosed)
    assert closed.cause is FailureCause.WORKER
    [failure] = closed.failures
    assert (failure.rank, failure.kind) == (1, "timeout")
    [said] = world.messages
    assert said in failure.message
    key = keys.stack_dump(world.leader.agent_id, 1, 1)
    assert key in said
    assert b"=== rank 0: at work (0)" in world.read_object(key)
    world.advance_until(lambda: world.is_training)


def test_an_unresponsive_worker_without_stack_dump_fails_its_round() -> None:
    world = FakeCluster(failure_limits=ANY_FAILURES)
    started(world)
    for node in world.nodes.values():
        node.worker_pool.can_dump_stacks = False
    world.node_of_rank(1).worker_pool.mark_unresponsive(1, 601.0)
    took_s = world.advance_until(lambda: world.last_event(RoundClosed), within_s=60.0)
    assert took_s == pytest.approx(30.0, abs=1.0)


def test_a_worker_that_responds_again_does_not_fail() -> None:
    world = FakeCluster()
    started(world)
    for node in world.nodes.values():
        node.worker_pool.can_dump_stacks = False
    world.node_of_rank(1).worker_pool.mark_unresponsive(1, 601.0)
    world.advance(5.0)
    world.node_of_rank(1).worker_pool.mark_unresponsive(1, 0.0)
    world.advance(60.0)
    assert (world.events_of(RoundClosed), world.messages) == ([], [])


@pytest.mark.parametrize("ends", [True, False])
def test_a_round_without_progress_is_aborted_if_configured(
    ends: bool,
) -> None:
    world = FakeCluster(
        hang_detection=HangDetectionConfig(no_progress_timeout_s=60.0, abort_on_hang=ends),
        failure_limits=ANY_FAILURES,
    )
    started(world)
    world.report(0)
    world.advance(59.0)
    assert world.messages == []
    world.advance(2.0)
    assert len(world.messages) == 1
    assert (world.last_event(RoundClosed) is not None) == ends
    if not ends:
        world.advance(120.0)
        assert len(world.messages) == 1


def test_workers_that_never_start_are_charged_to_the_platform() -> None:
    world = FakeCluster(
        hang_detection=HangDetectionConfig(start_timeout_s=20.0),
        failure_limits=FailureLimits(platform=0),
    )
    world.wait_for_round()
    world.send_from_worker(0, FunctionStarted())
    world.advance_until(lambda: world.view.fit_end)
    ended = world.last_event(FitEnded)
    assert ended.cause is FailureCause.PLATFORM
    assert "rank 1 has not started within 20 s" in ended.reason


def test_a_round_that_an_agent_aborted_already_fails_immediately() -> None:
    world = FakeCluster()
    world.boots_granted = False
    world.boot(Token("t-1"), 0)
    left = world.boot(Token("t-1"), 1)
    left.agent._round_participant.abort_round(1)  # by an earlier leader that no other agent knows
    took_s = world.advance_until(lambda: world.is_training)
    assert took_s < 5.0
    assert world.view.round is not None
    assert world.view.round.number == 2


def test_an_agent_that_rejoins_a_failing_round_receives_the_abort() -> None:
    """Its connection breaks while the entry that opens the round is being written."""
    world = FakeCluster()
    world.boots_granted = False
    leader = world.boot(Token("t-1"), 0)
    world.advance_until(lambda: world.last_event(LeaderElected).leader == leader.agent_id)
    world.advance(0.5)
    world.hang_store(leader)
    other = world.boot(Token("t-1"), 1)
    world.advance(1.0)
    other.process.freeze()
    other.net.reset_connections()
    world.advance(0.2)
    leader.worker_pool.survives_kill = True  # its worker takes a moment to end
    world.restore_store()
    world.advance(0.2)
    assert world.events_of(RoundClosed) == []
    other.process.thaw()
    world.advance(0.2)
    leader.worker_pool.survives_kill = False
    world.advance_until(lambda: world.is_training)
    assert [one.cause for one in world.events_of(RoundClosed)] == [FailureCause.NETWORK]
    assert other.worker_pool.rounds == [2], "it never began what was over already"


def test_an_invalid_frame_fails_the_worker_but_not_the_leader() -> None:
    world = FakeCluster(failure_limits=ANY_FAILURES)
    world.wait_for_round()
    crew = world.node_of_rank(1).worker_pool
    crew._events.append(
        WorkerFramesReceived(1, 1, [msgspec.Raw(b'{"type":"saved","name":"\xff"}')])
    )
    world.advance_until(lambda: world.last_event(RoundClosed))
    assert "sent an invalid message" in world.last_event(RoundClosed).failures[0].message
    assert not world.leader.has_exited


def test_a_collective_timeout_names_the_missing_ranks() -> None:
    world = FakeCluster(collective_timeout_s=3.0)
    world.wait_for_round()
    world.send_from_worker(0, RankZeroBroadcast(kind="barrier", seq=0))
    world.advance(2.8)
    assert world.messages_to(0, RankZeroBroadcastResult) == []
    world.advance(0.4)
    assert world.messages_to(0, RankZeroBroadcastResult) == [
        RankZeroBroadcastResult(kind="barrier", seq=0, missing_ranks=(1,))
    ]


def test_a_waiting_collective_warns_at_the_configured_interval() -> None:
    world = FakeCluster(collective_warn_interval_s=2.0)
    world.wait_for_round()
    world.send_from_worker(0, RankZeroBroadcast(kind="barrier", seq=0))
    world.advance(4.5)
    assert [one.missing_ranks for one in world.messages_to(0, CollectiveWaiting)] == [(1,), (1,)]
    assert world.messages_to(1, CollectiveWaiting) == []


def test_messages_before_the_round_is_confirmed_are_replayed() -> None:
    """Agents may find a round in the bucket while the leader still waits for the answer to its
    own entry. A barrier that is ignored then would never complete."""
    world = FakeCluster(failure_limits=ANY_FAILURES)
    world.wait_for_round()
    leader = world.leader
    assert leader.agent._leader is not None
    here = next(rank for rank in (0, 1) if world.node_of_rank(rank) is leader)
    there = 1 - here
    early = WorkerToLeader(
        round=2, rank=there, frames=[msgspec.Raw(encode(RankZeroBroadcast(kind="barrier", seq=0)))]
    )
    leader.agent._leader.on_agent_event(
        AgentMessageReceived(world.node_of_rank(there).agent_id, early), world.engine.now
    )
    world.fail_rank(there)
    world.advance_until(
        lambda: world.is_training and world.view.round and world.view.round.number == 2
    )
    world.send_from_worker(here, RankZeroBroadcast(kind="barrier", seq=0))
    world.settle()
    assert world.messages_to(there, RankZeroBroadcastResult)
    assert world.messages_to(here, RankZeroBroadcastResult)
