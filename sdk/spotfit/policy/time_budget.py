"""The time budget of a fit: when it is cancelled, and the later limits of agents and backends.

after the budget  | what ends the run
------------------|-----------------------------------------------------------------------
0 s               | the leader: a `Checkpointer` saves, then the fit ends as after a cancel
`AGENT_MARGIN_S`  | every agent exits by itself, if no leader has ended the fit
`BACKEND_…`       | the backend ends the machines, if their agents do not respond
"""

from __future__ import annotations

from spotfit.core.units import format_seconds
from spotfit.model.events import CancelRequested, FitEnded
from spotfit.model.leader_state import LeaderState
from spotfit.model.view import View
from spotfit.policy.actions import Wait

# A cancelled run waits up to 12 minutes for its last save (`scheduler._CANCEL_UPLOAD_S` and
# `_CANCEL_SAVE_S`), then releases its machines within two.
AGENT_MARGIN_S = 1200.0
BACKEND_TIME_LIMIT_MARGIN_S = 1800.0


def end_of_time_budget(
    view: View, state: LeaderState, now: float
) -> CancelRequested | FitEnded | Wait | None:
    """Return the event that ends a fit whose time budget is used up, or a `Wait` until then. Pure.

    None without a budget, and once the run is cancelled. A training that has ended keeps its
    result; its pending validations are left to the next fit. `now` is the leader's `Clock.now()` in
    seconds.
    """
    budget_s = view.spec.time_budget_s
    if budget_s is None or view.cancel_reason is not None:
        return None
    if state.elapsed_s < budget_s:
        return Wait(now + budget_s - state.elapsed_s, "the time budget of the run")
    if view.pending_fit_end is not None:
        return view.pending_fit_end
    reason = f"the time budget of {format_seconds(budget_s)} is used up"
    return CancelRequested(reason=reason, save=True, is_time_budget=True)


def is_overdue(view: View, elapsed_s: float) -> bool:
    """Whether an agent must exit by itself: no leader has ended the fit in time."""
    budget_s = view.spec.time_budget_s
    return budget_s is not None and view.fit_end is None and elapsed_s >= budget_s + AGENT_MARGIN_S
