"""Capacity: missing workers, requests for machines, and lost nodes."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from spotfit.core.ids import AgentId, Token
from spotfit.model.events import AgentCrash, FailureCause, LeaderElected, NodeLost
from spotfit.model.group import GroupStatus, NodeState, NodeStatus, Unreachable
from spotfit.model.leader_state import LeaderState, NoRound
from spotfit.model.spec import RunTiming
from spotfit.model.topology import Notice
from spotfit.model.view import AgentCrashes, MachineGroup, View
from spotfit.policy.capacity import (
    boot_failure_reason,
    find_lost_nodes,
    is_replaced,
    missing_workers,
    network_in_use,
    pending_slots,
    staying_members,
    surplus_groups,
    usable_members,
    with_crash,
    with_unreachable,
    workers_to_request,
)
from spotfit.testing.builders import (
    TOKEN,
    a_final_group_status,
    a_group,
    a_group_status,
    a_leader_state,
    a_member,
    a_member_status,
    a_notice,
    a_round,
    a_spec,
    a_view,
    an_agent_crash,
    an_agent_id,
    member_statuses,
)

TIMING = RunTiming(rejoin_timeout_s=5.0, boot_timeout_s=900.0, stop_timeout_s=10.0)
NOW = 1000.0


def usable(view: View, observations: LeaderState) -> list[str]:
    return [member_status.member.agent for member_status in usable_members(view, observations)]


def losses(view: View, observations: LeaderState, now: float = NOW) -> dict[int, str]:
    return {lost.node: lost.reason for lost in find_lost_nodes(view, observations, now)}


# --- usable members ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("view", "member_status"),
    [
        (a_view(lost_agents=frozenset({an_agent_id(1)})), a_member_status(1)),
        (a_view(notices={an_agent_id(1): a_notice()}), a_member_status(1)),
        (a_view(), a_member_status(1, notice=a_notice())),
        (a_view(groups={TOKEN: a_group(lost_nodes=frozenset({1}))}), a_member_status(1)),
        (a_view(), a_member_status(1, member=a_member(1, token=Token("t-unknown")))),
    ],
    ids=["lost", "noticed", "notice not yet written", "machine lost", "unknown group"],
)
def test_lost_leaving_and_released_members_are_not_usable(view: View, member_status: Any) -> None:
    observations = a_leader_state(members=member_statuses(a_member_status(0), member_status))
    assert usable(view, observations) == [an_agent_id(0)]


def test_members_of_a_released_group_are_not_usable() -> None:
    assert usable(a_view(groups={TOKEN: a_group(is_released=True)}), a_leader_state()) == []


# --- missing workers -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("groups", "connected", "missing"),
    [
        ({}, [], 4),
        ({TOKEN: a_group(nodes=4)}, [], 0),
        ({TOKEN: a_group(nodes=4)}, [0, 1], 0),
        ({TOKEN: a_group(nodes=4, lost_nodes=frozenset({3}))}, [0, 1, 2], 1),
        ({TOKEN: a_group(nodes=4, handle=None)}, [], 0),
        ({TOKEN: a_group(nodes=4, handle=None, refusal="full")}, [], 4),
        ({TOKEN: a_group(nodes=2, slots=2)}, [], 0),
        ({TOKEN: a_group(nodes=3)}, [], 1),
    ],
    ids=["nothing", "all granted", "half joined", "one lost", "request", "refused", "wide", "few"],
)
def test_missing_workers_are_max_minus_joined_and_pending(
    groups: Any, connected: list[int], missing: int
) -> None:
    view = a_view(spec=a_spec(max_workers=4), groups=groups)
    observations = a_leader_state(members=member_statuses(*(a_member_status(n) for n in connected)))
    assert missing_workers(view, observations) == missing


def test_a_leaving_node_is_replaced_before_its_deadline() -> None:
    view = a_view(notices={an_agent_id(1): a_notice()})
    assert missing_workers(view, a_leader_state()) == 1


def test_a_headless_leader_counts_slots_from_the_journal() -> None:
    headless = a_leader_state(members={}, is_headless=True)
    assert missing_workers(a_view(), headless) == 0
    decide_replacement = a_view(round=a_round(), notices={an_agent_id(1): a_notice()})
    assert missing_workers(decide_replacement, headless) == 1


@given(
    st.integers(1, 6),
    st.lists(
        st.tuples(st.integers(1, 3), st.integers(1, 3), st.sets(st.integers(0, 2))), max_size=4
    ),
    st.data(),
)
def test_no_workers_are_missing_while_enough_are_joined_or_pending(
    expected: int, shapes: list[tuple[int, int, set[int]]], data: st.DataObject
) -> None:
    groups = {
        Token(f"t-{n}"): a_group(
            token=Token(f"t-{n}"), nodes=nodes, slots=slots, lost_nodes=frozenset(lost)
        )
        for n, (nodes, slots, lost) in enumerate(shapes)
    }
    machines = [(token, node) for token, group in groups.items() for node in group.active_nodes]
    joined = [one for one in machines if data.draw(st.booleans())]
    observations = a_leader_state(
        members=member_statuses(
            *(
                a_member_status(
                    member=a_member(
                        n, token=token, node=node, slots=groups[token].plan.slots_per_node
                    )
                )
                for n, (token, node) in enumerate(joined)
            )
        )
    )
    view = a_view(spec=a_spec(max_workers=expected), groups=groups)
    active_slots = sum(groups[token].plan.slots_per_node for token, _ in machines)
    assert missing_workers(view, observations) == expected - active_slots
    assert pending_slots(view, observations) == active_slots - sum(
        member_status.member.slots for member_status in observations.members.values()
    )


def test_too_many_boot_failures_are_final() -> None:
    assert boot_failure_reason(a_view(boot_failures=40)) is None, "20 for each of the two"
    assert boot_failure_reason(a_view(boot_failures=41)) is not None
    assert boot_failure_reason(a_view(groups={}, boot_failures=21)) is not None


# --- lost nodes ----------------------------------------------------------------------------------

IN_ROUND = a_view(spec=a_spec(timing=TIMING), round=a_round())
FORMING = a_view(spec=a_spec(timing=TIMING))
ONE_MEMBER = member_statuses(a_member_status(0))


def test_connected_nodes_are_not_lost() -> None:
    assert losses(IN_ROUND, a_leader_state()) == {}


def test_a_node_reported_as_terminated_is_lost() -> None:
    status = a_group_status(NodeState.RUNNING, NodeState.GONE)
    observations = a_leader_state(members=ONE_MEMBER, group_statuses={TOKEN: status})
    assert losses(IN_ROUND, observations) == {1: "the backend reports it as gone"}
    message = replace(
        status, nodes=(status.nodes[0], NodeStatus(state=NodeState.FAILED, reason="disk full"))
    )
    assert losses(
        IN_ROUND, a_leader_state(members=ONE_MEMBER, group_statuses={TOKEN: message})
    ) == {1: "disk full"}


def test_a_connected_agent_is_not_lost_whatever_the_backend_reports() -> None:
    status = a_group_status(NodeState.RUNNING, NodeState.GONE)
    assert losses(IN_ROUND, a_leader_state(group_statuses={TOKEN: status})) == {}


def test_a_disconnected_agent_is_lost_after_the_rejoin_timeout() -> None:
    observations = a_leader_state(members=ONE_MEMBER, disconnected_since={an_agent_id(1): NOW})
    assert losses(IN_ROUND, observations, NOW + 5.0) == {}
    assert losses(IN_ROUND, observations, NOW + 5.1) == {
        1: "its agent did not reconnect within 5 s"
    }


def test_a_new_leader_waits_for_agents_to_connect() -> None:
    observations = a_leader_state(members=ONE_MEMBER, leading_since=NOW)
    assert losses(IN_ROUND, observations, NOW + 5.0) == {}
    assert 1 in losses(IN_ROUND, observations, NOW + 5.1)


def test_a_withdrawn_machine_is_charged_to_preemption() -> None:
    view = a_view(groups={TOKEN: a_group(nodes=2)})
    observations = a_leader_state(
        members={}, group_statuses={TOKEN: a_group_status(NodeState.REFUSED, NodeState.FAILED)}
    )
    found = {one.node: one.cause for one in find_lost_nodes(view, observations, NOW)}
    assert found == {0: FailureCause.PREEMPTION, 1: None}


def test_a_vanished_leader_is_lost_at_the_report_of_its_backend() -> None:
    view = replace(
        IN_ROUND,
        leader=LeaderElected(
            leader=an_agent_id(0),
            epoch=2,
            coordinator_address="h:1",
            reason="",
            lost_leader=an_agent_id(1),
        ),
    )
    observations = a_leader_state(members=ONE_MEMBER, leading_since=NOW)
    assert losses(view, observations, NOW + 5.0) == {}, "the backend may still report the cause"
    assert losses(view, observations, NOW + 5.1) == {
        1: "it was the leader, and its connections broke"
    }
    killed = NodeStatus(state=NodeState.FAILED, reason="OOMKilled", out_of_memory=True)
    status = GroupStatus(nodes=(NodeStatus(state=NodeState.RUNNING), killed))
    reported = replace(observations, group_statuses={TOKEN: status})
    (lost,) = find_lost_nodes(view, reported, NOW + 2.0)
    assert lost.cause is FailureCause.WORKER
    runs = replace(
        observations, group_statuses={TOKEN: a_group_status()}, status_as_of={TOKEN: NOW}
    )
    assert losses(view, runs, NOW) == {1: "it was the leader, and its connections broke"}


@pytest.mark.parametrize(
    ("state", "seen", "notices", "cause"),
    [
        (NodeState.GONE, 0.0, {}, FailureCause.PREEMPTION),
        (NodeState.RUNNING, NOW - 1, {}, FailureCause.PREEMPTION),
        (NodeState.RUNNING, NOW, {}, FailureCause.PLATFORM),
        (NodeState.RUNNING, NOW, {an_agent_id(1): a_notice()}, FailureCause.PREEMPTION),
    ],
    ids=["gone", "outdated report", "running", "running with a notice"],
)
def test_the_cause_of_a_lost_agent_follows_the_report_of_its_machine(
    state: NodeState, seen: float, notices: dict[AgentId, Notice], cause: FailureCause
) -> None:
    observations = a_leader_state(
        members=ONE_MEMBER,
        disconnected_since={an_agent_id(1): NOW},
        group_statuses={TOKEN: a_group_status(NodeState.RUNNING, state)},
        status_as_of={TOKEN: seen},
    )
    view = replace(IN_ROUND, notices=notices, notice_slots=dict.fromkeys(notices, 9))
    (lost,) = find_lost_nodes(view, observations, NOW + 5.1)
    assert (lost.agent, lost.cause) == (an_agent_id(1), cause)


def test_a_machine_that_exceeded_its_memory_limit_is_charged_to_the_worker() -> None:
    """Its replacements would be killed as well."""
    killed = NodeStatus(state=NodeState.FAILED, reason="OOMKilled", out_of_memory=True)
    status = GroupStatus(nodes=(NodeStatus(state=NodeState.RUNNING), killed))
    observations = a_leader_state(
        members=ONE_MEMBER,
        disconnected_since={an_agent_id(1): NOW},
        group_statuses={TOKEN: status},
    )
    (lost,) = find_lost_nodes(IN_ROUND, observations, NOW)
    assert lost.cause is FailureCause.WORKER
    assert "exceeded the memory limit of their container (OOMKilled)" in lost.reason
    assert 'Request more memory per worker, with "memory"' in lost.reason


def test_a_node_that_never_booted_has_no_cause() -> None:
    observations = a_leader_state(
        members=ONE_MEMBER,
        group_statuses={TOKEN: a_group_status(NodeState.RUNNING, NodeState.GONE)},
    )
    (lost,) = find_lost_nodes(FORMING, observations, NOW)
    assert (lost.agent, lost.cause) == (None, None)


def test_a_machine_that_ends_with_an_error_before_it_joins_is_a_failed_start() -> None:
    observations = a_leader_state(
        members={}, group_statuses={TOKEN: a_group_status(NodeState.GONE, NodeState.FAILED)}
    )
    found = {one.node: one.is_failed_start for one in find_lost_nodes(FORMING, observations, NOW)}
    assert found == {0: False, 1: True}


def test_an_agent_that_joined_is_no_failed_start() -> None:
    observations = a_leader_state(
        members=ONE_MEMBER,
        disconnected_since={an_agent_id(1): NOW},
        group_statuses={TOKEN: a_group_status(NodeState.RUNNING, NodeState.FAILED)},
    )
    (lost,) = find_lost_nodes(IN_ROUND, observations, NOW)
    assert not lost.is_failed_start


def test_the_cause_of_an_agent_that_a_new_leader_misses_follows_its_machine() -> None:
    """It is missing since the election: a later report of the backend is certain."""
    observations = a_leader_state(
        members=ONE_MEMBER,
        leading_since=NOW,
        group_statuses={TOKEN: a_group_status()},
        status_as_of={TOKEN: NOW + 1},
    )
    (lost,) = find_lost_nodes(IN_ROUND, observations, NOW + 5.1)
    assert lost.cause is FailureCause.PLATFORM


LOST = NodeLost(
    token=TOKEN, node=1, agent=an_agent_id(1), reason="gone", cause=FailureCause.PREEMPTION
)


def test_a_loss_by_a_crash_is_charged_to_the_platform() -> None:
    crash = an_agent_crash(1)
    assert with_crash(a_view(), LOST, crash) == replace(
        LOST, reason="its agent crashed: ValueError: no", cause=FailureCause.PLATFORM, crash=crash
    )


def test_a_crash_before_the_agent_joined_charges_no_round() -> None:
    lost = with_crash(a_view(), replace(LOST, agent=None, cause=None), an_agent_crash(1))
    assert (lost.cause, lost.crash) == (None, an_agent_crash(1))


@pytest.mark.parametrize("crash", [None, an_agent_crash(7)], ids=["none", "of an earlier agent"])
def test_a_loss_without_a_crash_of_its_agent_is_unchanged(crash: AgentCrash | None) -> None:
    assert with_crash(a_view(), LOST, crash) == LOST


@pytest.mark.parametrize(
    "view",
    [
        a_view(lost_agents=frozenset({an_agent_id(1)})),
        a_view(agent_crashes=AgentCrashes(incidents=1, latest=an_agent_crash(1))),
    ],
    ids=["lost since the last round", "lost before it"],
)
def test_a_crash_before_the_backend_restarted_the_machine_is_not_counted_again(view: View) -> None:
    for lost in (LOST, replace(LOST, agent=None, cause=None)):
        assert with_crash(view, lost, an_agent_crash(1)) == lost


def group_in(network: str, **fields: Any) -> MachineGroup:
    group = a_group(**fields)
    assert group.handle is not None
    return replace(group, handle=replace(group.handle, network=network))


@pytest.mark.parametrize(
    ("groups", "network"),
    [
        ([], ""),
        ([group_in("")], ""),
        ([group_in("east")], "east"),
        ([group_in("east"), group_in("west")], "east"),
        ([replace(group_in("east"), lost_nodes=frozenset({0, 1})), group_in("west")], "west"),
        ([replace(group_in("east"), lost_nodes=frozenset({0}))], "east"),
        ([replace(group_in("east"), is_released=True)], ""),
        ([replace(group_in("east"), handle=None)], ""),
    ],
)
def test_a_run_stays_in_the_network_of_its_standing_machines(
    groups: list[MachineGroup], network: str
) -> None:
    by_token = {Token(f"t-{n}"): group for n, group in enumerate(groups)}
    assert network_in_use(a_view(groups=by_token)) == network


def test_a_run_whose_partial_capacity_was_released_may_use_any_network() -> None:
    """Only the leader's machine is left, and it is released for those of the next request."""
    view = a_view(groups={Token("t-0"): group_in("east")}, partial_release_slot=7)
    assert view.is_capacity_released
    assert network_in_use(view) == ""


