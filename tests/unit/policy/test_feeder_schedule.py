"""Feeder schedule: how many machines transform datasets, by the share of waiting."""

from __future__ import annotations

from typing import Any

import pytest

from spotfit.core.ids import AgentId, Token
from spotfit.model.events import (
    FailureCause,
    FeedersStopped,
    FitEnded,
    GroupPlanned,
    GroupsReleased,
    GroupSubmitted,
    NodeLost,
    RankFailure,
)
from spotfit.model.group import (
    GroupHandle,
    GroupPlan,
    GroupRequest,
    GroupStatus,
    NodeState,
    NodeStatus,
)
from spotfit.model.leader_state import LeaderState, MemberStatus, NoRound
from spotfit.model.spec import CostSpec, FailureLimits, FeederSpec
from spotfit.model.topology import FeederAddress
from spotfit.model.view import FeederFailures, MachineGroup, View
from spotfit.policy.actions import (
    AppendEvent,
    LeaderAction,
    ReleaseGroups,
    RequestMachines,
    SubmitGroup,
    Wait,
)
from spotfit.policy.feeder_schedule import feeder_addresses, feeder_count, release_feeders
from spotfit.policy.scheduler import next_action
from spotfit.testing.builders import (
    TOKEN,
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
    fold_events,
    member_statuses,
)

NOW = 1000.0


def token_of(number: int) -> Token:
    return Token(f"t-f{number}")


def agent_of(number: int) -> AgentId:
    return AgentId(f"f{number}")


def feeder(number: int, *, is_listening: bool = True, **fields: Any) -> MemberStatus:
    member = a_member(agent=agent_of(number), token=token_of(number), node=0)
    address = FeederAddress(address=f"10.0.1.{number}:4000", connections=16)
    return a_member_status(member=member, feeder=address if is_listening else None, **fields)


def a_run(
    nodes: tuple[int, int] = (0, 4), *, machines: int = 0, spec: Any = None, **fields: Any
) -> View:
    """A round is open, and `machines` machines for feeders were granted."""
    groups: dict[Token, MachineGroup] = {TOKEN: a_group()}
    for number in range(machines):
        group = a_group(token=token_of(number), nodes=1, role="feed", planned_slot=10 + number)
        groups[token_of(number)] = group
    feeders = FeederSpec(min_nodes=nodes[0], max_nodes=nodes[1], resources={"CPU": 16.0})
    usual = {"spec": spec or a_spec(feeders=feeders), "groups": groups, "round": a_round()}
    return a_view(**{**usual, **fields})


def observed(share: float | None, *feeders: MemberStatus, **fields: Any) -> LeaderState:
    """Two busy worker nodes and the feeders; the leader has measured the share of waiting."""
    members = member_statuses(
        a_member_status(0, running_round=1), a_member_status(1, running_round=1), *feeders
    )
    agents = {(one.member.token, one.member.node): one.member.agent for one in feeders}
    usual: dict[str, Any] = {
        "members": members,
        "last_agent_by_node": agents,
        "data_wait_share": share,
        "data_wait_measured_s": 60.0,
        "phase": a_training(),
    }
    return a_leader_state(**{**usual, **fields})


def action_of(view: View, state: LeaderState, now: float = NOW) -> LeaderAction:
    return next_action(view, state, now)


# --- the number of machines ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("share", "nodes"),
    [
        (None, 2),
        (0.0, 1),
        (0.0099, 1),
        (0.01, 2),
        (0.05, 2),
        (0.051, 3),
        (1.0, 3),
    ],
)
def test_the_number_follows_the_share_of_waiting(share: float | None, nodes: int) -> None:
    view = a_run(machines=2)
    assert feeder_count(view, observed(share, feeder(0), feeder(1))).nodes == nodes


