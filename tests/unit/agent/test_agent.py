"""Tests of several agents together: elections, rounds, losses, and store failures."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from spotfit.checkpoint.manifest import Manifest
from spotfit.control.background_calls import BackgroundResult
from spotfit.core.errors import QuotaError, StoreError, StorePermissionError
from spotfit.core.ids import Token
from spotfit.ledger import keys
from spotfit.model.events import (
    CheckpointCommitted,
    FailureCause,
    FitEnded,
    FitStarted,
    GroupPlanned,
    GroupRefused,
    GroupsReleased,
    GroupSubmitted,
    JournalEvent,
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
from spotfit.model.group import GroupHandle, NodeState, NodeStatus
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
from tests.unit.agent.simulated_cluster import TIMING, FakeCluster, FakeNode, fake_seal
from tests.unit.control.fake_provisioner import LAUNCH

ANY_FAILURES = FailureLimits(worker=-1)
BRIEF = replace(TIMING, validator_idle_timeout_s=2.0)


# --- a run without failures ----------------------------------------------------------------------


def test_agents_that_join_elect_a_leader_and_start_all_ranks() -> None:
    cluster = FakeCluster()
    assert cluster.wait_for_round() == 1
    assert [one.epoch for one in cluster.events_of(LeaderElected)] == [1, 2]
    assert sorted(rank for node in cluster.nodes.values() for rank in node.ranks) == [0, 1]


def test_a_start_message_holds_rank_and_topology() -> None:
    cluster = FakeCluster()
    cluster.wait_for_round()
    for rank in (0, 1):
        node = cluster.node_of_rank(rank)
        start = node.worker_pool.workers[rank]
        assert (start.rank, start.world_size, start.node_rank, start.local_rank) == (
            rank,
            2,
            rank,
            0,
        )
        assert (start.host, start.round, start.checkpoint) == (node.member.host, 1, None)
        assert start.secret == "secret"
        assert node.worker_pool.spec == cluster.view.spec


def test_agents_publish_their_member_entries() -> None:
    cluster = FakeCluster()
    cluster.wait_for_round()
    offers = {one.agent for one in cluster.node_of_rank(0).ledger.list_members()}
    assert offers == {node.agent_id for node in cluster.nodes.values()}


def test_after_all_ranks_return_the_run_finishes_and_agents_exit() -> None:
    cluster = FakeCluster()
    cluster.wait_for_round()
    cluster.report(0, loss=0.5)
    cluster.finish_rank(1)
    assert cluster.view.is_active
    cluster.finish_rank(0, b"the result")
    cluster.advance_until(lambda: all(node.has_exited for node in cluster.nodes.values()))
    assert cluster.last_event(FitEnded) == FitEnded(
        outcome="finished", metrics={"rank": 0, "loss": 0.5}, result_key=keys.result(1, 0)
    )
    assert cluster.read_object(keys.result(1, 0)) == fake_seal(keys.result(1, 0), b"the result")
    assert cluster.last_event(GroupsReleased) is not None, "all machines are released"
    assert not any(node.agent.is_abandoned for node in cluster.nodes.values())


def test_a_committed_checkpoint_is_confirmed_to_all_workers() -> None:
    cluster = FakeCluster()
    cluster.wait_for_round()
    cluster.checkpoint(0, "c1", loss=0.5)
    committed = cluster.last_event(CheckpointCommitted)
    assert (committed.name, committed.report_index, committed.ranks) == ("c1", 0, (0,))
    for rank in (0, 1):
        assert cluster.messages_to(rank, CommitConfirmed) == [
            CommitConfirmed(checkpoint_name="c1", metrics={"rank": 0, "loss": 0.5})
        ]


# --- failed workers ------------------------------------------------------------------------------


def test_an_exception_closes_the_round_and_opens_the_next() -> None:
    cluster = FakeCluster(failure_limits=ANY_FAILURES)
    cluster.wait_for_round()
    cluster.checkpoint(0, "c1")
    failed = cluster.node_of_rank(1)
    cluster.fail_rank(1)
    cluster.advance_until(lambda: cluster.is_training)
    closed = cluster.last_event(RoundClosed)
    assert (closed.cause, closed.reason) == (FailureCause.WORKER, "rank 1 raised: ValueError: no")
    assert [(one.rank, one.pickle_key) for one in closed.failures] == [(1, keys.failure(1, 1))]
    assert cluster.read_object(keys.failure(1, 1)) == fake_seal(keys.failure(1, 1), b"pickle")
    assert cluster.view.round is not None
    assert (cluster.view.round.number, cluster.view.round.checkpoint_name) == (2, "c1")
    assert cluster.node_of_rank(1) is failed, "remaining nodes keep their ranks"
    assert cluster.node_of_rank(0).worker_pool.workers[0].checkpoint_metrics == {"rank": 0}


def test_a_killed_worker_stops_its_peers_immediately() -> None:
    cluster = FakeCluster(failure_limits=ANY_FAILURES)
    cluster.wait_for_round()
    peer = cluster.node_of_rank(0)
    cluster.node_of_rank(1).worker_pool.end_worker(1, "was killed by SIGKILL")
    duration_s = cluster.advance_until(
        lambda: cluster.is_training and peer.worker_pool.rounds == [1, 2]
    )
    assert duration_s < 0.2
    closed = cluster.last_event(RoundClosed)
    assert closed.failures[0].message == "The worker of rank 1 was killed by SIGKILL."


def test_exit_code_0_before_the_return_is_a_failure() -> None:
    cluster = FakeCluster()
    cluster.wait_for_round()
    cluster.node_of_rank(0).worker_pool.end_worker(0, "exited with code 0", clean=True)
    cluster.advance_until(lambda: cluster.view.fit_end)
    assert (
        "exited with code 0 before its function had returned" in cluster.last_event(FitEnded).reason
    )


def test_without_a_failure_budget_the_first_failure_ends_the_run() -> None:
    cluster = FakeCluster()
    cluster.wait_for_round()
    cluster.fail_rank(0)
    cluster.advance_until(lambda: all(node.has_exited for node in cluster.nodes.values()))
    ended = cluster.last_event(FitEnded)
    assert (ended.outcome, ended.cause) == ("failed", FailureCause.WORKER)
    assert len(cluster.events_of(RoundOpened)) == 1


def test_workers_that_survive_a_kill_cost_the_machine_but_not_the_run() -> None:
    cluster = FakeCluster(failure_limits=ANY_FAILURES)
    cluster.wait_for_round()
    stuck = cluster.node_of_rank(1)
    stuck.worker_pool.survives_kill = True
    cluster.fail_rank(0)
    cluster.advance_until(lambda: cluster.is_training, within_s=60)
    lost = cluster.last_event(NodeLost)
    assert (lost.agent, lost.reason) == (stuck.agent_id, "its workers did not stop in time")
    stuck.worker_pool.survives_kill = False
    cluster.advance_until(lambda: stuck.has_exited)
    assert stuck.agent.is_abandoned


def test_an_agent_exits_although_its_workers_do_not_end() -> None:
    """Nothing may end the machine of an agent whose run has ended, if the backend waits for it."""
    cluster = FakeCluster()
    cluster.wait_for_round()
    stuck = list(cluster.nodes.values())
    for node in stuck:
        node.worker_pool.survives_kill = True
    cluster.cancel()
    cluster.advance_until(lambda: cluster.view.fit_end)
    cluster.advance(25.0)
    assert not any(node.has_exited for node in stuck)
    cluster.advance_until(lambda: all(node.has_exited for node in stuck), within_s=60.0)
    assert all(node.agent.has_processes_left for node in stuck)


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
    cluster = FakeCluster(failure_limits=ANY_FAILURES)
    cluster.boots_granted = False
    first = cluster.boot(Token("t-1"), 0)
    cluster.advance_until(lambda: cluster.leader is first)
    break_environment(first)
    cluster.advance_until(lambda: cluster.view.fit_end)
    ended = cluster.last_event(FitEnded)
    assert (ended.outcome, ended.cause) == ("failed", FailureCause.WORKER)
    assert ended.reason == "not retried, the failure is permanent: rank 0 raised: no such package"
    assert ended.failures[0].pickle_key == keys.agent_failure(first.agent_id)
    assert cluster.events_of(RoundOpened) == []


def test_a_join_reports_an_unusable_node_to_a_new_leader() -> None:
    cluster = FakeCluster(failure_limits=ANY_FAILURES)
    cluster.wait_for_round()
    leader, other = cluster.leader, cluster.node_of_rank(follower(cluster))
    break_environment(other)
    cluster.advance(0.2)
    assert cluster.is_training, "running workers are not affected"
    cluster.kill(leader)
    cluster.advance_until(lambda: cluster.view.fit_end)
    assert cluster.last_event(FitEnded).reason.endswith("no such package")


# --- lost machines -------------------------------------------------------------------------------


def lost_agents(cluster: FakeCluster) -> set[str | None]:
    """Return the agents whose nodes are lost according to the journal."""
    return {lost.agent for lost in cluster.events_of(NodeLost)}


def follower(cluster: FakeCluster) -> int:
    """A rank on the node that is not the leader."""
    return next(rank for rank in (0, 1) if cluster.node_of_rank(rank) is not cluster.leader)


def test_a_lost_machine_is_replaced_and_the_run_continues() -> None:
    cluster = FakeCluster()
    cluster.wait_for_round()
    cluster.checkpoint(0, "c1")
    gone = cluster.node_of_rank(follower(cluster))
    cluster.kill(gone)
    cluster.advance_until(lambda: cluster.is_training)
    closed = cluster.last_event(RoundClosed)
    assert closed.cause is FailureCause.PREEMPTION
    assert cluster.last_event(NodeLost).agent == gone.agent_id
    assert cluster.last_event(GroupPlanned).request.num_workers == 1
    assert cluster.view.round is not None
    assert cluster.view.round.checkpoint_name == "c1"
    assert cluster.view.failure_counts == {FailureCause.PREEMPTION: 1}


def test_a_lost_leader_is_replaced_within_a_second() -> None:
    cluster = FakeCluster()
    cluster.wait_for_round()
    cluster.checkpoint(0, "c1")
    old = cluster.leader
    cluster.kill(old)
    duration_s = cluster.advance_until(lambda: cluster.leader is not old)
    assert duration_s < 1.0
    cluster.advance_until(lambda: cluster.is_training)
    assert cluster.last_event(LeaderElected).lost_leader == old.agent_id
    assert cluster.last_event(RoundClosed).cause is FailureCause.PREEMPTION
    assert cluster.view.latest_checkpoint is not None


def test_a_new_leader_commits_a_complete_checkpoint_of_its_predecessor() -> None:
    cluster = FakeCluster()
    cluster.wait_for_round()
    part = Manifest(
        name="c9", round=1, report_index=0, rank=0, ranks=(0,), metrics={"loss": 0.1}, files=()
    )
    cluster.put_manifest(part)
    cluster.kill(cluster.leader)
    cluster.advance_until(lambda: cluster.is_training)
    assert [one.name for one in cluster.events_of(CheckpointCommitted)] == ["c9"]
    assert cluster.view.round is not None
    assert cluster.view.round.checkpoint_name == "c9"


def test_a_late_checkpoint_of_an_old_round_does_not_roll_the_run_back() -> None:
    cluster = FakeCluster(failure_limits=ANY_FAILURES)
    cluster.wait_for_round()
    cluster.checkpoint(0, "old")
    cluster.checkpoint(1, "new")
    part = Manifest(name="late", round=1, report_index=0, rank=0, ranks=(0,), metrics={}, files=())
    cluster.put_manifest(part)
    cluster.fail_rank(0)
    cluster.advance_until(lambda: cluster.is_training)
    assert cluster.view.round is not None
    assert cluster.view.round.checkpoint_name == "new"


def test_a_broken_connection_is_retried_before_an_election() -> None:
    cluster = FakeCluster()
    cluster.wait_for_round()
    leader, other = cluster.leader, cluster.node_of_rank(follower(cluster))
    before = len(other.net.dialed)
    other.net.reset_connections()
    cluster.advance_until(lambda: cluster.is_training)
    assert other.net.dialed[before:] == [leader.net.address]
    assert cluster.leader is leader
    assert cluster.last_event(RoundClosed).round_number == 1


def test_a_broken_connection_is_not_a_lost_machine_while_its_backend_reports_it_running() -> None:
    cluster = FakeCluster(status_lag_s=0.0, failure_limits=FailureLimits(preemption=0, platform=0))
    cluster.wait_for_round()
    frozen = cluster.node_of_rank(follower(cluster))
    frozen.process.freeze()
    frozen.net.reset_connections()
    cluster.advance_until(lambda: cluster.last_event(RoundClosed))
    assert cluster.last_event(RoundClosed).cause is FailureCause.NETWORK
    frozen.process.thaw()
    cluster.advance_until(lambda: cluster.is_training)
    assert cluster.view.failure_counts == {FailureCause.NETWORK: 1}
    assert cluster.events_of(NodeLost) == []


@pytest.mark.parametrize(
    ("status_lag_s", "cause"), [(0.0, FailureCause.PLATFORM), (60.0, FailureCause.PREEMPTION)]
)
def test_a_lost_agent_is_charged_to_the_cause_that_its_backend_reports(
    status_lag_s: float, cause: FailureCause
) -> None:
    """Without a report of the backend a silent agent counts as preempted, the most likely cause."""
    cluster = FakeCluster(status_lag_s=status_lag_s)
    cluster.wait_for_round()
    frozen = cluster.node_of_rank(follower(cluster))
    frozen.process.freeze()
    frozen.net.reset_connections()
    cluster.advance_until(lambda: cluster.last_event(NodeLost))
    assert cluster.last_event(RoundClosed).cause is FailureCause.NETWORK
    assert cluster.last_event(NodeLost).cause is cause
    assert cluster.view.failure_counts == {cause: 1}
    assert cluster.view.last_round_closed is not None
    assert cluster.view.last_round_closed.cause is cause


def test_a_failure_budget_is_checked_once_the_cause_is_known() -> None:
    cluster = FakeCluster(status_lag_s=0.0, failure_limits=FailureLimits(platform=0))
    cluster.wait_for_round()
    frozen = cluster.node_of_rank(follower(cluster))
    frozen.process.freeze()
    frozen.net.reset_connections()
    cluster.advance_until(lambda: cluster.view.fit_end)
    ended = cluster.last_event(FitEnded)
    assert (ended.outcome, ended.cause) == ("failed", FailureCause.PLATFORM)
    assert "its agent did not reconnect within 1 s" in ended.reason


def test_a_leader_is_replaced_only_after_a_second_refused_connection() -> None:
    cluster = FakeCluster()
    cluster.wait_for_round()
    leader, other = cluster.leader, cluster.node_of_rank(follower(cluster))
    before = len(other.net.dialed)
    leader.net.stop_listening()
    leader.process.freeze()
    other.net.reset_connections()
    cluster.advance_until(lambda: cluster.leader is other)
    assert other.net.dialed[before:][:2] == [leader.net.address, other.net.address]
    assert cluster.last_event(LeaderElected).reason == "the previous leader's port is closed"


def test_a_silent_leader_is_replaced_only_after_its_lease_expired() -> None:
    cluster = FakeCluster()
    cluster.wait_for_round()
    leader, other = cluster.leader, cluster.node_of_rank(follower(cluster))
    leader.process.freeze()
    duration_s = cluster.advance_until(lambda: cluster.leader is other, within_s=60)
    assert duration_s > TIMING.heartbeat_timeout_s
    assert cluster.last_event(LeaderElected).lost_leader is None


def test_a_deposed_leader_joins_its_successor() -> None:
    cluster = FakeCluster()
    cluster.wait_for_round()
    old = cluster.leader
    old.process.freeze()
    cluster.advance_until(lambda: cluster.leader is not old, within_s=60)
    written = len(cluster.entries)
    old.process.thaw()
    cluster.advance_until(lambda: cluster.is_training or old.has_exited, within_s=60)
    assert not any(entry.author == old.agent_id for entry in cluster.entries[written:])
    assert cluster.view.failure_counts.get(FailureCause.WORKER, 0) == 0
    assert old.node_services.sidecar_stop_count == 1, "callbacks and hooks belong to its successor"
    assert cluster.leader.node_services.sidecar_stop_count == 0


def test_an_agent_declared_lost_exits_when_it_resumes() -> None:
    cluster = FakeCluster()
    cluster.wait_for_round()
    frozen = cluster.node_of_rank(follower(cluster))
    frozen.process.freeze()
    cluster.advance_until(lambda: frozen.agent_id in lost_agents(cluster), within_s=60)
    frozen.process.thaw()
    cluster.advance_until(lambda: frozen.has_exited)
    assert frozen.agent.is_abandoned
    assert not frozen.worker_pool.has_workers, "its workers ended before it"


def test_an_agent_without_replacement_exits_at_its_deadline() -> None:
    """Its exit code differs: a scheduler that restarts it resumes a run without other agents."""
    cluster = FakeCluster()
    cluster.boots_granted = False
    for node in (0, 1):
        cluster.boot(Token("t-1"), node)
    cluster.wait_for_round()
    leaving = cluster.node_of_rank(follower(cluster))
    leaving.instance.notice = a_notice(seconds_left=20.0)
    duration_s = cluster.advance_until(lambda: leaving.has_exited)
    assert duration_s == pytest.approx(20.5, abs=1.0)
    assert leaving.agent.is_drained
    assert not leaving.worker_pool.has_workers, "its workers ended before it"
    assert not leaving.agent.is_abandoned


def test_an_agent_of_an_unknown_group_exits() -> None:
    """A leader was deposed while renting it; no other process would release it."""
    cluster = FakeCluster()
    cluster.wait_for_round()
    unknown = cluster.boot(Token("t-unknown"), 0)
    cluster.advance_until(lambda: unknown.has_exited)
    assert unknown.agent.is_abandoned
    assert unknown.worker_pool.rounds == []
    assert cluster.is_training


def start_next_fit(*between: JournalEvent) -> FakeCluster:
    """A cluster whose fit is followed by another one before its machines have ended."""
    cluster = FakeCluster()
    cluster.wait_for_round()
    cluster.boots_granted = False
    cluster.hang_store()
    for event in (FitEnded(outcome="cancelled"), *between):
        cluster.append(event)
    cluster.append(FitStarted(spec=cluster.view.spec))
    cluster.restore_store()
    return cluster


def test_agents_of_an_earlier_fit_exit_and_do_not_lead_the_next_one() -> None:
    cluster = start_next_fit()
    epoch = cluster.view.epoch
    cluster.advance_until(lambda: all(node.has_exited for node in cluster.nodes.values()))
    assert cluster.view.epoch == epoch
    assert all(node.agent.is_abandoned for node in cluster.nodes.values())
    assert cluster.view.unsettled_groups.keys() == {"t-1"}


def test_agents_that_an_earlier_fit_has_released_do_not_lead_the_next_one() -> None:
    cluster = start_next_fit(GroupsReleased(token=Token("t-1")))
    epoch = cluster.view.epoch
    assert not cluster.view.unsettled_groups
    cluster.advance_until(lambda: all(node.has_exited for node in cluster.nodes.values()))
    assert cluster.view.epoch == epoch


def test_the_leading_agent_releases_groups_of_an_earlier_fit() -> None:
    cluster = start_next_fit()
    cluster.advance_until(lambda: all(node.has_exited for node in cluster.nodes.values()))
    (before,) = cluster.events_of(GroupPlanned)
    plan = replace(before.plan, token=Token("t-next"))
    cluster.append(GroupPlanned(request=replace(before.request, token=plan.token), plan=plan))
    handle = cluster.cloud.submit(plan, LAUNCH)
    assert isinstance(handle, GroupHandle)
    cluster.append(GroupSubmitted(token=plan.token, handle=handle))
    for node in (0, 1):
        cluster.boot(plan.token, node)
    cluster.advance_until(lambda: cluster.is_training and not cluster.view.unsettled_groups)
    assert cluster.cloud.cancelled_tokens == ["t-1"]
    assert [one.token for one in cluster.events_of(GroupsReleased)] == ["t-1"]


def test_a_restarted_machine_that_was_not_replaced_continues_with_its_new_agent() -> None:
    cluster = FakeCluster()
    cluster.boots_granted = False
    for node in (0, 1):
        cluster.boot(Token("t-1"), node)
    cluster.wait_for_round()
    lost = cluster.node_of_rank(follower(cluster))
    lost.process.kill()  # the backend restarts it before its groups are observed
    again = cluster.boot(lost.member.token, lost.member.node)
    cluster.advance_until(
        lambda: cluster.is_training and cluster.view.round and cluster.view.round.number == 2
    )
    assert again.worker_pool.rounds == [2]
    assert [one.request.num_workers for one in cluster.events_of(GroupPlanned)] == [2], (
        "no machine was requested"
    )
    assert cluster.view.failure_counts == {FailureCause.PREEMPTION: 1}


def test_a_restarted_machine_that_was_replaced_exits() -> None:
    """A backend that requeues lost machines also restarts those that were replaced."""
    cluster = FakeCluster()
    cluster.wait_for_round()
    lost = cluster.node_of_rank(follower(cluster))
    cluster.kill(lost)
    cluster.advance_until(lambda: lost.agent_id in lost_agents(cluster) and cluster.is_training)
    again = cluster.boot(lost.member.token, lost.member.node)
    cluster.advance_until(lambda: again.has_exited)
    assert again.agent.is_abandoned
    assert again.worker_pool.rounds == []
    assert cluster.is_training


def test_an_agent_that_does_not_lead_rejects_joins() -> None:
    cluster = FakeCluster()
    cluster.wait_for_round()
    other, leader = cluster.node_of_rank(follower(cluster)), cluster.leader
    caller = cluster.boot(Token("t-1"), 7)
    caller.process.freeze()
    caller.net.connect(
        other.net.address, Join(run_id=cluster.view.run_id or "", member=caller.member, next_slot=0)
    )
    cluster.settle()
    messages = [getattr(event, "message", event) for event in caller.net.drain_events()]
    assert messages[0] == JoinRejected(reason="not_leading")
    assert cluster.leader is leader


def test_a_join_of_another_run_is_rejected_by_the_leader() -> None:
    cluster = FakeCluster()
    cluster.wait_for_round()
    caller = cluster.boot(Token("t-1"), 7)
    caller.process.freeze()
    caller.net.connect(
        cluster.leader.net.address, Join(run_id="another", member=caller.member, next_slot=0)
    )
    cluster.settle()
    messages = [getattr(event, "message", event) for event in caller.net.drain_events()]
    assert messages[0] == JoinRejected(reason="other_run")
    assert cluster.view.round is not None


def test_a_final_refusal_stops_requests_for_machines() -> None:
    """A machine on its last attempt keeps working if its replacement is refused."""
    cluster = FakeCluster(failure_limits=FailureLimits(worker=-1))
    cluster.boots_granted = False
    cluster.advance_until(lambda: cluster.cloud.groups)
    (token,) = cluster.cloud.groups
    cluster.cloud.groups[token][0] = NodeStatus(state=NodeState.RUNNING, is_last_attempt=True)
    cluster.advance(1.0)
    cluster.cloud.submit_results = [QuotaError("0 of 0")] * 99
    cluster.boot(token, 0)
    cluster.boot(token, 1)
    cluster.advance_until(lambda: cluster.events_of(GroupRefused))
    cluster.advance(30.0)
    assert len(cluster.events_of(GroupRefused)) == 1
    assert cluster.events_of(RoundClosed) == []
    cluster.fail_rank(0)
    cluster.advance_until(
        lambda: cluster.is_training and cluster.view.round and cluster.view.round.number == 2
    )
    cluster.kill(cluster.node_of_rank(0))
    cluster.advance_until(lambda: cluster.view.fit_end)
    assert cluster.last_event(FitEnded).reason == "0 of 0"


# --- preemption notices --------------------------------------------------------------------------


def test_a_notice_is_sent_to_all_workers_and_its_machine_replaced() -> None:
    cluster = FakeCluster()
    cluster.wait_for_round()
    leaving = cluster.node_of_rank(follower(cluster))
    leaving.instance.notice = a_notice(seconds_left=60.0, deadline_ms=77)
    cluster.advance_until(lambda: cluster.last_event(PreemptionNoticed))
    assert cluster.last_event(PreemptionNoticed).agent == leaving.agent_id
    for rank in (0, 1):
        warned = cluster.messages_to(rank, PreemptionUpdate)[-1]
        assert warned.deadline_ms == 77
        assert warned.node_to_ranks == {leaving.name: (follower(cluster),)}
    cluster.advance_until(lambda: cluster.last_event(GroupPlanned).request.num_workers == 1)
    cluster.advance(5.0)
    assert len(cluster.events_of(RoundClosed)) == 0, "a notice alone closes no round"


def test_a_preemption_risk_is_sent_to_all_workers_once() -> None:
    cluster = FakeCluster()
    cluster.wait_for_round()
    cluster.node_of_rank(follower(cluster)).instance.notice = PreemptionRisk(reason="higher risk")
    cluster.advance_until(lambda: cluster.messages_to(0, SuggestSave))
    cluster.advance(5.0)
    for rank in (0, 1):
        assert cluster.messages_to(rank, SuggestSave) == [SuggestSave(reason="higher risk")]
        assert not cluster.messages_to(rank, PreemptionUpdate)
    assert not cluster.events_of(PreemptionNoticed)
    assert len(cluster.events_of(GroupPlanned)) == 1, "no replacement is requested"


def test_an_earlier_deadline_replaces_a_notice() -> None:
    cluster = FakeCluster()
    cluster.wait_for_round()
    leaving = cluster.node_of_rank(follower(cluster))
    leaving.instance.notice = a_notice(seconds_left=None)
    cluster.advance_until(lambda: cluster.last_event(PreemptionNoticed))
    cluster.advance(3.0)
    leaving.instance.notice = a_notice(seconds_left=15.0)
    cluster.advance_until(lambda: len(cluster.events_of(PreemptionNoticed)) == 2)
    notified_at_s = cluster.engine.now
    cluster.advance(10.0)
    assert len(cluster.events_of(PreemptionNoticed)) == 2
    assert len(cluster.events_of(RoundClosed)) == 0
    cluster.advance_until(lambda: cluster.events_of(RoundClosed))
    assert cluster.last_event(RoundClosed).reason == "the preemption deadline has passed"
    assert cluster.engine.now - notified_at_s < 20.0


def test_a_later_deadline_is_ignored() -> None:
    cluster = FakeCluster()
    cluster.wait_for_round()
    leaving = cluster.node_of_rank(follower(cluster))
    leaving.instance.notice = a_notice(seconds_left=30.0)
    cluster.advance_until(lambda: cluster.last_event(PreemptionNoticed))
    leaving.instance.notice = a_notice(seconds_left=60.0)
    cluster.advance(2.0)
    leaving.instance.notice = a_notice(seconds_left=None)
    cluster.advance(2.0)
    assert len(cluster.events_of(PreemptionNoticed)) == 1


def test_a_round_closes_once_state_is_saved_and_the_replacement_ready() -> None:
    cluster = FakeCluster()
    cluster.wait_for_round()
    leaving = cluster.node_of_rank(follower(cluster))
    leaving.instance.notice = a_notice(seconds_left=60.0)
    cluster.advance_until(lambda: len(cluster.nodes) == 3)
    cluster.checkpoint(0, "c1")
    cluster.advance_until(
        lambda: cluster.is_training and cluster.view.round and cluster.view.round.number == 2
    )
    closed = cluster.last_event(RoundClosed)
    assert (closed.cause, closed.reason) == (
        FailureCause.PREEMPTION,
        "checkpoint saved after the preemption notice; replacement ready",
    )
    assert leaving.ranks == []
    assert cluster.view.round is not None
    assert cluster.view.round.checkpoint_name == "c1"


def test_workers_are_informed_when_the_replacement_is_ready() -> None:
    cluster = FakeCluster()
    cluster.wait_for_round()
    cluster.boots_granted = False
    cluster.node_of_rank(follower(cluster)).instance.notice = a_notice(seconds_left=60.0)
    cluster.advance_until(lambda: cluster.last_event(GroupPlanned).request.num_workers == 1)
    assert not cluster.messages_to(0, PreemptionUpdate)[-1].replacement_ready
    cluster.boot(cluster.last_event(GroupPlanned).request.token, 0)
    cluster.advance_until(lambda: cluster.messages_to(0, PreemptionUpdate)[-1].replacement_ready)
    cluster.advance(5.0)
    ready_flags = [one.replacement_ready for one in cluster.messages_to(0, PreemptionUpdate)]
    assert ready_flags == sorted(ready_flags)
    assert ready_flags.count(True) == 1


def test_a_replica_on_a_peer_suffices_to_change_machines() -> None:
    cluster = FakeCluster()
    cluster.wait_for_round()
    leaving, staying = (
        cluster.node_of_rank(follower(cluster)),
        cluster.node_of_rank(1 - follower(cluster)),
    )
    leaving.worker_pool.confirm_replica(follower(cluster), 3, staying.member.peer_store_address)
    cluster.advance(1.0)
    leaving.instance.notice = a_notice(seconds_left=60.0)
    cluster.advance_until(lambda: len(cluster.nodes) == 3)
    cluster.advance(2.0)
    assert cluster.events_of(RoundClosed) == [], "the replica was saved before the notice"
    leaving.worker_pool.confirm_replica(follower(cluster), 9, "10.9.9.9:7001")
    cluster.advance(2.0)
    assert cluster.events_of(RoundClosed) == []
    leaving.worker_pool.confirm_replica(follower(cluster), 9, staying.member.peer_store_address)
    cluster.advance_until(
        lambda: cluster.is_training and cluster.view.round and cluster.view.round.number == 2
    )
    assert cluster.last_event(RoundClosed).state_replicated
    assert leaving.ranks == []
    assert cluster.view.checkpoints == ()


def test_a_save_before_the_replacement_was_ready_does_not_close_the_round() -> None:
    """Its upload is still in progress. Workers save again for the change of machines, and that
    snapshot is replicated to a peer at once."""
    cluster = FakeCluster()
    cluster.wait_for_round()
    for rank in (0, 1):
        cluster.send_from_worker(
            rank, FilesReport(report_index=0, metrics=msgspec.Raw(b"{}"), incremental=True)
        )
    name = cluster.messages_to(0, CheckpointNamed)[-1].checkpoint_name
    leaving = cluster.node_of_rank(follower(cluster))
    leaving.instance.notice = a_notice(seconds_left=60.0)
    cluster.advance_until(
        lambda: (
            cluster.messages_to(0, PreemptionUpdate)
            and cluster.messages_to(0, PreemptionUpdate)[-1].replacement_ready
        )
    )
    cluster.advance(1.0)
    for rank in (0, 1):
        cluster.send_from_worker(
            rank, SaveCompleted(report_index=0, checkpoint_name=name, size_bytes=10, step=120)
        )
    cluster.advance_until(lambda: cluster.view.checkpoints)
    cluster.advance(2.0)
    assert cluster.events_of(RoundClosed) == [], "step 120 may be much older than the notice"
    for rank in (0, 1):
        cluster.send_from_worker(
            rank, FilesReport(report_index=1, metrics=msgspec.Raw(b"{}"), incremental=True)
        )
    name = cluster.messages_to(0, CheckpointNamed)[-1].checkpoint_name
    for rank in (0, 1):
        cluster.send_from_worker(
            rank, SaveCompleted(report_index=1, checkpoint_name=name, size_bytes=10, step=150)
        )
    cluster.advance_until(
        lambda: cluster.is_training and cluster.view.round and cluster.view.round.number == 2
    )
    assert cluster.last_event(RoundClosed).reason == (
        "checkpoint saved after the preemption notice; replacement ready"
    )
    assert cluster.view.round is not None
    assert cluster.view.round.checkpoint_name == name


def test_a_replacement_is_used_once_it_is_warm() -> None:
    cluster = FakeCluster()
    cluster.wait_for_round()
    cluster.boots_granted = False
    leaving = cluster.node_of_rank(follower(cluster))
    leaving.instance.notice = a_notice(seconds_left=60.0)
    cluster.advance_until(lambda: cluster.last_event(GroupPlanned).request.num_workers == 1)
    cold = cluster.boot(cluster.last_event(GroupPlanned).request.token, 0)
    cold.worker_pool.is_warm = False
    cluster.advance_until(
        lambda: cold.agent_id in {one.agent for one in cold.ledger.list_members()}
    )
    cluster.checkpoint(0, "c1")
    cluster.advance(2.0)
    assert cluster.events_of(RoundClosed) == []
    cold.worker_pool.is_warm = True
    cluster.advance(0.2)
    cluster.checkpoint(1, "c2")
    cluster.advance_until(
        lambda: cluster.is_training and cluster.view.round and cluster.view.round.number == 2
    )
    assert cold.ranks != []


def test_a_replaced_machine_is_released_after_its_agent_has_exited(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster = FakeCluster(failure_limits=ANY_FAILURES)
    cluster.wait_for_round()
    leaving = list(cluster.nodes.values())
    for node in leaving:
        node.instance.notice = a_notice(seconds_left=60.0)
        hold_calls(node, monkeypatch, ".spotfit/failures")
    cluster.advance_until(lambda: len(cluster.nodes) == 4)
    cluster.fail_rank(1)
    cluster.advance_until(lambda: len(cluster.events_of(NodeLost)) == 2)
    cluster.advance(1.0)
    assert cluster.events_of(GroupsReleased) == []
    monkeypatch.undo()
    cluster.advance_until(lambda: cluster.events_of(GroupsReleased), within_s=2.0)
    assert all(node.has_exited for node in leaving)
    assert cluster.read_object(keys.failure(1, 1))


def test_a_replaced_machine_that_cannot_write_exits_after_three_seconds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster = FakeCluster(failure_limits=ANY_FAILURES)
    cluster.wait_for_round()
    leaving = cluster.node_of_rank(follower(cluster))
    leaving.instance.notice = a_notice(seconds_left=60.0)
    hold_calls(leaving, monkeypatch, ".spotfit/failures")
    cluster.advance_until(lambda: len(cluster.nodes) == 3)
    cluster.fail_rank(leaving.ranks[0])
    cluster.advance_until(lambda: cluster.events_of(NodeLost))
    took_s = cluster.advance_until(lambda: leaving.has_exited)
    assert took_s == pytest.approx(3.0, abs=0.3)


def hold_calls(node: FakeNode, monkeypatch: pytest.MonkeyPatch, prefix: str) -> None:
    """The bucket does not answer the node's background calls whose name has that prefix."""
    calls = node.node_services.stallable_calls
    run = calls.run

    def hold(name: str, job: Callable[[], Any]) -> BackgroundResult | None:
        return None if name.startswith(prefix) else run(name, job)

    monkeypatch.setattr(calls, "run", hold)


