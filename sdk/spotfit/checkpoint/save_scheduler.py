"""Decides after which steps a Checkpointer saves, equally on all ranks.

Every rank counts steps and epochs itself. Time differs between ranks, so only rank 0 decides by
time: at *checks*, after steps that rank 0 announced at the check before, the ranks call one
broadcast together. Between checks a step costs no communication.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from statistics import median

import msgspec
from msgspec.structs import replace

from spotfit.checkpoint.save_costs import SaveCostTracker
from spotfit.checkpoint.snapshot_channel import GroupOutlook
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
    """Save decisions of one rank. All ranks must make the same calls after the same steps."""

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
        """`outlook` is called on rank 0 only, once per check."""
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
        """Continue after that step: the training was restored to it."""
        self._last_saved_step, self._next_check_step = step, step + 1
        self._last_check_step, self._last_check_at = step, self._clock.now()
        self.cost_tracker.reset()

    def record_snapshot(self, step: int) -> None:
        """Record that a snapshot of that step is being taken."""
        self._last_saved_step = step

    def record_submitted(self, report: int, stall_s: float, size_bytes: int) -> None:
        """Record a submitted snapshot; `size_bytes` is the size of its largest shard."""
        if self._is_rank_zero:
            self.cost_tracker.record_save(report, stall_s, size_bytes, is_timed=self._is_timed)
        self._is_timed = False

    def reason_to_save(self, step: int, *, is_epoch_end: bool) -> str | None:
        """Return why to save after this step; None for not saving. Call it after every step."""
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
        decision = _decision_decoder.decode(self._broadcast_bytes("checkpoint", body))
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