def test_the_number_is_between_the_minimum_and_the_maximum() -> None:
    both = feeder(0), feeder(1)
    assert feeder_count(a_run((2, 2), machines=2), observed(1.0, *both)).nodes == 2
    assert feeder_count(a_run((2, 2), machines=2), observed(0.0, *both)).nodes == 2
    assert feeder_count(a_run((3, 4), machines=2), observed(None, *both)).nodes == 3
    assert feeder_count(a_run((0, 1), machines=2), observed(None, *both)).nodes == 1


def test_the_number_grows_only_once_the_last_machine_has_started() -> None:
    view = a_run(machines=2)
    starting = feeder(1, is_listening=False)
    assert feeder_count(view, observed(1.0, feeder(0), starting)).nodes == 2
    assert feeder_count(view, observed(1.0, feeder(0), feeder(1))).nodes == 3


@pytest.mark.parametrize(
    ("releases", "measured_s"), [(0, 60.0), (1, 120.0), (4, 960.0), (30, 3600.0)]
)
def test_each_release_doubles_the_time_until_the_next(releases: int, measured_s: float) -> None:
    view = a_run(machines=2, feeder_releases=releases)
    for after_s, nodes in ((measured_s - 1.0, 2), (measured_s, 1)):
        state = observed(0.0, feeder(0), feeder(1), data_wait_measured_s=after_s)
        assert feeder_count(view, state).nodes == nodes


def test_the_reason_states_the_share() -> None:
    count = feeder_count(a_run(machines=1), observed(0.123, feeder(0)))
    assert count.reason == "workers wait for rows for 12.3% of the time"


@pytest.mark.parametrize(
    "fields",
    [{"cancel_reason": "stop"}, {"pending_fit_end": FitEnded(outcome="finished")}],
    ids=["cancelled", "training ended"],
)
def test_a_run_that_trains_no_more_has_no_feeders(fields: dict[str, Any]) -> None:
    view = a_run((2, 4), machines=2, **fields)
    assert feeder_count(view, observed(1.0, feeder(0), feeder(1))).nodes == 0


def test_a_headless_leader_has_no_feeders() -> None:
    assert feeder_count(a_run((2, 4)), observed(None, is_headless=True)).nodes == 0


# --- addresses ----------------------------------------------------------------------------------


def test_workers_get_the_addresses_of_machines_that_listen_and_have_no_notice() -> None:
    view = a_run(machines=3)
    state = observed(None, feeder(2), feeder(1, is_listening=False), feeder(0, notice=a_notice()))
    assert [one.address for one in feeder_addresses(view, state)] == ["10.0.1.2:4000"]


# --- requests -----------------------------------------------------------------------------------


def test_missing_machines_are_requested_one_by_one() -> None:
    expected = RequestMachines(1, "2 machines for feeders: at least 2 machines", "feed")
    assert action_of(a_run((2, 4)), observed(None)) == expected
    pending = a_run((2, 4), machines=1)
    assert action_of(pending, observed(None)) == expected
    assert not isinstance(action_of(a_run((2, 4), machines=2), observed(None)), RequestMachines)


def test_a_waiting_run_requests_one_more() -> None:
    reason = "1 machine for feeders: workers wait for rows for 20.0% of the time"
    assert action_of(a_run(), observed(0.2)) == RequestMachines(1, reason, "feed")


def test_a_machine_with_a_notice_is_replaced() -> None:
    noticed = a_run((1, 1), machines=1, notices={agent_of(0): a_notice()})
    assert isinstance(
        action_of(noticed, observed(None, feeder(0, notice=a_notice()))), RequestMachines
    )


def test_a_lost_machine_is_replaced() -> None:
    lost = a_group(token=token_of(0), nodes=1, role="feed", lost_nodes=frozenset([0]))
    view = a_run((1, 1), groups={TOKEN: a_group(), token_of(0): lost})
    assert isinstance(action_of(view, observed(None)), RequestMachines)