def test_what_an_agent_could_not_reach_explains_the_loss_of_its_machine() -> None:
    report = an_agent_crash(1, unreachable=Unreachable.LEADER, traceback_text="no TCP")
    never_joined = replace(LOST, agent=None)
    assert with_crash(a_view(), never_joined, report) == replace(
        never_joined, reason="no TCP", cause=None, unreachable=Unreachable.LEADER
    )


def test_the_loss_of_a_machine_whose_agent_joined_has_no_such_explanation() -> None:
    report = an_agent_crash(1, unreachable=Unreachable.LEADER)
    assert with_crash(a_view(), LOST, report) == LOST
    assert with_unreachable(LOST, Unreachable.STORAGE) == LOST


def test_a_node_that_does_not_join_is_lost_after_the_boot_timeout() -> None:
    never = a_leader_state(members=ONE_MEMBER)
    assert losses(FORMING, never, NOW * 10) == {}, "never granted"
    granted = a_leader_state(members=ONE_MEMBER, granted_at={(TOKEN, n): NOW for n in range(2)})
    assert losses(FORMING, granted, NOW + 900) == {}
    assert losses(FORMING, granted, NOW + 901) == {1: "its agent did not join within 900 s"}


def test_workers_that_do_not_stop_cost_their_node() -> None:
    observations = a_leader_state(
        members=member_statuses(a_member_status(0), a_member_status(1, running_round=1)),
        phase=NoRound(since=NOW),
    )
    assert losses(FORMING, observations, NOW + 10.0) == {}
    assert losses(FORMING, observations, NOW + 10.1) == {1: "its workers did not stop in time"}
    assert losses(IN_ROUND, observations, NOW + 99) == {}, "running workers are expected in a round"