def test_a_drained_machine_is_declared_lost_by_the_next_round() -> None:
    cluster = FakeCluster()
    cluster.wait_for_round()
    leaving = cluster.node_of_rank(follower(cluster))
    leaving.instance.notice = a_notice(seconds_left=60.0)
    cluster.advance_until(lambda: len(cluster.nodes) == 3)
    cluster.checkpoint(0, "c1")
    cluster.advance_until(lambda: leaving.has_exited)
    assert leaving.agent.is_abandoned
    assert cluster.last_event(NodeLost).reason == "it was replaced after its preemption notice"
    assert cluster.events_of(RoundClosed)[1:] == []


def test_without_a_replacement_training_continues_until_the_deadline() -> None:
    cluster = FakeCluster()
    cluster.boots_granted = False
    for node in (0, 1):
        cluster.boot(Token("t-1"), node)
    cluster.wait_for_round()
    leaving = cluster.node_of_rank(follower(cluster))
    leaving.instance.notice = a_notice(seconds_left=20.0)
    duration_s = cluster.advance_until(lambda: cluster.last_event(RoundClosed))
    assert duration_s == pytest.approx(20.0, abs=0.5)
    assert cluster.last_event(RoundClosed).reason == "the preemption deadline has passed"


def test_workers_running_at_the_deadline_are_reported_with_their_machines() -> None:
    cluster = FakeCluster(failure_limits=FailureLimits(preemption=0))
    cluster.boots_granted = False
    for node in (0, 1):
        cluster.boot(Token("t-1"), node)
    cluster.wait_for_round()
    assert follower(cluster) == 1
    cluster.node_of_rank(1).instance.notice = a_notice(seconds_left=5.0, deadline_ms=77)
    cluster.advance_until(lambda: cluster.view.fit_end)
    ended = cluster.last_event(FitEnded)
    assert ended.cause is FailureCause.PREEMPTION
    assert ended.preempted == PreemptedNodes(
        node_to_ranks={"t-1/1": (1,)}, deadline_ms=77, drain_timed_out=True
    )


