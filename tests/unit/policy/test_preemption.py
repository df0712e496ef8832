"""Preemption: final saves, replacement of nodes, and resizing."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from spotfit.core.ids import Token
from spotfit.model.events import FailureCause, PreemptedNodes, RoundClosed
from spotfit.model.failure_model import SaveCostEstimate
from spotfit.model.leader_state import LeaderState, ReplicaLocation, RoundCommit, Training
from spotfit.model.spec import FailureLimits
from spotfit.model.view import View
from spotfit.policy.actions import Wait
from spotfit.policy.preemption import (
    DEFAULT_NOTICE_S,
    AwaitSaveInFlight,
    ContinueTraining,
    FinalSave,
    NoTimeToSave,
    PreDeadlineState,
    close_after_preemption,
    decide_final_save,
    replace_working_nodes,
    may_continue_without,
    replace_preempted_nodes,
    resize_group,
)
from spotfit.testing.builders import (
    TOKEN,
    a_committed_checkpoint,
    a_final_group_status,
    a_group,
    a_leader_state,
    a_member,
    a_member_status,
    a_notice,
    a_round,
    a_spec,
    a_training,
    a_view,
    an_agent_id,
    member_statuses,
)

SPARE = Token("t-2")
NOTICED = 100.0
LEAVING = a_member_status(1, notice=a_notice(seconds_left=60.0))
REPLACEMENT = a_member_status(2, member=a_member(2, token=SPARE, node=0))


def with_notice(*, saved: bool = False, **fields: Any) -> View:
    """The notice of a1 is in slot 7; the replacement's group is granted."""
    defaults: dict[str, Any] = {
        "round": a_round(),
        "notices": {an_agent_id(1): a_notice(seconds_left=60.0)},
        "notice_slots": {an_agent_id(1): 7},
        "latest_committed_slot": 8 if saved else 6,
        "groups": {TOKEN: a_group(), SPARE: a_group(token=SPARE, nodes=1)},
    }
    return a_view(**{**defaults, **fields})


COMMITTED = a_training(last_commit=RoundCommit(committed_at=109.9))


def committed_at(committed_at: float, **fields: Any) -> LeaderState:
    """A state whose last commit was at the given time."""
    commit = RoundCommit(committed_at=committed_at)
    return a_leader_state(phase=a_training(last_commit=commit, **fields))


def state_after_commit(*some: Any) -> LeaderState:
    """A state whose last commit was at 109.9."""
    return a_leader_state(
        members=member_statuses(a_member_status(0), *some),
        phase=COMMITTED,
        notice_received_at={an_agent_id(1): NOTICED},
    )


def training_of(view: View, state: LeaderState) -> Training:
    assert view.round is not None
    phase = state.phase if isinstance(state.phase, Training) else a_training()
    return replace(phase, round=view.round)


def decide_replacement(view: View, state: LeaderState, now: float) -> RoundClosed | Wait | None:
    return replace_preempted_nodes(view, state, training_of(view, state), now)


def test_without_a_notice_nothing_is_closed() -> None:
    assert decide_replacement(a_view(round=a_round()), a_leader_state(), NOTICED) is None


def test_a_notice_of_an_unassigned_node_changes_nothing() -> None:
    assert (
        decide_replacement(
            with_notice(round=a_round(members=[a_member(0)])), state_after_commit(LEAVING), NOTICED
        )
        is None
    )


