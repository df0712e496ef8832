"""The checkpoint interval: when rank 0 requests the next save during training.

`decide_save` returns `SaveNow` or `SaveLater`, each with its reason. With `every="auto"` the
interval is the first-order optimum of Young (1974) and Daly (2006), sqrt(2·c·m / (1 - r)), where

    c  training time lost per save: `SaveCostEstimate.cost_per_save_s`, measured in the run
    m  mean remaining lifetime of the group: `LifetimeEstimate.mean_remaining_s`, from losses
    r  share of announced ends: `LifetimeEstimate.announced_fraction`. Work is saved after a
       notice, so only the share 1 - r of the ends loses work.

bounded below by the commit time and by a limit on the time spent on saves (`max_overhead`, or 3.5 %
as long as no loss was observed). docs/guides/checkpoint_interval.md explains
how ranks agree on the step to save and compares the policy with an oracle on recorded spot markets;
docs/decisions/0027 and 0057 have the alternatives.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import msgspec

from spotfit.core.units import format_seconds
from spotfit.model.failure_model import (
    MAX_OVERHEAD_WITHOUT_LOSSES,
    FailureModel,
    SaveCostEstimate,
    SaveTrigger,
    age_bucket,
)

# The first save with "auto" is early, to measure the costs of a save, but after the first steps,
# which are slower than later ones (compilation, cold caches) and would distort the measurement.
FIRST_SAVE_S = 30.0

# Bounds of the interval between two checks, at which all ranks agree on whether to save. A check
# may find a preemption notice: 2 s are small against the shortest notices (Google Cloud: 30 s, AWS:
# 120 s).
MAX_CHECK_INTERVAL_S = 2.0
_MIN_CHECK_INTERVAL_S = 0.25

# Share of the training time that checks may take, as measured by rank 0. Where agents share the CPU
# cores with the training, the real costs were measured to be three times as high: 0.3 %.
_CHECK_TIME_FRACTION = 0.001

# Weights of the priors in `estimate_lifetime`, in numbers of observed ends: small, so that a few
# losses outweigh a wrong declaration of the backend, but > 0, so that the first loss does not
# change the interval completely. They were not tuned on the recorded markets.
_PRIOR_WEIGHT_ENDS = 1.0
_BUCKET_PRIOR_WEIGHT_ENDS = 2.0
_NOTICE_PRIOR_WEIGHT_ENDS = 2.0

# Backends that give notice do not announce every end: instances also crash or lose their host.
_PRIOR_ANNOUNCED_FRACTION = 0.9


class LifetimeEstimate(NamedTuple):
    """The expected end of a group."""

    mean_remaining_s: float
    """Mean remaining lifetime."""
    announced_fraction: float
    """Share of ends that are announced early enough to save."""
    has_losses: bool = True
    """Whether the estimate contains observed losses. Otherwise it is the backend's declaration."""


class SaveInterval(NamedTuple):
    """The time from the start of one save to the start of the next, with its reason."""

    interval_s: float
    reason: str


class TrainingProgress(msgspec.Struct, frozen=True):
    """The state of the training after a step, as rank 0 observes it.

    Times are seconds of the `Clock.now()` of rank 0's worker process; steps count from the start of
    the training.
    """

    now: float
    step: int
    last_save_at: float
    """When the last save of this round started, or else when its training started."""
    last_save_step: int
    """The step of the last save of this round, or else the step at which its training started."""
    saves_in_flight: int = 0
    """Number of saves that have started and are not committed."""
    has_free_slot: bool = True
    """Whether memory for another snapshot is free."""
    epoch_ended: bool = False
    """Whether an epoch has ended since the last save."""
    preemption_risk: str = ""
    """The reason of a preemption risk reported since the last save; '' if there was none."""


class SaveNow(NamedTuple):
    """Save at this step."""

    reason: str


class SaveLater(NamedTuple):
    """Do not save before `until`, unless another condition of the trigger is satisfied earlier.

    `until` is a time like `TrainingProgress.now`; that value itself means that the next check
    decides again, `math.inf` that no time interval is set.
    """

    until: float
    reason: str


