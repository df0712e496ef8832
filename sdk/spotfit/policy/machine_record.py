"""The record of machine-hours: what a process has observed of machines, and what of it is new.

`after_status` keeps the latest attempt of each machine as a backend reports it, and
`unrecorded_times` compares that with the record in the journal (`model.usage`). Backends that
report when they bill a machine give exact times; for others a start or an end lies between two
observations (docs/decisions/0059).

    state of a machine  | observation                          | next
    --------------------|--------------------------------------|------------------------------------
    waiting             | it runs, or has a start              | started, since the last observation
    started             | it is terminated, or waits again     | ended, since the last observation
    started, ended      | it runs, or has a later start        | started: the next attempt
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from msgspec.structs import replace

from spotfit.core.ids import Token
from spotfit.model.events import MachineTimes
from spotfit.model.group import NodeState, NodeStatus
from spotfit.model.usage import (
    GroupUsage,
    MachineUse,
    Usage,
    is_exact,
    is_later_attempt,
    is_other_start,
    is_timed,
)


class ObservedMachine(msgspec.Struct, frozen=True, kw_only=True):
    """What one process has observed of a machine. Times are milliseconds since 1970."""

    started_ms: tuple[int, int] | None = None
    """Bounds of the start of its latest attempt."""
    ended_ms: tuple[int, int] | None = None
    """Bounds of the end of that attempt."""
    previous_ended_ms: tuple[int, int] | None = None
    """Bounds of the end of the attempt before, if its end was not observed by itself."""
    waiting_ms: int | None = None
    """It was last observed not to run then."""
    running_ms: int = 0
    """It was last observed to run then."""
    attempt: int | None = None
    """`NodeStatus.attempt` of its latest attempt."""
    is_unbilled: bool = False
    """Whether the backend reports that it was never provided."""
    restarts: bool = False
    """Whether the backend may restart it by itself."""
    watched_from_ms: int = 0
    """When the process began to observe it; 0 if it has observed it since its request."""


def seen_in_record(use: MachineUse, *, restarts: bool, watched_from_ms: int) -> ObservedMachine:
    """Return what a process knows before its first observation of a machine: its record. Pure."""
    return ObservedMachine(
        started_ms=use.started_ms,
        attempt=use.attempt or None,
        restarts=restarts,
        watched_from_ms=watched_from_ms,
    )


def after_status(
    seen: ObservedMachine, status: NodeStatus, *, called_ms: int, now_ms: int, status_lag_s: float
) -> ObservedMachine:
    """Return what is known of a machine after the backend has reported `status`. Pure.

    The call was made at `called_ms` and was answered before `now_ms`, in ms since 1970. The report
    may be older by `status_lag_s`.
    """
    # What is reported as running or waiting was so before the call.
    as_of_ms = called_ms - round(status_lag_s * 1000)
    seen = _with_start(seen, status, now_ms)
    if status.ended_at_ms is not None:
        return replace(seen, ended_ms=(status.ended_at_ms, status.ended_at_ms))
    if status.state is NodeState.RUNNING:
        # It may be another attempt than before.
        is_unknown = seen.restarts and status.started_at_ms is None
        return seen if is_unknown else replace(seen, running_ms=max(seen.running_ms, as_of_ms))
    if seen.started_ms is None and status.state is NodeState.REFUSED:
        return replace(seen, is_unbilled=True)
    if status.state is NodeState.WAITING and status.started_at_ms is not None:
        return replace(seen, running_ms=max(seen.running_ms, as_of_ms))  # it boots
    if seen.ended_ms is None and (status.is_terminated or seen.started_ms is not None):
        seen = replace(seen, ended_ms=_bounds(seen.running_ms, now_ms))
    if status.state is NodeState.WAITING:
        seen = replace(seen, waiting_ms=max(seen.waiting_ms or 0, as_of_ms))
    return seen


def _with_start(seen: ObservedMachine, status: NodeStatus, now_ms: int) -> ObservedMachine:
    start_ms = status.started_at_ms
    if start_ms is not None:
        is_known = seen.started_ms is not None and is_exact(seen.started_ms)
        latest_ms = seen.started_ms[1] if seen.started_ms is not None else start_ms
        is_later = is_other_start(start_ms, latest_ms, seen.ended_ms)
        if is_known and not is_later:
            return seen
        started = _started(seen, (start_ms, start_ms), status.attempt)
        if is_later and seen.ended_ms is None:
            ended_ms = _bounds(max(seen.running_ms, latest_ms), start_ms)
            started = replace(started, previous_ended_ms=ended_ms)
        return started
    if status.state is NodeState.RUNNING and (seen.started_ms is None or seen.ended_ms is not None):
        # Not before the last attempt has ended.
        earliest = max(seen.waiting_ms or 0, seen.ended_ms[0] if seen.ended_ms else 0)
        started_ms = _bounds(earliest, now_ms)
        return _started(seen, started_ms, status.attempt)
    return seen


def _started(
    seen: ObservedMachine, started_ms: tuple[int, int], attempt: int | None
) -> ObservedMachine:
    return replace(
        seen,
        started_ms=started_ms,
        ended_ms=None,
        previous_ended_ms=None,
        running_ms=0,
        attempt=attempt,
        is_unbilled=False,
    )


def _bounds(earliest_ms: int, latest_ms: int) -> tuple[int, int]:
    # Equal bounds are a time that the backend has reported.
    return min(earliest_ms, latest_ms - 1), latest_ms


def unrecorded_times(
    usage: Usage, observed: Mapping[Token, Mapping[int, ObservedMachine]]
) -> dict[Token, tuple[MachineTimes, ...]]:
    """Return the starts and ends that were observed and that the record does not have. Pure.

    By group; without groups that are settled. `observed` is by group and node.
    """
    times: dict[Token, tuple[MachineTimes, ...]] = {}
    for token, machines in observed.items():
        group = usage.groups.get(token)
        if group is None:
            continue
        reports_starts = is_timed(usage, group)
        news = (
            _unrecorded(group, node, seen, reports_starts=reports_starts)
            for node, seen in machines.items()
            if node < len(group.machines)
        )
        if found := tuple(one for one in news if one is not None):
            times[token] = found
    return times


def _unrecorded(
    group: GroupUsage, node: int, seen: ObservedMachine, *, reports_starts: bool
) -> MachineTimes | None:
    use, started_ms, ended_ms = group.machines[node], seen.started_ms, seen.ended_ms
    if started_ms is not None and is_later_attempt(use, started_ms):
        previous = seen.previous_ended_ms if use.started_ms is not None else None
        # With the end of the attempt before, that of this one follows in another entry.
        return MachineTimes(
            node=node,
            started_ms=started_ms,
            ended_ms=previous or ended_ms,
            attempt=seen.attempt,
            unseen_until_ms=_unseen_until_ms(use, seen, started_ms[0]),
            may_be_restarted=seen.restarts and not is_exact(started_ms),
        )
    if use.started_ms is None:
        if started_ms is not None or use.is_unbilled:
            return None
        if use.ended_ms is not None:
            return None if reports_starts else _unseen(group, node, seen)
        if seen.is_unbilled or (ended_ms is not None and reports_starts):
            return MachineTimes(node=node, is_unbilled=True)
        return MachineTimes(node=node, ended_ms=ended_ms) if ended_ms is not None else None
    # Another process may have recorded a later attempt, which this one has not observed.
    is_of_attempt = ended_ms is not None and ended_ms[1] >= use.started_ms[0]
    exact_ms = started_ms if started_ms is not None and is_exact(started_ms) else None
    refined_ms = exact_ms if not is_exact(use.started_ms) else None
    if not is_of_attempt and refined_ms is None:
        return None
    own_end_ms = ended_ms if is_of_attempt else None
    return MachineTimes(node=node, started_ms=refined_ms, ended_ms=own_end_ms)


def _unseen_until_ms(use: MachineUse, seen: ObservedMachine, started_ms: int) -> int | None:
    """Until when the backend may have had attempts that no process has recorded."""
    if use.started_ms is not None or not seen.restarts:
        return None
    if seen.attempt is not None:
        return started_ms if seen.attempt > use.attempt + 1 else None
    # An attempt that starts and ends between two observations of one process is not considered.
    return min(seen.watched_from_ms, started_ms) if seen.watched_from_ms else None


def _unseen(group: GroupUsage, node: int, seen: ObservedMachine) -> MachineTimes | None:
    """The time without a process that observed a machine whose recorded attempts have ended."""
    use, until_ms = group.machines[node], seen.watched_from_ms
    is_over = use.is_lost or group.released_ms is not None
    if use.ended_ms is None or not seen.restarts or not until_ms or is_over:
        return None
    if seen.ended_ms is not None and seen.waiting_ms is None:
        # The first observation was its end, which came at the latest when the call returned.
        until_ms = seen.ended_ms[1]
    if until_ms <= max(use.ended_ms[1], use.waiting_ms):
        return None
    return MachineTimes(node=node, unseen_until_ms=until_ms)


def release_times(
    usage: Usage, token: Token, observed: Mapping[int, ObservedMachine]
) -> tuple[MachineTimes, ...]:
    """Return what the entry about the release of a group records of its machines. Pure.

    What is not recorded yet, and until when machines without a start are known to have waited.
    """
    group = usage.groups.get(token)
    if group is None:
        return ()
    times = unrecorded_times(usage, {token: observed}).get(token, ())
    started = {one.node for one in times}
    waiting = tuple(
        MachineTimes(node=node, waiting_ms=seen.waiting_ms)
        for node in group.billable_nodes
        if node not in started
        and group.machines[node].started_ms is None
        and (seen := observed.get(node)) is not None
        and seen.waiting_ms is not None
        and not (seen.restarts and seen.watched_from_ms)
    )
    return times + waiting