def lose_noticed_machine(cluster: FakeCluster) -> None:
    """Give the follower's machine a notice and lose the machine a second later."""
    leaving = cluster.node_of_rank(follower(cluster))
    assert leaving is cluster.node_of_rank(1)
    leaving.instance.notice = a_notice(seconds_left=60.0, deadline_ms=77)
    cluster.advance_until(lambda: cluster.last_event(PreemptionNoticed))
    cluster.advance(1.0)
    cluster.kill(leaving)


def test_with_relaxed_collectives_the_remaining_ranks_save() -> None:
    cluster = FakeCluster(relax_collectives=True)
    cluster.wait_for_round()
    lose_noticed_machine(cluster)
    cluster.advance(5.0)
    assert cluster.events_of(RoundClosed) == []
    cluster.send_from_worker(
        0, FilesReport(report_index=0, metrics=msgspec.Raw(b"{}"), checkpoint_dir_name="c1")
    )
    assert cluster.messages_to(0, CheckpointNamed)[-1].ranks == (0,)
    cluster.send_from_worker(0, SaveCompleted(report_index=0, checkpoint_name="c1", size_bytes=10))
    cluster.advance_until(lambda: cluster.last_event(RoundClosed))
    closed = cluster.last_event(RoundClosed)
    assert (closed.cause, closed.preempted) == (
        FailureCause.PREEMPTION,
        PreemptedNodes(node_to_ranks={"t-1/1": (1,)}, deadline_ms=77),
    )
    cluster.advance_until(lambda: cluster.is_training)
    assert cluster.view.round is not None
    assert cluster.view.round.checkpoint_name == "c1"