WITHOUT_A1 = replace(
    IN_ROUND,
    round=a_round(2, members=[a_member(0)]),
    round_opened_slot=8,
    notices={an_agent_id(1): a_notice()},
    notice_slots={an_agent_id(1): 7},
)


def test_a_node_with_a_notice_is_lost_once_a_round_opens_without_it() -> None:
    assert losses(WITHOUT_A1, a_leader_state()) == {
        1: "it was replaced after its preemption notice"
    }


def test_a_restarted_machine_loses_only_its_previous_agent() -> None:
    """Kubernetes replaces pods and AWS Batch retries jobs: the same node, another agent."""
    new_agent = a_member_status(1, member=a_member(1, agent=AgentId("newcomer")))
    observations = a_leader_state(members=member_statuses(a_member_status(0), new_agent))
    view = a_view(last_round=a_round())
    (lost,) = find_lost_nodes(view, observations, NOW)
    assert (lost.node, lost.agent, lost.machine_returned) == (1, an_agent_id(1), True)
    assert lost.cause is FailureCause.PREEMPTION
    known = replace(view, lost_agents=frozenset({an_agent_id(1)}))
    assert list(find_lost_nodes(known, observations, NOW)) == []


@pytest.mark.parametrize(
    "view",
    [
        replace(WITHOUT_A1, round=a_round(2)),
        replace(WITHOUT_A1, round=None),
        replace(WITHOUT_A1, notice_slots={an_agent_id(1): 9}),
        replace(WITHOUT_A1, notices={}, notice_slots={}),
    ],
    ids=["assigned", "no round yet", "joined later", "no notice"],
)
def test_a_node_with_a_notice_is_kept_until_the_next_round(view: View) -> None:
    assert losses(view, a_leader_state()) == {}


