"""Decides after which steps a Checkpointer saves, equally on all ranks.

Every rank counts steps and epochs itself. Time differs between ranks, so only rank 0 decides by
time: at *checks*, after steps that rank 0 announced at the check before, the ranks call one
broadcast together. Between checks a step costs no communication.

Measured cost of saves and speed of training steps, on rank 0.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice
from statistics import fmean, median, median_low

import msgspec
from msgspec.structs import replace

from spotfit.checkpoint.snapshot_channel import GroupOutlook, SnapshotStatus
from spotfit.core.clock import Clock
from spotfit.core.codec import decoder, encode
from spotfit.host import log
from spotfit.model.failure_model import SaveCostEstimate, SaveTrigger
from spotfit.policy.checkpoint_interval import (
    MAX_CHECK_INTERVAL_S,
    SaveLater,
    SaveNow,
    TrainingProgress,
    check_interval_s,
    decide_save,
    estimate_lifetime,
    format_steps_since_save,
    steps_until_check,
)
from spotfit.policy.preemption import (
    ContinueTraining,
    FinalSave,
    PreDeadlineState,
    decide_final_save,
)

# --- Measured cost of saves and speed of training steps, on rank 0 --------------------------------


# Costs follow the bucket and the batch size, so only recent saves and steps count. Five saves are
# enough for a median that ignores two outliers.
_RECENT_SAVES = 5
_RECENT_STEPS = 100
# The slowest step is searched in a longer history: an evaluation may run every few hundred steps.
_STEP_HISTORY = 1000
# Steps of normal training vary by less than a factor of 3. A slower one contains something else,
# such as an evaluation, and must not be counted as the cost of a save in flight.
_SLOW_STEP_FACTOR = 3.0
# Such a step took as long as one without a save, if it is within 25 % of the slowest one of those.
_SIMILAR_STEP_FACTOR = 1.25
# Until the first upload is measured: what a small machine's network link to a bucket provides.
_DEFAULT_BYTES_PER_S = 50e6


@dataclass
class _SaveSample:
    """One save, with the steps between its submission and its commit."""

    submitted_at: float
    size_bytes: int
    is_timed: bool
    slow_threshold_s: float
    first_step_s: float | None = None
    """Duration of the first step, in which this rank waits for ranks that save longer."""
    step_count: int = 0
    total_steps_s: float = 0.0
    slow_steps_s: list[float] = field(default_factory=list)

    def add_step(self, step_s: float) -> None:
        """Count a step of `step_s` seconds that ended between this save and its commit.

        Not called for the first of these steps, which is stored as `first_step_s`.
        """
        self.step_count += 1
        self.total_steps_s += step_s
        if step_s > self.slow_threshold_s:
            self.slow_steps_s.append(step_s)

    def mean_step_s(self, typical_s: float, slowest_s: float) -> float:
        """Return the mean duration in seconds of the steps that `add_step` has counted.

        Slow steps are left out if a step without a save was about as slow (`slowest_s`): they were
        not slow because of the save. `typical_s`, a usual duration, if no step is left.
        """
        excluded = [slow for slow in self.slow_steps_s if slow <= _SIMILAR_STEP_FACTOR * slowest_s]
        count = self.step_count - len(excluded)
        return (self.total_steps_s - sum(excluded)) / count if count else typical_s

    def first_step_wait_s(self, step_s: float) -> float | None:
        """Return by how many seconds the first step after this save exceeded `step_s`, at least 0.

        None if that step has not ended, if `step_s` is 0, or if the save was not due by time: after
        one at the end of an epoch the step also contains what the script does once per epoch.
        """
        if self.first_step_s is None or not self.is_timed or not step_s:
            return None
        return max(0.0, self.first_step_s - step_s)


class SaveCostTracker:
    """Measures the saves and steps of rank 0, in seconds of its process's monotonic clock.

    Only rank 0 uses it: its `SaveScheduler` records steps and submissions, its Checkpointer
    statuses. Measurements are of this process only, so they begin again in every round.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._in_flight_saves: dict[int, _SaveSample] = {}
        self._committed_this_step: list[_SaveSample] = []
        """Saves committed during the step that was just completed."""
        self._recent_saves: deque[_SaveSample] = deque(maxlen=_RECENT_SAVES)
        self.size_bytes = 0
        """Size of the last snapshot's largest shard."""
        self._stalls_s: deque[float] = deque(maxlen=_RECENT_SAVES)
        self._commits_s: deque[float] = deque(maxlen=_RECENT_SAVES)
        self._upload_speeds: deque[float] = deque(maxlen=_RECENT_SAVES)
        self._idle_steps_s: deque[float] = deque(maxlen=_STEP_HISTORY)
        """Steps without a save in flight."""
        self._steps_s: deque[float] = deque(maxlen=_STEP_HISTORY)
        """All steps except the first after each save."""
        self._last_step_at: float | None = None
        self.last_snapshot_at = clock.now()
        """When the latest saved state was copied; at first, when the training started."""

    @property
    def in_flight(self) -> int:
        """Number of submitted snapshots that `record_status` has not seen committed or failed.

        The scheduler of rank 0 starts no save beyond a maximum of them.
        """
        return len(self._in_flight_saves)

    @property
    def mean_step_s(self) -> float:
        """Mean duration in seconds of the last 1000 steps; 0 before the first.

        The first step after each save, in which rank 0 waits for slower ranks, is left out.
        """
        return fmean(self._steps_s) if self._steps_s else 0.0

    @property
    def slowest_step_s(self) -> float:
        """Duration in seconds of the slowest of the last 1000 steps; 0 before the first.

        The first step after each save, in which rank 0 waits for slower ranks, is left out.
        """
        return max(self._steps_s, default=0.0)

    @property
    def costs(self) -> SaveCostEstimate | None:
        """Estimated cost of a save, from the last five; None until a save is committed.

        Counts the stall of this rank, the wait for ranks that save longer (in the step after the
        save), and the slowdown of all steps until the commit. Low medians ignore single saves that
        coincided with something else.
        """
        if not self._commits_s:
            return None
        # Slow steps are left out: they contain something else, such as an evaluation.
        slow_s = _SLOW_STEP_FACTOR * self._median_step_s()
        typical = [step_s for step_s in self._recent_idle_steps_s() if step_s <= slow_s]
        typical_s = fmean(typical) if typical else 0.0
        slowest_s = max(self._idle_steps_s, default=0.0)
        steps = [(save, save.mean_step_s(typical_s, slowest_s)) for save in self._recent_saves]
        slowdowns = [
            max(0.0, 1 - typical_s / step_s) for _, step_s in steps if typical_s and step_s
        ]
        known = [save.first_step_wait_s(step_s) for save, step_s in steps]
        waits = [wait_s for wait_s in known if wait_s is not None]
        return SaveCostEstimate(
            stall_s=median(self._stalls_s) + (median_low(waits) if waits else 0.0),
            slowdown_fraction=median_low(slowdowns) if slowdowns else 0.0,
            commit_s=median(self._commits_s),
        )

    @property
    def upload_bytes_per_s(self) -> float:
        """Upload speed of the slowest rank: bytes of the largest shard per second until the commit.

        The median of the last five committed saves; 50e6 before the first commit.
        """
        return median(self._upload_speeds) if self._upload_speeds else _DEFAULT_BYTES_PER_S

    @property
    def oldest_in_flight_s(self) -> float:
        """Seconds since the oldest save in flight was submitted.

        Raises ValueError if there is none.
        """
        return self._clock.now() - min(save.submitted_at for save in self._in_flight_saves.values())

    def reset(self) -> None:
        """Forget when the last step and snapshot were: the training was restored to another state.

        Called by `SaveScheduler.reset`. The time since the last snapshot counts from now. Measured
        durations and saves in flight are kept.
        """
        self.last_snapshot_at = self._clock.now()
        self._last_step_at = None
        self._committed_this_step = []

    def record_step(self) -> None:
        """Record that a training step ends now; its duration counts from the last step or save.

        Called on rank 0 after every step, after `record_status`, whose commits count as those of
        the step that ends. The first call only starts the measurement.
        """
        now = self._clock.now()
        if self._last_step_at is not None:
            self._add_step(now - self._last_step_at)
        self._last_step_at = now
        # Only now: the step in which a save was committed counts as one of its steps.
        self._recent_saves.extend(self._committed_this_step)
        self._committed_this_step = []

    def record_save(
        self, report: int, stall_s: float, size_bytes: int, *, is_timed: bool = True
    ) -> None:
        """Record that a snapshot is submitted now, as report number `report` of the round.

        `stall_s` is how long the save has blocked the training loop in seconds, `size_bytes` the
        size of the snapshot's largest shard. `is_timed`: saved because of the elapsed time, not at
        a place in the training such as the end of an epoch.
        """
        # The next step is measured from the end of the save: the stall is recorded separately.
        self.last_snapshot_at = self._last_step_at = self._clock.now()
        # Without a step outside of saves there is no threshold yet: no step counts as slow.
        slow_threshold_s = _SLOW_STEP_FACTOR * self._median_step_s() or float("inf")
        self._in_flight_saves[report] = _SaveSample(
            self.last_snapshot_at,
            size_bytes,
            is_timed=is_timed,
            slow_threshold_s=slow_threshold_s,
        )
        self.size_bytes = size_bytes
        self._stalls_s.append(stall_s)

    def record_status(self, report: int, status: SnapshotStatus) -> None:
        """Record the status that the snapshot with report index `report` has now.

        The Checkpointer of rank 0 calls it after each step for its last two snapshots. The time of
        the first call with "committed" counts as the commit. Ignored for "submitted", for
        "uploaded", and for snapshots whose end is recorded, so repeated calls are harmless.
        """
        if report not in self._in_flight_saves or status in ("submitted", "uploaded"):
            return
        save = self._in_flight_saves.pop(report)
        if status == "committed":
            commit_s = self._clock.now() - save.submitted_at
            self._commits_s.append(commit_s)
            # Clamped: in local mode a commit may take no measurable time.
            self._upload_speeds.append(save.size_bytes / max(commit_s, 1e-3))
            self._committed_this_step.append(save)

    def _add_step(self, step_s: float) -> None:
        saves = [*self._in_flight_saves.values(), *self._committed_this_step]
        # The first step after a save waits for slower ranks and is counted separately.
        first = [save for save in saves if save.first_step_s is None]
        for save in first:
            save.first_step_s = step_s
        if first:
            return
        self._steps_s.append(step_s)
        for save in saves:
            save.add_step(step_s)
        if not saves:
            self._idle_steps_s.append(step_s)

    def _median_step_s(self) -> float:
        recent = self._recent_idle_steps_s()
        return median(recent) if recent else 0.0

    def _recent_idle_steps_s(self) -> list[float]:
        return list(islice(reversed(self._idle_steps_s), _RECENT_STEPS))


