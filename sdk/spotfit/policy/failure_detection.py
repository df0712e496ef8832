"""Failure detection: hung workers and disconnected agents.

Hang detection: silent workers, rounds without progress, and rounds that do not start.

Three independent checks (docs/decisions/0022):

- A worker whose heartbeat thread is silent for `worker_timeout_s` ends the round. This needs no
  knowledge of the training function, so it is always on.
- A round without a report, collective or save for `no_progress_timeout_s` gets a stack dump and, if
  `abort_on_hang`, is ended. Off by default: a hang cannot be distinguished from a long step.
- A round whose workers have not called the training function after `start_timeout_s` is retried.

Disconnected agents of a round, and the state of their machines according to the backend.

A broken connection does not show whether the machine is lost, its agent crashed or the network
failed. Only the backend can distinguish them, and its reports may be outdated by
`Traits.status_lag_s` (docs/decisions/0018).
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from spotfit.core.ids import AgentId, Token
from spotfit.core.units import format_ranks
from spotfit.model.events import FailureCause, RankFailure, RoundClosed
from spotfit.model.group import NodeState, NodeStatus, find_node_status
from spotfit.model.leader_state import LeaderState, RoundProgress, Training
from spotfit.model.spec import HangDetectionConfig
from spotfit.model.topology import NodeAssignment
from spotfit.model.view import View
from spotfit.policy.actions import Wait


class SuspectedHang(NamedTuple):
    """A round that is assumed to hang."""

    ranks: tuple[int, ...]
    """The ranks that the others presumably wait for."""
    reason: str
    ends_round: bool
    """Whether to end the round, or only to collect a stack dump."""


def detect_hang(
    config: HangDetectionConfig,
    silent_s_by_rank: Mapping[int, float],
    progress: RoundProgress,
    now: float,
) -> SuspectedHang | None:
    """Return the suspected hang of the open round, or None if there is none. Pure.

    `silent_s_by_rank` has the seconds since the last heartbeat of the world ranks whose workers
    exceed `worker_timeout_s`; any such rank is a hang that ends the round. Otherwise a hang is
    suspected if no rank made progress for `no_progress_timeout_s` (0 disables this) while all were
    training and no upload or validation is in flight. `now` and `progress.progressed_at` are times
    of the leader's `Clock.now()` in seconds. A hang that continues is returned again.
    """
    if silent_s_by_rank:
        longest_s = max(silent_s_by_rank.values())
        reason = f"{_format_ranks_have(silent_s_by_rank)} not answered for {longest_s:.0f} s"
        return SuspectedHang(tuple(sorted(silent_s_by_rank)), reason, ends_round=True)
    has_started = len(progress.running_ranks) == len(progress.progress_counts)
    # Uploads and validations may take arbitrarily long, and ranks may legitimately wait for them.
    is_busy = progress.is_uploading or progress.is_validating
    if not config.no_progress_timeout_s or not has_started or is_busy:
        return None
    if now < next_hang_check_at(config, progress):
        return None
    active = [
        rank for rank in range(len(progress.progress_counts)) if rank not in progress.returned_ranks
    ]
    # The ranks with the lowest count are the ones that the others wait for.
    lowest = min((progress.progress_counts[rank] for rank in active), default=0)
    slowest = tuple(rank for rank in active if progress.progress_counts[rank] == lowest)
    idle_s = now - progress.progressed_at
    reason = f"no rank has reported, saved or joined a collective for {idle_s:.0f} s"
    if len(slowest) < len(active):
        reason += f"; {_format_ranks_have(slowest)} made less progress than the others"
    return SuspectedHang(slowest, reason, config.abort_on_hang)


def next_hang_check_at(config: HangDetectionConfig, progress: RoundProgress) -> float:
    """Return when a round without further progress is suspected to hang.

    In seconds of the leader's `Clock.now()`; `math.inf` if `no_progress_timeout_s` is 0. Called by
    the leader's hang detector.
    """
    return (
        progress.progressed_at + config.no_progress_timeout_s
        if config.no_progress_timeout_s
        else float("inf")
    )


def close_unstarted_round(
    view: View, state: LeaderState, training: Training, now: float
) -> RoundClosed | Wait | None:
    """Return the end of a round whose workers have not all called the training function in time.

    The limit is `start_timeout_s` since the round was opened, and the cause PLATFORM. A `Wait`
    before that; None if all have started or the limit is 0 (none). `now` is the leader's
    `Clock.now()` in seconds. Called by the scheduler.
    """
    timeout_s = view.spec.hang_detection.start_timeout_s
    world_size = training.round.world_size
    late_ranks = tuple(sorted(set(range(world_size)) - training.running_ranks))
    if not late_ranks or not timeout_s:
        return None
    due_at = training.since + timeout_s
    if now < due_at:
        return Wait(due_at, f"{len(late_ranks)} of {world_size} workers are starting")
    reason = f"{_format_ranks_have(late_ranks)} not started within {timeout_s:.0f} s"
    # The user's function was not called yet, so the platform is charged.
    failures = tuple(
        RankFailure(
            rank=rank,
            kind="timeout",
            message=f"Rank {rank} did not call the training function within {timeout_s:.0f} s.",
            cause=FailureCause.PLATFORM,
        )
        for rank in late_ranks
    )
    return RoundClosed(
        round_number=training.round.number,
        cause=FailureCause.PLATFORM,
        reason=reason,
        failures=failures,
    )


def _format_ranks_have(ranks: Iterable[int]) -> str:
    listed = sorted(ranks)
    return f"{format_ranks(listed)} {'have' if len(listed) > 1 else 'has'}"


# --- Disconnected agents of a round ---------------------------------------------------------------


class NodeLiveness(enum.Enum):
    """The state of a disconnected agent's machine according to the backend."""

    TERMINATED = "terminated"
    RUNNING = "running after the disconnect"
    UNKNOWN = "no status that is certainly newer than the disconnect"


