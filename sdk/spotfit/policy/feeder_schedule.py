"""Feeder schedule: how many machines transform datasets for the workers.

Machines for feeders are requested one by one while a round is open. Between the minimum and the
maximum, their number follows the share of time for which workers wait for rows:

    share of the last minute     | machines
    -----------------------------|------------------------------------------
    above 5 %                    | one more, unless one is still starting
    from 1 to 5 %                | unchanged
    below 1 %                    | one less, after 1, 2, 4, … minutes
    not measured for a minute    | unchanged, at least the minimum

The measurement begins again with every change of the machines. Each release doubles the time until
the next one, because the workers may wait again without the machine. A lost machine, or one with a
preemption notice, is replaced. Feeders hold no state, so nothing has to be saved before their
release (docs/decisions/0077). None is requested while the workers are in a network in which the
feeders' backend has no machines, or if the budget does not suffice for its start.

Machines that fail before they work are replaced as often in a row as those of workers, with pauses.
Then the fit requests none any more, and the workers transform their rows themselves:

    loss of a machine that has not worked            | limit in a row
    -------------------------------------------------|------------------------------------------
    its environment or agent could not start, or it  | `retry_budget.failed_start_limit`
    joined and ended, other than by a preemption     |
    any, other than a refusal                        | `capacity.MAX_BOOT_FAILURES_PER_NODE`
    refused, or withdrawn before it has run          | none: it costs nothing
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from msgspec.structs import replace

from spotfit.core.backoff import exponential_backoff_s
from spotfit.core.units import format_count
from spotfit.model.events import FailureCause, FeedersStopped, NodeLost
from spotfit.model.leader_state import LeaderState, NoRound
from spotfit.model.spec import FeederSpec
from spotfit.model.topology import FeederAddress
from spotfit.model.view import View
from spotfit.policy import capacity, cost_budget, retry_budget
from spotfit.policy.actions import AppendEvent, LeaderAction, ReleaseGroups, RequestMachines, Wait

# Below, a further machine would save less of the accelerators' time than noise.
_MIN_WAIT_SHARE_TO_GROW = 0.05
_MAX_WAIT_SHARE_TO_SHRINK = 0.01
_SHRINK_S, _MAX_SHRINK_S = 60.0, 3600.0
# A change of machines takes the workers a minute or two, and feeders that return with it would take
# as long to start. A longer wait for capacity must not be paid for.
_IDLE_TIMEOUT_S = 300.0
# Pauses after refused machines and failed starts: feeders are not urgent, the workers transform.
_MIN_BACKOFF_S = 1.0
_MAX_BACKOFF_S = 600.0


MIN_WORK_S = 300.0
"""For how long the feeders of a machine accept connections before it counts as working. More than
the two minutes for which a machine tries to replace processes that have ended."""


class FeederCount(NamedTuple):
    """How many machines the feeders are to have, and why."""

    nodes: int
    reason: str


def feeder_count(view: View, state: LeaderState) -> FeederCount:
    """Return the number of machines for feeders that the run is to have now. Pure.

    0 without feeders, for a headless leader, and once no further round will be opened.
    """
    spec = view.spec.feeders
    if spec is None or state.is_headless:
        return FeederCount(0, "the run has no feeders")
    if _is_training_over(view):
        return FeederCount(0, "the training has ended")
    staying = len(capacity.staying_nodes(view, state, "feed"))
    least = min(max(staying, spec.min_nodes), spec.max_nodes)
    share = state.data_wait_share
    if view.round is None or share is None:
        return FeederCount(least, f"at least {format_count(spec.min_nodes, 'machine')}")
    reason = f"workers wait for rows for {share:.1%} of the time"
    is_starting = staying > len(feeder_addresses(view, state))
    if share > _MIN_WAIT_SHARE_TO_GROW and not is_starting and staying < spec.max_nodes:
        return FeederCount(least + 1, reason)
    shrink_s = exponential_backoff_s(
        view.feeder_releases, shortest_s=_SHRINK_S, longest_s=_MAX_SHRINK_S
    )
    is_settled = state.data_wait_measured_s >= shrink_s
    if share < _MAX_WAIT_SHARE_TO_SHRINK and is_settled and staying > spec.min_nodes:
        return FeederCount(least - 1, reason)
    return FeederCount(least, reason)


def feeder_addresses(view: View, state: LeaderState) -> tuple[FeederAddress, ...]:
    """Return where workers find feeders: on usable machines without a preemption notice."""
    members = capacity.usable_members(view, state, "feed")
    return tuple(
        sorted(
            (one.feeder for one in members if one.feeder is not None), key=lambda one: one.address
        )
    )


def with_failure(view: View, state: LeaderState, lost: NodeLost, now: float) -> NodeLost:
    """Return the loss, marked as unusable if the machine was for feeders that did not work. Pure.

    Not if it was preempted or the leader has given it up, nor for a headless leader, to which no
    feeders are reported. `now` is the leader's `Clock.now()` in seconds.
    """
    is_failure = lost.cause in (FailureCause.WORKER, FailureCause.PLATFORM)
    if lost.agent is None or not is_failure or lost.machine_returned or state.is_headless:
        return lost
    if view.groups[lost.token].role != "feed":
        return lost
    has_worked = now - state.feeding_since.get(lost.agent, now) >= MIN_WORK_S
    return replace(lost, is_unusable=not has_worked)


def request_feeders(view: View, state: LeaderState, now: float) -> Iterator[LeaderAction]:
    """Yield the request for one machine if the feeders are to have more than they have.

    Yields a `Wait` during the pause after failed machines, and the `FeedersStopped` after which
    none are requested, once too many have failed in a row and none is left. `now` is the leader's
    `Clock.now()` in seconds. A rule of `scheduler.next_action`.
    """
    # Without a round they would have nothing to do, and their quota may be that of the workers.
    if view.spec.feeders is None or view.round is None or view.feeders_stopped:
        return
    wanted, reason = feeder_count(view, state)
    staying = len(capacity.staying_nodes(view, state, "feed"))
    if wanted <= staying or not _may_rent(view, state, view.spec.feeders):
        return
    # Where one works, also with a preemption notice, the environment can be set up.
    is_working = any(one.feeder is not None for one in state.members.values())
    failure = None if is_working else _failure_reason(view)
    if failure is not None:
        # Others may still start, and one that has worked may only be disconnected.
        if not any(one.role == "feed" and one.active_nodes for one in view.groups.values()):
            yield AppendEvent(FeedersStopped(reason=failure))
        return
    request_at, refusals = float("-inf"), view.feeder_failures.refusals
    if "feed" in state.refused_at and refusals > 0:
        request_at = state.refused_at["feed"] + exponential_backoff_s(
            refusals - 1, shortest_s=_MIN_BACKOFF_S, longest_s=_MAX_BACKOFF_S
        )
    if now < request_at:
        yield Wait(request_at, f"a machine for feeders was refused or failed {refusals} times")
    else:
        yield RequestMachines(1, f"{format_count(wanted, 'machine')} for feeders: {reason}", "feed")


def release_feeders(view: View, state: LeaderState, now: float) -> Iterator[LeaderAction]:
    """Yield the release of a machine that the feeders are not to have any more.

    The newest one first, and all if the run has been without a round for five minutes, or has
    changed to another network. `now` is the leader's `Clock.now()` in seconds. A rule of
    `scheduler.next_action`; excludes the leader's own machine.
    """
    own = state.members.get(state.agent_id)
    candidates = [
        token
        for token, group in view.groups.items()
        if group.role == "feed" and group.handle is not None and group.active_nodes
        if own is None or token != own.member.token
    ]
    if not candidates or state.is_headless:
        return
    idle_until = state.phase.since + _IDLE_TIMEOUT_S if isinstance(state.phase, NoRound) else None
    is_idle = view.round is None and idle_until is not None and now >= idle_until
    left = [one for one in candidates if view.stands_by(one)]
    surplus = len(capacity.staying_nodes(view, state, "feed")) - feeder_count(view, state).nodes
    if left or is_idle:
        tokens = left or candidates
        yield ReleaseGroups(tokens[0], tuple(tokens[1:]))
    elif surplus > 0:
        yield ReleaseGroups(max(candidates, key=lambda one: view.groups[one].planned_slot))
    elif view.round is None and idle_until is not None:
        yield Wait(idle_until, "no round is open, so feeders have nothing to do")


def _may_rent(view: View, state: LeaderState, feeders: FeederSpec) -> bool:
    """Whether their backend has machines in the network of the workers, and the budget suffices."""
    # A run whose workers have one machine may not know its network by name.
    if feeders.networks and view.network and view.network not in feeders.networks:
        return False
    # A price that is unknown at the start is one without a budget.
    return cost_budget.affords_price(view, state, feeders.usd_per_hour or 0.0)


def _failure_reason(view: View) -> str | None:
    """Why no further machines should be requested: too many have failed in a row; else None."""
    failures = view.feeder_failures
    if failures.failed_starts > retry_budget.failed_start_limit(view):
        text = f"{format_count(failures.failed_starts, 'machine')} in a row could not start feeders"
    elif failures.boot_failures > capacity.MAX_BOOT_FAILURES_PER_NODE:
        text = f"{failures.boot_failures} machines in a row ended before their agents joined"
    else:
        return None
    assert failures.last is not None
    return f"{text}, the last is {failures.last.token}/{failures.last.node}: {failures.last.reason}"


def _is_training_over(view: View) -> bool:
    return (
        view.pending_fit_end is not None
        or view.cancel_reason is not None
        or retry_budget.fit_ended_by_budget(view) is not None
    )