def test_with_relaxed_collectives_a_save_does_not_wait_for_a_lost_part() -> None:
    cluster = FakeCluster(relax_collectives=True)
    cluster.wait_for_round()
    for rank in (1, 0):
        cluster.send_from_worker(
            rank, FilesReport(report_index=0, metrics=msgspec.Raw(b"{}"), checkpoint_dir_name="c0")
        )
    cluster.send_from_worker(0, SaveCompleted(report_index=0, checkpoint_name="c0", size_bytes=10))
    lose_noticed_machine(cluster)
    cluster.send_from_worker(
        0,
        FilesReport(report_index=1, metrics=msgspec.Raw(b"{}"), checkpoint_dir_name="c1"),
        SaveCompleted(report_index=1, checkpoint_name="c1", size_bytes=10),
    )
    assert cluster.advance_until(lambda: cluster.last_event(RoundClosed)) < 10.0, (
        "before the deadline of the notice"
    )
    assert [one.name for one in cluster.view.checkpoints] == ["c1"]


def test_with_a_grace_period_the_remaining_ranks_finish_their_uploads() -> None:
    cluster = FakeCluster(failure_limits=FailureLimits(preemption_grace_s=30.0))
    cluster.wait_for_round()
    cluster.send_from_worker(1, MetricsReport(report_index=0, metrics=msgspec.Raw(b"{}")))
    cluster.send_from_worker(
        0, FilesReport(report_index=0, metrics=msgspec.Raw(b"{}"), checkpoint_dir_name="c1")
    )
    lose_noticed_machine(cluster)
    cluster.advance(5.0)
    assert cluster.events_of(RoundClosed) == []
    cluster.send_from_worker(0, SaveCompleted(report_index=0, checkpoint_name="c1", size_bytes=10))
    cluster.advance_until(lambda: cluster.last_event(RoundClosed))
    assert [kept.name for kept in cluster.view.checkpoints] == ["c1"]


