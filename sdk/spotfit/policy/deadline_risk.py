"""What users must know of a deadline: that it cannot be met, or that it cannot be planned. Pure.

    risk          | when it is recorded
    --------------|--------------------------------------------------------------------------
    "no_progress" | checkpoints of the fit are committed, and none contains a progress
    "late"        | the training that is left takes longer than the time to the deadline, even
                  | if all workers train from now on, or the deadline has passed

A start of machines is not counted: its duration is an estimate, and nothing that can still be met
is reported. Each is recorded once in a fit (`DeadlineAtRisk`), so that a new leader does not repeat
it.
"""

from __future__ import annotations

from spotfit.core.units import format_count, format_seconds
from spotfit.model.events import DeadlineAtRisk
from spotfit.model.leader_state import LeaderState
from spotfit.model.view import View
from spotfit.policy.training_time import least_work_left_s


def find_deadline_risk(view: View, state: LeaderState, now: float) -> DeadlineAtRisk | None:
    """Return a risk that is not recorded yet; None if there is none, and without a deadline.

    `now` is the leader's `Clock.now()` in seconds; `state.wall_ms` is of the same moment.
    """
    if view.spec.cost.deadline_ms is None:
        return None
    recorded = view.market.deadline_risks
    if "no_progress" not in recorded and has_unknown_progress(view):
        return _without_progress(view)
    if "late" in recorded or state.wall_ms is None:
        return None
    # Without a progress the whole training counts as left: that shows nothing.
    work_s = 0.0 if has_unknown_progress(view) else least_work_left_s(view, state, now)
    time_left_s = (view.spec.cost.deadline_ms - state.wall_ms) / 1000
    return _late(work_s, time_left_s) if time_left_s < work_s or time_left_s < 0 else None


def has_unknown_progress(view: View) -> bool:
    """Return whether the fit has committed checkpoints, none of which contains a progress."""
    own = [one for one in view.checkpoints if one.round >= view.first_round]
    return bool(own) and all(one.progress is None for one in own)


def _without_progress(view: View) -> DeadlineAtRisk:
    effect = "the training time that is left is unknown"
    if view.spec.cost.training_time_s is not None:
        effect = f"all {format_seconds(view.spec.cost.training_time_s)} of it count as left"
    checkpoints = format_count(len(view.checkpoints), "checkpoint")
    return DeadlineAtRisk(
        risk="no_progress",
        reason=f"the deadline cannot be planned: no progress is reported with {checkpoints}, so "
        f"that {effect}",
        remedy="Pass progress= to report(), or total_steps= to the Checkpointer.",
    )


def _late(work_s: float, time_left_s: float) -> DeadlineAtRisk:
    left = f"at least {format_seconds(work_s)} of training are left with all workers"
    if time_left_s < 0:
        text = f"the deadline has passed; {left if work_s else 'the training has not ended'}"
    else:
        text = f"the deadline cannot be met: {left}, and {format_seconds(time_left_s)} of time"
    remedy = "The training continues. Cancel it and use more workers if it must end earlier."
    return DeadlineAtRisk(risk="late", reason=text, remedy=remedy)
