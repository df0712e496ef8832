"""How long to delay the next round for checkpoint uploads that are in flight when a round ends."""

from __future__ import annotations

import math

from spotfit.model.leader_state import LeaderState, NoRound
from spotfit.model.view import View
from spotfit.policy.actions import Wait
from spotfit.policy.recovery import plan_memory_recovery
from spotfit.policy.retry_budget import fit_ended_by_budget


def wait_for_uploads(view: View, state: LeaderState, now: float) -> Wait | None:
    """Wait for uploads of the last round, or None if waiting cannot save more than it costs.

    A commit saves the work done since the last commit, `uncommitted_work_s`; whether it will
    succeed is unknown. Waiting at most that long costs at most twice the optimal choice (the ski
    rental argument). If no round follows, all uploads are awaited: the nodes' memory is lost then.
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