def test_a_machine_whose_environment_cannot_be_set_up_is_lost() -> None:
    failure = RankFailure(rank=0, kind="raised", message="ShippingError: no torch")
    state = observed(None, feeder(0, is_listening=False, node_failure=failure))
    reason = "its environment could not be set up: ShippingError: no torch"
    lost = NodeLost(token=token_of(0), node=0, agent=None, reason=reason, is_unusable=True)
    assert action_of(a_run((1, 1), machines=1), state) == AppendEvent(lost)


def test_the_machine_of_the_leader_is_not_lost_for_its_environment() -> None:
    failure = RankFailure(rank=0, kind="raised", message="ShippingError: no torch")
    broken = feeder(0, is_listening=False, node_failure=failure)
    state = observed(None, broken, agent_id=agent_of(0))
    assert isinstance(action_of(a_run((1, 1), machines=1), state), Wait)


def test_nothing_is_requested_without_a_round_or_without_feeders() -> None:
    between = a_run((2, 4), round=None)
    state = observed(None, phase=NoRound(since=NOW))
    assert getattr(action_of(between, state), "role", "train") == "train"
    assert not isinstance(
        action_of(a_run(spec=a_spec()), observed(1.0)), RequestMachines | SubmitGroup
    )


@pytest.mark.parametrize(("network", "requested"), [("eu", True), ("us", False), ("", True)])
def test_machines_are_requested_only_in_a_network_of_their_backend(
    network: str, *, requested: bool
) -> None:
    feeders = FeederSpec(min_nodes=1, max_nodes=1, networks=("asia", "eu"))
    view = a_run(spec=a_spec(feeders=feeders), network=network)
    assert isinstance(action_of(view, observed(None)), RequestMachines) == requested


@pytest.mark.parametrize(
    ("budget_usd", "wall_ms", "requested"),
    [(1.0, 0, True), (0.1, 0, False), (0.1, None, True)],
    ids=["suffices", "does not suffice", "clock not measured"],
)
def test_machines_are_requested_only_if_the_budget_pays_for_their_start_and_stop(
    budget_usd: float, wall_ms: int | None, *, requested: bool
) -> None:
    """A start of ten minutes at $1 per hour costs $0.17."""
    feeders = FeederSpec(min_nodes=1, max_nodes=1, usd_per_hour=1.0)
    cost = CostSpec(budget_usd=budget_usd, start_time_s=600.0)
    view = a_run(spec=a_spec(feeders=feeders, cost=cost))
    action = action_of(view, observed(None, wall_ms=wall_ms))
    assert isinstance(action, RequestMachines) == requested


@pytest.mark.parametrize(("refusals", "pause_s"), [(1, 1.0), (4, 8.0), (30, 600.0)])
def test_refused_machines_are_requested_after_a_growing_pause(
    refusals: int, pause_s: float
) -> None:
    view = a_run((1, 1), feeder_failures=FeederFailures(refusals=refusals))
    state = observed(None, refused_at={"feed": NOW})
    assert isinstance(action_of(view, state, NOW + pause_s - 0.1), Wait)
    assert isinstance(action_of(view, state, NOW + pause_s), RequestMachines)


def failed(starts: int, *, boot_failures: int = 0) -> FeederFailures:
    """The failures after `starts` failed starts in a row, or `boot_failures` other losses."""
    lost = NodeLost(token=token_of(9), node=0, agent=None, reason="no torch", is_unusable=True)
    boots = max(starts, boot_failures)
    return FeederFailures(refusals=boots, boot_failures=boots, failed_starts=starts, last=lost)


@pytest.mark.parametrize(
    ("failures", "reason"),
    [
        (failed(3), "3 machines in a row could not start feeders, the last is t-f9/0: no torch"),
        (
            failed(0, boot_failures=21),
            "21 machines in a row ended before their agents joined, the last is t-f9/0: no torch",
        ),
    ],
    ids=["failed starts", "boot failures"],
)
def test_no_machines_are_requested_after_too_many_have_failed(
    failures: FeederFailures, reason: str
) -> None:
    view = a_run((1, 1), feeder_failures=failures)
    assert action_of(view, observed(None)) == AppendEvent(FeedersStopped(reason=reason))
    stopped = fold_events(FeedersStopped(reason=reason), view=view)
    assert isinstance(action_of(stopped, observed(1.0)), Wait)


