"""Tests of the round lifecycle: early messages, failures, collectives, and hangs."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest
from msgspec.structs import replace

from spotfit.agent.ports import AgentMessageReceived, WorkerFramesReceived
from spotfit.agent.round_lifecycle import OpenRound
from spotfit.core.codec import encode
from spotfit.core.ids import Token
from spotfit.ledger import keys
from spotfit.model.events import (
    CheckpointCommitted,
    FailureCause,
    FitEnded,
    LeaderElected,
    PreemptionNoticed,
    RankFailure,
    RoundClosed,
)
from spotfit.model.reporting import SaveAtEnd
from spotfit.model.spec import FailureLimits, HangDetectionConfig
from spotfit.protocol.agent_leader import (
    SnapshotReplicated,
    StackDump,
    ToLeader,
    WorkerTerminated,
    WorkerToLeader,
    WorkerUnresponsive,
)
from spotfit.protocol.worker_agent import (
    CheckpointNamed,
    CollectiveWaiting,
    FunctionStarted,
    RankZeroBroadcast,
    RankZeroBroadcastResult,
    SaveCompleted,
    WorkerReturned,
)
from spotfit.testing.builders import a_notice
from tests.unit.agent.simulated_cluster import FakeCluster, FakeNode
from tests.unit.protocol.invalid_frames import INVALID_FRAMES

ANY_FAILURES = FailureLimits(worker=-1)


def start_all_functions(cluster: FakeCluster) -> None:
    cluster.wait_for_round()
    for rank in (0, 1):
        cluster.send_from_worker(rank, FunctionStarted())


def test_an_unresponsive_worker_fails_its_round_and_names_its_stack_dump() -> None:
    cluster = FakeCluster(failure_limits=FailureLimits(worker=1))
    start_all_functions(cluster)
    cluster.node_of_rank(1).worker_pool.mark_unresponsive(1, 601.0)
    duration_s = cluster.advance_until(lambda: cluster.last_event(RoundClosed))
    assert duration_s < 2.0
    closed = cluster.last_event(RoundClosed)
    assert closed.cause is FailureCause.WORKER
    [failure] = closed.failures
    assert (failure.rank, failure.kind) == (1, "timeout")
    [message] = cluster.messages
    assert message in failure.message
    key = keys.stack_dump(cluster.leader.agent_id, 1, 1)
    assert key in message
    assert b"=== rank 0: at work (0)" in cluster.read_object(key)
    cluster.advance_until(lambda: cluster.is_training)


def test_an_unresponsive_worker_without_stack_dump_fails_its_round() -> None:
    cluster = FakeCluster(failure_limits=ANY_FAILURES)
    start_all_functions(cluster)
    for node in cluster.nodes.values():
        node.worker_pool.can_dump_stacks = False
    cluster.node_of_rank(1).worker_pool.mark_unresponsive(1, 601.0)
    duration_s = cluster.advance_until(lambda: cluster.last_event(RoundClosed), within_s=60.0)
    assert duration_s == pytest.approx(30.0, abs=1.0)


def test_a_worker_that_responds_again_does_not_fail() -> None:
    cluster = FakeCluster()
    start_all_functions(cluster)
    for node in cluster.nodes.values():
        node.worker_pool.can_dump_stacks = False
    cluster.node_of_rank(1).worker_pool.mark_unresponsive(1, 601.0)
    cluster.advance(5.0)
    cluster.node_of_rank(1).worker_pool.mark_unresponsive(1, 0.0)
    cluster.advance(60.0)
    assert (cluster.events_of(RoundClosed), cluster.messages) == ([], [])


@pytest.mark.parametrize("ends", [True, False])
def test_a_round_without_progress_is_aborted_if_configured(
    ends: bool,
) -> None:
    cluster = FakeCluster(
        hang_detection=HangDetectionConfig(no_progress_timeout_s=60.0, abort_on_hang=ends),
        failure_limits=ANY_FAILURES,
    )
    start_all_functions(cluster)
    cluster.report(0)
    cluster.advance(59.0)
    assert cluster.messages == []
    cluster.advance(2.0)
    assert len(cluster.messages) == 1
    assert (cluster.last_event(RoundClosed) is not None) == ends
    if not ends:
        cluster.advance(120.0)
        assert len(cluster.messages) == 1


def test_workers_that_never_start_are_charged_to_the_platform() -> None:
    cluster = FakeCluster(
        hang_detection=HangDetectionConfig(start_timeout_s=20.0),
        failure_limits=FailureLimits(platform=0),
    )
    cluster.wait_for_round()
    cluster.send_from_worker(0, FunctionStarted())
    cluster.advance_until(lambda: cluster.view.fit_end)
    ended = cluster.last_event(FitEnded)
    assert ended.cause is FailureCause.PLATFORM
    assert "rank 1 has not started within 20 s" in ended.reason


def test_a_round_that_an_agent_aborted_already_fails_immediately() -> None:
    cluster = FakeCluster()
    cluster.boots_granted = False
    cluster.boot(Token("t-1"), 0)
    leaving = cluster.boot(Token("t-1"), 1)
    leaving.agent._round_participant.abort_round(
        1
    )  # by an earlier leader that no other agent knows
    duration_s = cluster.advance_until(lambda: cluster.is_training)
    assert duration_s < 5.0
    assert cluster.view.round is not None
    assert cluster.view.round.number == 2


def test_an_agent_that_rejoins_a_failing_round_receives_the_abort() -> None:
    """Its connection breaks while the entry that opens the round is being written."""
    cluster = FakeCluster()
    cluster.boots_granted = False
    leader = cluster.boot(Token("t-1"), 0)
    cluster.advance_until(lambda: cluster.last_event(LeaderElected).leader == leader.agent_id)
    cluster.advance(0.5)
    cluster.hang_store(leader)
    other = cluster.boot(Token("t-1"), 1)
    cluster.advance(1.0)
    other.process.freeze()
    other.net.reset_connections()
    cluster.advance(0.2)
    leader.worker_pool.survives_kill = True  # its worker takes a moment to end
    cluster.restore_store()
    cluster.advance(0.2)
    assert cluster.events_of(RoundClosed) == []
    other.process.thaw()
    cluster.advance(0.2)
    leader.worker_pool.survives_kill = False
    cluster.advance_until(lambda: cluster.is_training)
    assert [one.cause for one in cluster.events_of(RoundClosed)] == [FailureCause.NETWORK]
    assert other.worker_pool.rounds == [2], "the failed round was not started on it"


@pytest.mark.parametrize(
    ("frame", "text"),
    [
        (b'{"type":"saved","name":"\xff"}', "'saved' is invalid"),
        (INVALID_FRAMES["deep-metrics"], "'metrics_report' is invalid: It is nested too deep"),
        (INVALID_FRAMES["no-metrics"], "'files_report' is invalid: Expected `object`"),
        (encode(RankZeroBroadcast(kind="report", seq=0)), "'rank_zero_broadcast' is invalid"),
    ],
)
def test_an_invalid_frame_fails_the_worker_but_not_the_leader(frame: bytes, text: str) -> None:
    cluster = FakeCluster(failure_limits=ANY_FAILURES)
    cluster.wait_for_round()
    worker_pool = cluster.node_of_rank(1).worker_pool
    worker_pool._events.append(WorkerFramesReceived(1, 1, [msgspec.Raw(frame)]))
    cluster.advance_until(lambda: cluster.last_event(RoundClosed))
    closed = cluster.last_event(RoundClosed)
    assert closed.cause is FailureCause.WORKER
    [failure] = closed.failures
    assert failure.message.startswith(f"The worker of rank 1 sent an invalid message: {text}")
    assert not cluster.leader.has_exited


@pytest.mark.parametrize("rank", [-1, 0, 2, 10**12])
@pytest.mark.parametrize(
    "make_message",
    [
        lambda rank: WorkerTerminated(
            round=1, rank=rank, failure=RankFailure(rank=rank, kind="died", message="forged")
        ),
        lambda rank: WorkerTerminated(
            round=1, rank=1, failure=RankFailure(rank=rank, kind="died", message="forged")
        ),
        lambda rank: WorkerUnresponsive(round=1, rank=rank, silent_s=1e9),
        lambda rank: StackDump(round=1, dump_id=0, rank=rank, stack_text="forged"),
        lambda rank: SnapshotReplicated(
            round=1, rank=rank, step=3, peer_store_address="10.0.0.9:1"
        ),
        lambda rank: WorkerToLeader(
            round=1, rank=rank, frames=[msgspec.Raw(encode(WorkerReturned(report_count=0)))]
        ),
    ],
)
def test_a_message_about_a_rank_of_another_node_is_ignored(
    make_message: Callable[[int], ToLeader], rank: int, caplog: pytest.LogCaptureFixture
) -> None:
    cluster = FakeCluster(hang_detection=HangDetectionConfig(worker_timeout_s=40.0))
    cluster.wait_for_round()
    cluster.node_of_rank(1).net.send_to_leader(make_message(rank))
    cluster.advance(1.0)
    assert "round.message_ignored" in caplog.messages
    assert cluster.events_of(RoundClosed) == []
    assert cluster.is_training


@pytest.mark.parametrize("number", [-1, 0, 3, 10**12])
def test_a_message_about_a_round_that_no_agent_can_know_is_ignored(number: int) -> None:
    cluster = FakeCluster()
    cluster.wait_for_round()
    sender = cluster.node_of_rank(1)
    failure = RankFailure(rank=1, kind="died", message="forged")
    for _ in range(100):
        sender.net.send_to_leader(WorkerTerminated(round=number, rank=1, failure=failure))
    cluster.advance(1.0)
    leader = cluster.leader.agent._leader
    assert leader is not None
    assert leader._rounds._early_messages == []
    assert cluster.events_of(RoundClosed) == []


def test_a_collective_timeout_names_the_missing_ranks() -> None:
    cluster = FakeCluster(collective_timeout_s=3.0)
    cluster.wait_for_round()
    cluster.send_from_worker(0, RankZeroBroadcast(kind="barrier", seq=0))
    cluster.advance(2.8)
    assert cluster.messages_to(0, RankZeroBroadcastResult) == []
    cluster.advance(0.4)
    assert cluster.messages_to(0, RankZeroBroadcastResult) == [
        RankZeroBroadcastResult(kind="barrier", seq=0, missing_ranks=(1,))
    ]


def test_a_waiting_collective_warns_at_the_configured_interval() -> None:
    cluster = FakeCluster(collective_warn_interval_s=2.0)
    cluster.wait_for_round()
    cluster.send_from_worker(0, RankZeroBroadcast(kind="barrier", seq=0))
    cluster.advance(4.5)
    assert [one.missing_ranks for one in cluster.messages_to(0, CollectiveWaiting)] == [(1,), (1,)]
    assert cluster.messages_to(1, CollectiveWaiting) == []


def test_messages_before_the_round_is_confirmed_are_replayed() -> None:
    """Agents may find a round in the bucket while the leader still waits for the outcome of its
    entry. A barrier that is ignored then would never complete."""
    cluster = FakeCluster(failure_limits=ANY_FAILURES)
    cluster.wait_for_round()
    leader = cluster.leader
    assert leader.agent._leader is not None
    leader_rank = next(rank for rank in (0, 1) if cluster.node_of_rank(rank) is leader)
    other_rank = 1 - leader_rank
    early = WorkerToLeader(
        round=2,
        rank=other_rank,
        frames=[msgspec.Raw(encode(RankZeroBroadcast(kind="barrier", seq=0)))],
    )
    leader.agent._leader.on_agent_event(
        AgentMessageReceived(cluster.node_of_rank(other_rank).agent_id, early), cluster.engine.now
    )
    cluster.fail_rank(other_rank)
    cluster.advance_until(
        lambda: cluster.is_training and cluster.view.round and cluster.view.round.number == 2
    )
    cluster.send_from_worker(leader_rank, RankZeroBroadcast(kind="barrier", seq=0))
    cluster.settle()
    assert cluster.messages_to(other_rank, RankZeroBroadcastResult)
    assert cluster.messages_to(leader_rank, RankZeroBroadcastResult)


AN_END = SaveAtEnd(step=7, saved_step=0, save_number=1, has_snapshot=True)


def return_with_snapshots(cluster: FakeCluster, *ends: SaveAtEnd) -> None:
    """Let all functions return, each with a snapshot of its last step."""
    start_all_functions(cluster)
    for rank, end in enumerate(ends):
        cluster.send_from_worker(rank, WorkerReturned(report_count=0, save_at_end=end))
    cluster.advance(2.0)


def test_the_run_ends_once_the_snapshots_at_the_end_are_committed() -> None:
    cluster = FakeCluster()
    return_with_snapshots(cluster, AN_END, AN_END)
    assert cluster.events_of(FitEnded) == []
    (named,) = cluster.messages_to(1, CheckpointNamed)
    for rank in (0, 1):
        done = SaveCompleted(report_index=0, checkpoint_name=named.checkpoint_name, step=7)
        cluster.send_from_worker(rank, done)
        cluster.node_of_rank(rank).worker_pool.end_worker(rank, clean=True)
    cluster.advance_until(lambda: cluster.events_of(FitEnded))
    assert [commit.step for commit in cluster.events_of(CheckpointCommitted)] == [7]
    assert cluster.last_event(FitEnded).last_save_error == ""


def test_a_node_that_is_lost_during_the_save_at_the_end_closes_the_round() -> None:
    cluster = FakeCluster(failure_limits=ANY_FAILURES)
    return_with_snapshots(cluster, AN_END, AN_END)
    lost = next(rank for rank in (0, 1) if cluster.node_of_rank(rank) is not cluster.leader)
    cluster.kill(cluster.node_of_rank(lost))
    cluster.advance_until(lambda: cluster.events_of(RoundClosed))
    assert cluster.events_of(FitEnded) == []


def test_a_node_with_a_notice_that_is_lost_during_the_save_at_the_end_closes_the_round() -> None:
    """Also if the others may continue without it: they cannot save its part of the last steps."""
    limits = FailureLimits(worker=-1, preemption_grace_s=20.0)
    cluster = FakeCluster(failure_limits=limits, relax_collectives=True)
    cluster.wait_for_round()
    cluster.node_of_rank(1).instance.notice = a_notice(seconds_left=60.0)
    cluster.advance_until(lambda: cluster.last_event(PreemptionNoticed))
    return_with_snapshots(cluster, AN_END, AN_END)
    nodes = [cluster.node_of_rank(rank) for rank in (0, 1)]
    for rank, node in enumerate(nodes):
        node.worker_pool.end_worker(rank, clean=True)
    cluster.kill(nodes[1])
    cluster.advance_until(lambda: cluster.events_of(RoundClosed) or cluster.events_of(FitEnded))
    assert cluster.events_of(FitEnded) == []
    assert cluster.last_event(RoundClosed).cause is FailureCause.PREEMPTION


def test_a_node_with_a_notice_that_is_lost_before_the_save_at_the_end_closes_the_round() -> None:
    limits = FailureLimits(worker=-1, preemption_grace_s=20.0)
    cluster = FakeCluster(failure_limits=limits, relax_collectives=True)
    start_all_functions(cluster)
    cluster.node_of_rank(1).instance.notice = a_notice(seconds_left=60.0)
    cluster.advance_until(lambda: cluster.last_event(PreemptionNoticed))
    cluster.send_from_worker(1, WorkerReturned(report_count=0, save_at_end=AN_END))
    cluster.kill(cluster.node_of_rank(1))
    cluster.advance(1.0)
    leader = cluster.node_of_rank(0)
    cluster.send_from_worker(0, WorkerReturned(report_count=0, save_at_end=AN_END))
    leader.worker_pool.end_worker(0, clean=True)
    cluster.advance_until(lambda: cluster.events_of(RoundClosed) or cluster.events_of(FitEnded))
    assert cluster.events_of(FitEnded) == []


def test_a_run_whose_ranks_ended_at_different_steps_ends_with_unsaved_steps() -> None:
    cluster = FakeCluster()
    return_with_snapshots(cluster, AN_END, replace(AN_END, step=8))
    for rank in (0, 1):
        cluster.node_of_rank(rank).worker_pool.end_worker(rank, clean=True)
    cluster.advance_until(lambda: cluster.events_of(FitEnded))
    ended = cluster.last_event(FitEnded)
    assert ended.outcome == "finished"
    assert "rank 0 ended at step 7, rank 1 at step 8" in ended.last_save_error


# --- exceptions about a lost peer ----------------------------------------------------------------


LOST_PEER = "lightgbm.basic.LightGBMError: Socket recv error, Connection reset by peer"


def cluster_with_lost_peer() -> tuple[FakeCluster, FakeNode]:
    """A cluster in which rank 0 has raised because of rank 1, and the node of rank 1."""
    cluster = FakeCluster(failure_limits=ANY_FAILURES)
    cluster.wait_for_round()
    cluster.fail_rank(0, LOST_PEER)
    cluster.advance(0.01)
    return cluster, cluster.node_of_rank(1)


def test_an_exception_about_a_lost_peer_waits_for_the_error_of_that_peer() -> None:
    cluster, peer = cluster_with_lost_peer()
    assert peer.worker_pool.has_workers
    cluster.fail_rank(1, "ValueError: the loss is NaN")
    cluster.advance_until(lambda: cluster.last_event(RoundClosed))
    closed = cluster.last_event(RoundClosed)
    assert closed.reason == "rank 1 raised: ValueError: the loss is NaN"


def test_an_exception_about_a_lost_peer_alone_ends_the_round() -> None:
    cluster, _ = cluster_with_lost_peer()
    duration_s = cluster.advance_until(lambda: cluster.last_event(RoundClosed))
    assert 0.4 < duration_s < 2.0
    assert cluster.last_event(RoundClosed).reason == f"rank 0 raised: {LOST_PEER}"


def test_exceptions_about_a_lost_peer_on_all_ranks_end_the_round_at_once() -> None:
    cluster, _ = cluster_with_lost_peer()
    cluster.fail_rank(1, LOST_PEER)
    duration_s = cluster.advance_until(lambda: cluster.last_event(RoundClosed))
    assert duration_s < 0.2


# --- exceptions on nodes with a notice -----------------------------------------------------------


def cluster_with_notice() -> tuple[FakeCluster, int, int]:
    """A training cluster, the rank on a node with a notice and the rank on the other node."""
    cluster = FakeCluster(failure_limits=ANY_FAILURES)
    cluster.wait_for_round()
    cluster.boots_granted = False
    leader = cluster.last_event(LeaderElected).leader
    leaving, staying = sorted(
        (0, 1), key=lambda rank: cluster.node_of_rank(rank).agent_id == leader
    )
    cluster.node_of_rank(leaving).instance.notice = a_notice(seconds_left=60.0)
    cluster.advance_until(lambda: cluster.last_event(PreemptionNoticed))
    return cluster, leaving, staying


def test_an_exception_on_a_node_with_a_notice_gives_the_other_ranks_time_to_raise() -> None:
    cluster, leaving, staying = cluster_with_notice()
    cluster.fail_rank(leaving, "RuntimeError: a bug")
    cluster.advance(0.01)
    assert cluster.node_of_rank(staying).worker_pool.has_workers
    cluster.fail_rank(staying, "RuntimeError: a bug")
    cluster.advance_until(lambda: cluster.last_event(RoundClosed))
    closed = cluster.last_event(RoundClosed)
    assert closed.cause is FailureCause.WORKER
    assert {failure.rank for failure in closed.failures} == {leaving, staying}


def test_an_exception_on_nodes_with_a_notice_alone_ends_the_round_as_a_preemption() -> None:
    cluster, leaving, staying = cluster_with_notice()
    peer = cluster.node_of_rank(staying)
    cluster.fail_rank(leaving, "RuntimeError: a bug")
    duration_s = cluster.advance_until(lambda: cluster.last_event(RoundClosed))
    closed = cluster.last_event(RoundClosed)
    assert duration_s < 2.0
    assert closed.cause is FailureCause.PREEMPTION
    assert closed.reason.endswith(f"rank {leaving} raised: RuntimeError: a bug")
    assert not peer.worker_pool.has_workers


def test_the_leader_sleeps_while_workers_are_stopped_after_that_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster, leaving, staying = cluster_with_notice()
    pool, late = cluster.node_of_rank(staying).worker_pool, []
    pool.survives_kill = True
    next_wake = OpenRound.next_wake

    def record(self: OpenRound, now: float) -> float:
        if (wake := next_wake(self, now)) <= now:
            late.append(wake)
        return wake

    monkeypatch.setattr(OpenRound, "next_wake", record)
    cluster.fail_rank(leaving, "RuntimeError: a bug")
    cluster.advance(3.0)
    assert pool.has_workers
    assert late == []


def test_an_exception_on_a_node_without_a_notice_stops_the_round_at_once() -> None:
    cluster, leaving, staying = cluster_with_notice()
    peer = cluster.node_of_rank(leaving)
    cluster.fail_rank(staying, "RuntimeError: a bug")
    cluster.advance(0.01)
    assert not peer.worker_pool.has_workers
