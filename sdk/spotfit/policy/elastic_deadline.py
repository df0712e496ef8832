"""How many spot and on-demand machines an elastic run with a deadline has. Pure.

Such a run trains with fewer machines while spot is scarce, which spends slack instead of money. The
slack σ is the time to the deadline minus the training time that is left with all machines.

    slack                        | spot machines             | on-demand machines
    -----------------------------|---------------------------|-------------------------------------
    σ > safety + losses          | all that are granted      | none
    safety < σ ≤ safety + losses | those that run; the whole | the rest; replaced by the whole
                                 | group, if it is granted   | group of spot machines
    σ ≤ safety                   | none                      | all, until the end

`safety` is the time until on-demand machines train after a loss, `losses` the slack that the losses
to come are expected to spend. With little slack the run is a group of fixed size: every machine
more interrupts the others when it is lost, and replacing on-demand machines one by one would spend
the slack that is left.

The last row keeps the deadline if on-demand machines arrive within the changeover time and are not
lost. docs/decisions/0058 has the figures; `benchmarks/cost.py` measures it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from spotfit.core.units import format_count, format_seconds
from spotfit.policy.deadline import DeadlineState


@dataclass(frozen=True, slots=True, kw_only=True)
class ElasticState(DeadlineState):
    """What the numbers of machines depend on. Times are in seconds.

    `work_left_s` is the training time that is left with `max_machines`, including a pause that is
    in progress; `changeover_s` does not include the repeated work, which `loss_pause_s` does.
    """

    max_machines: int
    spot_machines: int
    """Spot machines that run or start."""
    spot_available: int
    """Spot machines that run, start or would be granted."""
    on_demand_machines: int
    """On-demand machines that run or start."""
    loss_pause_s: float
    """Time that a loss costs the whole group: restart and repeated work."""
    growth_pause_s: float
    """Time that additional machines cost the whole group."""
    losses_per_hour: float
    """How often losses have interrupted the group while it had spot machines."""


class GroupSizes(NamedTuple):
    """Numbers of machines that the run should have."""

    spot: int
    on_demand: int
    reason: str


def choose_group_sizes(state: ElasticState) -> GroupSizes:
    """Return how many machines of each market the run should have now.

    Machines that are to be released stay until those that replace them train.
    """
    safety_s = state.changeover_s + state.loss_pause_s + state.growth_pause_s + 2 * state.look_s
    slack = f"{format_seconds(max(0.0, state.slack_s))} of slack"
    if state.slack_s <= safety_s:
        return GroupSizes(0, state.max_machines, f"{slack}: on-demand machines until the end")
    loss_s = state.loss_pause_s + state.changeover_s
    kept_s = safety_s + loss_s * state.losses_per_hour * state.time_left_s / 3600
    is_short = state.slack_s <= kept_s
    granted = min(state.spot_available, state.max_machines)
    if not is_short and not state.on_demand_machines:
        return GroupSizes(granted, 0, f"{slack}: {format_count(granted, 'spot machine')} suffice")
    if granted > state.spot_machines:
        may_return = state.slack_s > safety_s + loss_s * state.changes_left
        if granted < state.max_machines or not may_return:
            granted = state.spot_machines
    missing = state.max_machines - granted
    # On-demand machines that run are not released for slack: starting them again costs more.
    on_demand = missing if is_short else min(state.on_demand_machines, missing)
    reason = f"{slack}, {format_seconds(kept_s)} are kept for losses to come"
    return GroupSizes(granted, on_demand, reason)