def with_machine(view: View, token: Token) -> View:
    """The view after a machine for feeders was requested and submitted."""
    request = GroupRequest(token=token, num_workers=1, total_workers=1, role="feed")
    plan = GroupPlan(token=token, provisioner="local", num_nodes=1, slots_per_node=1)
    handle = GroupHandle(token=token, provisioner="local", name="g")
    submitted = GroupSubmitted(token=token, handle=handle)
    return fold_events(GroupPlanned(request=request, plan=plan), submitted, view=view)


def test_an_environment_that_cannot_be_set_up_costs_three_machines() -> None:
    view = a_run((1, 1))
    failure = RankFailure(rank=0, kind="raised", message="ShippingError: no torch")
    for number in range(3):
        assert isinstance(action_of(view, observed(None)), RequestMachines)
        token = token_of(number)
        view = with_machine(view, token)
        broken = feeder(number, is_listening=False, node_failure=failure)
        lost = action_of(view, observed(None, broken))
        assert isinstance(lost, AppendEvent)
        view = fold_events(lost.event, GroupsReleased(token=token), view=view)
    stopped = action_of(view, observed(None))
    assert isinstance(stopped, AppendEvent)
    assert isinstance(stopped.event, FeedersStopped)


KILLED = NodeStatus(state=NodeState.FAILED, reason="OOMKilled", out_of_memory=True)


def after_end(number: int, status: NodeStatus = KILLED, **fields: Any) -> LeaderState:
    """A machine for feeders has joined, and then ended."""
    agent, token = agent_of(number), token_of(number)
    usual: dict[str, Any] = {
        "last_agent_by_node": {(token, 0): agent},
        "disconnected_since": {agent: NOW},
        "group_statuses": {token: GroupStatus(nodes=(status,))},
    }
    return observed(None, **{**usual, **fields})


def loss_of(state: LeaderState, now: float = NOW) -> NodeLost:
    action = action_of(a_run((1, 1), machines=1), state, now)
    assert isinstance(action, AppendEvent)
    assert isinstance(action.event, NodeLost)
    return action.event


def test_a_machine_that_ends_before_it_has_worked_is_unusable() -> None:
    lost = loss_of(after_end(0))
    assert (lost.agent, lost.cause, lost.is_unusable) == (agent_of(0), FailureCause.WORKER, True)
    listened = after_end(0, feeding_since={agent_of(0): NOW})
    assert loss_of(listened, NOW + 299.0).is_unusable
    assert not loss_of(listened, NOW + 300.0).is_unusable


@pytest.mark.parametrize(
    "state",
    [after_end(0, NodeStatus(state=NodeState.GONE)), after_end(0, is_headless=True)],
    ids=["preempted", "headless leader"],
)
def test_the_loss_is_not_charged_to_a_machine_that_may_have_worked(state: LeaderState) -> None:
    assert not loss_of(state).is_unusable


def test_machines_that_join_and_end_before_they_work_cost_three_machines() -> None:
    view = a_run((1, 1))
    for number in range(3):
        state = observed(None, refused_at={"feed": NOW})
        waiting = action_of(view, state)
        assert isinstance(waiting, Wait if number else RequestMachines)
        assert waiting.reason.endswith(f"refused or failed {number} times") == (number > 0)
        assert isinstance(action_of(view, state, NOW + 10.0), RequestMachines)
        token = token_of(number)
        view = with_machine(view, token)
        lost = action_of(view, after_end(number))
        assert isinstance(lost, AppendEvent)
        view = fold_events(lost.event, GroupsReleased(token=token), view=view)
    stopped = action_of(view, observed(None))
    assert isinstance(stopped, AppendEvent)
    assert isinstance(stopped.event, FeedersStopped)


