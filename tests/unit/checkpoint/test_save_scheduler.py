"""Save decisions: equal on all ranks, by steps, epochs and time."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest

from spotfit.checkpoint.save_scheduler import SaveScheduler
from spotfit.checkpoint.snapshot_channel import GroupOutlook
from spotfit.model.failure_model import (
    FailureModel,
    MarketPrior,
    SaveCostEstimate,
    parse_save_trigger,
)
from spotfit.policy.checkpoint_interval import MAX_CHECK_INTERVAL_S
from spotfit.testing.builders import ManualClock


class Ranks:
    """Two ranks with equal steps; a broadcast from rank 0 takes `check_s`."""

    def __init__(self, every: Any, *, lifetime_s: float = 3600.0, check_s: float = 0.0015) -> None:
        self.clock = ManualClock()
        self.check_times: list[float] = []
        """Times of the checks."""
        self._check_s = check_s
        self.left_s: float | None = None
        self.recommendation: tuple[float, str] | None = None
        self.final_save_request: tuple[float, str] | None = None
        self.replacement_ready = False
        self.peer_bytes_per_s = 0.0
        self.reasons: list[str] = []
        self._last_broadcast = b""
        self._schedulers = [
            self._make_scheduler(every, lifetime_s, is_rank_zero=is_rank_zero)
            for is_rank_zero in (True, False)
        ]
        self._reports = itertools.count()

    def _make_scheduler(
        self, every: Any, lifetime_s: float, *, is_rank_zero: bool
    ) -> SaveScheduler:
        return SaveScheduler(
            parse_save_trigger(every),
            broadcast_bytes=self._broadcast
            if is_rank_zero
            else lambda _kind, _value: self._last_broadcast,
            is_rank_zero=is_rank_zero,
            clock=self.clock,
            outlook=lambda: GroupOutlook(
                failure_model=FailureModel(market_prior=MarketPrior(mean_lifetime_s=lifetime_s)),
                time_to_preemption_s=self.left_s,
                rebalance_recommendation=self.recommendation,
                final_save_request=self.final_save_request,
                replacement_ready=self.replacement_ready,
                peer_bytes_per_s=self.peer_bytes_per_s,
            ),
        )

    def _broadcast(self, kind: str, value: bytes) -> bytes:
        assert kind == "Checkpointer.step", "errors about the ranks that did not call it name it"
        self.check_times.append(self.clock.now())
        self.clock.wait(self._check_s)
        self._last_broadcast = value
        return value

    @property
    def costs(self) -> SaveCostEstimate:
        """Estimated cost of a save on rank 0."""
        found = self._schedulers[0].cost_tracker.costs
        assert found is not None
        return found

    @property
    def check_intervals_s(self) -> list[float]:
        """Intervals between checks."""
        return [later - look for look, later in itertools.pairwise(self.check_times)]

    def saves(
        self,
        steps: range,
        *,
        step_s: float | Callable[[int], float] = 0.0,
        epoch: int = 0,
        commits: bool = True,
        size_bytes: int = 10**6,
    ) -> list[int]:
        """Return the steps after which both save; the next step commits, if `commits`."""
        found = []
        report = None
        for step in steps:
            took_s = step_s(step) if callable(step_s) else step_s
            self.clock.wait(took_s)
            if self.left_s is not None:
                self.left_s -= took_s
            if commits and report is not None:
                self._schedulers[0].cost_tracker.record_status(report, "committed")
            ends = epoch > 0 and step % epoch == 0
            first, second = [
                scheduler.reason_to_save(step, is_epoch_end=ends) for scheduler in self._schedulers
            ]
            assert first == second
            if first is not None:
                found.append(step)
                self.reasons.append(first)
                report = next(self._reports)
                for scheduler in self._schedulers:
                    scheduler.record_snapshot(step)
                    scheduler.record_submitted(report, 0.5, size_bytes)
        return found


def gaps(saves: list[int]) -> list[int]:
    return [later - step for step, later in itertools.pairwise([0, *saves])]


def test_every_n_steps_saves_after_n_steps() -> None:
    ranks = Ranks(4)
    assert ranks.saves(range(1, 11)) == [4, 8]
    assert ranks.reasons == ["4 steps since the last save"] * 2
    ranks = Ranks(1)
    ranks.saves(range(1, 2))
    assert ranks.reasons == ["1 step since the last save"]


def test_all_ranks_save_the_same_step_after_an_interval() -> None:
    ranks = Ranks("10s")
    between = gaps(ranks.saves(range(1, 1000), step_s=0.1))
    assert all(98 <= gap <= 121 for gap in between), "10 s plus at most one check interval"
    assert "every 10 s" in ranks.reasons[0]


def test_checks_take_a_small_fraction_of_the_time() -> None:
    ranks = Ranks("10m")
    ranks.saves(range(1, 10_000), step_s=0.01)
    assert sum(ranks.check_intervals_s) > 99
    assert max(ranks.check_intervals_s) <= MAX_CHECK_INTERVAL_S
    assert len(ranks.check_times) * 0.0015 < 0.002 * 100, "checks take 0.2% of the time"
    dear = Ranks("10m", check_s=0.02)
    dear.saves(range(1, 10_000), step_s=0.01)
    assert len(dear.check_times) <= 100 / MAX_CHECK_INTERVAL_S + 15


def evaluation_every(steps: int, *, of_s: float) -> Callable[[int], float]:
    """Steps of 1 ms; every `steps` steps one takes `of_s`."""
    return lambda step: of_s if step % steps == 0 else 0.001


@pytest.mark.parametrize("every", [20, 100, 2500, 100_000])
def test_an_occasional_slow_step_delays_one_check_only(every: int) -> None:
    ranks = Ranks("10m")
    ranks.saves(range(1, 20_000), step_s=evaluation_every(every, of_s=4.0))
    assert max(ranks.check_intervals_s) <= MAX_CHECK_INTERVAL_S + 4.0
    in_all_s = ranks.check_times[-1] - ranks.check_times[0]
    assert len(ranks.check_times) * 0.0015 < 0.01 * in_all_s


def test_the_interval_is_kept_despite_occasional_slow_steps() -> None:
    ranks = Ranks("5s")
    when = evaluation_every(50, of_s=1.0)
    saves = ranks.saves(range(1, 4000), step_s=when)
    start_times_s = [sum(map(when, range(1, step + 1))) for step in [0, *saves]]
    assert (
        max(two - one for one, two in itertools.pairwise(start_times_s))
        < 5 + MAX_CHECK_INTERVAL_S + 1.0
    )


def test_a_notice_is_seen_in_time_despite_occasional_slow_steps() -> None:
    ranks = Ranks("at_notice")
    when = evaluation_every(100, of_s=4.0)
    assert ranks.saves(range(1, 650), step_s=when) == []
    ranks.left_s = 40.0
    assert ranks.saves(range(650, 1500), step_s=when), "no evaluation takes 40 s"


def test_when_steps_become_slower_at_most_two_checks_are_late() -> None:
    """The number of steps until the next check was fixed before they became slower."""
    ranks = Ranks("10m", check_s=0.0005)
    ranks.saves(range(1, 6100), step_s=lambda step: 0.01 if step < 6000 else 0.2)
    assert max(ranks.check_intervals_s) <= 20 * 0.51
    assert (
        1
        <= sum(
            check_intervals_s > MAX_CHECK_INTERVAL_S
            for check_intervals_s in ranks.check_intervals_s
        )
        <= 2
    )


def test_auto_saves_once_to_measure_and_then_by_lifetime() -> None:
    short_lifetime, long_lifetime = (
        Ranks("auto", lifetime_s=600.0),
        Ranks("auto", lifetime_s=40_000.0),
    )
    often, rare = (
        len(one.saves(range(1, 4000), step_s=0.5)) for one in (short_lifetime, long_lifetime)
    )
    assert short_lifetime.reasons[0].startswith("every 30 s: the first save, which measures")
    assert "0.50 s stall" in short_lifetime.reasons[-1]
    assert often > 2 * rare > 2


def test_the_next_save_is_logged_once_after_each_commit(
    capsys: pytest.CaptureFixture[str],
) -> None:
    ranks = Ranks("auto", lifetime_s=40_000.0)
    saves = ranks.saves(range(1, 4000), step_s=0.5)
    reasons = [
        line for line in capsys.readouterr().err.splitlines() if "checkpoint.next_save" in line
    ]
    assert 1 < len(saves) <= len(reasons) + 1 <= len(saves) + 1
    assert all("in_s=" in line and "the group is lost every" in line for line in reasons)
    Ranks("10s").saves(range(1, 100), step_s=0.5)
    assert "checkpoint.next_save" not in capsys.readouterr().err, (
        "the next save is not logged for a fixed interval"
    )


def test_auto_waits_for_the_save_in_flight() -> None:
    ranks = Ranks("auto")
    assert len(ranks.saves(range(1, 2000), step_s=0.5, commits=False)) == 1


def test_a_slow_step_after_a_timed_save_counts_as_its_cost() -> None:
    """It contains the wait for slower ranks; after an epoch it may contain other work."""
    by_time, epochs = Ranks(["auto", "epoch"]), Ranks(["auto", "epoch"])
    first, *_ = by_time.saves(range(1, 35), step_s=lambda step: 5.0 if step == 31 else 1.0)
    assert first == 30
    assert epochs.saves(range(1, 110), step_s=lambda step: 5.0 if step == 101 else 0.2, epoch=100)
    assert by_time.costs.stall_s == pytest.approx(4.5, abs=0.01)
    assert epochs.costs.stall_s == 0.5


def test_several_triggers_are_combined() -> None:
    ranks = Ranks(["10s", "epoch"])
    saves = ranks.saves(range(1, 400), step_s=0.1, epoch=150)
    assert {150, 300} <= set(saves)
    assert len(saves) >= 4


@pytest.mark.parametrize("every", ["at_notice", 10_000])
def test_a_preemption_notice_causes_a_save_with_any_trigger(every: Any) -> None:
    ranks = Ranks(every)
    assert ranks.saves(range(1, 50), step_s=1.0) == []
    ranks.left_s = 30.0
    first, *_, last = ranks.saves(range(50, 80), step_s=1.0)
    assert "49 s of work should not wait" in ranks.reasons[0] or first < 55
    assert all(why.startswith("preemption notice: ") for why in ranks.reasons)
    assert last > 65, "as late as is safe"


@pytest.mark.parametrize("step_s", [0.003, 0.01, 0.05, 0.3])
def test_the_final_save_is_not_missed(step_s: float) -> None:
    """Checks become more frequent towards the deadline."""
    ranks = Ranks("at_notice")
    first_step = round(20 / step_s)
    assert ranks.saves(range(1, first_step), step_s=step_s) == []
    ranks.left_s = 30.0
    saves = ranks.saves(range(first_step, first_step + round(30 / step_s)), step_s=step_s)
    last_left_s = 30 - (saves[-1] - first_step + 1) * step_s
    assert 1.0 < last_left_s < 4.0, "a second for the entry, half a one for the snapshot"


@pytest.mark.parametrize("step_s", [0.05, 0.1, 0.2, 0.5])
def test_little_is_lost_whenever_a_notice_arrives(step_s: float) -> None:
    """Saves are committed within a step. The final save starts when its duration is left, with a
    margin of a fifth, a second and a step, and at most three steps earlier."""
    takes_s = 1.2 * step_s + 0.5 + 1.0 + step_s
    for phase in range(40):
        notice_s = 30 + 0.37 * phase
        first_step, steps = round(20 / step_s) + phase, round(notice_s / step_s)
        ranks = Ranks("at_notice")
        assert ranks.saves(range(1, first_step), step_s=step_s) == []
        ranks.left_s = notice_s
        *_, last = ranks.saves(range(first_step, first_step + steps), step_s=step_s)
        assert (first_step + steps - 1 - last) * step_s <= takes_s + 3 * step_s, notice_s


@pytest.mark.parametrize("every", ["at_notice", "auto", "10s"])
def test_a_ready_replacement_causes_one_more_save_to_the_peer(every: Any) -> None:
    """One save stays in flight from the notice on. Another starts soon after the replacement is
    ready; a third one would block the training."""
    ranks = Ranks(every)
    ranks.peer_bytes_per_s = 1e6
    ranks.saves(range(1, 30), step_s=0.1)
    ranks.left_s = 60.0
    (one,) = ranks.saves(range(30, 100), step_s=0.1, commits=False)
    ranks.replacement_ready = True
    (other,) = ranks.saves(range(100, 500), step_s=0.1, commits=False)
    assert one < 60
    assert other <= 100 + 10 * MAX_CHECK_INTERVAL_S
    assert "a save to the peer takes" in ranks.reasons[-1]


def test_an_evaluation_before_the_deadline_is_expected() -> None:
    """An evaluation starts 6.5 s before the deadline and takes 6 s: a save after it is too late."""
    ranks = Ranks("at_notice")
    when = evaluation_every(1000, of_s=6.0)
    assert ranks.saves(range(1, 3101), step_s=when) == []
    ranks.left_s = sum(map(when, range(3101, 7001))) + 0.5
    *_, last = ranks.saves(range(3101, 7001), step_s=when)
    assert last > 6000


def test_a_rebalance_recommendation_causes_one_save() -> None:
    ranks = Ranks("at_notice")
    assert ranks.saves(range(1, 50), step_s=0.5) == []
    ranks.recommendation = (ranks.clock.now(), "higher risk")
    (saved,) = ranks.saves(range(50, 100), step_s=0.5)
    assert (saved - 49) * 0.5 <= MAX_CHECK_INTERVAL_S + 0.5
    assert ranks.reasons == ["elevated preemption risk: higher risk"]
    ranks.recommendation = (ranks.clock.now(), "higher risk, once more")
    assert len(ranks.saves(range(100, 150), step_s=0.5)) == 1


def test_a_request_for_the_final_save_causes_one_save() -> None:
    ranks = Ranks("at_notice")
    assert ranks.saves(range(1, 50), step_s=0.5) == []
    ranks.final_save_request = (ranks.clock.now(), "Ctrl-C")
    (saved,) = ranks.saves(range(50, 100), step_s=0.5)
    assert (saved - 49) * 0.5 <= MAX_CHECK_INTERVAL_S + 0.5
    assert ranks.reasons == ["the run ends: Ctrl-C"]


def test_no_save_starts_too_late_to_finish() -> None:
    ranks = Ranks("at_notice")
    ranks.saves(range(1, 10), step_s=1.0)
    ranks.left_s = 1.5
    assert ranks.saves(range(10, 12), step_s=0.5) == []
