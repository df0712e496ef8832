"""Partial capacity: machines that cost money while the backend grants too few for a round.

Between rounds, `partial_capacity_loss` gives them up after a timeout, and the scheduler requests
all again after a pause (`request_backoff.next_request_at`), from another queue if the backend has
one (docs/decisions/0053).

    state                 | event                                    | next
    ----------------------|------------------------------------------|----------------------
    too few are granted   | a further machine is granted             | too few, or enough
    too few are granted   | none for `partial_capacity_timeout_s`    | released
    released              | the pause is over: all are requested     | requested
    requested             | the backend accepts the request          | too few are granted

While released, the leader keeps its own machine, which it releases once the request is accepted:
the machines of the new request continue the run, and no other process may exist that would.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import NamedTuple

from spotfit.core.ids import Token
from spotfit.model.events import GroupWaiting, NodeLost
from spotfit.model.group import NodeState
from spotfit.model.leader_state import LeaderState, MemberStatus
from spotfit.model.view import MachineGroup, View
from spotfit.policy.actions import Wait
from spotfit.policy.capacity import usable_members
from spotfit.policy.request_backoff import release_jitter


class _Machine(NamedTuple):
    token: Token
    node: int
    """Its index in the group `token`."""


def partial_capacity_loss(view: View, state: LeaderState, now: float) -> NodeLost | Wait | None:
    """Return the next machine to release, or a `Wait` for the timeout; None without any. Pure.

    Called by the scheduler while no round is open; it appends the loss. `now` is the leader's
    `Clock.now()` in seconds.
    """
    own = _own_machine(state)
    others = [one for one in _active_machines(view) if one != own]
    if view.is_capacity_released:
        reason = "too few machines were granted"
        return _unused(state, others[0], reason) if others else None
    if own is not None and _is_superseded(view, own):
        return _unused(state, own, "all machines are requested again")
    expiry = _expiry(view, state)
    if expiry is None or not others:
        return None
    if now < expiry.until:
        return expiry
    return _unused(state, others[0], expiry.reason)


def _expiry(view: View, state: LeaderState) -> Wait | None:
    """When the timeout of a partial capacity is over, and the reason; None for enough machines."""
    members = {_machine_of(status): status for status in usable_members(view, state)}
    running = {
        one: state.granted_at[one] for one in _active_machines(view) if one in state.granted_at
    }
    by_network: Counter[str] = Counter()
    for one in {**members, **running}:
        by_network[view.network_of(one.token)] += view.groups[one.token].plan.slots_per_node
    # Machines of two networks cannot train together.
    slots = max(by_network.values(), default=0)
    # A request with an unknown outcome can be released only once it is known.
    is_pending = any(group.is_pending for group in _train_groups(view).values())
    if slots == 0 or slots >= max(1, view.spec.min_workers) or is_pending:
        return None
    timeout_s = view.spec.timing.partial_capacity_timeout_s * (1 + release_jitter(view) / 2)
    joined = (status.joined_at for status in members.values())
    since = max(state.leading_since, state.phase.since, *running.values(), *joined)
    why = f"; the backend reports: {view.waiting_reason}" if view.waiting_reason else ""
    reason = (
        f"machines for {slots} of at least {view.spec.min_workers} workers were granted, and no "
        f"further one within {timeout_s:.0f} s{why}"
    )
    return Wait(since + timeout_s, reason)


def _is_superseded(view: View, own: _Machine) -> bool:
    """Whether the others were released, and the backend has accepted the next request."""
    released = view.partial_release_slot
    requested = sum(
        group.plan.slots_per_node * len(group.active_nodes)
        for group in _train_groups(view).values()
        if group.handle is not None and group.planned_slot > released
    )
    group = _train_groups(view).get(own.token)
    is_old = group is not None and group.planned_slot < released and group.is_node_active(own.node)
    return is_old and requested >= max(1, view.spec.min_workers)


def waiting_reason_change(view: View, state: LeaderState) -> GroupWaiting | None:
    """Return the event for a new reason of the backend why machines of a group wait. Pure.

    Its reason is '' once all machines of the group run or have ended. Reasons that differ only in
    numbers, such as times, are equal: each event is a journal entry.
    """
    for token, group in view.groups.items():
        status = state.group_statuses.get(token)
        if status is None or not group.active_nodes:
            continue
        has_started = all(node.state is not NodeState.WAITING for node in status.nodes)
        reason = "" if has_started else status.refusal
        is_over = has_started and group.waiting_reason
        if is_over or (
            reason and _without_numbers(reason) != _without_numbers(group.waiting_reason)
        ):
            return GroupWaiting(token=token, reason=reason)
    return None


def _without_numbers(text: str) -> str:
    return re.sub(r"\d+", "#", text)


def _train_groups(view: View) -> dict[Token, MachineGroup]:
    return {token: group for token, group in view.groups.items() if group.role == "train"}


def _active_machines(view: View) -> list[_Machine]:
    groups = _train_groups(view).items()
    return [_Machine(token, node) for token, group in groups for node in group.active_nodes]


def _own_machine(state: LeaderState) -> _Machine | None:
    """The leader's own machine; None for a headless leader."""
    own = state.members.get(state.agent_id)
    return None if own is None else _machine_of(own)


def _machine_of(status: MemberStatus) -> _Machine:
    return _Machine(status.member.token, status.member.node)


def _unused(state: LeaderState, machine: _Machine, reason: str) -> NodeLost:
    agents = (a for a, status in state.members.items() if _machine_of(status) == machine)
    agent = next(agents, state.last_agent_by_node.get(machine))
    return NodeLost(
        token=machine.token, node=machine.node, agent=agent, reason=reason, is_unused=True
    )
