"""Partial capacity: machines that wait for others are released, and requested again."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from spotfit.core.ids import Token
from spotfit.model.events import (
    FitStarted,
    GroupPlanned,
    GroupRefused,
    GroupSubmitted,
    GroupWaiting,
    JournalEvent,
    NodeLost,
    RoundOpened,
)
from spotfit.model.group import GroupHandle, GroupPlan, GroupStatus, NodeState, NodeStatus
from spotfit.model.leader_state import LeaderState, NoRound
from spotfit.model.view import View
from spotfit.policy.actions import AppendEvent, RequestMachines, Wait
from spotfit.policy.capacity import find_lost_nodes
from spotfit.policy.partial_capacity import partial_capacity_loss, waiting_reason_change
from spotfit.policy.request_backoff import next_request_at
from spotfit.policy.scheduler import next_action
from spotfit.testing.builders import (
    TOKEN,
    a_leader_state,
    a_member_status,
    a_request,
    a_round,
    a_spec,
    an_agent_id,
    fold_events,
    member_statuses,
)

SECOND = Token("t-2")
WAITING, RUNNING = NodeState.WAITING, NodeState.RUNNING
CAPACITY = "CAPACITY:INSUFFICIENT_INSTANCE_CAPACITY"
TIMEOUT_S = 1350.0  # 900 s and at most half of it


def granted(token: Token, nodes: int = 3) -> tuple[JournalEvent, ...]:
    plan = GroupPlan(token=token, provisioner="local", num_nodes=nodes, slots_per_node=1)
    handle = GroupHandle(token=token, provisioner="local", name="g")
    return (
        GroupPlanned(request=a_request(token, nodes), plan=plan),
        GroupSubmitted(token=token, handle=handle),
    )


VIEW = fold_events(FitStarted(spec=a_spec(max_workers=3)), *granted(TOKEN))
HEADLESS = LeaderState(agent_id=an_agent_id(9), is_headless=True)


def state_of(*joined: int, **fields: Any) -> LeaderState:
    """Agents on those machines of three; leader a0 if it is among them."""
    running = {(TOKEN, n): 0.0 for n in joined}
    statuses = (NodeStatus(state=RUNNING if n in joined else WAITING) for n in range(3))
    group = GroupStatus(nodes=tuple(statuses), refusal=CAPACITY)
    usual: dict[str, Any] = {
        "members": member_statuses(*(a_member_status(n) for n in joined)),
        "group_statuses": {TOKEN: group},
        "granted_at": running,
    }
    return a_leader_state(**{**usual, **fields})


def released(view: View, state: LeaderState, now: float = TIMEOUT_S) -> tuple[View, list[NodeLost]]:
    """Give machines up until nothing is left to release."""
    losses = []
    while isinstance(lost := partial_capacity_loss(view, state, now), NodeLost):
        losses.append(lost)
        view = fold_events(lost, view=view)
    return view, losses


def test_granted_machines_are_released_after_the_timeout() -> None:
    early = partial_capacity_loss(VIEW, state_of(0, 1), 899.0)
    assert isinstance(early, Wait)
    assert 900.0 <= early.until <= TIMEOUT_S
    view, losses = released(VIEW, state_of(0, 1))
    assert [(lost.node, lost.agent) for lost in losses] == [(1, an_agent_id(1)), (2, None)]
    assert "2 of at least 3 workers" in losses[0].reason
    assert view.groups[TOKEN].active_nodes == (0,), "the leader continues the run"
    assert (view.partial_releases, view.refusals, view.boot_failures) == (1, 1, 0)
    assert view.lost_agents == {an_agent_id(1)}, "which lets the agent exit"


def test_a_leader_without_a_machine_gives_all_up() -> None:
    state = replace(state_of(0, 1), agent_id=an_agent_id(9), is_headless=True, members={})
    assert [lost.node for lost in released(VIEW, state)[1]] == [0, 1, 2]


@pytest.mark.parametrize(
    ("view", "state"),
    [
        (VIEW, state_of(0, 1, 2)),
        (VIEW, state_of()),
        (VIEW, replace(HEADLESS, group_statuses=state_of().group_statuses)),
        (VIEW, state_of(0, 1, granted_at={(TOKEN, n): 0.0 for n in range(3)})),
        (fold_events(*granted(SECOND)[:1], view=VIEW), state_of(0, 1)),
    ],
    ids=["all are there", "none costs money", "headless, none", "the third boots", "unknown"],
)
def test_nothing_is_released(view: View, state: LeaderState) -> None:
    assert partial_capacity_loss(view, state, TIMEOUT_S) is None


@pytest.mark.parametrize(
    "state",
    [
        state_of(0, 1, granted_at={(TOKEN, 0): 0.0, (TOKEN, 1): 1000.0}),
        state_of(0, 1, phase=NoRound(since=1000.0)),
        state_of(0, 1, leading_since=1000.0),
        state_of(
            0, 1, members=member_statuses(a_member_status(0), a_member_status(1, joined_at=1000.0))
        ),
    ],
    ids=["granted", "round ended", "elected", "joined"],
)
def test_the_timeout_counts_from_the_last_change(state: LeaderState) -> None:
    waited = partial_capacity_loss(VIEW, state, TIMEOUT_S)
    assert isinstance(waited, Wait)
    assert waited.until >= 1900.0


def test_machines_of_a_round_are_never_released() -> None:
    view = fold_events(RoundOpened(round=a_round()), view=VIEW)
    assert isinstance(next_action(view, state_of(0, 1), TIMEOUT_S), Wait)


def test_all_machines_are_requested_again_after_a_pause() -> None:
    view, _ = released(VIEW, state_of(0, 1))
    state = state_of(0, refused_at={"train": TIMEOUT_S}, group_statuses={})
    pause_s = next_request_at(view, state) - TIMEOUT_S
    assert 150.0 <= pause_s <= 450.0
    assert isinstance(next_action(view, state, TIMEOUT_S + pause_s - 1.0), Wait)
    action = next_action(view, state, TIMEOUT_S + pause_s)
    assert isinstance(action, RequestMachines)
    assert action.num_workers == 3, "also the leader's own machine"


def test_a_new_leader_pauses_from_its_election() -> None:
    view, _ = released(VIEW, state_of(0, 1))
    assert next_request_at(view, state_of(0, leading_since=5000.0)) >= 5150.0


def test_a_sweep_without_machines_requests_them_at_once() -> None:
    """It ends before the pause, and so does every later one."""
    view, _ = released(VIEW, state_of(0, 1))
    gone = replace(view, groups={})
    sweep = a_leader_state(is_headless=True, leading_since=5000.0)
    assert next_request_at(gone, sweep) == float("-inf")
    assert next_request_at(view, sweep) >= 5150.0, "a machine remains, whose agent may lead"
    assert next_request_at(gone, replace(sweep, refused_at={"train": 5000.0})) >= 5150.0


def test_the_pause_grows_with_every_release_up_to_an_hour() -> None:
    view, _ = released(VIEW, state_of(0, 1))
    state = state_of(0, refused_at={"train": 0.0})
    for releases in range(2, 30):
        longer = replace(view, partial_releases=releases)
        shortest = min(3600.0, 300.0 * 2 ** (releases - 1)) / 2
        assert shortest <= next_request_at(longer, state) <= 3 * shortest


def test_the_leader_gives_its_machine_up_once_the_request_is_accepted() -> None:
    view, _ = released(VIEW, state_of(0, 1))
    planned = fold_events(granted(SECOND)[0], view=view)
    assert partial_capacity_loss(planned, state_of(0), TIMEOUT_S) is None
    refused = fold_events(GroupRefused(token=SECOND, reason="full"), view=planned)
    assert partial_capacity_loss(refused, state_of(0), TIMEOUT_S) is None
    assert refused.is_capacity_released, "the next request is for all machines again"
    accepted = fold_events(granted(SECOND)[1], view=planned)
    after, losses = released(accepted, state_of(0))
    assert [(lost.token, lost.node, lost.agent) for lost in losses] == [(TOKEN, 0, an_agent_id(0))]
    assert after.partial_releases == 1, "one release"


def test_a_round_ends_the_series_of_releases() -> None:
    view, _ = released(VIEW, state_of(0, 1))
    opened = fold_events(RoundOpened(round=a_round()), view=view)
    assert (opened.partial_releases, opened.is_capacity_released) == (0, False)


def test_a_machine_that_waits_for_capacity_is_not_lost() -> None:
    assert list(find_lost_nodes(VIEW, state_of(0, 1), 10_000.0)) == []


def test_the_reason_of_the_backend_is_recorded_once_and_until_all_machines_run() -> None:
    state = state_of(0, 1)
    assert next_action(VIEW, state, 1.0) == AppendEvent(GroupWaiting(token=TOKEN, reason=CAPACITY))
    view = fold_events(GroupWaiting(token=TOKEN, reason=CAPACITY), view=VIEW)
    assert view.waiting_reason == CAPACITY
    assert waiting_reason_change(view, state) is None
    _, losses = released(view, state)
    assert losses[0].reason.endswith(f"the backend reports: {CAPACITY}")
    all_run = state_of(0, 1, 2)
    assert waiting_reason_change(view, all_run) == GroupWaiting(token=TOKEN, reason="")
    assert waiting_reason_change(VIEW, all_run) is None


def test_a_reason_that_differs_in_numbers_is_not_recorded_again() -> None:
    view = fold_events(GroupWaiting(token=TOKEN, reason="waits for 10 s"), view=VIEW)
    group = replace(state_of(0, 1).group_statuses[TOKEN], refusal="waits for 20 s")
    assert waiting_reason_change(view, state_of(0, 1, group_statuses={TOKEN: group})) is None
