"""Failure causes and retry budgets: what a failed round is charged to, and when the run ends.

Failed rounds are charged to one of three budgets of `FailureLimits`: worker (user code), platform,
or preemption. A broken connection (NETWORK) is charged later, once the backend has reported the
state of the machine (docs/decisions/0018).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import NamedTuple

from msgspec.structs import replace

from spotfit.core.errors import InfrastructureError, SpotfitError, TransientStoreError
from spotfit.core.ids import AgentId
from spotfit.model.events import FailureCause, FitEnded, PreemptedNodes, RankFailure, RoundClosed
from spotfit.model.group import NodeStatus, Unreachable
from spotfit.model.leader_state import LeaderState
from spotfit.model.topology import NodeAssignment, Round
from spotfit.model.view import View
from spotfit.policy.failure_detection import end_reason, is_machine_lost, is_missing, memory_kill
from spotfit.policy.secondary_errors import is_secondary

_PERMANENT_REASON = "not retried, the failure is permanent"
_ABORTED = "was killed by SIGABRT"  # a description of `host.process.describe_exit`

# Failures of spotfit itself and of machines that start no agent have a budget of their own, smaller
# than the default of `controller_failure_limit`: without it, such a run would pay for machines
# forever. Two retries tell a broken machine or a short outage of a registry from a wrong image. A
# traceback that recurs on an agent that was started after the first crash is not of a machine.
MAX_AGENT_CRASHES = 2
MAX_EQUAL_CRASHES = 1
MAX_FAILED_STARTS = 2
# One machine may be in a wrong network or have lost it. Two show that a further one would cost
# money for the same result.
MAX_UNREACHABLE = 1
# After a round of the fit, when the storage has been reached, it may be slow for minutes. Then this
# many show that it has changed, such as a permission that was withdrawn.
MAX_UNREACHABLE_TRAINED = 5

_UNREACHABLE_TEXTS: Mapping[Unreachable, tuple[str, str]] = {
    Unreachable.STORAGE: (
        "the storage of the run",
        "Give the network of the machines a route to the storage (an endpoint, a gateway or NAT), "
        "and permit HTTPS in its firewall or security group.",
    ),
    Unreachable.ACCESS: (
        "the storage of the run",
        "Check that the bucket in storage_path exists, that its region is the one in the URL "
        "(?region=...), and that the role or credentials of the machines may read and write it.",
    ),
    Unreachable.RUN: (
        "the run in its storage",
        "Set RunConfig(storage_path=...) to a bucket, or to a directory that all machines mount.",
    ),
    Unreachable.LEADER: (
        "the leader of the run",
        "Open TCP between the machines, for all ports, in their security group, firewall or "
        "network policy, and place them in one network.",
    ),
}
"""What was not reached, in words, and the remedy."""


class FailureDiagnosis(NamedTuple):
    """The cause of a failure, and whether a retry would fail in the same way."""

    cause: FailureCause
    is_permanent: bool


def diagnose_setup_failure(error: BaseException) -> FailureDiagnosis:
    """Classify an error that was raised before the training function was called.

    Called on the node that could not start a worker or a validation; the result is sent to the
    leader with the failure.

    error                                | cause    | permanent
    -------------------------------------|----------|-------------------------------
    temporary error of the bucket; OS,   | PLATFORM | no
    machine, out of memory               |          |
    other `SpotfitError`                 | WORKER   | unless its details say retryable
    other `Exception` (a bug in spotfit) | PLATFORM | yes
    `SystemExit`, `KeyboardInterrupt`    | WORKER   | no
    """
    match error:
        case TransientStoreError() | InfrastructureError() | OSError() | MemoryError():
            return FailureDiagnosis(FailureCause.PLATFORM, is_permanent=False)
        case SpotfitError():
            return FailureDiagnosis(
                FailureCause.WORKER, is_permanent=not error.details.get("retryable", False)
            )
        case Exception():
            return FailureDiagnosis(FailureCause.PLATFORM, is_permanent=True)
        case _:
            return FailureDiagnosis(FailureCause.WORKER, is_permanent=False)


def is_permanent_error(error: BaseException) -> bool:
    """Whether a retry of the training function would certainly raise the error again.

    True only for a `SpotfitError` created with `retryable=False`; False for errors of user code, of
    which it is unknown. A permanent error ends the run without a retry.
    """
    return isinstance(error, SpotfitError) and error.details.get("retryable") is False


def round_closed_by_failure(
    view: View, state: LeaderState, round_: Round, rank_failures: Iterable[RankFailure] = ()
) -> RoundClosed:
    """Return the `RoundClosed` of a round that failed, charged to the root cause. Pure.

    `rank_failures` are the failures reported so far, in order of arrival. In order of precedence:
    lost nodes and broken connections, workers that died on a node with a notice, other failures;
    without any of them, LEADER_CHANGE. Errors of the remaining ranks (such as NCCL errors) are
    consequences of a lost node and are not charged. `duration_s` is left to the caller.
    """
    reported = tuple(rank_failures)
    failures = tuple(sorted(reported, key=_causal_order))
    leaving = [one for one in round_.assignments if one.agent in view.notices]
    if any(_was_disconnected(view, state, one) for one in round_.assignments):
        return _closed_by_disconnect(view, state, round_, failures=failures)
    leaving_ranks = {rank for assignment in leaving for rank in assignment.ranks}
    if _is_caused_by_shutdown(reported, leaving_ranks):
        lost = f"{_format_lost_machines(leaving)} after a preemption notice"
        raised = next((one for one in failures if one.kind == "raised"), None)
        return RoundClosed(
            round_number=round_.number,
            cause=FailureCause.PREEMPTION,
            # An error in the code that saves before the deadline would not be visible otherwise.
            reason=f"{lost}; {_format_failure(raised)}" if raised else lost,
            failures=failures,
            preempted=preempted_nodes(leaving, view),
        )
    if failures:
        cause, failure = _find_cause(failures)
        return RoundClosed(
            round_number=round_.number,
            cause=cause,
            reason=_format_failure(failure),
            failures=failures,
        )
    return RoundClosed(
        round_number=round_.number,
        cause=FailureCause.LEADER_CHANGE,
        reason="the leader changed",
        missing_agents=_missing_agents(state, round_),
    )


def _causal_order(failure: RankFailure) -> tuple[bool, bool, bool, int]:
    """Sorts a cause before the failures that follow from it."""
    return (
        # A process that died without an exception precedes those that raised because it is gone.
        failure.kind == "raised",
        is_secondary(failure),
        # The watchdogs of NCCL and JAX abort a process whose peer is gone.
        _ABORTED in failure.message,
        failure.rank,
    )


def _is_caused_by_shutdown(
    reported: Sequence[RankFailure], leaving_ranks: AbstractSet[int]
) -> bool:
    """Whether the failures follow from the end of nodes with a notice, rather than from user code.

    A process that died on such a node was killed with it. An exception there is caused by the
    shutdown unless a rank on another node failed before, died, or raised the same: then it is an
    error of user code. Other exceptions of those ranks follow from the first one, as do exceptions
    about a lost peer.
    """
    leaving = [one for one in reported if one.rank in leaving_ranks]
    staying = [one for one in reported if one.rank not in leaving_ranks and not is_secondary(one)]
    if any(one.kind != "raised" for one in leaving):
        return True
    first = next((one for one in reported if not is_secondary(one)), None)
    if not leaving or first in staying or any(one.kind != "raised" for one in staying):
        return False
    errors = {_error_text(one) for one in leaving}
    return not any(_error_text(one) in errors for one in staying)


def _error_text(failure: RankFailure) -> str:
    # Ranks, devices and addresses differ between equal errors.
    return re.sub(r"\d+", "#", last_line(failure.message))


def _closed_by_disconnect(
    view: View, state: LeaderState, round_: Round, failures: tuple[RankFailure, ...]
) -> RoundClosed:
    """PREEMPTION if a machine is lost, PLATFORM if only agents are lost, otherwise NETWORK.

    WORKER if all lost machines were killed for exceeding their memory limits.
    """
    assignments = round_.assignments
    if killed := _killed_for_memory(view, state, round_):
        machines = _format_machine_names([assignment for assignment, _ in killed])
        return RoundClosed(
            round_number=round_.number,
            cause=FailureCause.WORKER,
            reason=f"{machines} ended: {end_reason(killed[0][1])}",
            failures=tuple(
                RankFailure(rank=rank, kind="died", message=f"Its machine ended: {end_reason(end)}")
                for assignment, end in killed
                for rank in assignment.ranks
            ),
        )
    if lost := [one for one in assignments if is_machine_lost(view, state, one)]:
        preempted = [one for one in assignments if one in lost or one.agent in view.notices]
        return RoundClosed(
            round_number=round_.number,
            cause=FailureCause.PREEMPTION,
            reason=_format_lost_machines(lost),
            failures=_with_lost_ranks(lost, "is gone", failures),
            preempted=preempted_nodes(preempted, view),
            missing_agents=_missing_agents(state, round_),
        )
    if unreachable := [one for one in assignments if one.agent in view.platform_outages]:
        return RoundClosed(
            round_number=round_.number,
            cause=FailureCause.PLATFORM,
            reason=_format_unreachable(view, unreachable),
            failures=_with_lost_ranks(unreachable, "runs, but its agent is unreachable", failures),
        )
    missing = [one for one in assignments if is_missing(view, state, one)]
    disconnected = [one for one in assignments if _was_disconnected(view, state, one)]
    return RoundClosed(
        round_number=round_.number,
        cause=FailureCause.NETWORK,
        reason=f"the connection to {_format_machine_names(disconnected)} broke",
        failures=_with_lost_ranks(missing, "is disconnected", failures),
        missing_agents=_missing_agents(state, round_),
    )


def _killed_for_memory(
    view: View, state: LeaderState, round_: Round
) -> list[tuple[NodeAssignment, NodeStatus]]:
    """The lost machines with their ends, if all exceeded their memory limits; else none."""
    lost = [one for one in round_.assignments if is_machine_lost(view, state, one)]
    kills = [(one, memory_kill(state, one.token, one.node)) for one in lost]
    killed = [(one, status) for one, status in kills if status is not None]
    return killed if len(killed) == len(lost) else []


def fit_ended_by_unusable_node(failure: RankFailure) -> FitEnded:
    """Return the end of a fit whose environment can start workers on no machine.

    `failure` is the permanent failure that one node has reported. Its cause is PLATFORM or WORKER;
    `metrics` is left to the caller.
    """
    cause, _ = _find_cause((failure,))
    return FitEnded(
        outcome="failed",
        reason=f"{_PERMANENT_REASON}: {_format_failure(failure)}",
        cause=cause,
        failures=(failure,),
    )


def fit_ended_by_budget(view: View) -> FitEnded | None:
    """Return the failed end of the fit if no retry of the last closed round is left, else None.

    Counts all rounds of the fit with the same cause against `FailureLimits`; a negative limit means
    none. Unless the round was preempted, a permanent failure ends the fit with any limit. NETWORK,
    RESIZE and LEADER_CHANGE have no limit. Crashes of agents end the fit as `fit_ended_by_crashes`
    says. Called by the scheduler after each round, and to ask whether another round follows;
    `metrics` is left to the caller.
    """
    if (ended := fit_ended_by_crashes(view)) is not None:
        return ended
    closed = view.last_round_closed
    limits = view.spec.failure_limits
    limit_by_cause = {
        FailureCause.WORKER: limits.worker,
        FailureCause.PLATFORM: limits.platform,
        FailureCause.PREEMPTION: limits.preemption,
    }
    if closed is None or closed.cause not in limit_by_cause:
        return None
    # After a preemption, even a permanent error of another rank may be a consequence of it.
    if closed.cause != FailureCause.PREEMPTION and any(
        failure.is_permanent for failure in closed.failures
    ):
        return FitEnded(
            outcome="failed",
            reason=f"{_PERMANENT_REASON}: {closed.reason}",
            cause=closed.cause,
            failures=closed.failures,
        )
    limit = limit_by_cause[closed.cause]
    count = view.failure_counts.get(closed.cause, 0)
    if limit < 0 or count <= limit:
        return None
    reason = f"failure {count} with cause {closed.cause.value!r}, limit {limit}: {closed.reason}"
    return FitEnded(
        outcome="failed",
        reason=reason,
        cause=closed.cause,
        failures=closed.failures,
        preempted=closed.preempted,
    )


def fit_ended_by_crashes(view: View) -> FitEnded | None:
    """Return the failed end of the fit if its agents have crashed too often, else None.

    Too often is more than `MAX_EQUAL_CRASHES` times with the same traceback, or more than
    `MAX_AGENT_CRASHES` times, or `FailureLimits.platform` times if that is less. See `AgentCrashes`
    for what counts. `metrics` is left to the caller.
    """
    crashes = view.agent_crashes
    if crashes.latest is None:
        return None
    repeated = crashes.by_signature.get(crashes.latest.signature, 0)
    limit = _own_limit(view, MAX_AGENT_CRASHES)
    if repeated <= min(MAX_EQUAL_CRASHES, limit) and crashes.incidents <= limit:
        return None
    machine_names = ", ".join(crashes.machine_names)
    what = f"the agent on {machine_names} crashed: {last_line(crashes.latest.traceback_text)}"
    if repeated > 1:
        reason = f"{what}; crash {repeated} with this traceback, limit {MAX_EQUAL_CRASHES}"
    else:
        reason = f"{what}; crash {crashes.incidents} of agents, limit {limit}"
    return _ended_by_platform(reason, crashes.latest.traceback_text, crashes.machine_names[-1])


def fit_ended_by_failed_starts(view: View) -> FitEnded | None:
    """Return the failed end of a fit whose machines start no agent, else None.

    That is after `MAX_FAILED_STARTS` retries, or `FailureLimits.platform` if that is less, and only
    while no agent of the fit has ever started: a single broken machine ends no run. A machine that
    waits for capacity, boots or was preempted is no failed start. `metrics` is left to the caller.
    """
    lost, limit = view.last_failed_start, failed_start_limit(view)
    if lost is None or view.failed_starts <= limit:
        return None
    reason = (
        f"no machine has started an agent, the last is {lost.token}/{lost.node}: {lost.reason}; "
        f"failed start {view.failed_starts}, limit {limit}"
    )
    text = lost.crash.traceback_text if lost.crash else "\n".join(lost.output)
    return _ended_by_platform(reason, text, f"{lost.token}/{lost.node}")


def failed_start_limit(view: View) -> int:
    """Return how many starts of machines may fail in a row, of workers' and of feeders' machines.

    `MAX_FAILED_STARTS`, or `FailureLimits.platform` if that is less.
    """
    return _own_limit(view, MAX_FAILED_STARTS)


def unreachable_remedy(what: Unreachable) -> str:
    """Return what a user can do if machines cannot reach this, as a sentence."""
    return _UNREACHABLE_TEXTS[what][1]


def fit_ended_by_unreachable(view: View, state: LeaderState, now: float) -> FitEnded | None:
    """Return the failed end of a fit whose machines cannot reach the storage or the leader.

    That is after two such machines since a round was last opened or closed, or one if
    `FailureLimits.platform` is 0. None otherwise. Also None, because the storage or the network may
    have been interrupted only:

    * if they did not reach the storage, and as many machines are connected, which reach it, or they
      are at most five and the fit has trained, unless that limit is 0;
    * if they did not reach the leader, and machines of this fit have trained together, or this
      leader has no machine, has led for less than `RunTiming.reach_timeout_s`, or is reached from
      another instance.

    `now` is the leader's `Clock.now()` in seconds. `metrics` is left to the caller.
    """
    losses = view.unreachable_machines
    limit = _own_limit(view, MAX_UNREACHABLE)
    if len(losses) <= limit:
        return None
    lost = losses[-1]
    assert lost.unreachable is not None
    # If others can reach it, the limit of boot failures applies to the replacements.
    if lost.unreachable is Unreachable.LEADER:
        if _may_be_reached(view, state, now):
            return None
    elif limit and len(losses) <= max(len(state.members), _trained_limit(view)):
        return None
    what, remedy = _UNREACHABLE_TEXTS[lost.unreachable]
    names = ", ".join(f"{one.token}/{one.node}" for one in losses)
    reason = f"{len(losses)} machines ({names}) could not reach {what}, the last: {lost.reason}"
    output = next((one.output for one in reversed(losses) if one.output), ())
    machine_name = f"{lost.token}/{lost.node}"
    ended = _ended_by_platform(reason, "\n".join(output), machine_name)
    return replace(ended, remedy=remedy)


def _trained_limit(view: View) -> int:
    return MAX_UNREACHABLE_TRAINED if view.round_opened_slot >= 0 else 0


def _may_be_reached(view: View, state: LeaderState, now: float) -> bool:
    """Whether the network may let machines through to this leader, or to the next one."""
    own = state.members.get(state.agent_id)
    if own is None or now - state.leading_since < view.spec.timing.reach_timeout_s:
        return True
    # Machines of this fit have trained together: no firewall is between them.
    has_trained = view.round_opened_slot >= 0
    if has_trained and view.last_round is not None and len(view.last_round.assignments) > 1:
        return True
    instance = own.member.instance
    return any(
        # Containers of one instance show nothing about the network between instances.
        agent != state.agent_id and (not instance or status.member.instance != instance)
        for agent, status in state.members.items()
    )


def last_line(traceback_text: str) -> str:
    """Return the line of a traceback that names the exception, at most 200 characters."""
    # The last line that is not indented: the remedy of a `SpotfitError` follows it, indented.
    lines = traceback_text.strip().splitlines()
    return next((line for line in reversed(lines) if not line.startswith(" ")), "")[:200]


def _own_limit(view: View, limit: int) -> int:
    """A limit of spotfit's own failures, or the user's for the platform if that is smaller."""
    platform = view.spec.failure_limits.platform
    return limit if platform < 0 else min(limit, platform)


def _ended_by_platform(reason: str, text: str, machine_name: str) -> FitEnded:
    # Rank -1: the failure is not of a worker.
    failure = RankFailure(rank=-1, kind="died", message=text, cause=FailureCause.PLATFORM)
    return FitEnded(
        outcome="failed",
        reason=reason,
        cause=FailureCause.PLATFORM,
        failures=(failure,) if text else (),
        failed_machine=machine_name,
    )


def preempted_nodes(
    assignments: Sequence[NodeAssignment], view: View, *, drain_timed_out: bool = False
) -> PreemptedNodes:
    """Return the given nodes of a round by machine name, with their world ranks.

    For `RoundClosed` and for the message to the workers. `deadline_ms` is the earliest announced
    deadline of those that have a notice, in milliseconds since 1970, or 0. `drain_timed_out` is
    True if workers were still running at the deadline.
    """
    notices = [view.notices[one.agent] for one in assignments if one.agent in view.notices]
    deadlines = [notice.deadline_ms for notice in notices if notice.deadline_ms]
    nodes = {assignment.machine_name: tuple(assignment.ranks) for assignment in assignments}
    return PreemptedNodes(
        node_to_ranks=nodes, deadline_ms=min(deadlines, default=0), drain_timed_out=drain_timed_out
    )


def _was_disconnected(view: View, state: LeaderState, assignment: NodeAssignment) -> bool:
    """Whether the agent was disconnected at any time in this round; it may be connected again."""
    return assignment.agent in state.disconnected_in_round or is_missing(view, state, assignment)


def _missing_agents(state: LeaderState, round_: Round) -> tuple[AgentId, ...]:
    """The agents that are or were disconnected; a new leader misses all that did not connect."""
    return tuple(
        one.agent
        for one in round_.assignments
        if one.agent not in state.members or one.agent in state.disconnected_in_round
    )


def _with_lost_ranks(
    assignments: list[NodeAssignment], condition: str, failures: tuple[RankFailure, ...]
) -> tuple[RankFailure, ...]:
    """Failures of kind "lost" for the ranks of `assignments`, then those of all other ranks."""
    ranks = [rank for assignment in assignments for rank in assignment.ranks]
    lost = [
        RankFailure(rank=r, kind="lost", message=f"The machine of rank {r} {condition}.")
        for r in ranks
    ]
    return (*lost, *(failure for failure in failures if failure.rank not in ranks))


def _format_lost_machines(assignments: list[NodeAssignment]) -> str:
    noun = "machine" if len(assignments) == 1 else "machines"
    return f"lost {len(assignments)} {noun} ({_format_machine_names(assignments)})"


def _format_unreachable(view: View, unreachable: list[NodeAssignment]) -> str:
    names = _format_machine_names(unreachable)
    crashed = view.agent_crashes.machine_names
    if any(one.machine_name in crashed for one in unreachable):
        return f"the agent on {names} crashed"
    return f"the agent on {names} is unreachable"


def _format_machine_names(assignments: list[NodeAssignment]) -> str:
    return ", ".join(assignment.machine_name for assignment in assignments)


def _find_cause(failures: tuple[RankFailure, ...]) -> tuple[FailureCause, RankFailure]:
    """The root cause among the failures: a permanent one, else one of the platform, else the
    first."""
    decisive = next((one for one in failures if one.is_permanent), None)
    decisive = decisive or next((one for one in failures if _is_platform_failure(one)), failures[0])
    is_platform = _is_platform_failure(decisive)
    return (FailureCause.PLATFORM if is_platform else FailureCause.WORKER), decisive


def _is_platform_failure(failure: RankFailure) -> bool:
    return failure.cause is FailureCause.PLATFORM or failure.kind == "lost"


def _format_failure(failure: RankFailure) -> str:
    return f"rank {failure.rank} {failure.kind}: {last_line(failure.message) or failure.kind}"
