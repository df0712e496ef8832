"""`DeadlineStatus`: how far a run is from its deadline, for users."""

from __future__ import annotations

from dataclasses import dataclass

from spotfit.core.units import format_seconds
from spotfit.model.view import JournalView, View
from spotfit.policy.deadline_risk import has_unknown_progress
from spotfit.policy.training_time import work_left_at_s


@dataclass(frozen=True)
class DeadlineStatus:
    """How far the last `fit()` of a run is from its deadline."""

    at_ms: int
    """The deadline, in milliseconds since 1970 by the clock of the storage."""
    slack_s: float | None = None
    """Time in seconds that may pass without progress: negative if the deadline will be missed by
    that much, as far as is known. Of a training that has finished, the time from its end to the
    deadline. None if it is unknown, and of one that has failed or was cancelled."""
    is_final: bool = False
    """Whether the training has ended."""
    risks: tuple[str, ...] = ()
    """Why the leader has found that the deadline cannot be met, or cannot be planned."""


def deadline_status(view: JournalView, now_ms: int) -> DeadlineStatus | None:
    """Return how far the run is from its deadline at `now_ms`; None without one.

    `now_ms` is the present in milliseconds since 1970, approximately by the storage's clock.
    """
    if not isinstance(view, View) or view.spec.cost.deadline_ms is None:
        return None
    ended = view.fit_end or view.pending_fit_end
    return DeadlineStatus(
        at_ms=view.spec.cost.deadline_ms,
        slack_s=_active_slack_s(view, now_ms) if ended is None else _final_slack_s(view),
        is_final=ended is not None,
        risks=tuple(view.market.deadline_risks.values()),
    )


def _final_slack_s(view: View) -> float | None:
    ended, ended_at_ms = view.fit_end or view.pending_fit_end, view.market.training_ended_at_ms
    assert view.spec.cost.deadline_ms is not None
    if ended is None or ended.outcome != "finished" or ended_at_ms is None:
        return None
    return (view.spec.cost.deadline_ms - ended_at_ms) / 1000


def _active_slack_s(view: View, now_ms: int) -> float | None:
    work_s = None if has_unknown_progress(view) else work_left_at_s(view, now_ms)
    assert view.spec.cost.deadline_ms is not None
    return None if work_s is None else (view.spec.cost.deadline_ms - now_ms) / 1000 - work_s


def format_slack(status: DeadlineStatus) -> str:
    """Return "1.5 h of slack", "met 3.0 h early" or "missed by 19 s"; '' if it is unknown."""
    if status.slack_s is None:
        return ""
    duration = format_seconds(abs(status.slack_s))
    if not status.is_final:
        return f"{duration} late" if status.slack_s < 0 else f"{duration} of slack"
    return f"missed by {duration}" if status.slack_s < 0 else f"met {duration} early"