def test_the_last_agent_of_a_node_is_known_without_an_assignment() -> None:
    observations = a_leader_state(
        members=ONE_MEMBER,
        last_agent_by_node={(TOKEN, 1): an_agent_id(1)},
        disconnected_since={an_agent_id(1): NOW},
    )
    assert losses(FORMING, observations, NOW + 5.0) == {}
    (lost,) = find_lost_nodes(FORMING, observations, NOW + 5.1)
    assert lost.agent == an_agent_id(1)


def test_a_headless_leader_waits_for_an_agent_to_take_the_lead() -> None:
    headless = a_leader_state(
        members={}, is_headless=True, group_statuses={TOKEN: a_group_status()}
    )
    assert losses(IN_ROUND, headless, NOW * 10) == {}
    granted = replace(
        headless, granted_at={(TOKEN, n): NOW for n in range(2)}, leading_since=NOW + 100
    )
    assert losses(IN_ROUND, granted, NOW + 1000) == {}
    late = losses(IN_ROUND, granted, NOW + 1001)
    assert late == dict.fromkeys((0, 1), "none of its agents took the lead within 900 s")
    gone = replace(headless, group_statuses={TOKEN: a_group_status(NodeState.GONE, NodeState.GONE)})
    assert losses(IN_ROUND, gone).keys() == {0, 1}


