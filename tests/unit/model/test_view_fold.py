"""`fold`: the effect of every event, and totality over all valid event sequences."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from spotfit.core.codec import decoder, encode
from spotfit.core.ids import AgentId, Token
from spotfit.model.events import (
    CancelRequested,
    CheckpointDropped,
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
    RankFailure,
    RoundClosed,
    RoundOpened,
    TrainingEnded,
    TrainingFunctionStarted,
    ValidationEnded,
    ValidationRequest,
    ValidationStarted,
)
from spotfit.model.failure_model import LifetimeHistogram
from spotfit.model.group import GroupHandle, GroupPlan, GroupRequest
from spotfit.model.offer import Market, Offer
from spotfit.model.reporting import ReportedCheckpointStatus
from spotfit.model.view import CRASH_FREE_S, MAX_DROPPED_CHECKPOINTS, JournalView, View, fold
from spotfit.testing.builders import (
    RUN_ID,
    TOKEN,
    a_committed_checkpoint,
    a_member,
    a_notice,
    a_request,
    a_round,
    a_spec,
    a_view,
    an_agent_crash,
    an_agent_id,
    an_entry,
    fold_events,
)

PLAN = GroupPlan(token=TOKEN, provisioner="local", num_nodes=2, slots_per_node=1)
HANDLE = GroupHandle(token=TOKEN, provisioner="local", name="g")
PLANNED = (FitStarted(spec=a_spec()), GroupPlanned(request=a_request(), plan=PLAN))
GRANTED = (*PLANNED, GroupSubmitted(token=TOKEN, handle=HANDLE))


def test_a_planned_group_is_pending_until_its_outcome() -> None:
    assert fold_events(*PLANNED).groups[TOKEN].is_pending
    assert fold_events(*GRANTED).groups[TOKEN].handle == HANDLE
    assert (
        fold_events(*PLANNED, GroupRefused(token=TOKEN, reason="full")).groups[TOKEN].refusal
        == "full"
    )


def test_refusals_are_counted_until_a_group_is_granted() -> None:
    again = GroupPlanned(
        request=a_request(Token("t-2")),
        plan=GroupPlan(token=Token("t-2"), provisioner="local", num_nodes=2, slots_per_node=1),
    )
    refused = fold_events(*PLANNED, GroupRefused(token=TOKEN, reason="full"), again)
    assert (refused.refusals, refused.last_refusal, refused.final_refusal) == (1, "full", None)
    granted = fold_events(GroupSubmitted(token=Token("t-2"), handle=HANDLE), view=refused)
    assert (granted.refusals, granted.last_refusal) == (0, None)


def test_a_final_refusal_is_recorded() -> None:
    assert (
        fold_events(
            *PLANNED, GroupRefused(token=TOKEN, reason="no quota", is_final=True)
        ).final_refusal
        == "no quota"
    )


def test_a_group_withdrawn_by_the_backend_counts_as_one_refusal() -> None:
    refused = [
        NodeLost(
            token=TOKEN, node=n, agent=None, reason="no capacity", cause=FailureCause.PREEMPTION
        )
        for n in (0, 1)
    ]
    view = fold_events(*GRANTED, *refused)
    assert (view.refusals, view.last_refusal, view.boot_failures) == (1, "no capacity", 0)
    assert view.groups[TOKEN].active_nodes == ()
    assert view.failure_counts == {}


def test_a_lost_node_adds_its_agent_to_the_lost_agents_if_known() -> None:
    view = fold_events(*GRANTED, NodeLost(token=TOKEN, node=1, agent=None, reason="gone"))
    assert (view.groups[TOKEN].lost_nodes, view.lost_agents) == (frozenset({1}), frozenset())
    view = fold_events(
        NodeLost(token=TOKEN, node=0, agent=an_agent_id(0), reason="gone"), view=view
    )
    assert (view.groups[TOKEN].active_nodes, view.lost_agents) == ((), frozenset({an_agent_id(0)}))


def test_a_round_is_open_until_closed_and_its_cause_is_counted() -> None:
    opened = fold_events(FitStarted(spec=a_spec()), RoundOpened(round=a_round(1)))
    assert (opened.round, opened.round_opened_slot) == (a_round(1), 1)
    closed = fold_events(
        RoundClosed(round_number=1, cause=FailureCause.WORKER, reason="raised"), view=opened
    )
    assert (closed.round, closed.last_round) == (None, a_round(1))
    assert closed.failure_counts == {FailureCause.WORKER: 1}
    twice = fold_events(
        RoundOpened(round=a_round(2)),
        RoundClosed(round_number=2, cause=FailureCause.WORKER, reason="raised"),
        view=closed,
    )
    assert twice.failure_counts == {FailureCause.WORKER: 2}


def test_a_commit_does_not_reset_failure_counts() -> None:
    failed = fold_events(
        FitStarted(spec=a_spec()),
        RoundOpened(round=a_round(1)),
        RoundClosed(round_number=1, cause=FailureCause.WORKER, reason=""),
    )
    saved = fold_events(
        RoundOpened(round=a_round(2)), a_committed_checkpoint("c1", round=2), view=failed
    )
    assert saved.failure_counts == {FailureCause.WORKER: 1}


def test_a_checkpoint_exists_from_its_commit_to_its_drop() -> None:
    view = fold_events(
        FitStarted(spec=a_spec()), a_committed_checkpoint("c1"), a_committed_checkpoint("c2")
    )
    assert [one.name for one in view.checkpoints] == ["c1", "c2"]
    assert view.latest_committed_slot == 2
    view = fold_events(CheckpointDropped(name="c1", reason="old"), view=view)
    assert [one.name for one in view.checkpoints] == ["c2"]
    assert view.dropped_checkpoints == ("c1",)
    assert view.latest_committed_slot == 2, "dropping is not a commit"


def test_a_notice_records_its_slot() -> None:
    view = fold_events(
        FitStarted(spec=a_spec()),
        a_committed_checkpoint("c1"),
        PreemptionNoticed(agent=an_agent_id(0), notice=a_notice()),
    )
    assert view.notices == {an_agent_id(0): a_notice()}
    assert view.notice_slots[an_agent_id(0)] > view.latest_committed_slot


def test_a_later_notice_replaces_the_first_but_keeps_its_slot() -> None:
    first, nearer = a_notice(seconds_left=None), a_notice(seconds_left=15.0)
    view = fold_events(
        FitStarted(spec=a_spec()),
        PreemptionNoticed(agent=an_agent_id(0), notice=first),
        a_committed_checkpoint("c1"),
    )
    view = fold_events(PreemptionNoticed(agent=an_agent_id(0), notice=nearer), view=view)
    assert view.notices == {an_agent_id(0): nearer}
    assert view.notice_slots[an_agent_id(0)] < view.latest_committed_slot


def test_fit_ended_closes_the_open_round() -> None:
    view = fold_events(
        FitStarted(spec=a_spec()), RoundOpened(round=a_round(1)), FitEnded(outcome="finished")
    )
    assert (view.round, view.is_active) == (None, False)
    assert view.last_round == a_round(1)


def test_the_next_fit_keeps_checkpoints_and_resets_counts() -> None:
    before = a_view(
        round=a_round(3),
        checkpoints=(a_committed_checkpoint(),),
        dropped_checkpoints=("c0",),
        failure_counts={FailureCause.WORKER: 1},
        notices={an_agent_id(1): a_notice()},
        lost_agents=frozenset({an_agent_id(1)}),
        cancel_reason="enough",
        final_refusal="no quota",
        fit_end=FitEnded(outcome="cancelled"),
    )
    view = fold_events(FitStarted(spec=a_spec(fit_id="f-2")), view=before)
    assert (view.is_active, view.fit_count) == (True, 2)
    assert (view.checkpoints, view.dropped_checkpoints) == ((a_committed_checkpoint(),), ("c0",))
    assert view.last_round == a_round(3)
    assert (view.failure_counts, view.notices, view.lost_agents) == ({}, {}, frozenset())
    assert (view.cancel_reason, view.final_refusal, view.round) == (None, None, None)


def test_the_next_fit_has_no_leader_and_continues_epochs() -> None:
    elected = fold_events(
        LeaderElected(leader=an_agent_id(0), epoch=7, coordinator_address="h:1"), view=a_view()
    )
    assert (elected.epoch, elected.is_leader(an_agent_id(0))) == (7, True)
    view = fold_events(
        FitStarted(spec=a_spec()), view=replace(elected, fit_end=FitEnded(outcome="finished"))
    )
    assert (view.leader, view.epoch) == (None, 7)


def test_boot_failures_are_counted_until_a_round_is_opened() -> None:
    dead = fold_events(
        *GRANTED,
        NodeLost(token=TOKEN, node=0, agent=None, reason="gone"),
        NodeLost(token=TOKEN, node=1, agent=None, reason="gone"),
    )
    assert dead.boot_failures == 2
    assert (
        fold_events(
            NodeLost(token=TOKEN, node=1, agent=an_agent_id(1), reason="gone"), view=dead
        ).boot_failures
        == 2
    )
    assert fold_events(RoundOpened(round=a_round()), view=dead).boot_failures == 0


ON_OTHER_CLOUD = FitStarted(spec=a_spec(provisioner="kubernetes"))


def next_fit_of(*events: JournalEvent, start: FitStarted = ON_OTHER_CLOUD) -> View:
    """The view after a fit with these events has ended and another one has started."""
    return fold_events(start, view=fold_events(*events, FitEnded(outcome="cancelled")))


def test_a_group_that_is_not_released_does_not_belong_to_the_next_fit() -> None:
    for events in (PLANNED, GRANTED):
        view = next_fit_of(*events)
        assert view.groups == {}
        assert view.unsettled_groups[TOKEN].group == fold_events(*events).groups[TOKEN]


def test_a_closed_group_is_not_unsettled_in_the_next_fit() -> None:
    for closed in (GroupsReleased(token=TOKEN), GroupRefused(token=TOKEN, reason="full")):
        before = GRANTED if isinstance(closed, GroupsReleased) else PLANNED
        assert next_fit_of(*before, closed).unsettled_groups == {}


def test_an_unsettled_group_keeps_the_backend_of_its_fit_through_later_fits() -> None:
    options = {"queues": ["spot"]}
    on_aws = FitStarted(spec=a_spec(provisioner="aws_batch", provisioner_options=options))
    second = next_fit_of(on_aws, *GRANTED[1:])
    ended = fold_events(FitEnded(outcome="failed"), view=second)
    third = fold_events(FitStarted(spec=a_spec()), view=ended)
    for view in (second, third):
        (unsettled,) = view.unsettled_groups.values()
        assert (unsettled.provisioner, unsettled.provisioner_options) == ("aws_batch", options)


def test_a_refused_group_of_an_earlier_fit_is_settled_and_delays_no_request() -> None:
    view = fold_events(GroupRefused(token=TOKEN, reason="unknown"), view=next_fit_of(*PLANNED))
    assert (view.unsettled_groups, view.refusals, view.last_refusal) == ({}, 0, None)


def test_groups_of_two_fits_are_released_by_one_entry() -> None:
    plan = replace(PLAN, token=Token("t-2"))
    own = GroupPlanned(request=a_request(plan.token), plan=plan)
    view = fold_events(own, view=next_fit_of(*GRANTED))
    released = fold_events(GroupsReleased(token=TOKEN, other_tokens=(Token("t-2"),)), view=view)
    assert released.unsettled_groups == {}
    assert released.groups[Token("t-2")].is_released
    assert TOKEN not in released.groups


def test_opening_a_round_removes_closed_groups() -> None:
    released = fold_events(*GRANTED, GroupsReleased(token=TOKEN))
    assert TOKEN not in fold_events(RoundOpened(round=a_round()), view=released).groups
    refused = fold_events(*PLANNED, GroupRefused(token=TOKEN, reason="full"))
    opened = fold_events(RoundOpened(round=a_round()), view=refused)
    assert (opened.groups, opened.last_refusal) == ({}, "full"), "the refusal itself is kept"
    assert TOKEN in fold_events(*PLANNED, RoundOpened(round=a_round())).groups, (
        "pending groups are kept"
    )
    lost = fold_events(
        *GRANTED,
        NodeLost(token=TOKEN, node=0, agent=an_agent_id(0), reason="gone"),
        RoundOpened(round=a_round()),
    )
    assert lost.groups[TOKEN].lost_nodes == {0}, "lost but not released"


def test_opening_a_round_removes_notices_of_lost_agents() -> None:
    with_notice = [PreemptionNoticed(agent=an_agent_id(n), notice=a_notice()) for n in (0, 1)]
    gone = fold_events(
        *GRANTED, *with_notice, NodeLost(token=TOKEN, node=1, agent=an_agent_id(1), reason="gone")
    )
    opened = fold_events(RoundOpened(round=a_round()), view=gone)
    assert opened.notices.keys() == opened.notice_slots.keys() == {an_agent_id(0)}


def test_opening_a_round_removes_lost_agents_except_the_former_leader() -> None:
    lost = [
        NodeLost(
            token=TOKEN, node=n, agent=an_agent_id(n), reason="gone", cause=FailureCause.PLATFORM
        )
        for n in (0, 1)
    ]
    gone = fold_events(
        *GRANTED,
        LeaderElected(
            leader=an_agent_id(2), epoch=2, coordinator_address="h:2", lost_leader=an_agent_id(0)
        ),
        *lost,
    )
    assert gone.lost_agents == gone.platform_outages == {an_agent_id(0), an_agent_id(1)}
    opened = fold_events(RoundOpened(round=a_round()), view=gone)
    assert opened.lost_agents == opened.platform_outages == {an_agent_id(0)}
    assert opened.groups[TOKEN].active_nodes == (), "closed groups have no active nodes"


def test_opening_a_round_keeps_a_lost_validator() -> None:
    started = ValidationStarted(
        checkpoint_name="c1",
        checkpoint_uid="m",
        attempt=1,
        agent=an_agent_id(1),
        token=TOKEN,
        node=1,
    )
    view = fold_events(
        *GRANTED,
        started,
        NodeLost(token=TOKEN, node=1, agent=an_agent_id(1), reason="gone"),
        RoundOpened(round=a_round()),
    )
    assert view.lost_agents == {an_agent_id(1)}


def test_only_the_last_dropped_checkpoints_are_recorded() -> None:
    names = [f"c{n}" for n in range(MAX_DROPPED_CHECKPOINTS + 10)]
    view = fold_events(
        FitStarted(spec=a_spec()), *(CheckpointDropped(name=name, reason="old") for name in names)
    )
    assert view.dropped_checkpoints == tuple(names[10:])
    again = fold_events(
        a_committed_checkpoint("c20"), CheckpointDropped(name="c15", reason="again"), view=view
    )
    assert again.dropped_checkpoints == (
        *[name for name in names[10:] if name not in ("c15", "c20")],
        "c15",
    )


def test_rounds_without_a_commit_are_counted_until_a_commit() -> None:
    failed = [
        RoundClosed(round_number=n, cause=FailureCause.WORKER, reason="raised") for n in (1, 2)
    ]
    assert fold_events(*failed, view=a_view()).rounds_without_progress == 2
    assert (
        fold_events(*failed, a_committed_checkpoint(), view=a_view()).rounds_without_progress == 0
    )
    assert (
        fold_events(
            *failed, FitEnded(outcome="failed"), FitStarted(spec=a_spec()), view=a_view()
        ).rounds_without_progress
        == 0
    )


@pytest.mark.parametrize("cause", [FailureCause.PREEMPTION, FailureCause.RESIZE])
def test_a_preempted_round_does_not_count_as_without_progress(cause: FailureCause) -> None:
    assert (
        fold_events(
            RoundClosed(round_number=1, cause=cause, reason="why"),
            view=a_view(rounds_without_progress=3),
        ).rounds_without_progress
        == 3
    )


def test_a_dropped_name_can_be_committed_again() -> None:
    dropped = fold_events(
        FitStarted(spec=a_spec()),
        a_committed_checkpoint("c1"),
        CheckpointDropped(name="c1", reason="old"),
    )
    again = fold_events(a_committed_checkpoint("c1"), view=dropped)
    assert ([one.name for one in again.checkpoints], again.dropped_checkpoints) == (["c1"], ())


# --- broken connections and their causes ---------------------------------------------------------

CUT = RoundClosed(
    round_number=1,
    cause=FailureCause.NETWORK,
    reason="the connection to t-1/1 broke",
    failures=(
        RankFailure(rank=1, kind="lost", message="not connected"),
        RankFailure(rank=0, kind="raised", message="an echo"),
    ),
    missing_agents=(an_agent_id(1),),
)
BROKEN_OFF = (*GRANTED, RoundOpened(round=a_round(1)), CUT)


def test_a_network_failure_is_not_charged_while_no_node_is_lost() -> None:
    view = fold_events(*BROKEN_OFF)
    assert (view.failure_counts, view.rounds_without_progress) == ({FailureCause.NETWORK: 1}, 1)


@pytest.mark.parametrize(
    ("cause", "without_progress", "outages"),
    [
        (FailureCause.PREEMPTION, 0, frozenset()),
        (FailureCause.PLATFORM, 1, frozenset({an_agent_id(1)})),
    ],
)
def test_a_network_failure_is_charged_once_its_node_is_lost(
    cause: FailureCause, without_progress: int, outages: frozenset[AgentId]
) -> None:
    view = fold_events(
        *BROKEN_OFF,
        NodeLost(token=TOKEN, node=1, agent=an_agent_id(1), reason="unreachable", cause=cause),
    )
    assert view.failure_counts == {cause: 1}
    assert (view.rounds_without_progress, view.platform_outages) == (without_progress, outages)
    assert view.last_round_closed is not None
    assert (view.last_round_closed.cause, view.last_round_closed.failures) == (cause, CUT.failures)
    reclaimed = (
        PreemptedNodes(node_to_ranks={"t-1/1": (1,)}) if cause is FailureCause.PREEMPTION else None
    )
    assert view.last_round_closed.preempted == reclaimed
    assert view.last_round_closed.reason.endswith("; t-1/1 is lost: unreachable")


def test_several_lost_nodes_of_a_round_are_charged_once() -> None:
    both = replace(
        CUT,
        failures=(
            RankFailure(rank=0, kind="lost", message=""),
            RankFailure(rank=1, kind="lost", message=""),
        ),
        missing_agents=(an_agent_id(0), an_agent_id(1)),
    )
    lost = [
        NodeLost(
            token=TOKEN, node=n, agent=an_agent_id(n), reason="gone", cause=FailureCause.PREEMPTION
        )
        for n in (0, 1)
    ]
    view = fold_events(*GRANTED, RoundOpened(round=a_round(1)), both, *lost)
    assert view.failure_counts == {FailureCause.PREEMPTION: 1}


@pytest.mark.parametrize(
    "lost",
    [
        NodeLost(
            token=TOKEN, node=0, agent=an_agent_id(0), reason="gone", cause=FailureCause.PREEMPTION
        ),
        NodeLost(token=TOKEN, node=1, agent=an_agent_id(1), reason="gone"),
        NodeLost(
            token=TOKEN, node=1, agent=an_agent_id(7), reason="gone", cause=FailureCause.PREEMPTION
        ),
    ],
    ids=["connected node", "no cause recorded", "unassigned agent"],
)
def test_other_losses_do_not_recharge_a_round(lost: NodeLost) -> None:
    assert fold_events(*BROKEN_OFF, lost).failure_counts == {FailureCause.NETWORK: 1}


ALL_MISSING = replace(
    CUT,
    cause=FailureCause.LEADER_CHANGE,
    failures=(),
    missing_agents=(an_agent_id(0), an_agent_id(1)),
)
LEADER_LOST = (*GRANTED, RoundOpened(round=a_round(1)), ALL_MISSING)


def lost_node(node: int, **fields: Any) -> NodeLost:
    fields = {"cause": FailureCause.PREEMPTION, "agent": an_agent_id(node), **fields}
    return NodeLost(token=TOKEN, node=node, reason="gone", **fields)


def test_a_change_of_the_leader_is_charged_once_its_machine_is_lost() -> None:
    view = fold_events(*LEADER_LOST, lost_node(0))
    assert view.failure_counts == {FailureCause.PREEMPTION: 1}
    assert view.last_round_closed is not None
    assert view.last_round_closed.preempted == PreemptedNodes(node_to_ranks={"t-1/0": (0,)})
    assert view.rounds_without_progress == 0


def test_two_machines_lost_at_once_are_charged_once_and_both_named() -> None:
    view = fold_events(*LEADER_LOST, lost_node(0), lost_node(1))
    assert view.failure_counts == {FailureCause.PREEMPTION: 1}
    assert view.last_round_closed is not None
    assert view.last_round_closed.preempted == PreemptedNodes(
        node_to_ranks={"t-1/0": (0,), "t-1/1": (1,)}
    )


def test_a_loss_after_the_next_round_has_opened_is_charged_to_the_earlier_round() -> None:
    """An elastic group continues before the loss of the missing machine is established."""
    smaller = a_round(2, members=[a_member(1)])
    missing = replace(BROKEN_OFF[-1], missing_agents=(an_agent_id(0),), failures=())
    view = fold_events(
        *GRANTED, RoundOpened(round=a_round(1)), missing, RoundOpened(round=smaller), lost_node(0)
    )
    assert view.failure_counts == {FailureCause.PREEMPTION: 1}


def test_an_agent_of_the_next_round_was_not_missing() -> None:
    view = fold_events(*LEADER_LOST, RoundOpened(round=a_round(2)), lost_node(0))
    assert view.failure_counts == {FailureCause.LEADER_CHANGE: 1}


def crashed_node(node: int, *, signature: str = "s") -> NodeLost:
    crash = an_agent_crash(node, signature=signature)
    return lost_node(node, cause=FailureCause.PLATFORM, crash=crash)


AS_PREEMPTION = replace(
    ALL_MISSING,
    cause=FailureCause.PREEMPTION,
    missing_agents=(an_agent_id(0),),
    preempted=PreemptedNodes(node_to_ranks={"t-1/0": (0,)}),
)


def test_a_crash_revises_a_round_that_was_charged_to_preemption() -> None:
    view = fold_events(*GRANTED, RoundOpened(round=a_round(1)), AS_PREEMPTION, crashed_node(0))
    assert view.failure_counts == {FailureCause.PLATFORM: 1}
    assert view.last_round_closed is not None
    assert view.last_round_closed.preempted is None
    assert view.rounds_without_progress == 1


@pytest.mark.parametrize("closed", [CUT, AS_PREEMPTION])
def test_a_memory_limit_revises_the_cause_and_the_failures(closed: RoundClosed) -> None:
    """The backend may report the reason after the end of the machine."""
    one = replace(closed, missing_agents=(an_agent_id(0),))
    lost = lost_node(0, cause=FailureCause.WORKER)
    view = fold_events(*GRANTED, RoundOpened(round=a_round(1)), one, lost)
    assert view.failure_counts == {FailureCause.WORKER: 1}
    assert view.last_round_closed is not None
    (failure,) = view.last_round_closed.failures
    assert (failure.rank, failure.message) == (0, "The machine t-1/0 ended: gone")


def test_a_round_that_lost_another_machine_stays_a_preemption() -> None:
    both = replace(AS_PREEMPTION, missing_agents=(an_agent_id(0), an_agent_id(1)))
    opened = (*GRANTED, RoundOpened(round=a_round(1)), both)
    for losses in ((crashed_node(0), lost_node(1)), (lost_node(1), crashed_node(0))):
        counts = fold_events(*opened, *losses).failure_counts
        assert counts[FailureCause.PREEMPTION] == 1, losses


def test_an_agent_that_is_lost_before_its_round_is_closed_revises_nothing_later() -> None:
    opened = (*GRANTED, RoundOpened(round=a_round(1)))
    both = replace(AS_PREEMPTION, missing_agents=(an_agent_id(0), an_agent_id(1)))
    assert fold_events(*opened, lost_node(0), lost_node(1), both).missing_agents == {}
    replaced = (lost_node(0, cause=None), lost_node(1, cause=None))
    assert fold_events(*opened, both, *replaced).missing_agents == {}
    # The other one decides whether the round was preempted.
    for first, cause in (
        (lost_node(1), FailureCause.PREEMPTION),
        (crashed_node(1), FailureCause.PLATFORM),
    ):
        assert fold_events(*opened, first, both, crashed_node(0)).failure_counts == {cause: 1}


def test_agents_that_crash_together_are_one_incident() -> None:
    view = fold_events(*LEADER_LOST, crashed_node(0), crashed_node(1))
    assert view.agent_crashes.incidents == 1
    assert view.agent_crashes.by_signature == {"s": 1}
    assert view.agent_crashes.machine_names == ("t-1/0", "t-1/1")


def test_a_crash_after_a_further_round_is_a_second_incident() -> None:
    one = (*LEADER_LOST, crashed_node(0), RoundOpened(round=a_round(2, members=[a_member(1)])))
    view = fold_events(*one, crashed_node(1))
    assert view.agent_crashes.incidents == 2
    assert view.agent_crashes.by_signature == {"s": 2}


def test_a_crash_that_is_established_in_the_next_round_belongs_to_its_incident() -> None:
    smaller = a_round(2, members=[a_member(2)])
    view = fold_events(*LEADER_LOST, crashed_node(1), RoundOpened(round=smaller), crashed_node(0))
    assert view.agent_crashes.by_signature == {"s": 1}


def test_a_crash_of_a_replacement_is_a_second_incident() -> None:
    token = Token("t-2")
    planned = GroupPlanned(request=a_request(token), plan=replace(PLAN, token=token))
    crash = NodeLost(
        token=token, node=0, agent=None, reason="", crash=an_agent_crash(7, token=token)
    )
    view = fold_events(*LEADER_LOST, crashed_node(0), planned, crash)
    assert view.agent_crashes.by_signature == {"s": 2}


def test_a_restarted_agent_that_crashes_again_is_a_second_incident() -> None:
    first = replace(crashed_node(0), machine_returned=True)
    again = replace(first, agent=None, crash=replace(an_agent_crash(7), node=0))
    view = fold_events(*LEADER_LOST, first, again)
    assert view.agent_crashes.by_signature == {"s": 2}


def test_a_restarted_node_stays_active_until_its_new_agent_takes_part_in_a_round() -> None:
    restarted = replace(crashed_node(0), crash=None, machine_returned=True)
    view = fold_events(*LEADER_LOST, restarted)
    group = view.groups[restarted.token]
    assert group.is_node_active(0)
    assert group.lost_agent_by_restarted_node == {0: restarted.agent}
    opened = fold_events(*LEADER_LOST, restarted, RoundOpened(round=a_round(2)))
    assert opened.groups[restarted.token].lost_agent_by_restarted_node == {}
    lost = fold_events(*LEADER_LOST, restarted, replace(restarted, machine_returned=False))
    group = lost.groups[restarted.token]
    assert (group.is_node_active(0), group.lost_agent_by_restarted_node) == (False, {})


def test_the_lost_agent_of_a_restarting_node_is_lost_until_its_successor_takes_part() -> None:
    """It may still run, and see its loss only together with the next round."""
    restarting = replace(crashed_node(0), crash=None, machine_returned=True)
    others = replace(a_round(2), assignments=a_round(2).assignments[1:])
    view = fold_events(*LEADER_LOST, restarting, RoundOpened(round=others))
    assert restarting.agent in view.lost_agents
    assert fold_events(RoundOpened(round=a_round(3)), view=view).lost_agents == frozenset()


@pytest.mark.parametrize(("age_s", "incidents"), [(CRASH_FREE_S - 1, 1), (CRASH_FREE_S, 0)])
def test_crashes_are_forgotten_after_a_long_round(age_s: float, incidents: int) -> None:
    crashed = (*LEADER_LOST, crashed_node(0), RoundOpened(round=a_round(2)))
    closed = RoundClosed(round_number=2, cause=FailureCause.RESIZE, reason="more", duration_s=age_s)
    committed = replace(a_committed_checkpoint("b", round=2), round_age_s=age_s)
    for event in (closed, committed):
        assert fold_events(*crashed, event).agent_crashes.incidents == incidents, event


def failed_start(token: Token, node: int = 0) -> NodeLost:
    return NodeLost(
        token=token, node=node, agent=None, reason="exit code 127", is_failed_start=True
    )


def test_machines_of_one_group_that_fail_to_start_count_once() -> None:
    view = fold_events(*GRANTED, failed_start(TOKEN, 0), failed_start(TOKEN, 1))
    assert (view.failed_starts, view.boot_failures) == (1, 2)
    assert view.last_failed_start == failed_start(TOKEN, 1)


def test_failed_starts_are_not_counted_once_an_agent_has_started() -> None:
    elected = LeaderElected(leader=an_agent_id(0), epoch=1, coordinator_address="10.0.0.1:1")
    assert fold_events(*GRANTED, elected, failed_start(TOKEN)).failed_starts == 0
    assert fold_events(*GRANTED, failed_start(TOKEN), elected).failed_starts == 0


def test_a_headless_leader_is_no_started_agent() -> None:
    elected = LeaderElected(leader=an_agent_id(0), epoch=1, coordinator_address=None)
    assert fold_events(*GRANTED, elected, failed_start(TOKEN)).failed_starts == 1


# --- networks -------------------------------------------------------------------------------------


def elected(n: int, epoch: int, network: str = "") -> LeaderElected:
    address = f"10.0.0.{n}:1" if network else None
    return LeaderElected(
        leader=an_agent_id(n), epoch=epoch, coordinator_address=address, network=network
    )


def group_in(token: str, network: str) -> tuple[GroupPlanned, GroupSubmitted]:
    name = Token(token)
    plan = GroupPlan(token=name, provisioner="local", num_nodes=1, slots_per_node=1)
    handle = GroupHandle(token=name, provisioner="local", name=token, network=network)
    return (
        GroupPlanned(request=a_request(name, 1), plan=plan),
        GroupSubmitted(token=name, handle=handle),
    )


IN_TWO_NETWORKS = (
    FitStarted(spec=a_spec()),
    *group_in("t-a", "a"),
    *group_in("t-b", "b"),
    elected(0, 1, "a"),
)


def test_the_network_of_a_run_is_that_of_its_last_leader_with_a_machine() -> None:
    view = fold_events(*IN_TWO_NETWORKS, elected(9, 2))
    assert (view.network, view.former_network) == ("a", "")
    changed = fold_events(elected(1, 3, "b"), view=view)
    assert (changed.network, changed.former_network) == ("b", "a")


def test_machines_of_another_network_than_the_runs_stand_by() -> None:
    view = fold_events(*IN_TWO_NETWORKS)
    assert [token for token in view.groups if view.stands_by(token)] == ["t-b"]
    assert not view.stands_by(Token("unknown"))
    lost = NodeLost(token=Token("t-a"), node=0, agent=None, reason="preempted")
    alone = fold_events(lost, view=view)
    assert not alone.stands_by(Token("t-b")), "no machine remains in the network of the run"


def test_a_planned_group_is_in_the_network_of_its_offer() -> None:
    planned, _ = group_in("t-c", "c")
    offer = Offer(name="far", provisioner="local", market=Market.SPOT, network="c")
    event = replace(planned, request=replace(planned.request, offer=offer))
    view = fold_events(event, view=fold_events(*IN_TWO_NETWORKS))
    assert view.network_of(Token("t-c")) == "c"
    assert view.stands_by(Token("t-c"))


def test_machines_are_left_if_the_run_returns_without_a_round() -> None:
    changed = fold_events(*IN_TWO_NETWORKS, elected(1, 2, "b"))
    returned = fold_events(elected(0, 3, "a"), view=changed)
    assert [token for token, group in returned.groups.items() if group.is_left] == ["t-b"]
    trained = fold_events(RoundOpened(round=a_round(1, members=[a_member(1)])), view=changed)
    moved = fold_events(elected(0, 3, "a"), view=trained)
    assert not any(group.is_left for group in moved.groups.values())


# --- arbitrary event sequences -------------------------------------------------------------------


def possible_events(view: View, n: int) -> Iterator[JournalEvent]:
    """The events that may follow `view`."""
    yield LeaderElected(
        leader=an_agent_id(n % 3),
        epoch=view.epoch + 1,
        coordinator_address=None if n % 2 else f"10.0.0.{n}:1",
    )
    if not view.is_active:
        yield FitStarted(spec=a_spec())
    else:
        yield CancelRequested(reason="enough")
        yield FitEnded(outcome="failed", reason="why", cause=FailureCause.WORKER)
        yield PreemptionNoticed(agent=an_agent_id(n % 4), notice=a_notice())
        token = Token(f"t-{view.next_slot}")
        yield GroupPlanned(
            request=a_request(token),
            plan=GroupPlan(token=token, provisioner="local", num_nodes=1 + n % 3, slots_per_node=1),
        )
        yield a_committed_checkpoint(f"c{n % 5}")
        if view.round is None:
            yield RoundOpened(round=a_round((view.last_round.number if view.last_round else 0) + 1))
        else:
            yield RoundClosed(
                round_number=view.round.number,
                cause=list(FailureCause)[n % len(FailureCause)],
                reason="why",
            )
    for token, group in view.groups.items():
        if group.is_pending:
            yield GroupSubmitted(
                token=token, handle=GroupHandle(token=token, provisioner="local", name="g")
            )
            yield GroupRefused(token=token, reason="full", is_final=bool(n % 2))
        elif group.handle is not None and not group.is_released:
            yield GroupsReleased(token=token)
        for node in group.active_nodes:
            cause = FailureCause.PREEMPTION if n % 3 else None
            yield NodeLost(
                token=token,
                node=node,
                agent=an_agent_id(node) if n % 2 else None,
                reason="gone",
                cause=cause,
            )
    for retained in view.checkpoints:
        yield CheckpointDropped(name=retained.name, reason="old")


@given(st.lists(st.integers(0, 10**6), max_size=60))
def test_every_valid_event_sequence_folds(choices: list[int]) -> None:
    view = fold_events(FitStarted(spec=a_spec()))
    for slot, n in enumerate(choices, 1):
        candidates = list(possible_events(view, n))
        event = candidates[n % len(candidates)]
        after = fold_events(event, view=view)
        assert after == fold_events(event, view=view), "equal views, equal entries: equal views"
        assert after.next_slot == slot + 1
        if isinstance(event, CheckpointDropped):
            assert event.name not in {one.name for one in after.checkpoints}
        assert after.round is None or after.is_active
        view = after
    assert decoder(View).decode(encode(view)) == view, "a cached view is complete"


@pytest.mark.parametrize("cause", list(FailureCause))
def test_every_cause_is_counted_separately(cause: FailureCause) -> None:
    assert fold_events(
        RoundClosed(round_number=1, cause=cause, reason="why"), view=a_view()
    ).failure_counts == {cause: 1}


# --- validations ---------------------------------------------------------------------------------

PENDING = a_committed_checkpoint("c1", metrics={"loss": 1.0}, validation=ValidationRequest())
LATER = a_committed_checkpoint("c2", report_index=1, validation=ValidationRequest())
VALIDATOR = Token("t-v")
FOR_VALIDATIONS = GroupPlanned(
    request=GroupRequest(token=VALIDATOR, num_workers=1, total_workers=1, role="validate"),
    plan=GroupPlan(token=VALIDATOR, provisioner="local", num_nodes=1, slots_per_node=1),
)


def started(attempt: int, mark: str = "1-0", token: Token = VALIDATOR) -> ValidationStarted:
    return ValidationStarted(
        checkpoint_name="c1",
        checkpoint_uid=mark,
        attempt=attempt,
        agent=an_agent_id(9),
        token=token,
        node=0,
    )


def test_validation_metrics_are_merged_into_the_checkpoint() -> None:
    view = fold_events(*GRANTED, PENDING, LATER, started(1))
    assert view.unvalidated_checkpoints == (PENDING, LATER)
    assert view.current_validation == started(1)
    view = fold_events(
        ValidationEnded(
            checkpoint_name="c1",
            checkpoint_uid="1-0",
            status="validated",
            metrics={"loss": 0.5, "acc": 1.0},
        ),
        view=view,
    )
    assert view.metrics_of("c1") == {"loss": 0.5, "acc": 1.0}
    assert (view.unvalidated_checkpoints, view.current_validation) == ((LATER,), None)


@pytest.mark.parametrize(
    ("how", "status"),
    [
        ("validated", ReportedCheckpointStatus.VALIDATED),
        ("failed", ReportedCheckpointStatus.VALIDATION_FAILED),
        ("timeout", ReportedCheckpointStatus.VALIDATION_TIMEOUT),
    ],
)
def test_status_of_a_checkpoint_follows_its_validation(
    how: Literal["validated", "failed", "timeout"], status: ReportedCheckpointStatus
) -> None:
    view = fold_events(*GRANTED, PENDING, a_committed_checkpoint("c3", report_index=2))
    pending, plain = view.checkpoints
    assert view.status_of(pending) is ReportedCheckpointStatus.PENDING_VALIDATION
    assert view.status_of(plain) is ReportedCheckpointStatus.COMMITTED
    view = fold_events(
        ValidationEnded(checkpoint_name="c1", checkpoint_uid="1-0", status=how), view=view
    )
    assert view.status_of(view.checkpoints[0]) is status


def test_checkpoints_with_equal_requested_names_have_separate_results() -> None:
    again = a_committed_checkpoint(
        "c1", report_index=1, metrics={"loss": 2.0}, validation=ValidationRequest()
    )
    view = fold_events(
        *GRANTED,
        PENDING,
        again,
        ValidationEnded(
            checkpoint_name="c1", checkpoint_uid="1-1", status="validated", metrics={"acc": 1.0}
        ),
    )
    assert [one.metrics for one in view.checkpoints] == [{"loss": 1.0}, {"loss": 2.0, "acc": 1.0}]
    assert view.unvalidated_checkpoints == (PENDING,)


def test_a_validation_result_is_removed_with_its_checkpoint() -> None:
    view = fold_events(
        *GRANTED,
        PENDING,
        ValidationEnded(checkpoint_name="c1", checkpoint_uid="1-0", status="failed"),
        CheckpointDropped(name="c1", reason=""),
    )
    assert (view.validation_results, view.unvalidated_checkpoints) == ({}, ())


def test_validation_attempts_are_counted_per_checkpoint() -> None:
    view = fold_events(*GRANTED, FOR_VALIDATIONS, PENDING, LATER, started(1), started(2))
    assert (view.validation_attempts, view.current_validation_tries) == (2, 2)
    view = fold_events(
        ValidationEnded(checkpoint_name="c1", checkpoint_uid="1-0", status="failed"),
        started(3, "1-1"),
        view=view,
    )
    assert (view.validation_attempts, view.current_validation_tries) == (3, 1)


def test_refusals_and_boot_failures_of_validators_are_counted_separately() -> None:
    boot_failure = NodeLost(token=VALIDATOR, node=0, agent=None, reason="it did not join")
    view = fold_events(
        *GRANTED,
        PENDING,
        FOR_VALIDATIONS,
        GroupSubmitted(token=VALIDATOR, handle=HANDLE),
        boot_failure,
    )
    assert (view.boot_failures, view.validator_refusals) == (0, 1)
    again = GroupPlanned(
        request=GroupRequest(token=Token("t-w"), num_workers=1, total_workers=1, role="validate"),
        plan=GroupPlan(token=Token("t-w"), provisioner="local", num_nodes=1, slots_per_node=1),
    )
    view = fold_events(
        again, GroupRefused(token=Token("t-w"), reason="no quota", is_final=True), view=view
    )
    assert (view.refusals, view.final_refusal, view.validator_refusals) == (0, None, 2)
    assert (view.permanent_validator_refusals, view.last_validator_refusal) == (1, "no quota")
    assert fold_events(started(1, token=TOKEN), view=view).validator_refusals == 2, (
        "beside the workers"
    )


def test_a_started_validation_on_its_own_machine_resets_the_refusals() -> None:
    view = fold_events(
        *GRANTED, PENDING, FOR_VALIDATIONS, GroupRefused(token=VALIDATOR, reason="full")
    )
    assert view.validator_refusals == 1
    more = (replace(FOR_VALIDATIONS), GroupSubmitted(token=VALIDATOR, handle=HANDLE), started(1))
    assert fold_events(*more, view=view).validator_refusals == 0


def test_planning_a_validator_removes_released_validators() -> None:
    other = Token("t-w")
    again = GroupPlanned(
        request=GroupRequest(token=other, num_workers=1, total_workers=1, role="validate"),
        plan=GroupPlan(token=other, provisioner="local", num_nodes=1, slots_per_node=1),
    )
    view = fold_events(
        *GRANTED,
        FOR_VALIDATIONS,
        GroupSubmitted(token=VALIDATOR, handle=HANDLE),
        GroupsReleased(token=VALIDATOR),
        again,
    )
    assert set(view.groups) == {TOKEN, other}


def test_training_ended_closes_the_round_and_keeps_the_fit_active() -> None:
    end = FitEnded(outcome="finished", metrics={"loss": 1.0})
    view = fold_events(*GRANTED, PENDING, RoundOpened(round=a_round()), TrainingEnded(fit_end=end))
    assert (view.round, view.pending_fit_end, view.is_active) == (None, end, True)
    view = fold_events(started(1), end, view=view)
    assert (view.fit_end, view.current_validation) == (end, None)


def test_the_next_fit_keeps_pending_validations() -> None:
    cut_off = fold_events(
        *GRANTED,
        PENDING,
        LATER,
        ValidationEnded(checkpoint_name="c1", checkpoint_uid="1-0", status="failed"),
        started(4, "1-1"),
    )
    view = fold_events(FitEnded(outcome="cancelled"), FitStarted(spec=a_spec()), view=cut_off)
    assert (view.unvalidated_checkpoints, view.current_validation, view.pending_fit_end) == (
        (LATER,),
        None,
        None,
    )
    assert (view.validation_attempts, list(view.validation_results)) == (4, ["1-0"])


# --- lifetimes -----------------------------------------------------------------------------------


def closed(duration_s: float | None, cause: FailureCause = FailureCause.PREEMPTION) -> RoundClosed:
    return RoundClosed(round_number=1, cause=cause, reason="gone", duration_s=duration_s)


OPENED = (
    *GRANTED,
    RoundOpened(round=a_round(1)),
    TrainingFunctionStarted(round_number=1, startup_s=5.0),
)
ANNOUNCED = PreemptionNoticed(agent=an_agent_id(0), notice=a_notice())


@pytest.mark.parametrize("cause", [one for one in FailureCause if one is not FailureCause.RESIZE])
def test_every_involuntary_end_is_counted_as_a_lifetime(cause: FailureCause) -> None:
    view = fold_events(*OPENED, closed(700.0, cause))
    assert view.lifetimes == LifetimeHistogram().with_end(700.0, saved_in_time=False)


def test_a_resize_does_not_end_a_lifetime() -> None:
    view = fold_events(*OPENED, closed(700.0, FailureCause.RESIZE), RoundOpened(round=a_round(2)))
    assert (view.lifetimes, view.group_age_s) == (LifetimeHistogram(), 700.0)
    started_again = TrainingFunctionStarted(round_number=2, startup_s=5.0)
    view = fold_events(started_again, closed(100.0), view=view)
    assert view.lifetimes == LifetimeHistogram().with_end(800.0, saved_in_time=False)
    assert view.group_age_s == 0.0


def test_an_end_is_announced_if_saved_after_the_notice() -> None:
    in_time = fold_events(*OPENED, ANNOUNCED, a_committed_checkpoint(), closed(700.0))
    assert in_time.lifetimes == LifetimeHistogram().with_end(700.0, saved_in_time=True)
    too_early = fold_events(*OPENED, a_committed_checkpoint(), ANNOUNCED, closed(700.0))
    assert too_early.lifetimes == LifetimeHistogram().with_end(700.0, saved_in_time=False)
    smaller = fold_events(
        *OPENED, ANNOUNCED, a_committed_checkpoint(), closed(700.0, FailureCause.RESIZE)
    )
    assert smaller.lifetimes.announced_count == 1, "a shrinking group with a notice"


def test_an_end_before_the_training_started_does_not_change_the_announced_share() -> None:
    opened = (*GRANTED, RoundOpened(round=a_round(1)))
    untrained = fold_events(*opened, ANNOUNCED, closed(50.0))
    assert untrained.lifetimes == LifetimeHistogram().with_end(
        50.0, saved_in_time=False, was_training=False
    )
    assert (untrained.lifetimes.total_count, untrained.lifetimes.untrained_count) == (1, 1)
    trained = fold_events(*OPENED, ANNOUNCED, closed(50.0))
    assert (trained.lifetimes.total_count, trained.lifetimes.untrained_count) == (1, 0)
    old_leader = fold_events(*opened, a_committed_checkpoint(), closed(50.0))
    assert old_leader.lifetimes.untrained_count == 0, "only the commit says that it has trained"


def test_a_round_lost_with_its_leader_lasted_at_least_until_its_last_commit() -> None:
    view = fold_events(*OPENED, a_committed_checkpoint(round_age_s=500.0), closed(None))
    assert view.lifetimes == LifetimeHistogram().with_end(500.0, saved_in_time=False)
    again = fold_events(RoundOpened(round=a_round(2)), closed(None), view=view)
    assert again.lifetimes.end_counts[0] == 2, "no save after the notice"


def test_the_next_fit_keeps_the_lifetime_histogram() -> None:
    view = fold_events(
        *OPENED, closed(700.0), FitEnded(outcome="finished"), FitStarted(spec=a_spec())
    )
    assert view.lifetimes.total_count == 1


@pytest.mark.parametrize(
    ("requests", "saves"),
    [([True], True), ([False], False), ([True, False], False), ([False, True], False)],
)
def test_a_cancellation_without_a_save_prevails(requests: list[bool], saves: bool) -> None:
    events = [CancelRequested(reason="enough", save=save) for save in requests]
    view = fold_events(FitStarted(spec=a_spec()), *events)
    assert view.saves_before_cancel is saves


def test_a_journal_has_a_view_with_spec_from_the_first_fit_on() -> None:
    empty = JournalView()
    cancelled = fold(empty, an_entry(CancelRequested(reason="early")))
    assert not isinstance(cancelled, View)
    assert (cancelled.next_slot, cancelled.run_id, cancelled.is_active) == (1, RUN_ID, False)
    started = fold(cancelled, an_entry(FitStarted(spec=a_spec())))
    assert isinstance(started, View)
    assert (started.next_slot, started.run_id, started.spec) == (2, RUN_ID, a_spec())
    assert started.cancel_reason is None


def test_the_times_of_the_last_fit_are_recorded() -> None:
    started = an_entry(FitStarted(spec=a_spec()), written_at_ms=1000)
    ended = an_entry(FitEnded(outcome="finished"), written_at_ms=3000)
    view = fold(JournalView(), started)
    assert (view.fit_started_at_ms, view.fit_ended_at_ms) == (1000, 0)
    view = fold(view, ended)
    assert (view.fit_started_at_ms, view.fit_ended_at_ms) == (1000, 3000)
    view = fold(view, an_entry(FitStarted(spec=a_spec()), written_at_ms=5000))
    assert (view.fit_started_at_ms, view.fit_ended_at_ms) == (5000, 0)


def test_the_startup_time_is_that_of_the_last_round() -> None:
    opened = fold_events(RoundOpened(round=a_round(1)), view=a_view())
    assert opened.is_round_starting
    started = fold_events(TrainingFunctionStarted(round_number=1, startup_s=2.5), view=opened)
    assert (started.is_round_starting, started.round_startup_s) == (False, 2.5)
    closed = RoundClosed(round_number=1, cause=FailureCause.WORKER, reason="")
    again = fold_events(closed, RoundOpened(round=a_round(2)), view=started)
    assert (again.is_round_starting, again.round_startup_s) == (True, None)


def test_a_round_with_a_commit_has_started() -> None:
    opened = fold_events(RoundOpened(round=a_round(1)), view=a_view())
    assert not fold_events(a_committed_checkpoint(), view=opened).is_round_starting
