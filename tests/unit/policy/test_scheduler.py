"""The scheduler: precedence of the rules, and totality over all views and states."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from spotfit.core.ids import Token
from spotfit.model.events import (
    CheckpointCommitted,
    CheckpointDropped,
    FailureCause,
    FitEnded,
    GroupsReleased,
    LeaderElected,
    NodeLost,
    PreemptionNoticed,
    RankFailure,
    RoundClosed,
    RoundOpened,
    TrainingFunctionStarted,
)
from spotfit.model.group import NodeState, Unreachable
from spotfit.model.leader_state import (
    Failing,
    LeaderState,
    NoRound,
    Returned,
    RoundCommit,
    RoundPhase,
    Training,
    UserCodeError,
)
from spotfit.model.spec import FailureLimits, RetentionConfig, RunTiming
from spotfit.model.topology import Round
from spotfit.model.view import View
from spotfit.policy.actions import (
    AppendEvent,
    Idle,
    LeaderAction,
    ReleaseGroups,
    RequestMachines,
    SubmitGroup,
    Wait,
)
from spotfit.policy.scheduler import next_action
from spotfit.testing.builders import (
    TOKEN,
    a_committed_checkpoint,
    a_final_group_status,
    a_group,
    a_group_status,
    a_leader_state,
    a_member,
    a_member_status,
    a_notice,
    a_returned,
    a_round,
    a_spec,
    a_training,
    a_view,
    an_agent_id,
    an_uploaded_checkpoint,
    fold_events,
    member_statuses,
)

NOW = 1000.0
OTHER = Token("t-2")
SPEC = a_spec(timing=RunTiming(failure_settle_s=0.03))
OPEN = a_view(spec=SPEC, round=a_round())
BUSY = member_statuses(a_member_status(0, running_round=1), a_member_status(1, running_round=1))
RAISED = RankFailure(rank=0, kind="raised", message="ValueError: no")
PENDING = {TOKEN: a_group(), OTHER: a_group(token=OTHER, nodes=1, handle=None)}


FAILED = Failing(round=a_round(), since=NOW - 9, rank_failures={0: RAISED})


def event_of(view: View, state: LeaderState, now: float = NOW) -> Any:
    action = next_action(view, state, now)
    assert isinstance(action, AppendEvent), action
    return action.event


def wait_of(view: View, state: LeaderState, now: float = NOW) -> Wait:
    action = next_action(view, state, now)
    assert isinstance(action, Wait), action
    return action


# --- before a round ------------------------------------------------------------------------------


def test_a_run_without_machines_requests_them() -> None:
    assert next_action(a_view(groups={}), a_leader_state(members={}), NOW) == RequestMachines(
        2, "2 of 2 workers need a machine"
    )


def test_a_planned_group_is_submitted_by_any_leader() -> None:
    view = a_view(groups={OTHER: a_group(token=OTHER, handle=None)})
    assert next_action(view, a_leader_state(members={}), NOW) == SubmitGroup(OTHER)


def test_after_a_refusal_the_leader_waits() -> None:
    view = a_view(groups={}, refusals=3, last_refusal="full")
    wait = wait_of(view, a_leader_state(members={}, refused_at={"train": NOW}))
    assert (wait.until, wait.reason) == (NOW + 4.0, "refused 3 times: full")


def test_with_all_members_a_round_is_opened() -> None:
    event = event_of(a_view(), a_leader_state())
    assert event == RoundOpened(round=a_round(1), reason="2 workers on 2 machines")


def test_no_round_opens_before_the_bucket_was_searched() -> None:
    wait = wait_of(a_view(), a_leader_state(phase=NoRound(bucket_searched=False)))
    assert wait.reason == "searching the bucket for complete checkpoints"


def test_no_round_opens_before_pending_uploads() -> None:
    closed = a_view(last_round=a_round(3))
    members_with_upload = member_statuses(a_member_status(0), a_member_status(1, uploading_round=3))
    state = a_leader_state(
        phase=NoRound(since=NOW, bucket_searched=False, uncommitted_work_s=20.0),
        members=members_with_upload,
    )
    action = next_action(closed, state, NOW)
    assert isinstance(action, Wait)
    assert "still upload" in action.reason


def test_a_failed_run_ends_after_its_last_checkpoints() -> None:
    failed = RoundClosed(
        round_number=3,
        cause=FailureCause.WORKER,
        reason="KeyError",
        failures=(RankFailure(rank=0, kind="raised", message="KeyError"),),
    )
    view = a_view(
        last_round=a_round(3), last_round_closed=failed, failure_counts={FailureCause.WORKER: 1}
    )
    assert isinstance(
        next_action(view, a_leader_state(phase=NoRound(bucket_searched=False)), NOW), Wait
    )
    event_of = next_action(view, a_leader_state(), NOW)
    assert isinstance(event_of, AppendEvent)
    assert isinstance(event_of.event, FitEnded)


def test_a_headless_leader_opens_no_round() -> None:
    assert wait_of(a_view(), a_leader_state(is_headless=True, members={})).reason == "nothing to do"


def test_a_leaving_leader_hands_over_between_rounds() -> None:
    decide_replacement = a_view(
        groups={TOKEN: a_group(nodes=3)},
        notices={an_agent_id(0): a_notice()},
        notice_slots={an_agent_id(0): 3},
        epoch=4,
    )
    three = member_statuses(
        a_member_status(0), a_member_status(1, joined_at=9.0), a_member_status(2, joined_at=5.0)
    )
    event = event_of(decide_replacement, a_leader_state(members=three))
    assert event == LeaderElected(
        leader=an_agent_id(2),
        epoch=5,
        coordinator_address=a_member(2).coordinator_address,
        reason="the previous leader's node has a preemption notice",
    )
    in_round = replace(decide_replacement, round=a_round(members=[a_member(0), a_member(1)]))
    within = a_leader_state(members=three, leading_since=NOW, phase=a_training())
    assert isinstance(next_action(in_round, within, NOW), Wait), "not within one"


def test_a_leader_on_its_last_attempt_hands_over() -> None:
    statuses = {TOKEN: a_final_group_status(0, nodes=3)}
    three = member_statuses(
        a_member_status(0), a_member_status(1, joined_at=9.0), a_member_status(2, joined_at=5.0)
    )
    groups = {TOKEN: a_group(nodes=3)}
    state = a_leader_state(members=three, group_statuses=statuses)
    event = event_of(a_view(groups=groups), state)
    why = "the backend would not restart the previous leader's node again"
    assert event == LeaderElected(
        leader=an_agent_id(2),
        epoch=2,
        coordinator_address=a_member(2).coordinator_address,
        reason=why,
    )
    alone = a_leader_state(group_statuses={TOKEN: a_final_group_status(0, 1)})
    request = {TOKEN: a_group(), OTHER: a_group(token=OTHER, nodes=2)}
    opened = event_of(a_view(groups=request), alone)
    assert isinstance(opened, RoundOpened), "no other agent can lead"


def test_leadership_is_not_handed_to_a_leaving_node() -> None:
    both_go = {an_agent_id(n): a_notice() for n in (0, 1)}
    request = {TOKEN: a_group(), OTHER: a_group(token=OTHER, handle=None)}
    view = a_view(notices=both_go, notice_slots=dict.fromkeys(both_go, 3), groups=request)
    assert next_action(view, a_leader_state(), NOW) == SubmitGroup(OTHER), (
        "it leads until other agents have joined"
    )


def test_an_unassigned_leaving_node_is_lost() -> None:
    view = replace(
        OPEN,
        round=a_round(2, members=[a_member(0)]),
        notices={an_agent_id(1): a_notice()},
        notice_slots={an_agent_id(1): 2},
    )
    event = event_of(view, a_leader_state())
    assert event == NodeLost(
        token=TOKEN,
        node=1,
        agent=an_agent_id(1),
        reason="it was replaced after its preemption notice",
    )


def test_repeated_boot_failures_end_the_run() -> None:
    assert isinstance(next_action(a_view(boot_failures=40), a_leader_state(), NOW), AppendEvent)
    event = event_of(a_view(boot_failures=41, groups={}), a_leader_state(members={}))
    assert isinstance(event, FitEnded)
    assert event.reason == "41 machines in a row terminated before their agents joined"


FAILED_START = NodeLost(
    token=TOKEN, node=0, agent=None, reason="exit code 127", is_failed_start=True
)
NO_AGENT = a_view(groups={}, failed_starts=3, last_failed_start=FAILED_START)


def test_machines_that_start_no_agent_end_the_run() -> None:
    event = event_of(NO_AGENT, a_leader_state(members={}))
    assert isinstance(event, FitEnded)
    assert "exit code 127" in event.reason


def test_after_failed_starts_the_run_waits_for_machines_that_still_boot() -> None:
    booting = replace(NO_AGENT, groups={OTHER: a_group(token=OTHER, nodes=1)})
    assert isinstance(next_action(booting, a_leader_state(members={}), NOW), Wait)


UNREACHABLE = NodeLost(
    token=TOKEN, node=1, agent=None, reason="no answer", unreachable=Unreachable.LEADER
)
NO_NETWORK = a_view(groups={TOKEN: a_group(nodes=1)}, unreachable_machines=(UNREACHABLE,) * 2)


def test_unreachable_machines_end_a_run_without_enough_others() -> None:
    event = event_of(NO_NETWORK, a_leader_state(members=member_statuses(a_member_status(0))))
    assert isinstance(event, FitEnded)
    assert event.remedy


def test_unreachable_machines_do_not_end_a_run_that_may_start_without_them() -> None:
    no_storage = replace(UNREACHABLE, unreachable=Unreachable.STORAGE)
    enough = replace(
        NO_NETWORK,
        spec=a_spec(min_workers=1, max_workers=2, is_elastic=True),
        unreachable_machines=(no_storage,) * 2,
    )
    action = next_action(enough, a_leader_state(members={}), NOW)
    assert isinstance(action, Wait)


def test_a_loss_is_recorded_before_the_budget_is_checked() -> None:
    """The loss may revise the cause of the closed round."""
    closed = RoundClosed(round_number=1, cause=FailureCause.PREEMPTION, reason="lost 1 machine")
    view = a_view(
        spec=a_spec(failure_limits=FailureLimits(preemption=0)),
        last_round=a_round(),
        last_round_closed=closed,
        failure_counts={FailureCause.PREEMPTION: 1},
    )
    state = a_leader_state(
        members=member_statuses(a_member_status(0)),
        group_statuses={TOKEN: a_group_status(NodeState.RUNNING, NodeState.GONE)},
    )
    assert isinstance(event_of(view, state), NodeLost)


# --- in a round ----------------------------------------------------------------------------------


def test_without_work_the_leader_waits() -> None:
    wait = wait_of(OPEN, a_leader_state(members=BUSY, phase=a_training()))
    assert (wait.until, wait.reason) == (NOW + 30.0, "nothing to do")


def test_a_complete_checkpoint_is_committed() -> None:
    ready = an_uploaded_checkpoint("c7", report_index=4, size_bytes=99)
    event = event_of(OPEN, a_leader_state(members=BUSY, ready_checkpoints=(ready,)))
    assert event == CheckpointCommitted(
        name="c7", round=1, report_index=4, metrics={"loss": 1.0}, ranks=(0,), size_bytes=99
    )
    own = event_of(
        OPEN,
        a_leader_state(members=BUSY, ready_checkpoints=(replace(ready, custom_folder="own"),)),
    )
    assert own == CheckpointCommitted(
        name="c7",
        round=1,
        report_index=4,
        metrics={"loss": 1.0},
        ranks=(0,),
        size_bytes=99,
        custom_folder="own",
    )


def test_a_failing_round_commits_before_it_closes() -> None:
    state = a_leader_state(
        members=BUSY,
        ready_checkpoints=(an_uploaded_checkpoint(),),
        phase=FAILED,
    )
    assert isinstance(event_of(OPEN, state), CheckpointCommitted)
    closed = event_of(OPEN, replace(state, ready_checkpoints=()))
    assert isinstance(closed, RoundClosed)
    assert closed.cause is FailureCause.WORKER


def test_only_the_leader_that_opened_a_round_records_its_duration() -> None:
    opener = a_leader_state(members=BUSY, phase=a_training(since=400.0))
    committed = event_of(OPEN, replace(opener, ready_checkpoints=(an_uploaded_checkpoint(),)))
    assert committed.round_age_s == 600.0
    failed = replace(opener, phase=replace(FAILED, opened_at=400.0))
    assert event_of(OPEN, failed).duration_s == 600.0
    successor = replace(failed, phase=FAILED)
    assert event_of(OPEN, successor).duration_s is None
    late = an_uploaded_checkpoint("c7", round=0)
    assert event_of(OPEN, replace(opener, ready_checkpoints=(late,))).round_age_s is None, (
        "the round is closed"
    )


def test_a_failure_waits_for_its_root_cause() -> None:
    state = a_leader_state(members=BUSY, phase=replace(FAILED, since=NOW, workers_stopped=False))
    wait = wait_of(OPEN, state, NOW + 0.02)
    assert wait.until == pytest.approx(NOW + 0.03)
    assert isinstance(event_of(OPEN, state, NOW + 0.04), RoundClosed)
    stopped = replace(state, phase=replace(FAILED, since=NOW))
    assert isinstance(event_of(OPEN, stopped, NOW), RoundClosed), "all workers have stopped"


def test_a_run_finishes_once_all_ranks_returned_and_reports_are_delivered() -> None:
    done = a_leader_state(phase=a_returned(), latest_metrics={"loss": 0.5})
    assert event_of(OPEN, done) == FitEnded(
        outcome="finished", metrics={"loss": 0.5}, result_key="r"
    )
    lost = replace(done, phase=a_returned(last_save_error="rank 0: the bucket is gone"))
    assert event_of(OPEN, lost).last_save_error == "rank 0: the bucket is gone"
    fewer = replace(done, phase=a_returned(missing_reports="rank 1 made 0 of 3"))
    assert event_of(OPEN, fewer).missing_reports == "rank 1 made 0 of 3"
    assert (
        wait_of(OPEN, replace(done, reports_delivered=False)).reason
        == "delivering the last reports to the callbacks"
    )
    training = replace(done, phase=a_training(running_ranks={0, 1}))
    assert wait_of(replace(OPEN, round_startup_s=1.0), training).reason == "nothing to do"


def test_the_start_of_the_training_function_is_recorded_once_on_all_ranks() -> None:
    some = a_leader_state(phase=a_training(since=NOW - 38.0, running_ranks={0}))
    assert isinstance(next_action(OPEN, some, NOW), Wait)
    all_ranks = a_leader_state(phase=a_training(since=NOW - 38.0, running_ranks={0, 1}))
    started = event_of(OPEN, all_ranks, NOW)
    assert started == TrainingFunctionStarted(round_number=1, startup_s=38.0)
    assert isinstance(next_action(fold_events(started, view=OPEN), all_ranks, NOW), Wait)


def test_returned_workers_have_limited_time_to_exit() -> None:
    decide_replacement = a_leader_state(
        members=BUSY, phase=a_returned(since=NOW, workers_stopped=False)
    )
    assert isinstance(next_action(OPEN, decide_replacement, NOW), Wait)
    assert isinstance(event_of(OPEN, decide_replacement, NOW + 45.0), FitEnded)
    assert isinstance(
        event_of(OPEN, replace(decide_replacement, phase=a_returned(since=NOW))), FitEnded
    )


def test_after_all_ranks_returned_a_lost_node_changes_nothing() -> None:
    state = a_leader_state(
        members=member_statuses(a_member_status(0)),
        phase=a_returned(),
        disconnected_since={an_agent_id(1): NOW},
    )
    event = event_of(OPEN, state)
    assert isinstance(event, FitEnded)
    assert event.outcome == "finished"


def test_a_lost_node_closes_the_round_although_others_returned() -> None:
    state = a_leader_state(
        members=member_statuses(a_member_status(0)),
        phase=Failing(round=a_round(), since=0.0),
        disconnected_since={an_agent_id(1): 0.0},
    )
    event = event_of(OPEN, state)
    assert isinstance(event, RoundClosed)
    assert event.cause is FailureCause.NETWORK
    gone = {TOKEN: a_group_status(NodeState.RUNNING, NodeState.GONE)}
    event = event_of(OPEN, replace(state, group_statuses=gone))
    assert isinstance(event, RoundClosed)
    assert event.cause is FailureCause.PREEMPTION


def test_with_a_disconnected_agent_the_backends_report_is_awaited() -> None:
    missing = a_leader_state(
        members=member_statuses(a_member_status(0)),
        disconnected_since={an_agent_id(1): NOW},
        phase=Failing(round=a_round(), since=NOW),
    )
    assert wait_of(OPEN, missing).until == NOW + SPEC.timing.failure_settle_s
    runs = replace(missing, group_statuses={TOKEN: a_group_status()}, status_as_of={TOKEN: NOW})
    event = event_of(OPEN, runs)
    assert isinstance(event, RoundClosed)
    assert event.cause is FailureCause.NETWORK


@pytest.mark.parametrize(
    ("message", "timeout_s"),
    [
        ("ValueError: no", SPEC.timing.failure_settle_s),
        ("xgboost.core.XGBoostError: Encountered EOF", SPEC.timing.heartbeat_timeout_s),
    ],
)
def test_a_machine_that_does_not_stop_its_workers_may_be_the_lost_peer(
    message: str, timeout_s: float
) -> None:
    failures = {0: RankFailure(rank=0, kind="raised", message=message)}
    failing = Failing(round=a_round(), since=NOW, rank_failures=failures, workers_stopped=False)
    assert wait_of(OPEN, a_leader_state(phase=failing)).until == NOW + timeout_s


def test_a_missing_former_leader_is_polled() -> None:
    elected = LeaderElected(
        leader=an_agent_id(0),
        epoch=2,
        coordinator_address="h:1",
        reason="",
        lost_leader=an_agent_id(7),
    )
    busy = a_leader_state(members=BUSY, phase=a_training())
    assert wait_of(replace(OPEN, leader=elected), busy).until == NOW + 1.0
    declared_lost = replace(OPEN, leader=elected, lost_agents=frozenset({an_agent_id(7)}))
    assert wait_of(declared_lost, busy).until > NOW + 1.0


UNABLE = RankFailure(
    rank=0, kind="raised", message="Python differs", cause=FailureCause.WORKER, is_permanent=True
)


def test_a_permanent_node_failure_ends_the_run_between_rounds() -> None:
    there = a_leader_state(
        members=member_statuses(a_member_status(0), a_member_status(1, node_failure=UNABLE))
    )
    forming = replace(OPEN, round=None)
    event = event_of(forming, there)
    assert isinstance(event, FitEnded)
    assert (event.outcome, event.cause, event.failures) == (
        "failed",
        FailureCause.WORKER,
        (UNABLE,),
    )
    training = replace(there, phase=a_training())
    assert not isinstance(next_action(OPEN, training, NOW), AppendEvent), "not during a round"
    lost = replace(forming, lost_agents=frozenset({an_agent_id(1)}))
    assert not isinstance(next_action(lost, there, NOW), AppendEvent), "not from a lost node"


def test_a_notice_is_recorded_once() -> None:
    with_notice = a_leader_state(
        members=member_statuses(a_member_status(0), a_member_status(1, notice=a_notice())),
        notice_received_at={an_agent_id(1): NOW},
    )
    assert event_of(OPEN, with_notice) == PreemptionNoticed(agent=an_agent_id(1), notice=a_notice())
    known = replace(OPEN, notices={an_agent_id(1): a_notice()}, notice_slots={an_agent_id(1): 5})
    assert isinstance(next_action(known, with_notice, NOW), RequestMachines), (
        "the replacement is requested next"
    )


def test_a_replacement_is_requested_during_the_round() -> None:
    decide_replacement = replace(
        OPEN, notices={an_agent_id(1): a_notice()}, notice_slots={an_agent_id(1): 5}
    )
    state = a_leader_state(
        members=member_statuses(a_member_status(0), a_member_status(1, notice=a_notice())),
        notice_received_at={an_agent_id(1): NOW},
    )
    assert next_action(decide_replacement, state, NOW) == RequestMachines(
        1, "1 of 2 workers need a machine"
    )
    request = replace(decide_replacement, groups=PENDING)
    assert next_action(request, state, NOW) == SubmitGroup(OTHER)


def test_a_pending_submit_delays_neither_commits_nor_round_ends() -> None:
    request = replace(OPEN, groups=PENDING)
    ready = a_leader_state(members=BUSY, ready_checkpoints=(an_uploaded_checkpoint(),))
    assert isinstance(event_of(request, ready), CheckpointCommitted)
    failed = a_leader_state(members=BUSY, phase=FAILED)
    assert isinstance(event_of(request, failed), RoundClosed)
    with_notice = a_leader_state(
        members=member_statuses(a_member_status(0), a_member_status(1, notice=a_notice()))
    )
    assert isinstance(event_of(request, with_notice), PreemptionNoticed)
    elastic = replace(request, round=None, spec=a_spec(min_workers=1, max_workers=2))
    assert isinstance(event_of(elastic, a_leader_state()), RoundOpened)


def test_a_lost_node_is_recorded_and_replaced() -> None:
    state = a_leader_state(
        members=member_statuses(a_member_status(0)),
        group_statuses={TOKEN: a_group_status(NodeState.RUNNING, NodeState.GONE)},
        disconnected_since={an_agent_id(1): NOW},
    )
    event = event_of(a_view(last_round=a_round()), state)
    why = "the backend reports it as gone"
    assert event == NodeLost(
        token=TOKEN, node=1, agent=an_agent_id(1), reason=why, cause=FailureCause.PREEMPTION
    )
    after = a_view(groups={TOKEN: a_group(lost_nodes=frozenset({1}))})
    assert next_action(after, state, NOW) == RequestMachines(1, "1 of 2 workers need a machine")


def test_disconnected_agents_are_polled() -> None:
    assert (
        wait_of(OPEN, a_leader_state(members=BUSY, disconnected_since={an_agent_id(7): NOW})).until
        == NOW + 1.0
    )


def test_a_group_without_machines_is_released() -> None:
    groups = {TOKEN: a_group(), OTHER: a_group(token=OTHER, nodes=1, lost_nodes=frozenset({0}))}
    view, state = a_view(round=a_round(), groups=groups), a_leader_state(phase=a_training())
    assert next_action(view, state, NOW) == ReleaseGroups(OTHER)


def test_a_connected_agent_of_a_lost_node_gets_time_to_exit_by_itself() -> None:
    groups = {TOKEN: a_group(), OTHER: a_group(token=OTHER, nodes=1, lost_nodes=frozenset({0}))}
    replaced = a_member_status(5, member=a_member(5, token=OTHER, node=0))
    members = {**BUSY, an_agent_id(5): replaced}
    view = a_view(round=a_round(), groups=groups, lost_agents=frozenset({an_agent_id(5)}))
    state = a_leader_state(
        phase=a_training(), members=members, loss_recorded_at={OTHER: NOW}, leading_since=0.0
    )
    wait = wait_of(view, state)
    assert (wait.until, wait.reason) == (NOW + 1.0, "a replaced machine is shutting down")
    assert next_action(view, state, NOW + 15) == ReleaseGroups(OTHER)
    assert next_action(view, replace(state, members=BUSY), NOW) == ReleaseGroups(OTHER)


def test_checkpoints_are_dropped_after_more_urgent_actions() -> None:
    retained = replace(
        OPEN,
        spec=a_spec(retention=RetentionConfig(num_to_keep=1)),
        checkpoints=(a_committed_checkpoint("c1"), a_committed_checkpoint("c2")),
    )
    assert event_of(retained, a_leader_state(members=BUSY)) == CheckpointDropped(
        name="c1", reason="num_to_keep=1: only the last 1 are kept"
    )


def test_checkpoints_are_dropped_before_the_end() -> None:
    retained = replace(
        OPEN,
        spec=a_spec(retention=RetentionConfig(num_to_keep=1)),
        checkpoints=(a_committed_checkpoint("c1"), a_committed_checkpoint("c2")),
    )
    done = a_leader_state(phase=a_returned())
    assert isinstance(event_of(retained, done), CheckpointDropped)
    after = replace(
        retained, checkpoints=(a_committed_checkpoint("c2"),), dropped_checkpoints=frozenset({"c1"})
    )
    assert isinstance(event_of(after, done), FitEnded)


# --- the end -------------------------------------------------------------------------------------


def test_cancellation_takes_precedence() -> None:
    view = a_view(round=a_round(), groups=PENDING, cancel_reason="Ctrl-C")
    state = a_leader_state(
        latest_metrics={"loss": 1}, ready_checkpoints=(an_uploaded_checkpoint(),)
    )
    assert event_of(view, state) == FitEnded(
        outcome="cancelled", reason="Ctrl-C", metrics={"loss": 1}
    )


CANCELLED = a_view(
    round=a_round(), groups=PENDING, cancel_reason="Ctrl-C", saves_before_cancel=True
)


@pytest.mark.parametrize(
    ("uploading", "taken_at", "waits_s"),
    [((), None, 120.0), ((1,), None, 600.0), ((), 99.0, 120.0), ((1,), 99.0, 600.0)],
)
def test_a_cancelled_run_waits_for_a_save_that_was_taken_after_the_request(
    uploading: tuple[int, ...], taken_at: float | None, waits_s: float
) -> None:
    commit = RoundCommit(committed_at=100.5, snapshot_taken_at=taken_at)
    training = a_training(
        save_requested_at=100.0, uploading_ranks=frozenset(uploading), last_commit=commit
    )
    state = a_leader_state(phase=training)
    view = replace(CANCELLED, groups={})
    assert isinstance(next_action(view, state, 99.0 + waits_s), Wait)
    assert event_of(view, state, 100.0 + waits_s).outcome == "cancelled"


def test_a_cancelled_run_ends_once_its_last_save_is_committed() -> None:
    training = a_training(
        save_requested_at=100.0,
        last_commit=RoundCommit(committed_at=102.0, snapshot_taken_at=101.0),
    )
    assert event_of(CANCELLED, a_leader_state(phase=training), 102.0).outcome == "cancelled"


def test_a_complete_checkpoint_is_committed_before_the_cancelled_run_ends() -> None:
    ready = an_uploaded_checkpoint()
    state = a_leader_state(phase=a_training(save_requested_at=0.0), ready_checkpoints=(ready,))
    assert event_of(CANCELLED, state, 1.0).name == ready.name


def test_a_cancelled_run_without_a_checkpointer_ends_at_once() -> None:
    for phase in (a_training(), NoRound()):
        assert event_of(CANCELLED, a_leader_state(phase=phase), 1.0).outcome == "cancelled"


def test_a_function_that_has_returned_finishes_in_spite_of_a_cancellation() -> None:
    state = a_leader_state(phase=a_returned(since=100.0))
    view = replace(CANCELLED, groups={})
    assert event_of(view, state, 101.0).outcome == "finished"
    pending = replace(state, reports_delivered=False)
    assert isinstance(next_action(view, pending, 101.0), Wait)
    assert event_of(view, pending, 220.0).outcome == "cancelled"


def test_no_machines_are_requested_while_a_cancelled_run_saves() -> None:
    view = replace(CANCELLED, groups={}, spec=a_spec(max_workers=4))
    state = a_leader_state(phase=a_training(save_requested_at=100.0))
    assert isinstance(next_action(view, state, 101.0), Wait)


def test_an_exception_in_a_callback_ends_the_run() -> None:
    error = UserCodeError(
        reason="a callback raised", traceback_text="Traceback\nKeyError: 'x'", pickle_key="f/1"
    )
    event = event_of(OPEN, a_leader_state(user_code_error=error))
    assert isinstance(event, FitEnded)
    assert (event.outcome, event.reason, event.cause) == (
        "failed",
        error.reason,
        FailureCause.PLATFORM,
    )
    assert event.failures == (
        RankFailure(rank=-1, kind="raised", message=error.traceback_text, pickle_key="f/1"),
    )


def test_a_final_refusal_ends_the_run_between_rounds() -> None:
    refused = a_view(final_refusal="no quota", groups={})
    alone = a_leader_state(members=member_statuses(a_member_status(0)))
    assert event_of(refused, alone) == FitEnded(
        outcome="failed", reason="no quota", cause=FailureCause.PLATFORM
    )
    assert isinstance(
        next_action(replace(OPEN, final_refusal="x"), a_leader_state(members=BUSY), NOW), Wait
    )


@pytest.mark.parametrize("wrong", [{"final_refusal": "no quota"}, {"boot_failures": 99}])
def test_after_a_final_refusal_a_complete_group_continues(wrong: dict[str, Any]) -> None:
    assert isinstance(event_of(a_view(**wrong), a_leader_state()), RoundOpened)
    alone = a_leader_state(members=member_statuses(a_member_status(0)))
    assert isinstance(next_action(a_view(**wrong), alone, NOW), Wait), (
        "the other machine still boots"
    )


def test_an_exceeded_limit_ends_the_run_with_the_failures() -> None:
    view = a_view(
        spec=a_spec(failure_limits=FailureLimits(worker=0)),
        failure_counts={FailureCause.WORKER: 1},
        last_round_closed=RoundClosed(
            round_number=1,
            cause=FailureCause.WORKER,
            reason="rank 0 raised: no",
            failures=(RAISED,),
        ),
    )
    event = event_of(view, a_leader_state(latest_metrics={"loss": 1.0}))
    assert isinstance(event, FitEnded)
    assert (event.cause, event.failures, event.metrics) == (
        FailureCause.WORKER,
        (RAISED,),
        {"loss": 1.0},
    )


def test_the_run_waits_until_callbacks_received_the_failure() -> None:
    closed = RoundClosed(
        round_number=1, cause=FailureCause.WORKER, reason="rank 0 raised", failures=(RAISED,)
    )
    view = a_view(last_round_closed=closed, failure_counts={FailureCause.WORKER: 1}, groups={})
    assert wait_of(view, a_leader_state(members={}, reports_delivered=False)).reason.startswith(
        "delivering the last failure"
    )
    assert isinstance(event_of(view, a_leader_state(members={})), FitEnded)


def test_an_invalid_score_ends_the_run() -> None:
    view = replace(
        OPEN,
        spec=a_spec(retention=RetentionConfig(num_to_keep=1, score_attribute="acc")),
        checkpoints=(
            a_committed_checkpoint("c1", metrics={"acc": "high"}),
            a_committed_checkpoint("c2"),
        ),
    )
    event = event_of(view, a_leader_state(members=BUSY))
    assert isinstance(event, FitEnded)
    assert (event.outcome, event.cause) == ("failed", FailureCause.PLATFORM)
    assert "must be a number" in event.reason


# --- after the end -------------------------------------------------------------------------------

DONE = a_view(fit_end=FitEnded(outcome="finished"))
LEADER_ONLY = member_statuses(a_member_status(0))
BOTH_JOINED = {(TOKEN, 0): an_agent_id(0), (TOKEN, 1): an_agent_id(1)}


def test_machines_get_time_to_exit_by_themselves() -> None:
    wait = wait_of(DONE, a_leader_state(phase=NoRound(since=NOW)))
    assert (wait.until, wait.reason) == (NOW + 1.0, "machines are shutting down")


def test_the_leaders_group_ends_with_the_leader_if_machines_terminate_themselves() -> None:
    state = a_leader_state(
        members=LEADER_ONLY, phase=NoRound(since=NOW), last_agent_by_node=BOTH_JOINED
    )
    assert event_of(DONE, state) == GroupsReleased(token=TOKEN)
    released = replace(DONE, groups={TOKEN: a_group(is_released=True)})
    assert next_action(released, state, NOW) == Idle()


def test_the_leaders_machine_is_released_after_its_deletions_within_a_minute() -> None:
    state = a_leader_state(
        members=LEADER_ONLY,
        phase=NoRound(since=NOW),
        last_agent_by_node=BOTH_JOINED,
        has_unfinished_writes=True,
    )
    assert wait_of(DONE, state).until == NOW + 1.0
    assert wait_of(DONE, state, NOW + 59.5).until == NOW + 60.0
    assert event_of(DONE, state, NOW + 60) == GroupsReleased(token=TOKEN)
    assert event_of(DONE, replace(state, has_unfinished_writes=False)) == GroupsReleased(
        token=TOKEN
    )


def test_the_leaders_machine_is_not_cancelled_before_its_output_is_stored() -> None:
    state = a_leader_state(
        members=LEADER_ONLY,
        phase=NoRound(since=NOW),
        releases_on_agent_exit=False,
        has_unwritten_logs=True,
    )
    assert wait_of(DONE, state).until == NOW + 1.0
    assert next_action(DONE, replace(state, has_unwritten_logs=False), NOW) == ReleaseGroups(TOKEN)


def test_a_group_with_a_machine_that_never_joined_is_released() -> None:
    state = a_leader_state(
        members=LEADER_ONLY,
        phase=NoRound(since=NOW),
        last_agent_by_node={(TOKEN, 0): an_agent_id(0)},
    )
    assert next_action(DONE, state, NOW) == ReleaseGroups(TOKEN), "it may still boot and cost money"
    status = a_group_status(NodeState.RUNNING, NodeState.GONE)
    assert event_of(DONE, replace(state, group_statuses={TOKEN: status})) == GroupsReleased(
        token=TOKEN
    )


def test_the_leaders_group_is_released_last_if_machines_do_not_terminate_themselves() -> None:
    view = replace(DONE, groups={TOKEN: a_group(), OTHER: a_group(token=OTHER, nodes=1)})
    state = a_leader_state(
        members=LEADER_ONLY,
        phase=NoRound(since=NOW),
        releases_on_agent_exit=False,
        last_agent_by_node=BOTH_JOINED,
    )
    assert next_action(view, state, NOW) == ReleaseGroups(OTHER)
    assert next_action(DONE, state, NOW) == ReleaseGroups(TOKEN)


def test_other_groups_are_released_first() -> None:
    spare = a_group(token=OTHER, nodes=1)
    view = replace(DONE, groups={TOKEN: a_group(), OTHER: spare})
    assert next_action(
        view, a_leader_state(members=LEADER_ONLY, phase=NoRound(since=NOW)), NOW
    ) == ReleaseGroups(OTHER)


def test_a_machine_that_does_not_exit_is_released() -> None:
    stays = member_statuses(
        a_member_status(0), a_member_status(5, member=a_member(5, token=OTHER, node=0))
    )
    view = replace(DONE, groups={OTHER: a_group(token=OTHER, nodes=1)})
    state = a_leader_state(members=stays, phase=NoRound(since=NOW))
    assert isinstance(next_action(view, state, NOW + 14), Wait)
    assert next_action(view, state, NOW + 15) == ReleaseGroups(OTHER)


def test_a_planned_group_is_submitted_after_the_end() -> None:
    view = replace(DONE, groups=PENDING)
    assert next_action(view, a_leader_state(phase=NoRound(since=NOW)), NOW) == SubmitGroup(OTHER)


def test_known_machines_are_released_before_requests_are_looked_up() -> None:
    spare = Token("t-3")
    view = replace(DONE, groups={**PENDING, spare: a_group(token=spare, nodes=1)})
    state = a_leader_state(members=LEADER_ONLY, phase=NoRound(since=NOW))
    assert next_action(view, state, NOW) == ReleaseGroups(spare)


@pytest.mark.parametrize("handle", [None, a_group(token=OTHER).handle], ids=["pending", "granted"])
def test_a_leader_whose_backend_does_not_answer_leaves_groups_to_the_next_one(handle: Any) -> None:
    other = a_group(token=OTHER, nodes=1, handle=handle)
    view = replace(DONE, groups={TOKEN: a_group(), OTHER: other})
    state = a_leader_state(
        members=LEADER_ONLY, phase=NoRound(since=NOW), last_agent_by_node=BOTH_JOINED
    )
    call = SubmitGroup(OTHER) if handle is None else ReleaseGroups(OTHER)
    assert next_action(view, state, NOW + 89) == call
    assert event_of(view, state, NOW + 90) == GroupsReleased(token=TOKEN)
    view = replace(view, groups={**view.groups, TOKEN: a_group(is_released=True)})
    assert isinstance(next_action(view, state, NOW + 90), Idle)
    # Neither would save money.
    for forever in (
        replace(state, is_headless=True, members={}),
        replace(state, releases_on_agent_exit=False),
    ):
        assert next_action(view, forever, NOW + 9000) == call


def test_a_headless_leader_releases_all_groups() -> None:
    headless = a_leader_state(is_headless=True, members={}, phase=NoRound(since=NOW))
    assert next_action(DONE, headless, NOW) == ReleaseGroups(TOKEN)
    assert next_action(replace(DONE, groups={}), headless, NOW) == Idle()


def test_a_headless_leader_lets_running_agents_of_the_last_round_exit() -> None:
    view = replace(DONE, last_round=a_round())
    headless = a_leader_state(
        is_headless=True,
        members={},
        phase=NoRound(since=NOW),
        group_statuses={TOKEN: a_group_status(NodeState.RUNNING, NodeState.GONE)},
    )
    assert wait_of(view, headless).until == NOW + 1.0
    assert next_action(view, headless, NOW + 15) == ReleaseGroups(TOKEN)
    gone = {TOKEN: a_group_status(NodeState.GONE, NodeState.GONE)}
    assert next_action(view, replace(headless, group_statuses=gone), NOW) == ReleaseGroups(TOKEN)


def test_a_headless_leader_closes_a_round_without_agents() -> None:
    headless = a_leader_state(
        is_headless=True, members={}, group_statuses={TOKEN: a_group_status()}
    )
    one_left = replace(OPEN, lost_agents=frozenset({an_agent_id(0)}))
    assert isinstance(next_action(one_left, headless, NOW), Wait)
    without_agents = replace(OPEN, lost_agents=frozenset({an_agent_id(0), an_agent_id(1)}))
    event = event_of(without_agents, headless)
    assert isinstance(event, RoundClosed)
    assert event.cause is FailureCause.PREEMPTION


# --- arbitrary views and states ------------------------------------------------------------------

FAILURES = st.dictionaries(
    st.integers(0, 1),
    st.builds(
        RankFailure,
        rank=st.integers(0, 1),
        kind=st.sampled_from(["raised", "died"]),
        message=st.text(max_size=5),
    ),
    max_size=2,
)
AGENTS = st.integers(0, 3).map(an_agent_id)
TIMES = st.floats(0, 2000)


@st.composite
def views(draw: st.DrawFn) -> View:
    groups = {}
    for n in range(draw(st.integers(0, 3))):
        token = Token(f"t-{n + 1}")
        group = a_group(token=token, nodes=2, lost_nodes=draw(st.frozensets(st.integers(0, 1))))
        group_outcome = draw(st.sampled_from(["granted", "pending", "refusal", "released"]))
        if group_outcome != "granted":
            changed: dict[str, Any] = {
                "pending": {"handle": None},
                "refusal": {"handle": None, "refusal": "full"},
                "released": {"is_released": True},
            }
            group = replace(group, **changed[group_outcome])
        groups[token] = group
    with_notice = draw(st.frozensets(AGENTS, max_size=2))
    low = draw(st.integers(1, 2))
    return a_view(
        spec=a_spec(
            min_workers=low,
            max_workers=draw(st.integers(low, 4)),
            failure_limits=FailureLimits(
                worker=draw(st.integers(-1, 1)), platform=-1, preemption=draw(st.integers(-1, 1))
            ),
            retention=RetentionConfig(
                num_to_keep=draw(st.sampled_from([None, 1])),
                score_attribute=draw(st.sampled_from([None, "loss"])),
            ),
        ),
        groups=groups,
        round=draw(st.none() | st.just(a_round())),
        last_round=draw(st.none() | st.just(a_round())),
        leader=draw(
            st.just(
                LeaderElected(
                    leader=an_agent_id(0),
                    epoch=1,
                    coordinator_address="h:1",
                    reason="",
                    lost_leader=draw(st.none() | AGENTS),
                )
            )
        ),
        last_round_closed=draw(
            st.none()
            | st.builds(
                RoundClosed,
                round_number=st.just(1),
                cause=st.sampled_from(FailureCause),
                reason=st.text(),
            )
        ),
        failure_counts={cause: draw(st.integers(0, 2)) for cause in FailureCause},
        refusals=draw(st.integers(0, 3)),
        boot_failures=draw(st.sampled_from([0, 1, 99])),
        final_refusal=draw(st.none() | st.just("no quota")),
        notices=dict.fromkeys(with_notice, a_notice(seconds_left=draw(st.none() | TIMES))),
        notice_slots=dict.fromkeys(with_notice, draw(st.integers(0, 9))),
        latest_committed_slot=draw(st.integers(-1, 9)),
        lost_agents=draw(st.frozensets(AGENTS, max_size=2)),
        checkpoints=tuple(
            a_committed_checkpoint(
                f"c{n}", metrics=draw(st.sampled_from([{"loss": n}, {}, {"loss": "x"}]))
            )
            for n in range(draw(st.integers(0, 3)))
        ),
        cancel_reason=draw(st.none() | st.just("enough")),
        fit_end=draw(st.none() | st.just(FitEnded(outcome="finished"))),
    )


def phases(round_: Round | None) -> st.SearchStrategy[RoundPhase]:
    if round_ is None:
        return st.builds(NoRound, since=TIMES, bucket_searched=st.booleans())
    same = st.just(round_)
    return (
        st.builds(
            Training,
            round=same,
            since=TIMES,
            running_ranks=st.frozensets(st.integers(0, 1)),
            last_commit=st.none() | st.builds(RoundCommit, committed_at=TIMES),
        )
        | st.builds(
            Failing,
            round=same,
            since=TIMES,
            opened_at=st.none() | TIMES,
            rank_failures=FAILURES,
            workers_stopped=st.booleans(),
        )
        | st.builds(
            Returned,
            round=same,
            since=TIMES,
            opened_at=TIMES,
            result_key=st.just("r"),
            workers_stopped=st.booleans(),
        )
    )


@st.composite
def views_and_states(draw: st.DrawFn) -> tuple[View, LeaderState]:
    view = draw(views())
    return view, draw(leader_states(view))


@st.composite
def leader_states(draw: st.DrawFn, view: View) -> LeaderState:
    is_headless = draw(st.booleans())
    connected = draw(st.sets(st.integers(0, 3)))
    notice = draw(st.none() | st.just(a_notice()))
    return LeaderState(
        agent_id=an_agent_id(0),
        is_headless=is_headless,
        releases_on_agent_exit=draw(st.booleans()),
        leading_since=draw(TIMES),
        members=member_statuses(
            *(
                a_member_status(n, running_round=draw(st.none() | st.just(1)), notice=notice)
                for n in connected
            )
        ),
        disconnected_since=draw(st.dictionaries(AGENTS, TIMES, max_size=2)),
        disconnected_in_round=draw(st.frozensets(AGENTS, max_size=1)),
        last_agent_by_node=draw(st.sampled_from([{}, {(TOKEN, 0): an_agent_id(0)}, BOTH_JOINED])),
        phase=draw(phases(None if is_headless else view.round)),
        reports_delivered=draw(st.booleans()),
        user_code_error=draw(
            st.none()
            | st.just(UserCodeError(reason="a callback raised", traceback_text="Traceback"))
        ),
        ready_checkpoints=draw(st.sampled_from([(), (an_uploaded_checkpoint(),)])),
        group_statuses=draw(
            st.dictionaries(
                st.just(TOKEN), st.sampled_from([a_group_status(), a_group_status(NodeState.GONE)])
            )
        ),
        granted_at=draw(st.dictionaries(st.tuples(st.just(TOKEN), st.integers(0, 1)), TIMES)),
        refused_at=draw(st.dictionaries(st.just("train"), TIMES)),
    )


@given(views_and_states(), TIMES)
def test_next_action_is_total_and_deterministic(
    view_and_state: tuple[View, LeaderState], now: float
) -> None:
    view, state = view_and_state
    action: LeaderAction = next_action(view, state, now)
    assert action == next_action(view, state, now)
    if isinstance(action, Wait):
        assert action.until <= now + 30.0, "the wait is bounded"
        assert action.reason


@given(views_and_states(), TIMES)
def test_actions_are_consistent_with_the_view(
    view_and_state: tuple[View, LeaderState], now: float
) -> None:
    view, state = view_and_state
    match next_action(view, state, now):
        case SubmitGroup(token=token):
            assert view.groups[token].is_pending
        case ReleaseGroups(token=token):
            assert view.groups[token].handle is not None
            assert not view.groups[token].is_released
        case RequestMachines(num_workers=workers):
            assert workers > 0
            assert view.is_active
        case AppendEvent(event=RoundOpened()):
            assert view.round is None
            assert view.is_active
        case AppendEvent(event=RoundClosed(round_number=number)):
            assert view.round is not None
            assert view.round.number == number
        case AppendEvent(event=FitEnded()):
            assert view.fit_end is None
        case Idle():
            assert view.fit_end is not None