# --- machines that their backend restarts --------------------------------------------------------

RESTARTS_S = 120.0
RESTARTING = a_view(
    spec=a_spec(timing=TIMING),
    groups={TOKEN: a_group(lost_agent_by_restarted_node={1: an_agent_id(1)})},
)


def a_requeueing_state(*states: NodeState, **fields: Any) -> LeaderState:
    """The state of a leader whose only connected agent is a0; a1 was lost at `NOW`."""
    usual: dict[str, Any] = {
        "members": ONE_MEMBER,
        "requeues_itself": True,
        "last_agent_by_node": {(TOKEN, 1): an_agent_id(1)},
        "disconnected_since": {an_agent_id(1): NOW},
        "group_statuses": {TOKEN: a_group_status(*states)},
        "status_as_of": {TOKEN: NOW - 60.0},
        "reported_running": frozenset({(TOKEN, 1)}),
    }
    return a_leader_state(**{**usual, **fields})


def test_a_machine_that_its_backend_may_restart_is_not_replaced_before_it_is_reported() -> None:
    state = a_requeueing_state()
    for now in (NOW + 5.1, NOW + RESTARTS_S):
        assert losses(FORMING, state, now) == {}
    assert missing_workers(FORMING, state) == 0
    (lost,) = find_lost_nodes(FORMING, state, NOW + RESTARTS_S + 0.1)
    assert lost.machine_returned is False
    assert "its backend did not restart the machine" in lost.reason