# The interval of checks follows their median cost; nine ignore single ones that waited for a rank.
_RECENT_CHECKS = 9


class _SaveDecision(msgspec.Struct, frozen=True):
    """Rank 0's decision at a check."""

    reason: str | None
    """Why to save now; None for not saving."""
    next_check_step: int
    """Step after which the ranks check again."""


_decision_decoder = decoder(_SaveDecision)


class SaveScheduler:
    """Save decisions of one rank for one Checkpointer.

    All ranks must make the same calls after the same steps.
    """

    def __init__(
        self,
        trigger: SaveTrigger,
        *,
        broadcast_bytes: Callable[[str, bytes], bytes],
        is_rank_zero: bool,
        clock: Clock,
        outlook: Callable[[], GroupOutlook],
        max_in_flight: int = 2,
    ) -> None:
        """Start with step 0 as the last saved one; the first check is after step 1.

        `outlook` is called on rank 0 only, once per check. `broadcast_bytes` is the channel's
        collective. While `max_in_flight` snapshots are neither committed nor failed, no periodic
        save is due.
        """
        self._trigger = trigger
        # Epochs and steps are counted by each rank; the decision by time must not repeat them.
        self._timed_trigger = replace(trigger, epochs=False, every_steps=None)
        self._broadcast_bytes = broadcast_bytes
        self._is_rank_zero = is_rank_zero
        self._clock = clock
        self._outlook = outlook
        self._started_at = clock.now()
        self._max_in_flight = max_in_flight
        # After the first step, because the duration of a step is unknown before.
        self._next_check_step = 1
        self._last_check_at = self._started_at
        self._last_check_step = 0
        self._check_durations_s: deque[float] = deque(maxlen=_RECENT_CHECKS)
        self._last_saved_step = 0
        self._is_timed = False
        """Whether the save that is due was decided by time."""
        self._last_logged_step: int | None = None
        """Saved step after which `checkpoint.next_save` was logged."""
        self.cost_tracker = SaveCostTracker(clock)

    def reset(self, step: int) -> None:
        """Continue after `step`, the number of steps completed in the state that was restored.

        Called by `Checkpointer.restore` on all ranks: `step` counts as saved, and after step
        `step + 1` the ranks join a broadcast that decides about the next save.
        """
        self._last_saved_step, self._next_check_step = step, step + 1
        self._last_check_step, self._last_check_at = step, self._clock.now()
        self.cost_tracker.reset()

    def record_snapshot(self, step: int) -> None:
        """Record on every rank that a snapshot of that step is being taken.

        `step` counts completed steps. Called before the memory is copied, also if the save then
        fails on this rank: `every_steps` counts from it on all ranks equally.
        """
        self._last_saved_step = step

    def has_unsaved_steps(self, step: int) -> bool:
        """Whether no snapshot was taken after this step; `step` counts completed steps."""
        return step > self._last_saved_step

    def record_submitted(self, report: int, stall_s: float, size_bytes: int) -> None:
        """Record that this rank's snapshot was submitted as report number `report` of the round.

        `stall_s` is how long the save has blocked the training loop in seconds, `size_bytes` the
        size of the snapshot's largest shard on any rank. Only rank 0 keeps the measurements.
        """
        if self._is_rank_zero:
            self.cost_tracker.record_save(report, stall_s, size_bytes, is_timed=self._is_timed)
        self._is_timed = False

    def reason_to_save(self, step: int, *, is_epoch_end: bool) -> str | None:
        """Return why to save after this step, such as "an epoch has ended"; None for not saving.

        `step` counts completed steps, including those before a restart. Called by
        `Checkpointer.step` on every rank after every optimizer step, with equal arguments; the
        answer is the same on all ranks. Most calls only count. After the steps that rank 0 has
        announced the ranks join a broadcast, which blocks until all have arrived.
        """
        self._is_timed = False
        if self._is_rank_zero:
            self.cost_tracker.record_step()
        # Without communication first: these are equal on all ranks by counting.
        if self._trigger.epochs and is_epoch_end:
            return "an epoch has ended"
        steps_since_save = step - self._last_saved_step
        if self._trigger.every_steps is not None and steps_since_save >= self._trigger.every_steps:
            return format_steps_since_save(steps_since_save)
        if step < self._next_check_step:
            return None
        body = encode(self._make_decision(step))
        started_at = self._clock.now()
        decision = _decision_decoder.decode(self._broadcast_bytes("Checkpointer.step", body))
        self._check_durations_s.append(self._clock.now() - started_at)
        self._next_check_step = decision.next_check_step
        self._is_timed = decision.reason is not None
        return decision.reason

    def _make_decision(self, step: int) -> _SaveDecision:
        if not self._is_rank_zero:
            return _SaveDecision(None, 0)  # the broadcast ignores the values of other ranks
        reason, next_check_s = self._decide(step)
        now = self._clock.now()
        # Measured between checks, so that the time of a save is included.
        steps, elapsed_s = step - self._last_check_step, now - self._last_check_at
        self._last_check_step, self._last_check_at = step, now
        interval_s = (
            check_interval_s(median(self._check_durations_s))
            if self._check_durations_s
            else MAX_CHECK_INTERVAL_S
        )
        return _SaveDecision(
            reason,
            step + steps_until_check(steps, elapsed_s, within_s=min(interval_s, next_check_s)),
        )

    def _decide(self, step: int) -> tuple[str | None, float]:
        """Return why to save (None for not saving), and in how many seconds to check again."""
        outlook, next_check_s = self._outlook(), MAX_CHECK_INTERVAL_S
        requested_at, ending = outlook.final_save_request or (-math.inf, "")
        # Once: the leader ends the run when this save is committed.
        if requested_at > self.cost_tracker.last_snapshot_at and self.has_unsaved_steps(step):
            return f"the run ends: {ending}", MAX_CHECK_INTERVAL_S
        if outlook.time_to_preemption_s is not None:
            final = decide_final_save(
                self._pre_deadline_state(outlook, outlook.time_to_preemption_s, step)
            )
            if isinstance(final, FinalSave):
                # A state that was saved after this very step needs no second save.
                reason = f"preemption notice: {final.reason}"
                return (reason if step > self._last_saved_step else None), MAX_CHECK_INTERVAL_S
            if not isinstance(final, ContinueTraining):
                return None, MAX_CHECK_INTERVAL_S
            # Half of the time left: steps until then may be slower than those before.
            next_check_s = final.for_s / 2
        now = self._clock.now()
        verdict = self._decide_periodic_save(outlook, step, now)
        if isinstance(verdict, SaveNow):
            return verdict.reason, MAX_CHECK_INTERVAL_S
        # Logged once after each commit: earlier its cost is unknown and the time would change.
        tracker = self.cost_tracker
        is_known = self._trigger.auto and tracker.costs is not None and not tracker.in_flight
        if is_known and self._last_logged_step != self._last_saved_step and verdict.until > now:
            self._last_logged_step = self._last_saved_step
            in_s = round(verdict.until - now, 1)
            log.info("checkpoint.next_save", in_s=in_s, reason=verdict.reason)
        due_s = verdict.until - now if verdict.until > now else MAX_CHECK_INTERVAL_S
        return None, min(next_check_s, due_s)

    def _decide_periodic_save(
        self, outlook: GroupOutlook, step: int, now: float
    ) -> SaveNow | SaveLater:
        tracker = self.cost_tracker
        recommended_at, risk = outlook.rebalance_recommendation or (-math.inf, "")
        progress = TrainingProgress(
            now=now,
            step=step,
            last_save_at=tracker.last_snapshot_at,
            last_save_step=self._last_saved_step,
            saves_in_flight=tracker.in_flight,
            has_free_slot=tracker.in_flight < self._max_in_flight,
            # A recommendation causes one save, not one per check.
            preemption_risk=risk if recommended_at > tracker.last_snapshot_at else "",
        )
        lifetime = estimate_lifetime(
            outlook.failure_model,
            round_age_s=now - self._started_at,
            notice_save_s=tracker.size_bytes / tracker.upload_bytes_per_s,
        )
        return decide_save(self._timed_trigger, progress, costs=tracker.costs, lifetime=lifetime)

    def _pre_deadline_state(
        self, outlook: GroupOutlook, time_left_s: float, step: int
    ) -> PreDeadlineState:
        tracker = self.cost_tracker
        costs = tracker.costs or SaveCostEstimate(stall_s=0.0, slowdown_fraction=0.0, commit_s=0.0)
        # An estimate from earlier commits; a save that exceeds it may finish at any moment.
        in_flight_s = (
            max(0.0, costs.commit_s - tracker.oldest_in_flight_s) if tracker.in_flight else None
        )
        # A snapshot of this step makes everything up to it saved, whenever it is committed.
        unsaved_s = (
            self._clock.now() - tracker.last_snapshot_at if step > self._last_saved_step else 0.0
        )
        return PreDeadlineState(
            time_left_s=time_left_s,
            unsaved_work_s=unsaved_s,
            step_s=tracker.mean_step_s,
            max_step_s=tracker.slowest_step_s,
            costs=costs,
            size_bytes=tracker.size_bytes,
            bucket_bytes_per_s=tracker.upload_bytes_per_s,
            peer_bytes_per_s=outlook.peer_bytes_per_s,
            in_flight_remaining_s=in_flight_s,
            has_free_slot=tracker.in_flight < self._max_in_flight,
            replacement_ready=outlook.replacement_ready,
        )