@pytest.mark.parametrize(
    ("saved", "replaced", "now", "outcome"),
    [
        (False, False, 110.0, "1 nodes leave in 50 s"),
        (True, False, 110.0, "1 nodes leave in 50 s"),
        (False, True, 110.0, "1 nodes leave in 50 s"),
        (True, True, 110.0, "checkpoint saved after the preemption notice; replacement ready"),
        (True, True, 130.0, "replacement ready; the round ends at the next save"),
        (True, True, 158.5, "checkpoint saved after the preemption notice; replacement ready"),
        (False, False, 160.0, "the preemption deadline has passed"),
    ],
    ids=[
        "neither",
        "saved",
        "replaced",
        "both",
        "both, but a while ago",
        "last chance",
        "too late",
    ],
)
def test_the_round_continues_until_saved_and_replaced_or_the_deadline(
    saved: bool, replaced: bool, now: float, outcome: str
) -> None:
    state = state_after_commit(LEAVING, REPLACEMENT) if replaced else state_after_commit(LEAVING)
    decision = decide_replacement(with_notice(saved=saved), state, now)
    assert decision is not None
    assert decision.reason == outcome
    if isinstance(decision, RoundClosed):
        assert (decision.round_number, decision.cause) == (1, FailureCause.PREEMPTION)
        assert decision.preempted == PreemptedNodes(
            node_to_ranks={"t-1/1": (1,)},
            drain_timed_out=outcome.startswith("the preemption deadline"),
        )
    else:
        assert decision.until == (158.0 if "next save" in outcome else 160.0)


@pytest.mark.parametrize(
    ("saved", "requeues", "now", "closes"),
    [(True, True, 155.5, True), (True, True, 154.0, False), (True, False, 155.5, False)],
    ids=["near the deadline", "earlier", "its backend restarts nothing"],
)
def test_a_node_with_a_granted_replacement_leaves_before_its_backend_restarts_it(
    now: float, *, saved: bool, requeues: bool, closes: bool
) -> None:
    state = replace(state_after_commit(LEAVING), requeues_itself=requeues)
    decision = decide_replacement(with_notice(saved=saved), state, now)
    assert isinstance(decision, RoundClosed) is closes
    without = with_notice(saved=saved, groups={TOKEN: a_group()})
    assert isinstance(decide_replacement(without, state, now), Wait), "no replacement was granted"


def test_an_unsaved_node_uses_all_of_its_notice() -> None:
    state = replace(state_after_commit(LEAVING), requeues_itself=True)
    assert isinstance(decide_replacement(with_notice(saved=False), state, 159.0), Wait)


REPLICATED = a_round(
    members=[a_member(0, peer_store_address="a:9"), a_member(1, slots=2, peer_store_address="b:9")]
)


def replicas(
    reported_at: float, *, by: int = 0, steps: tuple[int, ...] = (9, 9)
) -> dict[int, ReplicaLocation]:
    """Replicas of the ranks of a1 on one node."""
    address = REPLICATED.assignments[by].peer_store_address
    return {
        rank: ReplicaLocation(step=step, peer_store_address=address, reported_at=reported_at)
        for rank, step in zip((1, 2), steps, strict=True)
    }


@pytest.mark.parametrize(
    ("fields", "changes"),
    [
        ({}, False),
        ({"last_commit": RoundCommit(committed_at=109.9, snapshot_taken_at=105.5)}, True),
        ({"last_commit": RoundCommit(committed_at=109.9)}, True),
        ({"replacement_ready_at": None}, True),
        ({"replica_locations": replicas(109.9)}, True),
    ],
    ids=["older", "newer", "user files", "not notified", "replicated"],
)
def test_a_commit_of_an_old_snapshot_does_not_close_while_a_replica_may_follow(
    fields: dict[str, Any], changes: bool
) -> None:
    """A replica of newer work can arrive at a peer sooner than the next commit."""
    early: dict[str, Any] = {
        "last_commit": RoundCommit(committed_at=109.9, snapshot_taken_at=101.0),
        "replacement_ready_at": 105.0,
        **fields,
    }
    state = replace(state_after_commit(LEAVING, REPLACEMENT), phase=a_training(**early))
    decision = decide_replacement(with_notice(round=REPLICATED, saved=True), state, 110.0)
    assert isinstance(decision, RoundClosed) == changes
    if isinstance(decision, RoundClosed):
        assert decision.reason == "checkpoint saved after the preemption notice; replacement ready"


