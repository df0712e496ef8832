"""Capacity: how many workers need machines, which machines can be used, and which are lost.

A node is lost when its backend reports it as terminated, when its agent stays disconnected, when it
does not boot, or when a round was opened without it. `find_lost_nodes` reports each lost node once,
with the reason.

If a backend restarts lost machines by itself, only the agent is lost, and no replacement is
requested unless the restarted machine does not join in time (docs/decisions/0051):

    state of a node        | event                                       | next
    -----------------------|---------------------------------------------|------------------------
    its agent disconnected | the backend reports it as WAITING           | restarting
    its agent disconnected | a new agent joins                           | connected
    its agent disconnected | the backend reports its end                 | lost
    its agent disconnected | `restart_report_timeout_s`, no report       | lost
    restarting             | a new agent joins                           | connected
    restarting             | the backend reports its end                 | lost
    restarting             | `boot_timeout_s`                            | lost
    restarting             | all workers have other machines             | lost
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from collections.abc import Set as AbstractSet

from msgspec.structs import replace

from spotfit.core.ids import AgentId, Token
from spotfit.model.events import AgentCrash, FailureCause, NodeLost, ValidationStarted
from spotfit.model.group import NodeState, Role, Unreachable, find_node_status
from spotfit.model.leader_state import LeaderState, MemberStatus
from spotfit.model.offer import Market
from spotfit.model.topology import NodeAssignment
from spotfit.model.view import View
from spotfit.policy.failure_detection import (
    NodeLiveness,
    disconnected_since,
    end_reason,
    memory_kill,
    node_liveness,
)
from spotfit.policy.request_backoff import unusable_pause_text
from spotfit.policy.retry_budget import last_line

# After the end of a fit or the loss of their node, agents read that entry, stop their workers, free
# their shared memory, store their last log lines and exit by themselves; cancelling the group
# earlier would kill them meanwhile. An agent limits these steps to 3 s of writes, 1 s for workers
# and 10 s of log lines (`agent.agent`, `agent.driver`, `agent.log_shipper`): together 14 s. A
# machine that hangs, whose agent waits longer for its processes, is paid for no longer than this.
SELF_EXIT_TIMEOUT_S = 15.0

# The last leader deletes dropped checkpoints before its own machine is released: no process would
# continue. One takes a request per file; the next fit deletes what is left after this time.
FINAL_WRITES_TIMEOUT_S = 60.0

# When an agent that leads stops asking a backend that answers neither releases nor look-ups: its
# machine would cost money for as long. The client, which waits for two minutes, or a sweep may have
# the permission or the network that the machine lacks. Half a minute more than the writes may take.
FINAL_CALLS_TIMEOUT_S = 90.0

# With the pauses of `request_backoff` the next refusal comes after more than ten minutes: pauses of
# 1, 2, 4, … s, then 60 s. Credentials are renewed and permissions propagate within that time:
# https://docs.aws.amazon.com/IAM/latest/UserGuide/troubleshoot.html#troubleshoot_general_eventual-consistency
_MAX_PERMANENT_REFUSALS = 15

# Machines that end while booting usually have a wrong image or no permissions, which a retry does
# not change. The limit is high because a bad host or a slow registry can fail several boots in a
# row.
MAX_BOOT_FAILURES_PER_NODE = 20

_REPLACED = "it was replaced after its preemption notice"
_MOVED = "it was replaced by machines of another offer"
_LEFT = "no round could be opened in its network"
_NOTICED = "it has a preemption notice, and no workers"
_NOT_NEEDED = "all workers have other machines"


def usable_members(view: View, state: LeaderState, role: Role = "train") -> list[MemberStatus]:
    """Return the connected agents that may be assigned workers, validations or feeders, by `role`.

    Those on machines of groups with that role that are not lost, not released and have no
    preemption notice. Their workers may still be starting or stopping.
    """
    return [
        status
        for agent, status in state.members.items()
        if agent not in view.lost_agents
        and agent not in view.notices
        and status.notice is None
        and (group := view.groups.get(status.member.token)) is not None
        and group.role == role
        and group.is_node_active(status.member.node)
    ]


def is_last_attempt(state: LeaderState, token: Token, node: int) -> bool:
    """Whether the backend would not restart that machine if it is lost once more.

    `node` is its index in the group `token`. False for backends that restart nothing, and while the
    group is not observed. Such a machine is replaced while it works: if it was lost while no
    process watches the run, nothing would resume the run (docs/decisions/0032).
    """
    status = find_node_status(state.group_statuses, token, node)
    return status is not None and status.is_last_attempt


def staying_members(view: View, state: LeaderState) -> list[MemberStatus]:
    """Return the `usable_members` whose machines need no replacement.

    Excludes those on their last restart, see `is_last_attempt`, and those of an offer that is not
    chosen any more.
    """
    return [
        status
        for status in usable_members(view, state)
        if not is_last_attempt(state, status.member.token, status.member.node)
        and not is_of_other_offer(view, status.member.token)
    ]


def staying_nodes(view: View, state: LeaderState, role: Role) -> list[tuple[Token, int]]:
    """Return the machines of that role, running or requested, without a preemption notice."""
    return [
        (token, node)
        for token, group in view.groups.items()
        if group.role == role
        for node in group.active_nodes
        if state.last_agent_by_node.get((token, node)) not in view.notices
    ]


def chosen_members(view: View, state: LeaderState) -> list[MemberStatus]:
    """Return the `staying_members` that the next round is to have, as far as they are connected.

    In an elastic run that chooses its offers, on each chosen one no more than its workers need.
    """
    staying, choice = staying_members(view, state), view.market.choice
    if not view.spec.is_elastic or choice is None or not choice.workers:
        return staying
    left, chosen = dict(choice.workers), []
    for status in sorted(staying, key=lambda one: _order(view, one)):
        request = view.market.requests.get(status.member.token)
        offer = "" if request is None else request.offer
        if left.get(offer, 1) > 0:
            chosen.append(status)
            left[offer] = left.get(offer, view.spec.max_workers) - status.member.slots
    return chosen


def _order(view: View, status: MemberStatus) -> tuple[bool, float]:
    """Members of the last round come first, then the oldest ones."""
    assignments = view.last_round.assignments if view.last_round else ()
    works = any(one.agent == status.member.agent for one in assignments)
    return not works, status.joined_at


def round_members(view: View, state: LeaderState) -> list[MemberStatus]:
    """Return the members that the next round has if it is opened now.

    The `chosen_members`, and others in their place while these are too few. Without a deadline,
    on-demand machines that are not chosen any more work only if the others cannot train without.
    """
    chosen = chosen_members(view, state)
    slots = sum(one.member.slots for one in chosen)
    if slots >= view.spec.max_workers:
        return chosen
    agents = {one.member.agent for one in chosen}
    others = [one for one in usable_members(view, state) if one.member.agent not in agents]
    if not view.spec.is_elastic:
        return [*chosen, *others]
    if view.spec.cost.deadline_ms is None and slots >= max(1, view.spec.min_workers):
        others = [one for one in others if not _is_on_demand(view, one.member.token)]
    members = list(chosen)
    for one in sorted(others, key=lambda one: _order(view, one)):
        if sum(member.member.slots for member in members) < view.spec.max_workers:
            members.append(one)
    return members


def _is_on_demand(view: View, token: Token) -> bool:
    """Whether a group was rented on demand, in a run that chooses its offers."""
    group = view.groups[token]
    is_on_demand = group.offer is not None and group.offer.market is Market.ON_DEMAND
    return is_on_demand and view.market.choice is not None


def pending_slots(view: View, state: LeaderState) -> int:
    """Return the worker slots of machines that were requested and whose agents are not connected.

    Includes machines that are not granted yet, boot, or have lost their connection; excludes lost
    ones and machines for validations.
    """
    connected = {(status.member.token, status.member.node) for status in state.members.values()}
    return _slots_without(view, connected)


def joining_slots(view: View, state: LeaderState) -> int:
    """Return the `pending_slots` of machines that could connect to this leader: of its network."""
    connected = {(status.member.token, status.member.node) for status in state.members.values()}
    return _slots_without(view, connected | _standing_by(view))


def _standing_by(view: View) -> set[tuple[Token, int]]:
    """The machines of other networks than that of the run."""
    return {
        (token, node)
        for token, group in view.groups.items()
        if view.stands_by(token)
        for node in group.active_nodes
    }


def is_start_expected(view: View, state: LeaderState) -> bool:
    """Whether requested machines have not joined, other than those that the backend delays."""
    connected = {(one.member.token, one.member.node) for one in state.members.values()}
    waiting = {
        token
        for token, request in view.market.requests.items()
        if request.offer and request.waiting_since_s is not None
    }
    return any(
        (token, node) not in connected
        for token, group in view.groups.items()
        if group.role == "train" and token not in waiting and not view.stands_by(token)
        for node in group.active_nodes
    )


def has_too_few_slots(view: View, state: LeaderState) -> bool:
    """Whether connected and pending worker slots together are fewer than `min_workers`.

    Then the run cannot continue without a further request; see `pending_slots`.
    """
    joined = sum(status.member.slots for status in usable_members(view, state))
    return joined + pending_slots(view, state) < max(1, view.spec.min_workers)


def is_replaced(view: View, token: Token, node: int) -> bool:
    """Whether all workers have machines without that one, connected or granted. Pure.

    `node` is its index in the group `token`. Machines of the last round with a preemption notice do
    not count. Called by an agent whose preemption deadline has passed: if so, its backend need not
    restart the machine.
    """
    assignments = view.last_round.assignments if view.last_round else ()
    leaving = {(one.token, one.node) for one in assignments if one.agent in view.notices}
    excluded = leaving | {(token, node)} | _standing_by(view)
    slots = _slots_without(view, excluded, granted_only=True)
    return slots >= view.spec.max_workers


def missing_workers(view: View, state: LeaderState) -> int:
    """Return `max_workers` minus the worker slots of machines that run or were requested.

    The scheduler requests machines for up to that many workers; 0 or less means none. Machines of
    connected agents with a preemption notice, or on their last backend restart, do not count. For a
    headless leader, to which no agent connects, those with a notice do not. In a run that chooses
    its offers only machines of these count.
    """
    if (choice := view.market.choice) is not None:
        return sum(n for name, n in missing_by_offer(view, state) if name in choice.workers)
    if not state.is_headless:
        if view.is_capacity_released:
            return view.spec.max_workers  # the leader's own machine is released, too
        joined = sum(status.member.slots for status in staying_members(view, state))
        return view.spec.max_workers - joined - pending_slots(view, state)
    # A headless leader has no members: every node counts that is not lost and has no notice, or
    # that the backend will restart after its preemption.
    assignments = view.last_round.assignments if view.last_round else ()
    leaving = {
        (one.token, one.node)
        for one in assignments
        if one.agent in view.notices and not _is_requeued(state, one.token, one.node)
    }
    return view.spec.max_workers - _slots_without(view, leaving)


def missing_by_offer(view: View, state: LeaderState) -> list[tuple[str, int]]:
    """Return the chosen offers that workers need machines of, with the number of these workers.

    First those that the run is to have its machines from, then the standing request. Machines of
    other offers do not count, so that those of a new choice start beside them.
    """
    choice = view.market.choice
    if choice is None:
        return []
    wanted = dict(choice.workers)
    if choice.standing_offer:
        wanted[choice.standing_offer] = view.spec.max_workers
    missing = {
        offer: workers - slots_of_offer(view, state, offer) for offer, workers in wanted.items()
    }
    return [(offer, workers) for offer, workers in missing.items() if workers > 0]


def slots_of_offer(view: View, state: LeaderState, offer: str) -> int:
    """Return the worker slots of all machines of that offer that stay, connected or pending."""
    nodes = nodes_of_offer(view, state, offer)
    return sum(view.groups[token].plan.slots_per_node for token, _ in nodes)


def nodes_of_offer(view: View, state: LeaderState, offer: str) -> list[tuple[Token, int]]:
    """Return all machines of that offer that stay, connected or pending, as group and index."""
    tokens = {token for token, one in view.market.requests.items() if one.offer == offer}
    leaving = {
        (status.member.token, status.member.node)
        for status in state.members.values()
        if status.member.agent in view.notices or status.member.agent in view.lost_agents
    } | {
        (status.report.member.token, status.report.member.node)
        for status in state.standby.values()
        if status.report.has_notice
    }
    assignments = view.last_round.assignments if view.last_round else ()
    if state.is_headless:
        leaving = {(one.token, one.node) for one in assignments if one.agent in view.notices}
    return [
        (token, node)
        for token, group in view.groups.items()
        if token in tokens
        for node in group.active_nodes
        if (token, node) not in leaving
    ]


def is_of_other_offer(view: View, token: Token) -> bool:
    """Whether the run is to have its machines from other offers than that of the group.

    While it waits, machines that still run are kept, except those of a move that was ended.
    """
    choice, request = view.market.choice, view.market.requests.get(token)
    if choice is None or request is None:
        return False
    if not choice.workers:
        return bool(request.offer) and request.offer == choice.incomplete_offer
    return request.offer not in choice.workers


def is_unwanted(view: View, token: Token) -> bool:
    """Whether the group is of an offer that is neither chosen nor a standing request."""
    return is_of_other_offer(view, token) and not is_standing_request(view, token)


def _slots_without(
    view: View, excluded: AbstractSet[tuple[Token, int]], *, granted_only: bool = False
) -> int:
    """Worker slots of all machines for workers that may run, other than the excluded ones."""
    return sum(
        group.plan.slots_per_node
        for token, group in view.groups.items()
        if group.role == "train" and (group.handle is not None or not granted_only)
        for node in group.active_nodes
        if (token, node) not in excluded
    )


def network_in_use(view: View) -> str:
    """Return the network in which further machines must be placed; '' if any may be used.

    That of the leader, else of the oldest group that has a machine which is not lost. Machines of
    two networks cannot connect to each other. Any after a partial capacity was released: the
    leader's machine, the only one left, is released next.
    """
    if view.is_capacity_released:
        return ""
    networks = [
        group.handle.network
        for group in view.groups.values()
        if group.handle is not None and not group.is_released and group.active_nodes
    ]
    return view.network if view.network in networks else next(filter(None, networks), "")


def has_machines(state: LeaderState, token: Token) -> bool:
    """Whether the group has agents, or the backend reports a machine as running."""
    status = state.group_statuses.get(token)
    is_running = status is not None and any(
        node.state is NodeState.RUNNING for node in status.nodes
    )
    return is_running or has_agents(state, token)


def has_agents(state: LeaderState, token: Token) -> bool:
    """Whether an agent of the group is connected, or is ready in another network."""
    return any(one.member.token == token for one in state.members.values()) or any(
        one.is_ready and one.report.member.token == token for one in state.standby.values()
    )


def _is_requeued(state: LeaderState, token: Token, node: int) -> bool:
    """Whether the backend restarts the machine when it is lost, as far as its reports say."""
    status = find_node_status(state.group_statuses, token, node)
    if status is None:
        return state.requeues_itself
    # WAITING on the last attempt: that attempt is still to come.
    is_last = status.is_last_attempt and status.state is not NodeState.WAITING
    return state.requeues_itself and not status.is_terminated and not is_last


def surplus_groups(view: View, state: LeaderState) -> list[Token]:
    """Return granted groups for workers that are not needed: none of their agents is connected.

    Only if the connected machines that stay hold `max_workers`: either a replacement was requested
    and the backend has restarted the lost machine as well, or the reverse. Until then, any of them
    may be the first to join.
    """
    unchosen = _unchosen_groups(view, state)
    if unchosen or state.is_headless or not state.requeues_itself or not _is_complete(view, state):
        return unchosen
    connected = {status.member.token for status in state.members.values()}
    return [
        token
        for token, group in view.groups.items()
        if group.role == "train"
        and group.handle is not None
        and group.active_nodes
        and token not in connected
        and not is_standing_request(view, token)
    ]


def is_standing_request(view: View, token: Token) -> bool:
    """Whether the group is requested so that the run can move to its offer."""
    choice, request = view.market.choice, view.market.requests.get(token)
    if choice is None or request is None or not choice.standing_offer:
        return False
    return request.offer == choice.standing_offer


def _unchosen_groups(view: View, state: LeaderState) -> list[Token]:
    """Granted groups that are not wanted, and of which no agent is connected.

    Those of other offers once all workers have machines and a round is open, or one of an elastic
    run; before, a request that waits is kept: it costs nothing, and may be the standing request
    then. Those of other networks once a round is open: they could not join it.
    """
    if view.market.choice is None:
        return []
    connected = {status.member.token for status in state.members.values()}
    assigned = {one.token for one in view.round.assignments} if view.round is not None else set()
    is_before_round = view.round is None and view.pending_fit_end is None
    # Also on machines of an offer that is not chosen any more, while those of the choice start.
    # An elastic run trains without the others.
    needed = max(1, view.spec.min_workers) if view.spec.is_elastic else view.spec.max_workers
    is_training = (
        view.round is not None
        and view.round.world_size >= needed
        and all(one.agent in state.members for one in view.round.assignments)
    )
    has_all = is_training or _is_complete(view, state)
    is_complete = not state.is_headless and not is_before_round and has_all
    return [
        token
        for token in view.market.requests
        if (group := view.groups.get(token)) is not None
        and group.handle is not None
        and group.active_nodes
        and token not in connected | assigned
        and (
            (is_complete and _is_excess_group(view, state, token))
            or (is_complete and is_unwanted(view, token))
            or (view.round is not None and view.stands_by(token) and is_unwanted(view, token))
        )
    ]


def _is_excess_group(view: View, state: LeaderState, token: Token) -> bool:
    """Whether the other groups of its offer suffice for the workers that an elastic run has there.

    False for a standing request, and without workers on that offer.
    """
    choice, offer = view.market.choice, view.market.requests[token].offer
    workers = 0 if choice is None else choice.workers.get(offer, 0)
    if not view.spec.is_elastic or not workers or is_standing_request(view, token):
        return False
    group = view.groups[token]
    own = group.plan.slots_per_node * len(group.active_nodes)
    return slots_of_offer(view, state, offer) - own >= workers


def _is_complete(view: View, state: LeaderState, *, without: AgentId | None = None) -> bool:
    """Whether the connected machines that stay, other than `without`, hold `max_workers`."""
    staying = staying_members(view, state)
    slots = sum(one.member.slots for one in staying if one.member.agent != without)
    return slots >= view.spec.max_workers


def workers_to_request(view: View, missing: int) -> int:
    """Return the number of workers of the next request, of the `missing` ones (at least 1).

    All of them, but for an elastic run halved per refused request since the last grant. Never less
    than `min_workers` requires: machines below it could not train, but would cost money.
    """
    if not view.spec.is_elastic:
        return missing
    return _halved(view, missing, view.refusals, view.spec.max_workers - missing)


def workers_to_request_of(view: View, state: LeaderState, offer: str, missing: int) -> int:
    """Return the number of workers of the next request for an offer, as `workers_to_request`.

    All missing ones for the standing request of a run with a deadline: only a whole group replaces
    on-demand machines.
    """
    choice = view.market.choice
    if not view.spec.is_elastic or choice is None:
        return missing
    replaces = bool(choice.workers) and view.spec.cost.deadline_ms is not None
    if offer == choice.standing_offer and replaces:
        return missing
    names = {*choice.workers, offer}
    present = sum(slots_of_offer(view, state, name) for name in names)
    return _halved(view, missing, view.market.record_of(offer).refusals, present)


def _halved(view: View, missing: int, refusals: int, present: int) -> int:
    required = min(missing, max(1, view.spec.min_workers - present))
    # All-or-nothing backends refuse a large group although part of it is available; halving finds a
    # size that fits after O(log n) refusals.
    return max(required, missing >> refusals)


def final_refusal_reason(view: View) -> str | None:
    """Return why further requests for machines of workers are pointless, else None.

    At once before the first round of the fit: a wrong configuration must not wait. Afterwards the
    refusal must persist for ten minutes of requests; see `View.permanent_refusals`.
    """
    if view.spec.cost.chooses_offers:
        return _final_refusal_of_offers(view)
    if view.permanent_refusals > _MAX_PERMANENT_REFUSALS:
        return view.last_refusal
    return view.final_refusal


def _final_refusal_of_offers(view: View) -> str | None:
    """The reason of the last offer if each was refused for good, and no round was opened."""
    cost = view.spec.cost
    refusals = [
        view.market.record_of(offer.name).final_refusal
        for offer in cost.offers
        if offer.name in cost.machines and (offer.market is Market.SPOT or cost.uses_on_demand)
    ]
    has_trained = view.round_opened_slot >= 0
    return refusals[-1] if refusals and all(refusals) and not has_trained else None


def boot_failure_reason(view: View) -> str | None:
    """Return why no more machines should be requested: too many in a row failed to boot, else None.

    The limit is 20 per machine of the largest group. The scheduler then ends the run if too few
    slots are left.
    """
    # Spot machines that are preempted while they boot are requested with pauses, and replaced by
    # other offers; the image of the machines is not the reason.
    if view.spec.cost.chooses_offers and view.has_started_agent:
        return None
    group_sizes = [group.plan.num_nodes for group in view.groups.values() if group.role == "train"]
    if view.boot_failures <= MAX_BOOT_FAILURES_PER_NODE * max(group_sizes, default=1):
        return None
    return f"{view.boot_failures} machines in a row terminated before their agents joined"


def find_lost_nodes(view: View, state: LeaderState, now: float) -> Iterator[NodeLost]:
    """Yield the nodes that are lost and not yet recorded as lost, with reason and cause.

    `now` is the leader's `Clock.now()` in seconds. The scheduler appends the yielded events to the
    journal, one at a time. After the end of the training, machines of workers are expected to exit
    and are not yielded, unless one runs the current validation or the leader is headless.
    """
    connected = {
        (status.member.token, status.member.node): agent for agent, status in state.members.items()
    }
    # What the leader has observed itself is newer than what the journal says.
    last_agents = {(one.token, one.node): one.agent for one in _last_assigned(view)} | dict(
        state.last_agent_by_node
    )
    last_agents |= {
        (one.report.member.token, one.report.member.node): agent
        for agent, one in state.standby.items()
    }
    # After the training, workers' machines exit by themselves and their loss is not recorded,
    # except that of the machine that runs the current validation. A headless leader records all:
    # only losses show it which machines are gone.
    exit_unrecorded = view.pending_fit_end is not None and not state.is_headless
    validation = view.current_validation
    validator = (validation.token, validation.node) if validation is not None else None
    for token, group in view.groups.items():
        for node in group.active_nodes:
            if exit_unrecorded and group.role == "train" and (token, node) != validator:
                continue
            agent = connected.get((token, node))
            if agent is not None:
                lost = _loss_while_connected(view, state, now, token=token, node=node, agent=agent)
            else:
                agent = last_agents.get((token, node))
                lost = _loss_while_disconnected(
                    view, state, now, token=token, node=node, agent=agent
                )
            if lost is not None:
                yield lost


def _loss_while_connected(
    view: View, state: LeaderState, now: float, *, token: Token, node: int, agent: AgentId
) -> NodeLost | None:
    """The loss of a node whose machine has a connected agent, if it is lost."""
    reason = None
    if view.round is None:
        is_stopping = state.members[agent].running_round is not None
        if is_stopping and now - state.phase.since > view.spec.timing.stop_timeout_s:
            reason = "its workers did not stop in time"
        elif _is_replaced_before_round(view, state, agent):
            reason = _REPLACED
    elif view.round.assignment_of(agent) is None:
        is_train = view.groups[token].role == "train"
        is_full = view.round.world_size >= view.spec.max_workers
        # A round that was opened before the notice may have had no place for the agent.
        if view.notice_slots.get(agent, math.inf) <= view.round_opened_slot:
            reason = _REPLACED
        elif agent in view.notices and view.spec.cost.chooses_offers:
            reason = _NOTICED
        elif is_train and is_full and is_last_attempt(state, token, node):
            reason = "it was replaced because its backend would not restart it again"
        elif is_train and is_full and is_unwanted(view, token):
            reason = _MOVED
        # The run decides whether it moves to such a machine, now that it is granted.
        elif is_train and is_standing_request(view, token):
            reason = None
        elif is_train and (
            _is_unused_in_elastic_run(view, state, agent) or _is_surplus_member(view, state, agent)
        ):
            reason = _NOT_NEEDED
    if reason is not None:
        return NodeLost(token=token, node=node, agent=agent, reason=reason)
    # The loss of the agent that ran there before is not recorded yet.
    agents = [one.agent for one in _last_assigned(view) if (one.token, one.node) == (token, node)]
    known = state.members.keys() | view.lost_agents
    if (previous := next((one for one in agents if one not in known), None)) is None:
        return None
    return NodeLost(
        token=token,
        node=node,
        agent=previous,
        reason="its backend restarted the machine with a new agent",
        cause=FailureCause.PREEMPTION,
        machine_returned=True,
    )


def _last_assigned(view: View) -> list[NodeAssignment | ValidationStarted]:
    """The nodes of the last round and of the current validation; a node may occur twice."""
    assignments = view.last_round.assignments if view.last_round else ()
    return [*assignments, *([view.current_validation] if view.current_validation else ())]


def _is_replaced_before_round(view: View, state: LeaderState, agent: AgentId) -> bool:
    """Whether an agent with a notice may exit before the next round is opened without it.

    Its backend would restart the machine if the notice ended before.
    """
    status = state.members[agent]
    is_idle = status.running_round is None and status.uploading_round is None
    is_leaving = agent in view.notices and agent != state.agent_id
    return state.requeues_itself and is_leaving and is_idle and _is_complete(view, state)


def _is_surplus_member(view: View, state: LeaderState, agent: AgentId) -> bool:
    """Whether an agent without a part in the round is not needed for the next one either.

    A replacement and a machine that its backend has restarted may join at the same time.
    """
    if not state.requeues_itself or agent == state.agent_id or view.round is None:
        return False
    own = state.members[agent].member
    # Its predecessor on the machine may be lost already, although its connection has not ended.
    has_predecessor = any(
        (one.token, one.node) == (own.token, own.node) for one in view.round.assignments
    )
    return not has_predecessor and _is_complete(view, state, without=agent)


def _is_unused_in_elastic_run(view: View, state: LeaderState, agent: AgentId) -> bool:
    """Whether the next round would not have the agent either: more machines are rented than chosen.

    The leader's own machine is released after it has handed over the leadership.
    """
    choice = view.market.choice
    if not view.spec.is_elastic or choice is None or not choice.workers:
        return False
    members = {one.member.agent for one in round_members(view, state)}
    return agent not in members and agent != state.agent_id


def _loss_while_disconnected(
    view: View, state: LeaderState, now: float, *, token: Token, node: int, agent: AgentId | None
) -> NodeLost | None:
    """The loss of a node without a connected agent, if it is lost."""
    status = find_node_status(state.group_statuses, token, node)
    is_restarting = _is_restarting(view, token, node=node, agent=agent)
    # The new agent has not joined.
    agent = None if is_restarting else agent
    in_other_network = _loss_in_other_network(view, state, token, node=node, agent=agent)
    if status is not None and status.is_terminated:
        reason: str | None = end_reason(status)
    elif in_other_network is not None:
        return in_other_network
    elif agent in state.standby and agent not in state.disconnected_since:
        reason = None
    elif agent is None or state.is_headless:
        reason = _absence_reason(
            view, state, now, token=token, node=node, is_restarting=is_restarting
        )
    elif _is_requeued(state, token, node):
        return _loss_before_restart(view, state, now, token=token, node=node, agent=agent)
    else:
        reason = _disconnect_reason(view, state, now, token=token, node=node, agent=agent)
    if reason is None:
        return None
    cause = _loss_cause(view, state, token=token, node=node, agent=agent)
    has_failed = status is not None and status.state is NodeState.FAILED
    return NodeLost(
        token=token,
        node=node,
        agent=agent,
        reason=reason,
        cause=cause,
        is_failed_start=agent is None and has_failed,
    )


def _loss_in_other_network(
    view: View, state: LeaderState, token: Token, *, node: int, agent: AgentId | None
) -> NodeLost | None:
    """The loss of a node whose agent stands by in another network, if it is not needed any more.

    Its agent reads that and exits: the leader's machine may have no permission to release it.
    """
    if agent is None or state.is_headless or not view.stands_by(token):
        return None
    standby = state.standby.get(agent)
    failure = standby.report.failure if standby is not None else ""
    if failure:
        reason = f"its environment could not be set up: {failure.strip().splitlines()[-1]}"
    elif view.round is None:
        return None
    elif view.groups[token].is_left:
        reason = _LEFT
    elif standby is not None and standby.report.has_notice:
        return NodeLost(token=token, node=node, agent=agent, reason=_NOTICED)
    elif is_unwanted(view, token):
        return NodeLost(token=token, node=node, agent=agent, reason=_MOVED)
    else:
        return None
    # Without an agent it counts as a refused request, so that the next one comes after a pause.
    reason = f"{reason}{unusable_pause_text(view, token)}"
    return NodeLost(token=token, node=node, agent=None, reason=reason, is_unusable=True)


def _is_restarting(view: View, token: Token, *, node: int, agent: AgentId | None) -> bool:
    """Whether the backend restarts the node, whose last known agent is `agent`, after its loss."""
    restarted = view.groups[token].lost_agent_by_restarted_node
    return node in restarted and agent in (None, restarted[node])


def _absence_reason(
    view: View, state: LeaderState, now: float, *, token: Token, node: int, is_restarting: bool
) -> str | None:
    """Why a node without an agent is lost; None if its agent may still join."""
    timeout_s = view.spec.timing.boot_timeout_s
    since = state.granted_at.get((token, node), math.inf)
    absence = "its agent did not join"
    if is_restarting:
        # Also while it waits for capacity: a new request may get a machine elsewhere.
        since = state.loss_recorded_at.get(token, state.leading_since)
        absence = "the machine that its backend restarts did not join"
        if _is_complete(view, state) and not is_standing_request(view, token):
            return _NOT_NEEDED
    if state.is_headless:
        # No agent connects to a headless leader, but a running one would have been elected
        # within a lease timeout, which is much shorter.
        since = max(since, state.leading_since)
        absence = "none of its agents took the lead"
    return f"{absence} within {timeout_s:.0f} s" if now - since > timeout_s else None


def _loss_before_restart(
    view: View, state: LeaderState, now: float, *, token: Token, node: int, agent: AgentId
) -> NodeLost | None:
    """The loss of a disconnected agent whose backend restarts the machine if that is lost.

    None until the backend has reported what became of the machine.
    """
    timing = view.spec.timing
    since = disconnected_since(view, state, agent)
    since = state.leading_since if since is None else since
    status = find_node_status(state.group_statuses, token, node)
    # The report may be older than the machine, and the connection may only be interrupted.
    is_certain = node_liveness(state, token, node=node, since=since) is NodeLiveness.TERMINATED
    has_run = (token, node) in state.reported_running
    is_settled = is_certain or (has_run and now - since > timing.rejoin_timeout_s)
    restarts = status is not None and status.state is NodeState.WAITING and is_settled
    timeout_s = max(timing.rejoin_timeout_s, timing.restart_report_timeout_s)
    if status is not None and restarts:
        reason = f"{status.reason or 'its machine was lost'}; its backend restarts the machine"
    elif _is_complete(view, state) and not is_standing_request(view, token):
        reason = f"its agent disconnected; {_NOT_NEEDED}"
    elif now - since > timeout_s:
        reason = (
            f"its agent did not reconnect within {timeout_s:.0f} s, and its backend did not "
            "restart the machine"
        )
    else:
        return None
    return NodeLost(
        token=token,
        node=node,
        agent=agent,
        reason=reason,
        cause=_loss_cause(view, state, token=token, node=node, agent=agent),
        machine_returned=restarts,
    )


def with_crash(view: View, lost: NodeLost, crash: AgentCrash | None) -> NodeLost:
    """Return the loss of a node with the error that its last agent has stored, if it has one. Pure.

    A crash is charged to the platform, whatever the backend reports: a machine whose agent has
    exited ends, too, and was not preempted. `crash` may be of an earlier agent of the machine, or
    recorded already because the backend has restarted the machine, and is ignored then. A report
    of what an agent could not reach explains only the loss of a machine whose agent never joined.
    """
    if crash is None or lost.agent not in (None, crash.agent):
        return lost
    if crash.unreachable is not None:
        return (
            lost if lost.agent else with_unreachable(lost, crash.unreachable, crash.traceback_text)
        )
    recorded = view.agent_crashes.latest
    if crash.agent in view.lost_agents or (recorded and recorded.agent == crash.agent):
        return lost
    return replace(
        lost,
        reason=f"its agent crashed: {last_line(crash.traceback_text)}",
        cause=None if lost.agent is None else FailureCause.PLATFORM,
        crash=crash,
    )


def with_unreachable(lost: NodeLost, what: Unreachable | None, reason: str = "") -> NodeLost:
    """Return the loss of a machine whose agent never joined, with what it could not reach. Pure.

    Unchanged for None, and for a loss with an agent. `reason` replaces that of the backend.
    """
    if what is None or lost.agent is not None:
        return lost
    return replace(lost, unreachable=what, cause=None, reason=reason or lost.reason)


def _disconnect_reason(
    view: View, state: LeaderState, now: float, *, token: Token, node: int, agent: AgentId
) -> str | None:
    """Why a node with a disconnected agent is lost; None if the agent may still reconnect."""
    timing = view.spec.timing
    if view.leader and view.leader.lost_leader == agent:
        # The new leader found its port closed. Wait for the backend's report, which decides on the
        # cause: without it, a machine that exceeds its memory limit would be replaced without end.
        liveness = node_liveness(state, token, node=node, since=state.leading_since)
        is_settled = now - state.leading_since > timing.rejoin_timeout_s
        if liveness is NodeLiveness.UNKNOWN and not is_settled:
            return None
        return "it was the leader, and its connections broke"
    last_seen_at = max(state.leading_since, state.disconnected_since.get(agent, 0.0))
    if view.stands_by(token):
        # It reports through the storage, see `LeaderState.standby`.
        timeout_s = timing.lease_timeout_s
        is_late = now - last_seen_at > timeout_s
        return f"its agent has not reported for {timeout_s:.0f} s" if is_late else None
    if now - last_seen_at <= timing.rejoin_timeout_s:
        return None
    return f"its agent did not reconnect within {timing.rejoin_timeout_s:.0f} s"


def _loss_cause(
    view: View, state: LeaderState, token: Token, node: int, *, agent: AgentId | None
) -> FailureCause | None:
    """PLATFORM if the backend reports the machine as running, otherwise PREEMPTION.

    WORKER if it was killed for exceeding its memory limit: so would its replacements be. None for a
    node that never booted, unless the backend withdrew the granted machine: a boot failure ends no
    round, so there is no budget to charge.
    """
    if agent is None:
        status = find_node_status(state.group_statuses, token, node)
        is_refused = status is not None and status.state is NodeState.REFUSED
        return FailureCause.PREEMPTION if is_refused else None
    if memory_kill(state, token, node) is not None:
        return FailureCause.WORKER
    # An agent that never connected to this leader is missing since its election.
    since = disconnected_since(view, state, agent)
    since = state.leading_since if since is None else since
    is_running = node_liveness(state, token, node=node, since=since) is NodeLiveness.RUNNING
    has_notice = agent in view.notices
    return FailureCause.PLATFORM if is_running and not has_notice else FailureCause.PREEMPTION
