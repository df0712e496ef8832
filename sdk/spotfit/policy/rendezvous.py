"""Rendezvous: when the next round is opened, its members, and their ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence

from msgspec.structs import replace

from spotfit.model.leader_state import LeaderState, MemberStatus
from spotfit.model.topology import NodeAssignment, Round
from spotfit.model.view import View
from spotfit.policy.actions import Wait
from spotfit.policy.capacity import (
    next_request_at,
    pending_slots,
    requeueable_members,
    usable_members,
)
from spotfit.policy.recovery import plan_memory_recovery

# Several rounds in a row may fail quickly, for example while the network is unstable. After five
# rounds without a commit, retries slow down to one in 30 s: a round that always fails then costs
# little, and one that would succeed is delayed little.
_ROUNDS_BEFORE_BACKOFF = 5
_MIN_BACKOFF_S = 0.1
_MAX_BACKOFF_S = 30.0


def next_round(view: View, state: LeaderState, now: float) -> Round | Wait:
    """The round that can be opened now, or how long to wait and for what."""
    failures = view.rounds_without_progress - _ROUNDS_BEFORE_BACKOFF
    # The exponent is limited so that 2.0**failures cannot overflow.
    backoff_s = min(_MAX_BACKOFF_S, _MIN_BACKOFF_S * 2.0 ** min(failures, 10))
    backoff_ends_at = state.phase.since + backoff_s
    if failures > 0 and now < backoff_ends_at:
        reason = f"{view.rounds_without_progress} rounds in a row ended without a checkpoint"
        return Wait(backoff_ends_at, reason)
    members = usable_members(view, state)
    stopping = [status for status in members if status.running_round is not None]
    if stopping:
        return Wait(now + 1.0, f"workers of the last round are stopping on {len(stopping)} nodes")
    slots = sum(status.member.slots for status in members)
    if slots < max(1, view.spec.min_workers):
        return Wait(now + 5.0, f"slots for {slots} of at least {view.spec.min_workers} workers")
    fill_timeout_at = state.phase.since + view.spec.timing.round_fill_timeout_s
    # After a refusal, the pending machines are not expected soon.
    is_refused = view.last_refusal is not None and now < next_request_at(view, state)
    may_grow = slots < view.spec.max_workers and pending_slots(view, state) > 0 and not is_refused
    if may_grow and now < fill_timeout_at:
        reason = f"slots for {slots} of {view.spec.max_workers} workers; more machines are booting"
        return Wait(fill_timeout_at, reason)
    # Prefer machines that the backend would restart, if they suffice for a full round.
    requeueable = requeueable_members(view, state)
    if sum(status.member.slots for status in requeueable) >= view.spec.max_workers:
        members = requeueable
    return _form_round(view, members)


def _form_round(view: View, members: Sequence[MemberStatus]) -> Round:
    """Assign ranks to the members, up to `max_workers`."""
    # Members of the last round come first and in the same order, so that ranks keep their local
    # shards.
    last = view.last_round.assignments if view.last_round else ()
    node_ranks = {one.agent: float(one.node_rank) for one in last}
    ordered = sorted(
        (status.member for status in members),
        key=lambda member: (node_ranks.get(member.agent, math.inf), member.token, member.node),
    )
    first_rank = 0
    assignments: list[NodeAssignment] = []
    for member in ordered:
        num_workers = min(member.slots, view.spec.max_workers - first_rank)
        if num_workers == 0:
            break
        node_rank = len(assignments)
        assignments.append(
            member.assign(node_rank=node_rank, first_rank=first_rank, num_workers=num_workers)
        )
        first_rank += num_workers
    number = view.last_round.number + 1 if view.last_round else 1
    latest = view.latest_checkpoint
    round_ = Round(
        number=number,
        assignments=tuple(assignments),
        checkpoint_name=latest.name if latest else None,
    )
    memory = plan_memory_recovery(view, assignments, members)
    if memory is None:
        return round_
    return replace(round_, memory_snapshot=memory.snapshot_id, shard_holders=memory.shard_holders)