@pytest.mark.parametrize(("instance", "closes"), [("i", False), ("j", True)])
def test_a_replica_on_the_instance_that_leaves_is_not_safe(instance: str, closes: bool) -> None:
    """The notices of its other machines arrive a moment later."""
    round_ = a_round(
        members=[
            a_member(0, peer_store_address="a:9", instance=instance),
            a_member(1, slots=2, peer_store_address="b:9", instance="i"),
        ]
    )
    training = a_training(replica_locations=replicas(109.9))
    state = replace(state_after_commit(LEAVING, REPLACEMENT), phase=training)
    decision = decide_replacement(with_notice(round=round_), state, 110.0)
    assert isinstance(decision, RoundClosed) == closes


NO_PEER_STORE = a_round(members=[a_member(0), a_member(1, slots=2, peer_store_address="b:9")])
LARGE_SAVE = (a_committed_checkpoint("c", size_bytes=30 * 2**30),)
"""Half of it is replicated in 72 s."""


@pytest.mark.parametrize(
    "fields",
    [
        {"round": NO_PEER_STORE},
        {"round": a_round(members=[a_member(1, peer_store_address="b:9")])},
        {"spec": a_spec(failure_limits=FailureLimits(preemption_grace_s=30.0)), "left_s": 33.0},
        {"left_s": 3.0},
        {"checkpoints": LARGE_SAVE},
    ],
    ids=["no peer store", "no staying node", "lost before the grace", "no time", "too large"],
)
def test_without_replication_a_commit_of_an_old_snapshot_closes(
    fields: dict[str, Any],
) -> None:
    left_s = fields.pop("left_s", 50.0)
    view = with_notice(**{"round": REPLICATED, "saved": True, **fields})
    grace_s = view.spec.failure_limits.preemption_grace_s
    now = NOTICED + 60.0 + grace_s - left_s
    commit = RoundCommit(committed_at=now, snapshot_taken_at=99.0)
    phase = a_training(last_commit=commit, replacement_ready_at=100.5)
    state = replace(state_after_commit(LEAVING, REPLACEMENT), phase=phase)
    decision = decide_replacement(view, state, now)
    assert isinstance(decision, RoundClosed)
    assert (
        decision.reason
        == "checkpoint saved before the preemption notice was committed; replacement ready"
    )


@pytest.mark.parametrize(
    ("copies", "changes"),
    [
        (replicas(109.9), True),
        (replicas(105.0), False),
        (replicas(NOTICED - 1), False),
        (replicas(109.9, by=1), False),
        (replicas(109.9, steps=(9, 6)), False),
        ({1: replicas(109.9)[1]}, False),
    ],
    ids=[
        "fresh",
        "old",
        "before the notice",
        "on the leaving node",
        "different steps",
        "missing part",
    ],
)
def test_a_replica_on_a_staying_node_closes_like_a_commit(
    copies: dict[int, ReplicaLocation], changes: bool
) -> None:
    """The next round resumes from memory, so the bucket need not be awaited."""
    phase = replace(COMMITTED, replica_locations=copies)
    state = replace(state_after_commit(LEAVING, REPLACEMENT), phase=phase)
    decision = decide_replacement(with_notice(round=REPLICATED), state, 110.0)
    assert isinstance(decision, RoundClosed) == changes
    if isinstance(decision, RoundClosed):
        assert decision.state_replicated
        assert decision.cause is FailureCause.PREEMPTION


def test_a_notice_without_time_has_the_default_deadline() -> None:
    view = with_notice(notices={an_agent_id(1): a_notice(seconds_left=None)})
    decision = decide_replacement(view, state_after_commit(LEAVING), NOTICED)
    assert isinstance(decision, Wait)
    assert decision.until == NOTICED + DEFAULT_NOTICE_S


def test_the_grace_period_extends_the_deadline() -> None:
    view = with_notice(spec=a_spec(failure_limits=FailureLimits(preemption_grace_s=30.0)))
    decision = decide_replacement(view, state_after_commit(LEAVING), NOTICED)
    assert isinstance(decision, Wait)
    assert decision.until == 190.0


