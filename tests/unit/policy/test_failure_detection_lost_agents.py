"""Disconnected agents and what the backend reports about their machines."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from spotfit.model.events import LeaderElected
from spotfit.model.group import NodeState
from spotfit.policy.failure_detection import (
    NodeLiveness,
    disconnected_since,
    is_machine_lost,
    is_unexplained_loss,
    node_liveness,
)
from spotfit.testing.builders import (
    TOKEN,
    a_group_status,
    a_leader_state,
    a_member_status,
    a_notice,
    a_round,
    a_view,
    an_agent_id,
    member_statuses,
)

VIEW = a_view(round=a_round())
PLACE = a_round().assignments[1]
DISCONNECTED_AT_3 = a_leader_state(
    members=member_statuses(a_member_status(0)),
    disconnected_since={an_agent_id(1): 3.0},
    leading_since=1.0,
)
LOST_LEADER_VIEW = replace(
    VIEW,
    leader=LeaderElected(
        leader=an_agent_id(0),
        epoch=2,
        coordinator_address="h:1",
        reason="",
        lost_leader=an_agent_id(1),
    ),
)


def group_status_of(state: NodeState, seen: float) -> dict[str, Any]:
    return {
        "group_statuses": {TOKEN: a_group_status(NodeState.RUNNING, state)},
        "status_as_of": {TOKEN: seen},
    }


def test_a_connected_agent_is_not_disconnected() -> None:
    assert disconnected_since(VIEW, a_leader_state(), an_agent_id(1)) is None
    assert disconnected_since(LOST_LEADER_VIEW, a_leader_state(), an_agent_id(1)) is None, (
        "a reconnected former leader"
    )


def test_a_disconnect_starts_at_the_break_or_at_the_election() -> None:
    assert disconnected_since(VIEW, DISCONNECTED_AT_3, an_agent_id(1)) == 3.0
    leader_state = a_leader_state(members=member_statuses(a_member_status(0)), leading_since=1.0)
    assert disconnected_since(LOST_LEADER_VIEW, leader_state, an_agent_id(1)) == 1.0
    assert disconnected_since(VIEW, leader_state, an_agent_id(1)) is None, (
        "its disconnect was not observed"
    )


def test_a_former_leader_is_disconnected_since_the_election() -> None:
    """Its lease has expired, so that no port was found closed."""
    view = replace(VIEW, former_leader=an_agent_id(1))
    leader_state = a_leader_state(members=member_statuses(a_member_status(0)), leading_since=1.0)
    assert disconnected_since(view, leader_state, an_agent_id(1)) == 1.0


@pytest.mark.parametrize(
    ("state", "seen", "liveness"),
    [
        (NodeState.GONE, 2.0, NodeLiveness.TERMINATED),
        (NodeState.FAILED, 2.0, NodeLiveness.TERMINATED),
        (NodeState.RUNNING, 2.9, NodeLiveness.UNKNOWN),
        (NodeState.RUNNING, 3.0, NodeLiveness.RUNNING),
        (NodeState.WAITING, 3.0, NodeLiveness.TERMINATED),
    ],
)
def test_termination_is_certain_and_running_only_if_newer(
    state: NodeState, seen: float, liveness: NodeLiveness
) -> None:
    leader_state = a_leader_state(**group_status_of(state, seen))
    assert node_liveness(leader_state, TOKEN, 1, since=3.0) is liveness


def test_an_unreported_machine_is_unknown() -> None:
    assert node_liveness(a_leader_state(), TOKEN, 1, since=3.0) is NodeLiveness.UNKNOWN
    few = a_leader_state(
        group_statuses={TOKEN: a_group_status(NodeState.GONE)}, status_as_of={TOKEN: 9.0}
    )
    assert node_liveness(few, TOKEN, 1, since=3.0) is NodeLiveness.UNKNOWN


@pytest.mark.parametrize(
    ("fields", "taken", "open_"),
    [
        ({}, False, True),
        (group_status_of(NodeState.GONE, 0.0), True, False),
        (group_status_of(NodeState.RUNNING, 3.0), False, False),
    ],
    ids=["no report", "terminated", "running"],
)
def test_only_a_terminated_machine_is_lost(
    fields: dict[str, Any], *, taken: bool, open_: bool
) -> None:
    leader_state = replace(DISCONNECTED_AT_3, **fields)
    assert is_machine_lost(VIEW, leader_state, PLACE) is taken
    assert is_unexplained_loss(VIEW, leader_state, PLACE) is open_


def test_a_node_with_a_notice_is_lost_without_a_report() -> None:
    view = replace(VIEW, notices={an_agent_id(1): a_notice()})
    assert is_machine_lost(view, DISCONNECTED_AT_3, PLACE)
    assert not is_unexplained_loss(view, DISCONNECTED_AT_3, PLACE)


def test_a_recorded_loss_is_explained() -> None:
    view = replace(VIEW, lost_agents=frozenset({an_agent_id(1)}))
    assert is_machine_lost(view, DISCONNECTED_AT_3, PLACE)
    assert not is_unexplained_loss(view, DISCONNECTED_AT_3, PLACE)
    assert not is_machine_lost(
        replace(view, platform_outages=view.lost_agents), DISCONNECTED_AT_3, PLACE
    )