def test_a_restart_that_the_backend_reports_loses_only_the_agent() -> None:
    waiting = NodeStatus(state=NodeState.WAITING, reason="Host EC2 (instance i-1) terminated.")
    status = GroupStatus(nodes=(NodeStatus(state=NodeState.RUNNING), waiting))
    state = a_requeueing_state(group_statuses={TOKEN: status})
    assert losses(FORMING, state, NOW + 5.0) == {}, "the report may be older than the machine"
    (lost,) = find_lost_nodes(FORMING, state, NOW + 5.1)
    assert (lost.agent, lost.machine_returned) == (an_agent_id(1), True)
    assert lost.cause is FailureCause.PREEMPTION
    assert lost.reason == "Host EC2 (instance i-1) terminated.; its backend restarts the machine"
    certain = replace(state, status_as_of={TOKEN: NOW})
    assert losses(FORMING, certain, NOW + 0.1).keys() == {1}


def test_a_report_from_before_the_boot_of_a_machine_is_no_restart() -> None:
    """The API did not answer while the machine booted and its agent joined and disconnected."""
    state = a_requeueing_state(
        NodeState.RUNNING, NodeState.WAITING, reported_running=frozenset({(TOKEN, 0)})
    )
    assert losses(FORMING, state, NOW + 6.0) == {}
    (lost,) = find_lost_nodes(FORMING, replace(state, status_as_of={TOKEN: NOW}), NOW + 6.0)
    assert lost.machine_returned


def test_a_machine_that_its_backend_does_not_restart_is_lost_at_its_report() -> None:
    state = a_requeueing_state(NodeState.RUNNING, NodeState.GONE)
    (lost,) = find_lost_nodes(FORMING, state, NOW)
    assert lost.machine_returned is False


def test_a_machine_on_its_last_attempt_is_replaced_after_the_rejoin_timeout() -> None:
    state = a_requeueing_state(group_statuses={TOKEN: a_final_group_status(1)})
    assert losses(FORMING, state, NOW + 5.1) == {1: "its agent did not reconnect within 5 s"}