def estimate_lifetime(
    failure_model: FailureModel, *, round_age_s: float, notice_save_s: float = 0.0
) -> LifetimeEstimate:
    """Estimate the remaining lifetime of a group whose round was opened `round_age_s` seconds ago.

    Called by rank 0 before each `decide_save`; `failure_model` is what was known when the round was
    opened. `notice_save_s` is the duration of a save after a notice: a backend with a shorter
    notice counts as one without notices.

    Lifetimes are modeled as piecewise exponential: a constant hazard rate per age bucket. Rates
    have conjugate gamma priors and the announced share has a beta prior; the posterior means are
    used. An age bucket's prior is the rate over all ages (a hierarchical model), whose prior is the
    backend's declaration. The age of the present group counts as censored exposure.
    """
    age_s = failure_model.group_age_s + round_age_s
    lifetimes = failure_model.lifetimes.with_observed(age_s)
    # A group ends with its first node. For independent nodes its lifetime is that of one node
    # divided by n; if all nodes of a zone are preempted together it is not divided at all. Recorded
    # markets lie between the two, hence the square root.
    prior_lifetime_s = failure_model.market_prior.mean_lifetime_s / math.sqrt(
        failure_model.num_nodes
    )
    # Mean of Gamma(shape = ends, rate = exposure); a prior of weight w is w ends in w lifetimes.
    overall_rate = (_PRIOR_WEIGHT_ENDS + lifetimes.total_count) / (
        _PRIOR_WEIGHT_ENDS * prior_lifetime_s + sum(lifetimes.observed_s)
    )
    bucket = age_bucket(age_s)
    rate = (_BUCKET_PRIOR_WEIGHT_ENDS + lifetimes.end_counts[bucket]) / (
        _BUCKET_PRIOR_WEIGHT_ENDS / overall_rate + lifetimes.observed_s[bucket]
    )
    notice_suffices = failure_model.market_prior.notice_s > notice_save_s
    prior_announced = (
        _NOTICE_PRIOR_WEIGHT_ENDS * _PRIOR_ANNOUNCED_FRACTION if notice_suffices else 0.0
    )
    # An end before the training had started could not be saved, however early it was announced.
    announced_fraction = (prior_announced + lifetimes.announced_count) / (
        _NOTICE_PRIOR_WEIGHT_ENDS + lifetimes.total_count - lifetimes.untrained_count
    )
    return LifetimeEstimate(1 / rate, announced_fraction, has_losses=lifetimes.total_count > 0)


def optimal_interval(
    costs: SaveCostEstimate, lifetime: LifetimeEstimate, *, max_overhead: float | None
) -> SaveInterval:
    """Return the interval between saves that minimizes the training time lost to saves and losses.

    Over an interval T a save costs c (`cost_per_save_s`), and an unannounced end loses T/2 on
    average. The rate of such ends is (1 - r) / m: r is `announced_fraction`, m `mean_remaining_s`.
    c/T + (1 - r)·T/(2·m) is minimal at T = sqrt(2·c·m / (1 - r)), the Young/Daly formula. The
    interval is longer if saves would overlap, or exceed the share `max_overhead` of the training
    time. At None that share is limited only as long as no loss was observed: the optimum limits it
    to the share that it saves of the work lost, but the declaration that it is based on until then
    may be wrong.
    """
    # Without the lower bound the interval would be infinite if every end so far was announced.
    unannounced_fraction = max(1e-6, 1 - lifetime.announced_fraction)
    optimum_s = math.sqrt(
        2 * costs.cost_per_save_s * lifetime.mean_remaining_s / unannounced_fraction
    )
    largest_share, limit_reason = _overhead_limit(lifetime, max_overhead)
    overhead_limit_s = costs.cost_per_save_s / largest_share
    reason = (
        f"a save costs {format_seconds(costs.cost_per_save_s)} "
        f"({format_seconds(costs.stall_s)} stall, {costs.slowdown_fraction:.0%} slower for "
        f"{format_seconds(costs.commit_s)}); "
        f"the group is lost every {format_seconds(lifetime.mean_remaining_s)}"
    )
    if lifetime.announced_fraction:
        reason += f", {lifetime.announced_fraction:.0%} of losses are announced in time"
    if overhead_limit_s > max(optimum_s, costs.commit_s):
        return SaveInterval(overhead_limit_s, f"{reason}; {limit_reason}")
    # Overlapping saves would share the bandwidth: each commit came later, and nothing was gained.
    if optimum_s <= costs.stall_s + costs.commit_s:
        reason = f"{reason}; the next save starts when the last is committed"
        return SaveInterval(costs.stall_s + costs.commit_s, reason)
    return SaveInterval(optimum_s, reason)


def _overhead_limit(lifetime: LifetimeEstimate, max_overhead: float | None) -> tuple[float, str]:
    """The largest share of the training time for saves, and the reason of a longer interval."""
    if max_overhead is not None:
        return max_overhead, f"more frequent saves would exceed max_overhead={max_overhead:.1%}"
    if lifetime.has_losses:
        return math.inf, ""
    share = MAX_OVERHEAD_WITHOUT_LOSSES
    return share, f"no loss was observed, so saves take at most {share:.1%} of the time"