def test_without_grace_or_relaxed_collectives_a_lost_machine_closes_the_round() -> None:
    cluster = FakeCluster()
    cluster.wait_for_round()
    cluster.send_from_worker(1, MetricsReport(report_index=0, metrics=msgspec.Raw(b"{}")))
    cluster.send_from_worker(
        0, FilesReport(report_index=0, metrics=msgspec.Raw(b"{}"), checkpoint_dir_name="c1")
    )
    lose_noticed_machine(cluster)
    assert cluster.advance_until(lambda: cluster.last_event(RoundClosed)) < 1.0
    assert cluster.last_event(RoundClosed).cause is FailureCause.PREEMPTION


def test_errors_that_follow_a_preemption_are_charged_to_it() -> None:
    cluster = FakeCluster(relax_collectives=True)
    cluster.wait_for_round()
    lose_noticed_machine(cluster)
    cluster.advance(1.0)
    cluster.fail_rank(0, "ConnectionError: closed by peer")
    cluster.advance_until(lambda: cluster.last_event(RoundClosed))
    assert cluster.last_event(RoundClosed).cause is FailureCause.PREEMPTION


# --- end of the run ------------------------------------------------------------------------------


def test_a_cancelled_run_stops_its_workers() -> None:
    cluster = FakeCluster()
    cluster.wait_for_round()
    cluster.cancel()
    duration_s = cluster.advance_until(
        lambda: all(node.has_exited for node in cluster.nodes.values())
    )
    assert duration_s < 3.0
    assert cluster.last_event(FitEnded).outcome == "cancelled"
    assert not any(node.worker_pool.has_workers for node in cluster.nodes.values())


