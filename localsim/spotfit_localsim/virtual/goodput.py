"""Goodput on a recorded spot market: the fraction of time that becomes committed training progress.

Virtual time with the production policies: `policy.checkpoint_interval` decides when to save,
`policy.preemption` what to save after a notice. Save costs are given instead of measured. The whole
group is lost with its first machine and restores from the bucket; restores from memory are not
modelled.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from dataclasses import replace as with_

from msgspec.structs import replace

from spotfit.model.failure_model import (
    AGE_BUCKET_EDGES_S,
    FailureModel,
    SaveCostEstimate,
    SaveTrigger,
    age_bucket,
)
from spotfit.policy.checkpoint_interval import (
    SaveNow,
    TrainingProgress,
    decide_save,
    estimate_lifetime,
)
from spotfit.policy.preemption import (
    ContinueTraining,
    FinalSave,
    PreDeadlineState,
    decide_final_save,
)
from spotfit_localsim.random_streams import RandomStream
from spotfit_localsim.traces import CapacityTrace


@dataclass(frozen=True, slots=True)
class GroupLifetime:
    """A period with all machines of the group, until the first preemption."""

    duration_s: float
    has_notice: bool = False


@dataclass(frozen=True, slots=True)
class GoodputConfig:
    """Durations and costs."""

    costs: SaveCostEstimate = field(
        default=SaveCostEstimate(stall_s=0.5, slowdown_fraction=0.3, commit_s=20.0)
    )
    recovery_s: float = 60.0
    """Time from the machines being up to the first new step."""
    final_upload_s: float = 10.0
    """Duration of the final upload, with the full bandwidth of the machine."""
    step_s: float = 0.5
    notice_s: float = 120.0
    noticed_fraction: float = 0.0
    """The fraction of preemptions announced `notice_s` before."""


def group_lifetimes(
    trace: CapacityTrace, machines: int, *, noticed_fraction: float = 0.0, stream: RandomStream
) -> tuple[GroupLifetime, ...]:
    """Return the periods with at least `machines` machines; each change at a random time within its
    sampling interval. A period that lasts to the end of the trace is left out.
    """
    started_at: float | None = None
    lifetimes: list[GroupLifetime] = []
    for recorded_at_s, count in trace.points:
        # The change happened at some time within the sampling interval before its record.
        at_s = max(0.0, recorded_at_s - trace.sampling_interval_s * stream.random())
        if count >= machines and started_at is None:
            started_at = at_s
        elif count < machines and started_at is not None:
            lifetimes.append(
                GroupLifetime(at_s - started_at, has_notice=stream.bernoulli(noticed_fraction))
            )
            started_at = None
    # Random times may swap two changes within one interval.
    return tuple(lifetime for lifetime in lifetimes if lifetime.duration_s > 0)


class GroupSimulation:
    """One lifetime of a group; work is measured in seconds of undisturbed training."""

    def __init__(self, lifetime: GroupLifetime, config: GoodputConfig) -> None:
        self.lifetime = lifetime
        self.config = config
        self.now = config.recovery_s
        self.work_s = 0.0
        self.saved_at = self.now
        self.saved_work_s = 0.0
        self.committed_work_s = 0.0
        """Work in a committed checkpoint."""
        self.commit_due_at: float | None = None
        """When the save in flight is committed; None without one."""
        self.was_noticed = False
        """Whether a preemption notice was received."""
        self.is_saved_after_notice = False
        """Whether a save was committed after the notice."""

    def train(self, until: float) -> None:
        """Train until `until`, committing the save in flight when it is due."""
        until = min(until, self.lifetime.duration_s)
        if self.commit_due_at is not None and self.commit_due_at <= until:
            self._advance_until(self.commit_due_at)
            self.committed_work_s, self.commit_due_at = self.saved_work_s, None
            self.is_saved_after_notice = self.was_noticed
        self._advance_until(until)

    def save(self, upload_s: float) -> None:
        """Stop for a snapshot; it is committed `upload_s` later, after the save in flight."""
        self.saved_at, self.saved_work_s = self.now, self.work_s
        self.now = min(self.now + self.config.costs.stall_s, self.lifetime.duration_s)
        # Uploads are serialized: this one starts after the one in flight.
        self.commit_due_at = max(self.now, self.commit_due_at or 0.0) + upload_s

    def repeat_save(self, interval_s: float, times: int) -> None:
        """Continue, directly after a save, as if it were followed by `times` more at an interval.

        Same result as `train` and `save` in turns, for an interval in which a save is committed.
        """
        costs = self.config.costs
        trained_s = interval_s - costs.stall_s - costs.slowdown_fraction * costs.commit_s
        self.committed_work_s = self.saved_work_s + (times - 1) * trained_s
        self.work_s = self.saved_work_s = self.saved_work_s + times * trained_s
        self.saved_at += times * interval_s
        self.now = self.saved_at + costs.stall_s
        self.commit_due_at = self.now + costs.commit_s

    def _advance_until(self, until: float) -> None:
        lasts_s = max(0.0, until - self.now)
        # The upload competes with the training for network and CPU.
        slowed = self.config.costs.slowdown_fraction if self.commit_due_at is not None else 0.0
        self.work_s += lasts_s * (1 - slowed)
        self.now += lasts_s


SavePolicy = Callable[[GroupSimulation, float], None]
"""Trains the group until a time, saving as it decides."""


def fixed_interval(interval_s: float) -> SavePolicy:
    """Save at a fixed interval, but not before the last save is committed."""
    return interval_by_age((interval_s,) * (len(AGE_BUCKET_EDGES_S) + 1))


def interval_by_age(intervals_s: Sequence[float]) -> SavePolicy:
    """Save at an interval that depends on the age of the group at the last save."""

    def policy(group: GroupSimulation, until: float) -> None:
        costs = group.config.costs
        # A save that starts before the last one is committed would only wait for it.
        shortest_s = costs.stall_s + costs.commit_s
        edges_s = (*AGE_BUCKET_EDGES_S, math.inf)
        while True:
            bucket = age_bucket(group.saved_at)
            interval_s = max(intervals_s[bucket], shortest_s)
            if group.saved_at + interval_s >= until:
                return group.train(until)
            group.train(group.saved_at + interval_s)
            group.save(costs.commit_s)
            # Many saves at one interval: computed at once, because simulating each takes minutes.
            left_s = min(until, edges_s[bucket]) - group.saved_at
            if (times := int(left_s / interval_s) - 1) > 0:
                group.repeat_save(interval_s, times)

    return policy


@dataclass
class ProductionPolicy:
    """The production policy, which learns from past lifetimes only."""

    failure_model: FailureModel
    save_trigger: SaveTrigger = field(default=SaveTrigger(auto=True))
    has_measured_costs: bool = False
    """Whether a save was made: before, the costs are unknown."""

    def __call__(self, group: GroupSimulation, until: float) -> None:
        while group.now < until:
            due = self._next_check_at(group)
            if due <= group.now:
                group.save(group.config.costs.commit_s)
                self.has_measured_costs = True
            else:
                group.train(min(due, until))

    def learn(self, group: GroupSimulation) -> None:
        """Update the failure model after the end of `group`, by what the journal would contain."""
        duration_s = group.lifetime.duration_s
        endings = self.failure_model.lifetimes.with_end(
            duration_s,
            saved_in_time=group.is_saved_after_notice,
            was_training=duration_s > group.config.recovery_s,
        )
        self.failure_model = replace(self.failure_model, lifetimes=endings)

    def _next_check_at(self, group: GroupSimulation) -> float:
        """Return when a save may be due; now if one is."""
        # One save at a time: the next decision is due at the commit.
        if group.commit_due_at is not None:
            return group.commit_due_at
        progress = TrainingProgress(
            group.now, step=1, last_save_at=group.saved_at, last_save_step=0
        )
        expected_lifetime = estimate_lifetime(
            self.failure_model, round_age_s=group.now, notice_save_s=group.config.final_upload_s
        )
        # As in production, the first interval is chosen without knowing the costs.
        costs = group.config.costs if self.has_measured_costs else None
        decision = decide_save(self.save_trigger, progress, costs=costs, lifetime=expected_lifetime)
        if isinstance(decision, SaveNow):
            return group.now
        return max(decision.until, group.now + group.config.step_s)


def simulate_lifetime(
    lifetime: GroupLifetime, config: GoodputConfig, policy: SavePolicy
) -> GroupSimulation:
    """Simulate one lifetime from its first machine to its end."""
    group = GroupSimulation(lifetime, config)
    # A shorter lifetime ends before its first step.
    if lifetime.duration_s > config.recovery_s:
        policy(group, lifetime.duration_s - (config.notice_s if lifetime.has_notice else 0.0))
        if lifetime.has_notice:
            _act_on_notice(group)
        group.train(lifetime.duration_s)
    return group


def _act_on_notice(group: GroupSimulation) -> None:
    """Act after the preemption notice, by the production policy."""
    config = group.config
    group.was_noticed = True
    while group.now < group.lifetime.duration_s:
        commit_due_at = group.commit_due_at
        state = PreDeadlineState(
            time_left_s=group.lifetime.duration_s - group.now,
            unsaved_work_s=group.now - group.saved_at,
            step_s=config.step_s,
            costs=config.costs,
            # Only the quotient of size and bandwidth matters here.
            size_bytes=2**30,
            bucket_bytes_per_s=2**30 / config.final_upload_s,
            in_flight_remaining_s=None if commit_due_at is None else commit_due_at - group.now,
        )
        decision = decide_final_save(state)
        if isinstance(decision, ContinueTraining):
            group.train(group.now + decision.for_s)
        elif isinstance(decision, FinalSave):
            group.train(group.now + config.step_s)
            group.save(config.final_upload_s)
        else:
            return


def goodput(lifetimes: Sequence[GroupLifetime], config: GoodputConfig, policy: SavePolicy) -> float:
    """Return the fraction of the time that became committed work.

    Each lifetime is simulated with and without a notice, weighted by `noticed_fraction`: this has
    less variance than drawing the notices. The policy learns from the actual lifetime.
    """
    weights = {True: config.noticed_fraction, False: 1 - config.noticed_fraction}
    committed_s = 0.0
    for lifetime in lifetimes:
        groups = {
            has_notice: simulate_lifetime(with_(lifetime, has_notice=has_notice), config, policy)
            for has_notice, weight in weights.items()
            if weight > 0 or has_notice is lifetime.has_notice
        }
        committed_s += sum(
            weights[has_notice] * group.committed_work_s for has_notice, group in groups.items()
        )
        # After the lifetime: a policy must not know how the one that it decides for ends.
        if isinstance(policy, ProductionPolicy):
            policy.learn(groups[lifetime.has_notice])
    return committed_s / _total_duration_s(lifetimes)


def oracle_goodput(lifetimes: Sequence[GroupLifetime], config: GoodputConfig) -> float:
    """Return the upper bound: each lifetime saved once, just in time for its end."""
    # No policy can do better: it would save exactly once, ending with the lifetime.
    lost_s = config.recovery_s + config.final_upload_s
    return sum(
        max(0.0, lifetime.duration_s - lost_s) for lifetime in lifetimes
    ) / _total_duration_s(lifetimes)


def _total_duration_s(lifetimes: Sequence[GroupLifetime]) -> float:
    return sum(lifetime.duration_s for lifetime in lifetimes)