def test_the_earliest_deadline_counts() -> None:
    soon = a_member_status(0, notice=a_notice(seconds_left=5.0))
    view = with_notice(
        notices={
            an_agent_id(0): a_notice(seconds_left=5.0),
            an_agent_id(1): a_notice(seconds_left=60.0),
        },
        notice_slots={an_agent_id(0): 7, an_agent_id(1): 7},
    )
    noticed_at = {an_agent_id(0): NOTICED, an_agent_id(1): NOTICED}
    decision = decide_replacement(
        view,
        a_leader_state(members=member_statuses(soon, LEAVING), notice_received_at=noticed_at),
        NOTICED,
    )
    assert isinstance(decision, Wait)
    assert decision.until == 105.0


def test_a_new_leader_counts_from_its_election() -> None:
    state = a_leader_state(members=member_statuses(a_member_status(0)), leading_since=500.0)
    decision = decide_replacement(with_notice(), state, 500.0)
    assert isinstance(decision, Wait)
    assert decision.until == 560.0


def test_an_elastic_group_shrinks_once_no_machine_is_pending() -> None:
    elastic = a_spec(min_workers=1, max_workers=2)
    alone = with_notice(saved=True, spec=elastic, groups={TOKEN: a_group()})
    smaller = decide_replacement(alone, state_after_commit(LEAVING), 110.0)
    assert smaller == RoundClosed(
        round_number=1,
        cause=FailureCause.RESIZE,
        reason="checkpoint saved after the preemption notice; continuing with 1 workers",
    )
    pending_replacement = with_notice(saved=True, spec=elastic)
    assert isinstance(
        decide_replacement(pending_replacement, state_after_commit(LEAVING), 110.0), Wait
    )


# --- nodes lost after a notice, while the remaining ranks save -----------------------------------

RELAXED = a_spec(relax_collectives=True)
WITH_GRACE = a_spec(failure_limits=FailureLimits(preemption_grace_s=30.0))


def decide_after_loss(view: View, now: float, **fields: Any) -> RoundClosed | Wait | None:
    """a1 is lost; its notice of 60 s was received at 100."""
    there = a_leader_state(
        members=member_statuses(a_member_status(0)),
        disconnected_since={an_agent_id(1): 150.0},
        notice_received_at={an_agent_id(1): NOTICED},
        phase=a_training(**fields),
    )
    return close_after_preemption(view, there, training_of(view, there), now)


@pytest.mark.parametrize(
    ("view", "may_continue"),
    [
        (with_notice(spec=RELAXED), True),
        (with_notice(spec=WITH_GRACE), True),
        (with_notice(), False),
        (with_notice(spec=RELAXED, notices={}), False),
        (with_notice(spec=RELAXED, round=a_round(members=[a_member(1), a_member(0)])), False),
    ],
    ids=["relaxed", "with grace", "by default", "not announced", "it has rank 0"],
)
def test_a_round_may_continue_without_a_node_in_these_cases(view: View, may_continue: bool) -> None:
    assert view.round is not None
    place = view.round.assignment_of(an_agent_id(1))
    assert place is not None
    assert may_continue_without(view, place) == may_continue


def test_without_lost_nodes_nothing_is_closed() -> None:
    view = with_notice(spec=RELAXED)
    state = state_after_commit(LEAVING)
    assert close_after_preemption(view, state, training_of(view, state), 110.0) is None


def test_with_relaxed_collectives_remaining_ranks_may_start_a_save() -> None:
    waits = decide_after_loss(with_notice(spec=RELAXED), 150.0)
    assert isinstance(waits, Wait)
    assert waits.until == 160.0
    over = decide_after_loss(with_notice(spec=RELAXED), 160.0)
    assert isinstance(over, RoundClosed)
    assert (over.cause, over.preempted) == (
        FailureCause.PREEMPTION,
        PreemptedNodes(node_to_ranks={"t-1/1": (1,)}),
    )


def test_after_the_save_the_round_is_closed_at_once() -> None:
    assert isinstance(decide_after_loss(with_notice(spec=RELAXED, saved=True), 150.0), RoundClosed)