def disconnected_since(view: View, state: LeaderState, agent: AgentId) -> float | None:
    """Return when the agent was disconnected, in seconds of the leader's `Clock.now()`.

    None if it is connected, or was never connected to this leader. For the previous leader, lost
    before this one was elected, the time of the election.
    """
    if agent in state.members:
        return None
    if agent in state.disconnected_since:
        return state.disconnected_since[agent]
    # The previous leader was lost before this leader was elected; it has no disconnect of its own.
    # Its port may be closed, or its lease may have expired: then its host does not respond.
    was_leader = view.leader is not None and view.leader.lost_leader == agent
    return state.leading_since if was_leader or view.former_leader == agent else None


def is_missing(view: View, state: LeaderState, assignment: NodeAssignment) -> bool:
    """Whether the assigned agent is recorded as lost, or is disconnected from the leader.

    False for an agent that has not connected yet to a new leader.
    """
    return (
        assignment.agent in view.lost_agents
        or disconnected_since(view, state, assignment.agent) is not None
    )


def node_liveness(state: LeaderState, token: Token, node: int, since: float) -> NodeLiveness:
    """Return the state of a machine after `since`, as far as the backend's reports are certain.

    `node` is its index in the group `token`; `since`, in seconds of the leader's `Clock.now()`, is
    usually the time of a disconnect. UNKNOWN until a status is at least that new. TERMINATED also
    if the backend has requeued the machine.
    """
    status = find_node_status(state.group_statuses, token, node)
    if status is None:
        return NodeLiveness.UNKNOWN
    # Termination is permanent, so an old report of it is valid; an old report of RUNNING is not.
    if status.is_terminated:
        return NodeLiveness.TERMINATED
    if state.status_as_of.get(token, float("-inf")) < since:
        return NodeLiveness.UNKNOWN
    # WAITING after its agent was connected: the backend has requeued the machine.
    is_running = status.state is NodeState.RUNNING
    return NodeLiveness.RUNNING if is_running else NodeLiveness.TERMINATED


def end_reason(status: NodeStatus) -> str:
    """Return why the backend has ended a machine, for a machine that has ended; with a remedy if
    it was killed for exceeding its memory limit."""
    reason = status.reason or f"the backend reports it as {status.state}"
    if not status.out_of_memory:
        return reason
    return (
        f"its processes exceeded the memory limit of their container ({reason}). What to do: "
        'Request more memory per worker, with "memory" in resources_per_worker, in bytes'
    )


def memory_kill(state: LeaderState, token: Token, node: int) -> NodeStatus | None:
    """Return the status of a machine that was killed for exceeding its memory limit, else None.

    `node` is its index in the group `token`. None while the backend does not report it.
    """
    status = find_node_status(state.group_statuses, token, node)
    return status if status is not None and status.out_of_memory else None


def is_machine_lost(view: View, state: LeaderState, assignment: NodeAssignment) -> bool:
    """Whether the assigned machine is gone, rather than running with an unreachable agent.

    For an agent recorded as lost, False only if the backend reports its machine as running. For a
    disconnected agent, True only if it has a preemption notice or the backend reports the machine
    as terminated. False for a connected agent.
    """
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
    """Whether the assigned agent is disconnected, and a newer report of the backend may show why.

    The scheduler then delays closing the round, up to `RunTiming.failure_settle_s`.
    """
    since = disconnected_since(view, state, assignment.agent)
    if since is None or assignment.agent in view.lost_agents or assignment.agent in view.notices:
        return False
    return (
        node_liveness(state, assignment.token, node=assignment.node, since=since)
        is NodeLiveness.UNKNOWN
    )
