"""Machines for feeders in the view: their refusals, losses and releases."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from spotfit.core.ids import AgentId, Token
from spotfit.model.events import (
    FailureCause,
    FeedersStopped,
    FitStarted,
    GroupPlanned,
    GroupRefused,
    GroupsReleased,
    GroupSubmitted,
    JournalEvent,
    NodeLost,
)
from spotfit.model.group import GroupHandle, GroupPlan, GroupRequest
from spotfit.model.view import FeederFailures
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
    assert view.feeder_failures == FeederFailures(refusals=1)
    assert (view.refusals, view.final_refusal) == (0, None)


def test_a_failed_start_counts_as_refused_and_not_as_a_boot_failure() -> None:
    view = fold_events(STARTED, *granted(FIRST), lost(None))
    counted = FeederFailures(refusals=1, boot_failures=1, last=lost(None))
    assert (view.feeder_failures, view.boot_failures) == (counted, 0)
    view = fold_events(*granted(SECOND), view=view)
    assert view.feeder_failures == counted, "a grant is no start"


@pytest.mark.parametrize(
    ("fields", "boot_failures", "failed_starts"),
    [
        ({"is_failed_start": True}, 1, 1),
        ({"is_unusable": True}, 1, 1),
        ({}, 1, 0),
        ({"cause": FailureCause.PREEMPTION}, 0, 0),
    ],
    ids=["ended with an error", "environment", "ended", "withdrawn request"],
)
def test_losses_before_the_start_are_counted_by_kind(
    fields: dict[str, Any], boot_failures: int, failed_starts: int
) -> None:
    view = fold_events(STARTED, *granted(FIRST), replace(lost(None), **fields))
    failures = view.feeder_failures
    assert failures.refusals == 1
    assert (failures.boot_failures, failures.failed_starts) == (boot_failures, failed_starts)


def test_the_loss_of_a_machine_that_has_joined_and_not_worked_is_a_failed_start() -> None:
    unusable = replace(lost("f1"), cause=FailureCause.WORKER, is_unusable=True)
    view = fold_events(STARTED, *granted(FIRST), unusable)
    counted = FeederFailures(refusals=1, boot_failures=1, failed_starts=1, last=unusable)
    assert view.feeder_failures == counted
    assert AgentId("f1") in view.lost_agents


def test_a_release_of_a_machine_resets_the_failures() -> None:
    failed = replace(lost(None), is_failed_start=True)
    view = fold_events(STARTED, *granted(FIRST), failed, *granted(SECOND))
    assert fold_events(GroupsReleased(token=SECOND), view=view).feeder_failures == FeederFailures()


def test_the_reason_of_the_stop_lasts_until_the_next_fit() -> None:
    view = fold_events(STARTED, FeedersStopped(reason="no torch"))
    assert view.feeders_stopped == "no torch"
    assert fold_events(STARTED, view=view).feeders_stopped == ""


def test_the_loss_of_a_machine_that_had_started_is_charged_to_nothing() -> None:
    view = fold_events(STARTED, planned(SECOND), GroupRefused(token=SECOND, reason="full"))
    view = fold_events(*granted(FIRST), lost("f1"), view=view)
    assert view.feeder_failures == FeederFailures()
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
