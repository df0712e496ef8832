"""Rendezvous: when the next round is opened, its members, and their ranks.

How long to delay the next round for checkpoint uploads that are in flight when a round ends.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from msgspec.structs import replace

from spotfit.model.leader_state import LeaderState, MemberStatus, NoRound
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
from spotfit.policy.retry_budget import fit_ended_by_budget

# Several rounds in a row may fail quickly, for example while the network is unstable. After five
# rounds without a commit, retries slow down to one in 30 s: a round that always fails then costs
# little, and one that would succeed is delayed little.
_ROUNDS_BEFORE_BACKOFF = 5
_MIN_BACKOFF_S = 0.1
_MAX_BACKOFF_S = 30.0


def next_round(view: View, state: LeaderState, now: float) -> Round | Wait:
    """Return the round to open now, or a `Wait` until it is decided again, with what is missing.

    Waits for `min_workers`, for workers of the last round to stop, up to `round_fill_timeout_s` for
    machines that boot, and longer after rounds without a checkpoint. The round has the next number,
    the assignments of all ranks, and the checkpoint or memory snapshot to resume from. `now` is the
    leader's `Clock.now()` in seconds. Called by the scheduler between rounds; the caller appends
    `RoundOpened`.
    """
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


# --- How long to delay the next round for checkpoint uploads --------------------------------------


def wait_for_uploads(view: View, state: LeaderState, now: float) -> Wait | None:
    """Return the `Wait` for uploads of the last round, or None if there is nothing to wait for.

    A commit saves the work done since the last commit, `uncommitted_work_s`; whether it will
    succeed is unknown. Waiting at most that long costs at most twice the optimal choice (the ski
    rental argument). If no round follows, all uploads are awaited for up to `upload_timeout_s`: the
    nodes' memory is lost then. `now` is the leader's `Clock.now()` in seconds.
    """
    last, phase = view.last_round, state.phase
    if not isinstance(phase, NoRound) or last is None:
        return None
    is_final = fit_ended_by_budget(view) is not None
    connected = [one for one in last.assignments if one.agent in state.members]
    members = state.members.values()
    # The snapshot in memory is at least as new as the one that is being uploaded.
    if not is_final and plan_memory_recovery(view, connected, members) is not None:
        return None
    timing = view.spec.timing
    worth_s = math.inf if is_final else phase.uncommitted_work_s
    until = phase.since + min(worth_s, timing.upload_timeout_s)
    uploading = [status for status in members if status.uploading_round == last.number]
    if uploading and now < until:
        return Wait(until, f"{len(uploading)} nodes are still uploading a checkpoint")
    # Only after its workers have stopped does a node report the uploads they left to it.
    stop_at = phase.since + min(worth_s, timing.stop_timeout_s)
    if now < stop_at and any(status.running_round == last.number for status in members):
        return Wait(stop_at, "workers of the last round are stopping and may leave uploads")
    return None