@pytest.mark.parametrize(
    ("saving", "now", "waits"),
    [({0}, 150.0, True), ({0}, 189.9, True), ({0}, 190.0, False), ({0, 1}, 150.0, False)],
    ids=["at the loss", "within the grace period", "after the grace period", "lost rank is saving"],
)
def test_remaining_ranks_may_finish_a_save_within_the_grace_period(
    saving: set[int], now: float, waits: bool
) -> None:
    decision = decide_after_loss(
        with_notice(spec=WITH_GRACE), now, uploading_ranks=frozenset(saving)
    )
    assert isinstance(decision, Wait if waits else RoundClosed)


def test_without_a_save_in_flight_the_grace_period_is_not_awaited() -> None:
    assert isinstance(decide_after_loss(with_notice(spec=WITH_GRACE), 150.0), RoundClosed)


# --- growing -------------------------------------------------------------------------------------

ELASTIC = a_spec(min_workers=1, max_workers=3, resize_interval_s=30.0)
SMALL = a_round(members=[a_member(0)])


def decide_resize(view: View, state: LeaderState, now: float) -> RoundClosed | Wait | None:
    return resize_group(view, state, training_of(view, state), now)


def small_group_view(**fields: Any) -> View:
    return a_view(**{"spec": ELASTIC, "round": SMALL, "latest_committed_slot": 9, **fields})


@pytest.mark.parametrize(
    ("view", "state"),
    [
        (small_group_view(spec=a_spec(max_workers=3)), a_leader_state()),
        (small_group_view(), a_leader_state(members=member_statuses(a_member_status(0)))),
        (small_group_view(round=a_round(members=[a_member(0, slots=3)])), a_leader_state()),
    ],
    ids=["fixed size", "no free slots", "full"],
)
def test_a_fixed_or_full_group_does_not_grow(view: View, state: LeaderState) -> None:
    assert decide_resize(view, state, 1000.0) is None


def test_a_group_grows_after_a_commit_and_at_intervals() -> None:
    early = decide_resize(small_group_view(), committed_at(1000.0, since=990.0), 1000.0)
    assert isinstance(early, Wait)
    assert early.until == 1020.0
    due = decide_resize(small_group_view(), committed_at(999.9, since=970.0), 1000.0)
    assert due == RoundClosed(
        round_number=1, cause=FailureCause.RESIZE, reason="growing from 1 to 2 workers"
    )


@pytest.mark.parametrize("state", [a_leader_state(phase=a_training()), committed_at(990.0)])
def test_growing_waits_for_a_fresh_commit(state: LeaderState) -> None:
    decision = decide_resize(small_group_view(), state, 1000.0)
    assert isinstance(decision, Wait)
    assert "growing after the next commit" in decision.reason


def test_a_commit_of_the_previous_round_does_not_count() -> None:
    view = small_group_view(next_slot=20, latest_committed_slot=9)
    assert isinstance(decide_resize(view, committed_at(999.5), 1000.0), Wait)


def test_a_zero_resize_interval_still_waits() -> None:
    eager = a_spec(min_workers=1, max_workers=3, resize_interval_s=0.0)
    decision = decide_resize(small_group_view(spec=eager), a_leader_state(), 1000.0)
    assert isinstance(decision, Wait)
    assert decision.until == 1001.0


def test_a_range_of_one_size_is_elastic_and_full() -> None:
    only = a_spec(min_workers=2, max_workers=2, is_elastic=True)
    assert (
        decide_resize(small_group_view(spec=only, round=a_round()), committed_at(999.9), 1000.0)
        is None
    )


def test_a_group_does_not_grow_for_a_cold_node() -> None:
    cold = replace(
        committed_at(999.9),
        members=member_statuses(a_member_status(0), a_member_status(1, is_warm=False)),
    )
    assert decide_resize(small_group_view(), cold, 1000.0) is None


def test_a_cold_replacement_is_not_ready() -> None:
    """The group keeps training meanwhile, so waiting for imports costs nothing."""
    cold = a_member_status(2, member=a_member(2, token=SPARE, node=0), is_warm=False)
    decision = decide_replacement(with_notice(saved=True), state_after_commit(LEAVING, cold), 110.0)
    assert isinstance(decision, Wait)


