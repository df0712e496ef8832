"""How long a run still trains, and how long its starts take, from its record. Pure."""

from __future__ import annotations

import math

from spotfit.model.leader_state import LeaderState, Training
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
    gap_s = max([*view.market.commit_gaps_s, *view.market.first_gaps_s], default=0.0)
    return view.spec.timing.lease_timeout_s + start_time_s(view) + gap_s


def complete_training_s(view: View) -> float | None:
    """Return the duration of the complete training with all workers; None if it is unknown.

    The slower one of the measured speed and the user's estimate.
    """
    estimate_s = view.spec.cost.training_time_s
    if estimate_s is not None and view.market.measured_share == 0:
        return estimate_s  # the first interval of a round contains the start of its function
    known = (view.market.complete_training_s, estimate_s)
    return max((one for one in known if one is not None), default=None)


def work_left_s(view: View, state: LeaderState, now: float) -> float | None:
    """Return the training time that is left with all workers; None if it is unknown."""
    complete_s = complete_training_s(view)
    if complete_s is None:
        return None
    left_s = complete_s * (1 - (view.market.progress or 0.0))
    phase, opened = state.phase, view.market.round
    if isinstance(phase, Training) and view.round_startup_s is not None and opened is not None:
        # What was trained since the last commit; a loss repeats it, which `changeover_s` contains.
        return max(0.0, left_s - max(0.0, now - phase.since - opened.committed_age_s))
    return left_s
