"""How many spot and on-demand machines an elastic run with a deadline has. Pure.

Such a run trains with fewer machines while spot is scarce, which spends slack instead of money. The
slack σ is the time to the deadline minus the training time that is left with all machines.

    slack                        | spot machines             | on-demand machines
    -----------------------------|---------------------------|-------------------------------------
    σ > safety + losses          | all that are granted, if  | none
                                 | they suffice for training |
    safety < σ ≤ safety + losses | those that run; the whole | the rest; replaced by the whole
                                 | group, if it is granted   | group of spot machines
    d ≤ σ ≤ safety               | all, if they all train    | else all
    0 ≤ σ < d                    | none                      | all, until the end

d is the changeover time: until on-demand machines train after a loss. `safety` adds the pauses of a
loss and of a growth to it, `losses` the slack that the losses to come are expected to spend. With
little slack the run is a group of fixed size: every machine more interrupts the others when it is
lost, and replacing on-demand machines one by one would spend the slack that is left. A complete
group that trains keeps its slack, so that it stays until d is left.

The deadline is kept if on-demand machines arrive within d and are not lost. docs/decisions/0058 and
0063 have the figures; `benchmarks/cost.py` measures it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from spotfit.core.units import format_count, format_seconds
from spotfit.policy.deadline import DeadlineState

# Mean share of the machines that are lost together, in recordings of 6 to 16 machines per zone.
_LOST_SHARE = 0.4


@dataclass(frozen=True, slots=True, kw_only=True)
class ElasticState(DeadlineState):
    """What the numbers of machines depend on. Times are in seconds.

    `work_left_s` is the training time that is left with `max_machines`, including a pause that is
    in progress. The work that a loss repeats may be in `changeover_s` or in `loss_pause_s`.
    """

    max_machines: int
    min_machines: int = 1
    """Fewer machines train nothing."""
    spot_machines: int
    """Spot machines that run or start."""
    spot_available: int
    """Spot machines that run, start or would be granted."""
    spot_training: int = 0
    """Spot machines that train."""
    on_demand_machines: int
    """On-demand machines that run or start."""
    is_return_requested: bool = False
    """Whether a whole group of spot machines is requested to replace them."""
    loss_pause_s: float
    """Time that a loss costs the whole group: restart and repeated work."""
    growth_pause_s: float
    """Time that additional machines cost the whole group."""
    losses_per_hour: float
    """How often losses have interrupted the group while it had spot machines."""

    @property
    def safety_s(self) -> float:
        """The slack with which an incomplete group may still have spot machines."""
        pauses_s = self.loss_pause_s + self.growth_pause_s
        return self.changeover_s + pauses_s + 2 * self.look_s

    @property
    def may_return(self) -> bool:
        """Whether the slack suffices to replace on-demand machines by a whole group of spot ones,
        with the losses that are expected until the deadline."""
        kept_s = self.loss_s * self.changes_left
        # The slack is measured at commits: it varies by what a loss repeats.
        margin_s = self.loss_pause_s if self.is_return_requested else 0.0
        return self.slack_s > self.safety_s + max(0.0, kept_s - margin_s)

    @property
    def loss_s(self) -> float:
        """The slack that the loss of a machine spends, on average.

        The whole group pauses, then it is smaller until others have started.
        """
        return self.loss_pause_s + _LOST_SHARE * self.changeover_s


class GroupSizes(NamedTuple):
    """Numbers of machines that the run should have."""

    spot: int
    on_demand: int
    reason: str


def choose_group_sizes(state: ElasticState) -> GroupSizes:
    """Return how many machines of each market the run should have now.

    Machines that are to be released stay until those that replace them train.
    """
    size = state.max_machines
    slack = f"{format_seconds(max(0.0, state.slack_s))} of slack"
    if state.slack_s <= state.safety_s:
        # As for a group of fixed size; on-demand machines after the end would be of no use.
        is_needed = 0 <= state.slack_s < state.changeover_s < state.work_left_s
        if state.spot_training >= size and not is_needed:
            return GroupSizes(size, 0, f"{slack}: all spot machines train")
        return GroupSizes(0, size, f"{slack}: on-demand machines until the end")
    kept_s = state.safety_s + state.loss_s * state.losses_per_hour * state.time_left_s / 3600
    is_short = state.slack_s <= kept_s
    granted = min(state.spot_available, size)
    if not is_short and not state.on_demand_machines:
        if granted < state.min_machines:
            few = f"{granted} of at least {state.min_machines} machines are granted on spot"
            return GroupSizes(0, 0, f"{slack}: waiting, {few}")
        return GroupSizes(granted, 0, f"{slack}: {format_count(granted, 'spot machine')} suffice")
    if granted > state.spot_machines and (granted < size or not state.may_return):
        granted = state.spot_machines
    missing = size - granted
    # On-demand machines that run are not released for slack: starting them again costs more.
    on_demand = missing if is_short else min(state.on_demand_machines, missing)
    reason = f"{slack}, {format_seconds(kept_s)} are kept for losses to come"
    return GroupSizes(granted, on_demand, reason)