@pytest.mark.parametrize("failures", [failed(2), failed(0, boot_failures=20)])
def test_fewer_failed_machines_are_replaced(failures: FeederFailures) -> None:
    view = a_run((1, 1), feeder_failures=failures)
    assert isinstance(action_of(view, observed(None)), RequestMachines)


@pytest.mark.parametrize(("limit", "is_stopped"), [(0, True), (1, False), (-1, False)])
def test_a_smaller_limit_of_the_user_applies(limit: int, is_stopped: bool) -> None:
    limits = FailureLimits(platform=limit)
    spec = a_spec(feeders=FeederSpec(min_nodes=1, max_nodes=1), failure_limits=limits)
    view = a_run(spec=spec, feeder_failures=failed(1))
    assert isinstance(action_of(view, observed(None)), AppendEvent) == is_stopped


def test_refused_machines_are_requested_without_a_limit() -> None:
    view = a_run((1, 1), feeder_failures=FeederFailures(refusals=1000))
    assert isinstance(action_of(view, observed(None)), RequestMachines)


def test_machines_that_still_start_are_awaited_before_the_stop() -> None:
    view = a_run((2, 2), machines=1, feeder_failures=failed(3))
    assert isinstance(action_of(view, observed(None)), Wait)
    starting = feeder(0, is_listening=False)
    assert isinstance(action_of(view, observed(None, starting)), Wait)


def test_where_a_machine_works_failed_ones_are_replaced() -> None:
    view = a_run((2, 2), machines=1, feeder_failures=failed(3))
    assert isinstance(action_of(view, observed(None, feeder(0))), RequestMachines)


def test_a_machine_that_works_with_a_notice_shows_that_others_can_start() -> None:
    notices = {agent_of(0): a_notice()}
    view = a_run((2, 2), machines=1, feeder_failures=failed(3), notices=notices)
    noticed = feeder(0, notice=a_notice())
    assert isinstance(action_of(view, observed(None, noticed)), RequestMachines)


def test_the_loss_of_a_machine_with_a_notice_is_awaited_before_the_stop() -> None:
    notices = {agent_of(0): a_notice()}
    view = a_run((2, 2), machines=1, feeder_failures=failed(3), notices=notices)
    agents = {(token_of(0), 0): agent_of(0)}
    state = observed(None, last_agent_by_node=agents, disconnected_since={agent_of(0): NOW})
    assert isinstance(action_of(view, state), Wait)


# --- releases -----------------------------------------------------------------------------------


def test_the_newest_machine_is_released_if_workers_do_not_wait() -> None:
    state = observed(0.0, feeder(0), feeder(1))
    assert action_of(a_run(machines=2), state) == ReleaseGroups(token_of(1))


def test_all_machines_are_released_after_five_minutes_without_a_round() -> None:
    view = a_run((2, 2), machines=2, round=None)
    state = observed(None, feeder(0), feeder(1), phase=NoRound(since=NOW))

    def releases(now: float) -> list[LeaderAction]:
        return [one for one in release_feeders(view, state, now) if not isinstance(one, Wait)]

    assert releases(NOW + 299.0) == []
    assert releases(NOW + 300.0) == [ReleaseGroups(token_of(0), (token_of(1),))]


def test_the_machine_of_the_leader_is_not_released() -> None:
    state = observed(0.0, feeder(0), feeder(1), agent_id=agent_of(1))
    view = a_run(machines=2)
    assert list(release_feeders(view, state, NOW)) == [ReleaseGroups(token_of(0))]


def test_a_machine_for_feeders_gets_no_workers() -> None:
    view = a_run(
        machines=1, round=None, groups={token_of(0): a_run(machines=1).groups[token_of(0)]}
    )
    state = observed(None, feeder(0), phase=NoRound(since=NOW), agent_id=an_agent_id(0))
    assert action_of(view, state) == RequestMachines(2, "2 of 2 workers need a machine")
