"""How long a run still trains, and how long its starts take, from its record. Pure."""

from __future__ import annotations

import math

from spotfit.model.leader_state import LeaderState, Training
from spotfit.model.market_record import MarketRecord
from spotfit.model.view import View

# Of the measured starts, all but the slowest one of ten.
_START_QUANTILE = 0.9


def start_time_s(view: View) -> float:
    """Return how long it takes from a request for machines to the first step, in seconds."""
    durations_s = sorted(view.market.start_durations_s)
    if not durations_s:
        return view.spec.cost.start_time_s
    return durations_s[math.ceil(_START_QUANTILE * len(durations_s)) - 1]


def changeover_s(view: View) -> float:
    """Return the time from a loss to new progress on other machines, in seconds.

    Detection of the loss, the start of other machines, and the work that is repeated.
    """
    return view.spec.timing.lease_timeout_s + start_time_s(view) + repeated_work_s(view)


def repeated_work_s(view: View) -> float:
    """Return how much training a loss repeats at most, in seconds: the longest measured gap."""
    return max([*view.market.commit_gaps_s, *view.market.first_gaps_s], default=0.0)


def restart_s(view: View) -> float:
    """Return how long a round takes from its opening to the first step, in seconds.

    The longest of the last ones; 0 before the first round, when nothing can be interrupted.
    """
    return max(view.market.startups_s, default=0.0)


def complete_training_s(view: View) -> float | None:
    """Return the duration of the complete training with all workers; None if it is unknown."""
    estimate_s = view.spec.cost.training_time_s
    return estimated_training_s(view.market, view.spec.max_workers, estimate_s=estimate_s)


def estimated_training_s(
    record: MarketRecord, workers: int, *, estimate_s: float | None
) -> float | None:
    """Return the duration of the complete training with that many workers; None if it is unknown.

    The slower one of the measured speed and `estimate_s` of the user. The speed of n workers is
    taken to be n times that of one at most, and more workers not to be slower: other numbers of
    workers give a lower and an upper bound. The upper one counts without an estimate, the lower one
    with it.
    """
    exact = record.speeds.get(workers)
    if exact is None and estimate_s is None:
        # The first interval of a round contains the start of its function.
        exact = record.first_speeds.get(workers)
    if exact is not None:
        return max(exact.complete_s, estimate_s or 0.0)
    others = record.speeds or ({} if estimate_s is not None else record.first_speeds)
    if estimate_s is not None:
        lower = (one.complete_s * min(1.0, n / workers) for n, one in others.items())
        return max(estimate_s, *lower, 0.0)
    upper = (one.complete_s * max(1.0, n / workers) for n, one in others.items())
    return min(upper, default=None)


def work_left_s(view: View, state: LeaderState, now: float) -> float | None:
    """Return the training time that is left with all workers; None if it is unknown.

    What a smaller group has trained since the last commit counts by its number of workers.
    """
    return _left_of_s(view, complete_training_s(view), _uncommitted_s(view, state, now))


def least_work_left_s(view: View, state: LeaderState, now: float) -> float:
    """Return the least training time that is left with all workers, as far as it is known.

    As `work_left_s`, but from speeds that were measured without the start of a round, and as if
    other numbers of workers said nothing but how fast all of them are at most.
    """
    estimate_s = view.spec.cost.training_time_s or 0.0
    least_s = estimated_training_s(view.market, view.spec.max_workers, estimate_s=estimate_s)
    return _left_of_s(view, least_s, _uncommitted_s(view, state, now)) or 0.0


def work_left_at_s(view: View, wall_ms: int) -> float | None:
    """Return `work_left_s` for a process that does not lead, for display.

    `wall_ms` is the present in ms since 1970 by the storage's clock, or about that.
    """
    opened, uncommitted_s = view.market.round, 0.0
    if opened is not None and opened.committed_at_ms is not None:
        uncommitted_s = (wall_ms - opened.committed_at_ms) / 1000
    return _left_of_s(view, complete_training_s(view), uncommitted_s)


def _uncommitted_s(view: View, state: LeaderState, now: float) -> float:
    """How long the open round has trained since its last commit."""
    phase, opened = state.phase, view.market.round
    if not isinstance(phase, Training) or opened is None:
        return 0.0
    return now - phase.since - opened.committed_age_s


def _left_of_s(view: View, complete_s: float | None, uncommitted_s: float) -> float | None:
    if complete_s is None:
        return None
    left_s = complete_s * (1 - (view.market.progress or 0.0))
    opened = view.market.round
    if view.round_startup_s is None or opened is None:
        return left_s
    # What was trained since the last commit; a loss repeats it, which `changeover_s` contains.
    share = min(1.0, opened.workers / view.spec.max_workers)
    return max(0.0, left_s - max(0.0, uncommitted_s) * share)