def test_an_agent_that_starts_after_the_end_exits() -> None:
    cluster = FakeCluster()
    cluster.wait_for_round()
    cluster.finish_rank(1)
    cluster.finish_rank(0)
    cluster.advance_until(lambda: cluster.view.fit_end)
    late = cluster.boot(Token("t-1"), 1)
    cluster.advance_until(lambda: late.has_exited)
    assert late.worker_pool.rounds == []


# --- store errors --------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(6))
def test_a_run_finishes_although_store_calls_fail_randomly(seed: int) -> None:
    rng = random.Random(seed)
    cluster = FakeCluster(failure_limits=ANY_FAILURES)
    cluster.store.should_fail = lambda: rng.random() < 0.3
    cluster.wait_for_round()
    cluster.report(0)
    cluster.checkpoint(1, "c1", loss=0.5)
    cluster.advance_until(lambda: cluster.view.latest_checkpoint)
    cluster.fail_rank(1)
    cluster.advance_until(
        lambda: cluster.is_training and cluster.view.round and cluster.view.round.number == 2
    )
    cluster.finish_rank(1)
    cluster.finish_rank(0, b"the result")
    cluster.advance_until(lambda: cluster.view.fit_end)
    assert cluster.store.failure_count > 0
    assert [one.cause for one in cluster.events_of(RoundClosed)] == [FailureCause.WORKER]
    ended = cluster.last_event(FitEnded)
    assert ended.outcome == "finished"
    assert cluster.read_object(ended.result_key) == fake_seal(ended.result_key, b"the result")