def decide_save(
    trigger: SaveTrigger,
    progress: TrainingProgress,
    *,
    costs: SaveCostEstimate | None,
    lifetime: LifetimeEstimate | None,
) -> SaveNow | SaveLater:
    """Decide whether rank 0 requests a save after the step in `progress`. Pure.

    `costs` is None until the first save was measured; `lifetime` may be None unless `trigger.auto`.
    A saved step is not saved again, and no save starts without memory for its snapshot. A reported
    preemption risk triggers one save with every trigger, when no save is in flight and the unsaved
    work is worth its cost. Preemption notices are handled by
    `policy.preemption.decide_final_save`.
    """
    if progress.step <= progress.last_save_step:
        return SaveLater(progress.now, "no step was completed since the last save")
    # Most machines with a reported risk are not preempted, so a save must be worth its costs. It
    # is taken once per risk, with every trigger.
    unsaved_work_s = progress.now - progress.last_save_at
    is_worth_it = costs is None or unsaved_work_s >= costs.cost_per_save_s
    decision: SaveNow | SaveLater
    if progress.preemption_risk and not progress.saves_in_flight and is_worth_it:
        decision = SaveNow(f"elevated preemption risk: {progress.preemption_risk}")
    else:
        decision = _decide_by_trigger(trigger, progress, costs=costs, lifetime=lifetime)
    if isinstance(decision, SaveNow) and not progress.has_free_slot:
        return SaveLater(
            progress.now,
            f"{progress.saves_in_flight} saves are in flight and use all snapshot memory",
        )
    return decision


def _decide_by_trigger(
    trigger: SaveTrigger,
    progress: TrainingProgress,
    *,
    costs: SaveCostEstimate | None,
    lifetime: LifetimeEstimate | None,
) -> SaveNow | SaveLater:
    steps = progress.step - progress.last_save_step
    if trigger.epochs and progress.epoch_ended:
        return SaveNow("an epoch has ended")
    if trigger.every_steps is not None and steps >= trigger.every_steps:
        return SaveNow(format_steps_since_save(steps))
    if trigger.every_s is not None:
        return _decide_after_interval(progress, SaveInterval(trigger.every_s, "set by the user"))
    if not trigger.auto:
        return SaveLater(math.inf, "no time interval is set")
    if progress.saves_in_flight:
        return SaveLater(progress.now, "the last save is still in flight")
    if costs is None or lifetime is None:
        first = SaveInterval(FIRST_SAVE_S, "the first save, which measures the costs of a save")
        return _decide_after_interval(progress, first)
    interval = optimal_interval(costs, lifetime, max_overhead=trigger.max_overhead)
    return _decide_after_interval(progress, interval)


def _decide_after_interval(
    progress: TrainingProgress, interval: SaveInterval
) -> SaveNow | SaveLater:
    due_at = progress.last_save_at + interval.interval_s
    reason = f"every {format_seconds(interval.interval_s)}: {interval.reason}"
    return SaveNow(reason) if progress.now >= due_at else SaveLater(due_at, reason)


def check_interval_s(check_s: float) -> float:
    """Return the seconds between two checks, at which all ranks agree on whether to save.

    `check_s` is the measured duration of one check in seconds. Checks take at most 0.1 % of the
    time, within the limits of 0.25 and `MAX_CHECK_INTERVAL_S` (2) seconds.
    """
    return min(MAX_CHECK_INTERVAL_S, max(_MIN_CHECK_INTERVAL_S, check_s / _CHECK_TIME_FRACTION))


def steps_until_check(steps_done: int, elapsed_s: float, *, within_s: float) -> int:
    """Return the number of steps until a check that is due in `within_s` seconds; at least 1.

    The last `steps_done` steps took `elapsed_s` seconds. The result exceeds `steps_done` by at most
    half (or one step), so that a slow phase does not delay the check too long.
    """
    steps = within_s * steps_done / elapsed_s if elapsed_s > 0 else math.inf
    # Grow by at most 1.5x per check: after a slow phase (evaluation, data stall) the measured speed
    # is not representative, and an overestimate would delay the check past a preemption deadline.
    return max(1, int(min(steps, max(steps_done + 1, 1.5 * steps_done))))


def format_steps_since_save(steps_done: int) -> str:
    """Return the reason of a save that is due after a number of steps.

    For 500: "500 steps since the last save".
    """
    return f"{steps_done} step{'' if steps_done == 1 else 's'} since the last save"