def test_a_restarting_machine_counts_until_the_boot_timeout() -> None:
    state = a_requeueing_state(NodeState.RUNNING, NodeState.WAITING, loss_recorded_at={TOKEN: NOW})
    assert missing_workers(RESTARTING, state) == 0
    assert losses(RESTARTING, state, NOW + 900.0) == {}
    (lost,) = find_lost_nodes(RESTARTING, state, NOW + 901.0)
    assert (lost.agent, lost.machine_returned) == (None, False)
    assert lost.reason == "the machine that its backend restarts did not join within 900 s"


def test_a_restarting_machine_is_lost_if_all_workers_have_others() -> None:
    other = a_member_status(2, member=a_member(2, token=Token("t-other"), node=0))
    groups = {**RESTARTING.groups, Token("t-other"): a_group(token=Token("t-other"), nodes=1)}
    state = a_requeueing_state(members=member_statuses(a_member_status(0), other))
    found = losses(replace(RESTARTING, groups=groups), state)
    assert found == {1: "all workers have other machines"}


def test_a_group_without_connected_agents_is_surplus_once_all_workers_have_machines() -> None:
    spare = Token("t-spare")
    view = a_view(groups={TOKEN: a_group(), spare: a_group(token=spare, nodes=1)})
    state = a_leader_state(requeues_itself=True)
    assert surplus_groups(view, state) == [spare]
    assert surplus_groups(view, replace(state, requeues_itself=False)) == []
    assert surplus_groups(view, replace(state, members=ONE_MEMBER)) == []
    noticed = replace(view, notices={an_agent_id(1): a_notice()})
    assert surplus_groups(noticed, state) == [], "it replaces the machine with the notice"


def test_a_surplus_agent_is_lost_but_not_a_replacement() -> None:
    spare = Token("t-spare")
    groups = {TOKEN: a_group(), spare: a_group(token=spare, nodes=1)}
    view = a_view(groups=groups, round=a_round())
    extra = a_member_status(2, member=a_member(2, token=spare, node=0))
    members = member_statuses(a_member_status(0), a_member_status(1), extra)
    state = a_leader_state(members=members, requeues_itself=True)
    assert [lost.token for lost in find_lost_nodes(view, state, NOW)] == [spare]
    noticed = replace(view, notices={an_agent_id(1): a_notice()})
    assert losses(noticed, state) == {}


def test_a_replaced_agent_is_lost_between_rounds_once_its_uploads_have_ended() -> None:
    """Its backend would restart the machine if its notice ended before the next round."""
    view = a_view(notices={an_agent_id(1): a_notice()})
    joined = a_member_status(2, member=a_member(2, token=Token("t-r"), node=0))
    view = replace(view, groups={**view.groups, Token("t-r"): a_group(token=Token("t-r"), nodes=1)})
    members = member_statuses(a_member_status(0), a_member_status(1), joined)
    state = a_leader_state(members=members, requeues_itself=True)
    assert losses(view, state) == {1: "it was replaced after its preemption notice"}
    assert losses(view, replace(state, requeues_itself=False)) == {}
    assert losses(view, replace(state, agent_id=an_agent_id(1))) == {}, "it hands over first"
    uploading = a_member_status(1, uploading_round=1)
    busy = replace(state, members=member_statuses(a_member_status(0), uploading, joined))
    assert losses(view, busy) == {}


def test_a_new_agent_is_kept_while_its_predecessor_is_still_connected() -> None:
    """The connection of a host that has lost its power ends only after a timeout."""
    successor = a_member_status(2, member=a_member(1, agent=AgentId("newcomer")))
    members = member_statuses(a_member_status(0), a_member_status(1), successor)
    state = a_leader_state(members=members, requeues_itself=True)
    assert losses(a_view(round=a_round()), state) == {}


@pytest.mark.parametrize(
    ("groups", "replaced"),
    [
        ({TOKEN: a_group()}, False),
        ({TOKEN: a_group(), Token("t-r"): a_group(token=Token("t-r"), nodes=1)}, True),
        ({TOKEN: a_group(), Token("t-r"): a_group(token=Token("t-r"), handle=None)}, False),
    ],
    ids=["no request", "granted", "requested"],
)
def test_an_agent_is_replaced_once_a_replacement_is_granted(groups: Any, *, replaced: bool) -> None:
    view = a_view(groups=groups, last_round=a_round(), notices={an_agent_id(1): a_notice()})
    assert is_replaced(view, TOKEN, 1) is replaced