@pytest.mark.parametrize("error_type", [StorePermissionError, StoreError])
def test_agents_survive_every_store_error(error_type: type[StoreError]) -> None:
    cluster = FakeCluster()
    cluster.wait_for_round()
    cluster.store.error_type = error_type
    cluster.store.should_fail = lambda: True
    cluster.checkpoint(0, "c1")
    cluster.advance(3.0)
    cluster.store.should_fail = lambda: False
    cluster.advance_until(lambda: cluster.last_event(CheckpointCommitted))
    assert cluster.events_of(RoundClosed) == []


def test_a_repeated_store_error_is_logged_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    cluster = FakeCluster()
    cluster.wait_for_round()
    node = cluster.leader
    cluster.store.should_fail = lambda: True
    for _ in range(5):
        node.agent.tick(cluster.engine.now)
        cluster.engine.now += 1.0
    error_count = capsys.readouterr().err.count("the store fails")
    assert 1 <= error_count <= 3


# --- store stalls --------------------------------------------------------------------------------


def test_while_the_bucket_hangs_the_round_continues_and_entries_are_written_once() -> None:
    cluster = FakeCluster()
    cluster.wait_for_round()
    cluster.report(0)
    cluster.hang_store()
    for n in range(1, 30):
        cluster.report(n, loss=n)
        cluster.advance(1.0)
    assert cluster.is_training
    cluster.checkpoint(30, "c1", loss=0.5)
    for rank in (0, 1):
        cluster.send_from_worker(rank, RankZeroBroadcast(kind="barrier", seq=0))
    assert [len(cluster.messages_to(rank, RankZeroBroadcastResult)) for rank in (0, 1)] == [1, 1]
    cluster.advance(5.0)
    assert cluster.events_of(CheckpointCommitted) == []
    cluster.restore_store()
    cluster.advance_until(lambda: cluster.last_event(CheckpointCommitted))
    cluster.advance(20.0)
    assert [one.name for one in cluster.events_of(CheckpointCommitted)] == ["c1"]
    assert cluster.events_of(RoundClosed) == []
    assert len(cluster.events_of(LeaderElected)) == 2
    cluster.finish_rank(1)
    cluster.finish_rank(0)
    cluster.advance_until(lambda: all(node.has_exited for node in cluster.nodes.values()))
    keys_there = [key for (key, *_) in cluster.store.list(".spotfit/reports")]
    lines = b"".join(cluster.read_object(key) for key in keys_there).splitlines()
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
        "(rank 0 returned from the training function before)\n"
        "Traceback\nRuntimeError: connection closed by peer"
    )


def test_while_the_bucket_hangs_a_worker_exit_stops_the_round() -> None:
    cluster = FakeCluster(failure_limits=ANY_FAILURES)
    cluster.wait_for_round()
    peer = cluster.node_of_rank(0)
    cluster.hang_store()
    cluster.advance(10.0)
    cluster.fail_rank(1)
    assert not peer.worker_pool.has_workers, "stopped at once"
    cluster.advance(10.0)
    assert cluster.events_of(RoundClosed) == []
    cluster.restore_store()
    duration_s = cluster.advance_until(lambda: cluster.is_training)
    assert duration_s < 1.0
    closed = cluster.last_event(RoundClosed)
    assert closed.reason == "rank 1 raised: ValueError: no"
    assert cluster.read_object(keys.failure(1, 1)) == fake_seal(keys.failure(1, 1), b"pickle")
    assert len(cluster.events_of(RoundOpened)) == 2


@pytest.mark.parametrize("executed", [True, False])
def test_a_write_that_timed_out_is_stored_exactly_once(*, executed: bool) -> None:
    cluster = FakeCluster(failure_limits=ANY_FAILURES)
    cluster.wait_for_round()
    cluster.hang_store()
    cluster.checkpoint(0, "c1", loss=0.5)
    cluster.advance(2.0)
    for _ in range(3):
        cluster.time_out_store_calls(executed=executed)
        cluster.advance(5.0)
    assert cluster.is_training
    cluster.restore_store()
    cluster.advance(5.0)
    assert [one.name for one in cluster.events_of(CheckpointCommitted)] == ["c1"]
    assert cluster.events_of(RoundClosed) == []


def test_a_leader_lost_while_the_bucket_hangs_is_replaced_afterwards() -> None:
    cluster = FakeCluster()
    cluster.wait_for_round()
    cluster.checkpoint(0, "c1")
    old = cluster.leader
    cluster.hang_store()
    cluster.advance(3.0)
    cluster.kill(old)
    cluster.advance(10.0)
    assert len(cluster.events_of(LeaderElected)) == 2
    cluster.restore_store()
    cluster.advance_until(lambda: cluster.is_training)
    assert len(cluster.events_of(LeaderElected)) == 3
    assert cluster.leader is not old
    assert cluster.last_event(RoundClosed).cause is FailureCause.PREEMPTION


def test_a_result_being_written_delays_only_the_end_of_the_run() -> None:
    cluster = FakeCluster(failure_limits=ANY_FAILURES)
    cluster.wait_for_round()
    cluster.hang_store()
    cluster.finish_rank(0, b"the result")
    cluster.advance(10.0)
    assert cluster.is_training is False
    assert cluster.node_of_rank(1).ranks == [1]
    cluster.finish_rank(1)
    cluster.restore_store()
    cluster.advance_until(lambda: cluster.view.fit_end)
    assert cluster.last_event(FitEnded).outcome == "finished"
    assert cluster.events_of(RoundClosed) == []
    assert cluster.read_object(keys.result(1, 0)) == fake_seal(keys.result(1, 0), b"the result")


ORPHAN_TIMEOUT_20_S = msgspec.structs.replace(TIMING, orphan_timeout_s=20.0)


def test_an_agent_without_leader_and_bucket_exits_after_the_orphan_timeout() -> None:
    cluster = FakeCluster(timing=ORPHAN_TIMEOUT_20_S)
    cluster.wait_for_round()
    remaining = cluster.node_of_rank(follower(cluster))
    cluster.boots_granted = False
    cluster.store.should_fail = lambda: True
    cluster.kill(cluster.node_of_rank(1 - follower(cluster)))
    duration_s = cluster.advance_until(lambda: remaining.has_exited)
    assert duration_s == pytest.approx(20.0, abs=1.0)
    assert remaining.agent.is_abandoned
    assert not remaining.worker_pool.has_workers


def test_an_agent_with_a_leader_survives_any_bucket_outage() -> None:
    cluster = FakeCluster(timing=ORPHAN_TIMEOUT_20_S)
    cluster.wait_for_round()
    cluster.store.should_fail = lambda: True
    cluster.advance(30.0)
    assert not any(node.has_exited for node in cluster.nodes.values())
    assert cluster.is_training


def test_agents_exit_if_the_storage_of_their_run_was_deleted() -> None:
    cluster = FakeCluster(timing=ORPHAN_TIMEOUT_20_S)
    cluster.wait_for_round()
    nodes = list(cluster.nodes.values())
    cluster.bucket.objects.clear()
    duration_s = cluster.advance_until(
        lambda: all(node.has_exited for node in nodes), within_s=100.0
    )
    # The check within a minute, then the timeout, which ends at one of the repeated checks.
    assert 20.0 < duration_s < 90.0
    assert all(node.agent.is_abandoned for node in nodes)
    assert cluster.entries == [], "the journal may be that of another run by now"
    assert len(cluster.nodes) == len(nodes)


