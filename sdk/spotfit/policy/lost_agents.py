"""Disconnected agents of a round, and the state of their machines according to the backend.

A broken connection does not show whether the machine is lost, its agent crashed or the network
failed. Only the backend can distinguish them, and its reports may be outdated by
`Traits.status_lag_s` (docs/decisions/0018).
"""

from __future__ import annotations

import enum

from spotfit.core.ids import AgentId, Token
from spotfit.model.group import NodeState
from spotfit.model.leader_state import LeaderState
from spotfit.model.topology import NodeAssignment
from spotfit.model.view import View


class NodeLiveness(enum.Enum):
    """The state of a disconnected agent's machine according to the backend."""

    TERMINATED = "terminated"
    RUNNING = "running after the disconnect"
    UNKNOWN = "no status that is certainly newer than the disconnect"


def disconnected_since(view: View, state: LeaderState, agent: AgentId) -> float | None:
    """When the agent was disconnected, by the leader's clock; None if it is connected or
    unknown."""
    if agent in state.members:
        return None
    if agent in state.disconnected_since:
        return state.disconnected_since[agent]
    # The previous leader was lost before this leader was elected; it has no disconnect of its own.
    was_leader = view.leader is not None and view.leader.lost_leader == agent
    return state.leading_since if was_leader else None


def is_missing(view: View, state: LeaderState, assignment: NodeAssignment) -> bool:
    """Whether the assigned agent is lost or disconnected."""
    return (
        assignment.agent in view.lost_agents
        or disconnected_since(view, state, assignment.agent) is not None
    )


def node_liveness(state: LeaderState, token: Token, node: int, since: float) -> NodeLiveness:
    """The state of a machine after `since`, as far as the backend's reports are certain."""
    group_status = state.group_statuses.get(token)
    if group_status is None or node >= len(group_status.nodes):
        return NodeLiveness.UNKNOWN
    # Termination is permanent, so an old report of it is valid; an old report of RUNNING is not.
    if group_status.nodes[node].is_terminated:
        return NodeLiveness.TERMINATED
    if state.status_as_of.get(token, float("-inf")) < since:
        return NodeLiveness.UNKNOWN
    # WAITING after its agent was connected: the backend has requeued the machine.
    is_running = group_status.nodes[node].state is NodeState.RUNNING
    return NodeLiveness.RUNNING if is_running else NodeLiveness.TERMINATED


def is_machine_lost(view: View, state: LeaderState, assignment: NodeAssignment) -> bool:
    """Whether the machine is gone, rather than running with an unreachable agent."""
    if assignment.agent in view.lost_agents:
        return assignment.agent not in view.platform_outages
    since = disconnected_since(view, state, assignment.agent)
    if since is None:
        return False
    if assignment.agent in view.notices:
        return True
    liveness = node_liveness(state, assignment.token, node=assignment.node, since=since)
    return liveness is NodeLiveness.TERMINATED


def is_unexplained_loss(view: View, state: LeaderState, assignment: NodeAssignment) -> bool:
    """Whether the agent is disconnected and a newer report of the backend may show why."""
    since = disconnected_since(view, state, assignment.agent)
    if since is None or assignment.agent in view.lost_agents or assignment.agent in view.notices:
        return False
    return (
        node_liveness(state, assignment.token, node=assignment.node, since=since)
        is NodeLiveness.UNKNOWN
    )
