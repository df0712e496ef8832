"""Machines for feeders in the view: their refusals, losses and releases."""

from __future__ import annotations

import pytest

from spotfit.core.ids import AgentId, Token
from spotfit.model.events import (
    FailureCause,
    FitStarted,
    GroupPlanned,
    GroupRefused,
    GroupsReleased,
    GroupSubmitted,
    JournalEvent,
    NodeLost,
)
from spotfit.model.group import GroupHandle, GroupPlan, GroupRequest
from spotfit.testing.builders import a_spec, fold_events

FIRST, SECOND = Token("t-f1"), Token("t-f2")


def planned(token: Token) -> GroupPlanned:
    return GroupPlanned(
        request=GroupRequest(token=token, num_workers=1, total_workers=1, role="feed"),
        plan=GroupPlan(token=token, provisioner="local", num_nodes=1, slots_per_node=1),
    )


def granted(token: Token) -> tuple[JournalEvent, ...]:
    handle = GroupHandle(token=token, provisioner="local", name="g")
    return planned(token), GroupSubmitted(token=token, handle=handle)


def lost(agent: str | None) -> NodeLost:
    return NodeLost(
        token=FIRST,
        node=0,
        agent=AgentId(agent) if agent else None,
        reason="gone",
        cause=FailureCause.PREEMPTION if agent else None,
    )


STARTED = FitStarted(spec=a_spec())


@pytest.mark.parametrize("is_final", [False, True])
def test_refused_machines_count_apart_from_those_of_workers(is_final: bool) -> None:
    refused = GroupRefused(token=FIRST, reason="no quota", is_final=is_final)
    view = fold_events(STARTED, planned(FIRST), refused)
    assert (view.feeder_refusals, view.refusals, view.final_refusal) == (1, 0, None)


def test_a_failed_start_counts_as_refused_and_not_as_a_boot_failure() -> None:
    view = fold_events(STARTED, *granted(FIRST), lost(None))
    assert (view.feeder_refusals, view.boot_failures) == (1, 0)
    view = fold_events(*granted(SECOND), view=view)
    assert view.feeder_refusals == 1, "a grant is no start"


def test_the_loss_of_a_machine_that_had_started_is_charged_to_nothing() -> None:
    view = fold_events(STARTED, planned(SECOND), GroupRefused(token=SECOND, reason="full"))
    view = fold_events(*granted(FIRST), lost("f1"), view=view)
    assert view.feeder_refusals == 0
    assert (view.failure_counts, view.platform_outages) == ({}, frozenset())
    assert AgentId("f1") in view.lost_agents
    assert not view.groups[FIRST].active_nodes


def test_releases_are_counted_except_those_of_lost_machines() -> None:
    view = fold_events(STARTED, *granted(FIRST), *granted(SECOND), lost("f1"))
    view = fold_events(GroupsReleased(token=FIRST), view=view)
    assert view.feeder_releases == 0
    assert fold_events(GroupsReleased(token=SECOND), view=view).feeder_releases == 1


def test_closed_groups_are_removed_with_the_next_request() -> None:
    view = fold_events(STARTED, *granted(FIRST), GroupsReleased(token=FIRST), planned(SECOND))
    assert set(view.groups) == {SECOND}