# --- final saves ---------------------------------------------------------------------------------

GIB = 2**30


def state_before_deadline(left_s: float, **fields: Any) -> PreDeadlineState:
    """1 GiB: a save takes 13.1 s to the bucket at 100 MiB/s, or 3.3 s to a peer."""
    defaults: dict[str, Any] = {
        "unsaved_work_s": 30.0,
        "step_s": 0.5,
        "costs": SaveCostEstimate(stall_s=0.5, slowdown_fraction=0.3, commit_s=20.0),
        "size_bytes": GIB,
        "bucket_bytes_per_s": 100 * 2.0**20,
    }
    return PreDeadlineState(left_s, **{**defaults, **fields})


def test_with_time_left_training_continues_and_saves_at_the_end() -> None:
    decision = decide_final_save(state_before_deadline(120.0))
    assert isinstance(decision, ContinueTraining)
    assert decision.for_s == pytest.approx(120 - (0.5 + 0.5 + 1.2 * 10.24 + 1.0) - 0.5)
    later = decide_final_save(state_before_deadline(120.0 - decision.for_s - 0.1))
    assert isinstance(later, FinalSave)
    assert later.target == "bucket"


def test_a_slow_step_is_taken_into_account() -> None:
    """13.8 s are needed, and the next step may be one that takes 8 s."""
    slow = {"max_step_s": 8.0}
    assert isinstance(decide_final_save(state_before_deadline(22.0, **slow)), FinalSave)
    decision = decide_final_save(state_before_deadline(30.0, **slow))
    assert isinstance(decision, ContinueTraining)
    assert decision.for_s == pytest.approx(30 - (0.5 + 0.5 + 1.2 * 10.24 + 1.0) - 8.0)


def test_less_work_than_a_slow_step_is_saved_at_the_last_moment() -> None:
    assert isinstance(
        decide_final_save(state_before_deadline(22.0, max_step_s=8.0, unsaved_work_s=7.0)),
        ContinueTraining,
    )
    assert isinstance(
        decide_final_save(state_before_deadline(15.0, max_step_s=8.0, unsaved_work_s=7.0)),
        FinalSave,
    )


def test_much_unsaved_work_is_saved_early() -> None:
    assert isinstance(
        decide_final_save(state_before_deadline(120.0, unsaved_work_s=651.0)), FinalSave
    )
    assert isinstance(
        decide_final_save(state_before_deadline(120.0, unsaved_work_s=649.0)), ContinueTraining
    )


def test_a_ready_replacement_triggers_a_save_at_once() -> None:
    decision = decide_final_save(state_before_deadline(120.0, replacement_ready=True))
    assert isinstance(decision, FinalSave)
    assert "replacement ready" in decision.reason


def test_a_ready_replacement_waits_for_the_save_in_flight() -> None:
    decision = decide_final_save(
        state_before_deadline(60.0, replacement_ready=True, in_flight_remaining_s=0.5)
    )
    assert isinstance(decision, AwaitSaveInFlight)


BESIDE: dict[str, Any] = {
    "replacement_ready": True,
    "in_flight_remaining_s": 30.0,
    "peer_bytes_per_s": 1000 * 2.0**20,
}
"""One save is in flight; another takes 3.3 s to a peer."""


def test_newer_work_is_saved_to_a_peer_beside_an_upload() -> None:
    decision = decide_final_save(state_before_deadline(60.0, **BESIDE, unsaved_work_s=3.5))
    assert isinstance(decision, FinalSave)
    assert decision.target == "peer"
    assert "3.50 s of unsaved work" in decision.reason


@pytest.mark.parametrize(
    ("left_s", "fields"),
    [
        (60.0, {"unsaved_work_s": 3.0}),
        (60.0, {"has_free_slot": False}),
        (60.0, {"peer_bytes_per_s": 0.0}),
        (3.0, {}),
    ],
    ids=["little unsaved work", "no snapshot memory", "no staying node", "no time"],
)
def test_the_save_in_flight_is_awaited_if_no_other_save_fits(
    left_s: float, fields: dict[str, Any]
) -> None:
    assert isinstance(
        decide_final_save(state_before_deadline(left_s, **{**BESIDE, **fields})), AwaitSaveInFlight
    )