def test_a_headless_leader_leaves_a_preempted_machine_to_its_backend() -> None:
    view = replace(IN_ROUND, notices={an_agent_id(1): a_notice()})
    headless = a_requeueing_state(members={}, is_headless=True)
    assert missing_workers(view, headless) == 0
    assert missing_workers(view, replace(headless, requeues_itself=False)) == 1


def test_a_status_with_too_few_nodes_leaves_the_other_nodes_unknown() -> None:
    observations = a_leader_state(
        members=ONE_MEMBER, group_statuses={TOKEN: a_group_status(NodeState.RUNNING)}
    )
    assert losses(FORMING, observations) == {}


# --- size of requests ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("refusals", "missing", "ordered"),
    [(0, 8, 8), (1, 8, 4), (2, 8, 3), (9, 8, 3), (0, 4, 4), (2, 4, 1), (9, 4, 1)],
)
def test_an_elastic_request_is_halved_per_refusal_down_to_min_workers(
    refusals: int, missing: int, ordered: int
) -> None:
    spec = a_spec(min_workers=3, max_workers=8, is_elastic=True)
    assert workers_to_request(a_view(spec=spec, refusals=refusals), missing) == ordered


def test_an_elastic_group_of_one_size_is_requested_completely() -> None:
    only = a_spec(min_workers=4, max_workers=4, is_elastic=True)
    for refusals in range(4):
        assert workers_to_request(a_view(spec=only, refusals=refusals), 4) == 4


def test_a_fixed_group_requests_all_missing_workers_after_refusals() -> None:
    spec = a_spec(min_workers=8, max_workers=8)
    assert workers_to_request(a_view(spec=spec, refusals=5), 6) == 6


# --- machines on their last backend restart ------------------------------------------------------

SPARE = Token("t-2")


def test_a_machine_on_its_last_attempt_is_replaced_while_it_works() -> None:
    observations = a_leader_state(group_statuses={TOKEN: a_final_group_status(1)})
    assert usable(a_view(), observations) == [an_agent_id(0), an_agent_id(1)]
    assert [
        member_status.member.agent for member_status in staying_members(a_view(), observations)
    ] == [an_agent_id(0)]
    assert missing_workers(a_view(), observations) == 1
    request = a_view(groups={TOKEN: a_group(), SPARE: a_group(token=SPARE, nodes=1)})
    assert missing_workers(request, observations) == 0, "once"


def last_attempt_losses(view: View, **fields: Any) -> list[Any]:
    three = member_statuses(
        a_member_status(0),
        a_member_status(1),
        a_member_status(2, member=a_member(2, token=SPARE, node=0)),
    )
    observations = a_leader_state(
        members=three, **{"group_statuses": {TOKEN: a_final_group_status(1)}, **fields}
    )
    return [(lost.agent, lost.cause) for lost in find_lost_nodes(view, observations, NOW)]


def test_a_machine_on_its_last_attempt_is_released_once_a_full_round_runs_without_it() -> None:
    groups = {TOKEN: a_group(), SPARE: a_group(token=SPARE, nodes=1)}
    fresh = a_member(2, token=SPARE, node=0)
    without = a_view(round=a_round(members=[a_member(0), fresh]), groups=groups)
    assert last_attempt_losses(without) == [(an_agent_id(1), None)], "without a cause"
    assert last_attempt_losses(without, group_statuses={TOKEN: a_final_group_status()}) == [], (
        "the backend would restart it"
    )
    within = a_view(round=a_round(members=[a_member(0), a_member(1)]), groups=groups)
    assert last_attempt_losses(within) == []
    assert last_attempt_losses(a_view(groups=groups)) == [], "between rounds"
    small = a_view(
        spec=a_spec(min_workers=1, max_workers=2),
        round=a_round(members=[a_member(0)]),
        groups=groups,
    )
    assert last_attempt_losses(small) == [], "a round below max_workers still needs it"