def test_agents_continue_if_the_storage_of_their_run_returns() -> None:
    cluster = FakeCluster(timing=ORPHAN_TIMEOUT_20_S)
    cluster.wait_for_round()
    objects = dict(cluster.bucket.objects)
    cluster.bucket.objects.clear()
    cluster.advance(70.0)
    cluster.bucket.objects.update(objects)
    cluster.advance(20.0)
    assert cluster.is_training
    cluster.checkpoint(0, "c0")
    cluster.advance_until(lambda: cluster.events_of(CheckpointCommitted))


def test_an_agent_that_never_reads_its_run_exits_with_the_reason() -> None:
    cluster = FakeCluster()
    lost = cluster.boot(Token("t-1"), 0)
    cluster.store.should_fail = lambda: True
    assert lost.agent.tick(100.0) is not None
    assert lost.agent.tick(130.0) is not None
    assert lost.agent.tick(130.1) is None
    assert lost.agent.start_failure is not None
    assert "not readable within 30 s" in lost.agent.start_failure.reason


def test_a_result_that_cannot_be_stored_does_not_block_the_agent() -> None:
    cluster = FakeCluster()
    cluster.wait_for_round()
    cluster.finish_rank(1)
    node = cluster.node_of_rank(0)
    cluster.store.should_fail = lambda: True
    node.worker_pool.send_from_worker(0, WorkerReturned(report_count=0, pickled_value=b"result"))
    node.worker_pool.end_worker(0, clean=True)
    cluster.advance(3.0)
    cluster.store.should_fail = lambda: False
    assert cluster.view.is_active
    cluster.advance_until(lambda: cluster.view.fit_end)
    assert cluster.read_object(keys.result(1, 0)) == fake_seal(keys.result(1, 0), b"result")


def test_an_unnamed_checkpoint_gets_a_generated_name() -> None:
    cluster = FakeCluster()
    cluster.wait_for_round()
    cluster.send_from_worker(1, MetricsReport(report_index=0, metrics=msgspec.Raw(b"{}")))
    cluster.send_from_worker(0, FilesReport(report_index=0, metrics=msgspec.Raw(b"{}")))
    assert cluster.messages_to(0, CheckpointNamed)[0].checkpoint_name == "made-0"


# --- validations ---------------------------------------------------------------------------------


def start_validation(own_machine: bool | None = None) -> FakeCluster:
    """A cluster that validates a checkpoint."""
    cluster = FakeCluster(validation=ValidationSpec(own_machine=own_machine), timing=BRIEF)
    cluster.wait_for_round()
    cluster.checkpoint(0, "c1", validation=ValidationRequest(), loss=1)
    cluster.advance_until(lambda: cluster.validating_node)
    return cluster


def test_a_validation_machine_is_released_after_the_validation() -> None:
    cluster = start_validation()
    validator = cluster.validating_node
    assert validator is not None
    request = cluster.last_event(GroupPlanned).request
    assert (request.role, request.num_workers, request.total_workers) == ("validate", 1, 1)
    assert validator.member.token == request.token
    assert validator.ranks == []
    assert cluster.is_training
    validator.validator.finish(acc=0.5)
    cluster.advance_until(
        lambda: (
            cluster.messages_to(0, ValidationFinished)
            and cluster.messages_to(1, ValidationFinished)
        )
    )
    assert cluster.view.metrics_of("c1") == {"rank": 0, "loss": 1, "acc": 0.5}
    cluster.advance_until(lambda: cluster.last_event(GroupsReleased))
    assert cluster.last_event(GroupsReleased).token == request.token
    assert cluster.is_training


def test_a_validation_beside_workers_survives_the_end_of_their_round() -> None:
    cluster = start_validation(own_machine=False)
    beside = cluster.validating_node
    assert beside is cluster.leader
    cluster.fail_rank(1)
    assert cluster.last_event(FitEnded) is None
    assert cluster.last_event(TrainingEnded).fit_end.outcome == "failed"
    cluster.advance_until(lambda: len([n for n in cluster.nodes.values() if not n.has_exited]) == 1)
    assert cluster.validating_node is beside
    beside.validator.finish(error_text="no")
    cluster.advance_until(lambda: cluster.last_event(FitEnded))
    assert cluster.last_event(FitEnded) == cluster.last_event(TrainingEnded).fit_end
    assert cluster.events_of(ValidationEnded)[0].reason == "no"


def test_a_validation_result_is_repeated_to_a_new_leader() -> None:
    cluster = start_validation()
    busy = cluster.validating_node
    assert busy is not None
    lost_leader = cluster.leader
    cluster.kill(lost_leader)
    busy.validator.finish(acc=0.5)
    cluster.advance_until(lambda: cluster.last_event(ValidationEnded))
    assert cluster.leader is not lost_leader
    assert cluster.last_event(ValidationEnded).metrics == {"acc": 0.5}
    assert len(cluster.events_of(ValidationStarted)) == 1


def test_a_repeated_result_does_not_hide_a_later_attempt() -> None:
    cluster = start_validation()
    busy = cluster.validating_node
    assert busy is not None
    busy.validator.finish(acc=0.5)
    cluster.advance_until(lambda: cluster.last_event(ValidationEnded))
    cluster.checkpoint(1, "c2", validation=ValidationRequest(), loss=1)
    cluster.advance_until(lambda: cluster.validating_node)
    for attempt in (2, 1):  # the first is repeated by an agent that reconnected
        busy.net.send_to_leader(
            ValidationReported(attempt=attempt, status="validated", metrics={"acc": attempt})
        )
    cluster.advance_until(lambda: len(cluster.events_of(ValidationEnded)) == 2)
    assert cluster.last_event(ValidationEnded).metrics == {"acc": 2}


def test_a_validation_restarts_after_its_machine_was_lost() -> None:
    cluster = start_validation()
    first = cluster.validating_node
    assert first is not None
    cluster.kill(first)
    cluster.advance_until(lambda: cluster.validating_node)
    again = cluster.validating_node
    assert again is not None
    assert again.member.token != first.member.token
    assert [one.attempt for one in cluster.events_of(ValidationStarted)] == [1, 2]


def test_after_training_only_the_validating_agent_stays() -> None:
    cluster = start_validation()
    busy = cluster.validating_node
    assert busy is not None
    for rank in (0, 1):
        cluster.finish_rank(rank, b"42" if rank == 0 else b"")
    cluster.advance_until(lambda: [n for n in cluster.nodes.values() if not n.has_exited] == [busy])
    assert cluster.leader is busy
    assert cluster.view.is_active
    busy.validator.finish(acc=0.5)
    cluster.advance_until(lambda: busy.has_exited)
    ended = cluster.last_event(FitEnded)
    assert (ended.outcome, ended.metrics) == ("finished", {"rank": 0, "loss": 1})
    assert cluster.read_object(ended.result_key) == fake_seal(ended.result_key, b"42")
    assert not cluster.cloud.groups or all(
        group.is_closed for group in cluster.view.groups.values()
    )


def test_a_cancelled_run_does_not_wait_for_validations() -> None:
    cluster = start_validation()
    cluster.cancel()
    cluster.advance_until(lambda: all(node.has_exited for node in cluster.nodes.values()))
    assert cluster.last_event(FitEnded).outcome == "cancelled"
    assert cluster.events_of(ValidationEnded) == []
    assert [one.name for one in cluster.view.unvalidated_checkpoints] == ["c1"]