def test_no_save_blocks_the_training_on_snapshot_memory() -> None:
    full = {"in_flight_remaining_s": 5.0, "has_free_slot": False}
    decision = decide_final_save(state_before_deadline(19.5, **full))
    assert isinstance(decision, ContinueTraining)
    assert 0.5 <= decision.for_s < 1.0, "space may be available at the next step"
    assert isinstance(
        decide_final_save(state_before_deadline(19.5, in_flight_remaining_s=5.0)), FinalSave
    )


def test_a_peer_is_used_if_the_bucket_is_too_slow() -> None:
    decision = decide_final_save(state_before_deadline(3.5, peer_bytes_per_s=1000 * 2.0**20))
    assert isinstance(decision, FinalSave)
    assert decision.target == "peer"


def test_the_save_in_flight_is_not_slowed_down_if_no_other_fits() -> None:
    assert isinstance(
        decide_final_save(state_before_deadline(20.0, in_flight_remaining_s=10.0)),
        AwaitSaveInFlight,
    )
    assert isinstance(
        decide_final_save(state_before_deadline(120.0, in_flight_remaining_s=10.0)),
        ContinueTraining,
    )


@pytest.mark.parametrize("speed", [0.0, 50 * 2.0**20])
def test_without_time_no_save_starts(speed: float) -> None:
    assert decide_final_save(state_before_deadline(15.0, bucket_bytes_per_s=speed)) == NoTimeToSave(
        "15 s left: not enough for a save"
    )


# --- machines on their last backend restart ------------------------------------------------------


def decide_last_attempt(view: View, state: LeaderState, now: float) -> RoundClosed | Wait | None:
    return replace_working_nodes(view, state, training_of(view, state), now)


GROUPS = {TOKEN: a_group(), SPARE: a_group(token=SPARE, nodes=1)}
OPEN = a_view(round=a_round(), groups=GROUPS, latest_committed_slot=8)


def last_attempt_state(*some: Any, **fields: Any) -> LeaderState:
    defaults: dict[str, Any] = {
        "phase": COMMITTED,
        "group_statuses": {TOKEN: a_final_group_status(1)},
    }
    return a_leader_state(
        members=member_statuses(a_member_status(0), a_member_status(1), *some),
        **{**defaults, **fields},
    )


def test_a_machine_on_its_last_attempt_is_left_after_a_commit() -> None:
    decision = decide_last_attempt(OPEN, last_attempt_state(REPLACEMENT), 110.0)
    assert isinstance(decision, RoundClosed)
    assert decision.cause is FailureCause.RESIZE, "a resize has no retry budget"
    assert "the backend would not restart t-1/1 again" in decision.reason


def test_between_commits_a_machine_on_its_last_attempt_continues() -> None:
    decision = decide_last_attempt(OPEN, last_attempt_state(REPLACEMENT), 115.0)
    assert isinstance(decision, Wait)
    assert "after the next commit" in decision.reason
    nothing_saved = replace(OPEN, latest_committed_slot=-1)
    assert isinstance(
        decide_last_attempt(nothing_saved, last_attempt_state(REPLACEMENT), 110.0), Wait
    )


@pytest.mark.parametrize(
    "state",
    [
        last_attempt_state(),
        last_attempt_state(replace(REPLACEMENT, is_warm=False)),
        last_attempt_state(REPLACEMENT, group_statuses={TOKEN: a_final_group_status()}),
        last_attempt_state(
            REPLACEMENT,
            group_statuses={
                TOKEN: a_final_group_status(1),
                SPARE: a_final_group_status(0, nodes=1),
            },
        ),
    ],
    ids=[
        "no replacement",
        "one that is cold",
        "the backend would restart it",
        "it is as good as lost",
    ],
)
def test_without_a_replacement_a_machine_on_its_last_attempt_continues(state: LeaderState) -> None:
    assert decide_last_attempt(OPEN, state, 110.0) is None
