"""Measurement of what saves cost the training."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from spotfit.checkpoint.save_scheduler import SaveCostTracker
from spotfit.model.failure_model import SaveCostEstimate
from spotfit.testing.builders import ManualClock


class Rank:
    """Rank 0 on a manual clock."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.measured = SaveCostTracker(self.clock)
        self._saves = 0

    def steps(self, how_long_s: Iterable[float]) -> None:
        for step_s in how_long_s:
            self.clock.wait(step_s)
            self.measured.record_step()

    def save(
        self, meanwhile_s: Iterable[float], *, stall_s: float = 0.005, timed: bool = True
    ) -> None:
        """Save once; the commit is during the last of the steps."""
        *most_s, last_s = meanwhile_s
        n, self._saves = self._saves, self._saves + 1
        self.clock.wait(stall_s)
        self.measured.record_save(n, stall_s, 1000, is_timed=timed)
        self.steps(most_s)
        self.clock.wait(last_s)
        self.measured.record_status(n, "committed")
        self.measured.record_step()

    @property
    def costs(self) -> SaveCostEstimate:
        assert self.measured.costs is not None
        return self.measured.costs


def test_costs_are_unknown_before_the_first_commit() -> None:
    rank = Rank()
    rank.steps([1.0] * 10)
    assert rank.measured.costs is None
    rank.save([2.0] * 5, stall_s=0.25)
    assert rank.costs == SaveCostEstimate(stall_s=0.25, slowdown_fraction=0.5, commit_s=10.0)
    assert (rank.measured.in_flight, rank.measured.size_bytes) == (0, 1000)


def test_waiting_for_a_slower_rank_counts_as_stall() -> None:
    """This rank saves in 5 ms, another in 3 s, for which the next step waits."""
    rank = Rank()
    for _ in range(5):
        rank.steps([0.05] * 200)
        rank.save([3.05, *[0.05] * 400])
    assert rank.costs.stall_s == pytest.approx(3.005)
    assert rank.costs.slowdown_fraction == pytest.approx(0.0, abs=1e-6)


def test_the_wait_counts_if_the_commit_is_in_the_same_step() -> None:
    rank = Rank()
    rank.steps([0.02] * 200)
    rank.save([1.52])
    assert rank.costs.stall_s == pytest.approx(1.505)


def test_slow_steps_only_during_saves_count_as_slowdown() -> None:
    """Every tenth step takes 1 s during uploads, and none otherwise."""
    rank = Rank()
    rank.steps([0.1] * 100)
    rank.save([0.1, *[*[0.1] * 9, 1.0] * 10])
    assert rank.costs.slowdown_fraction == pytest.approx(1 - 0.1 / 0.19)


def test_evaluations_do_not_count_as_slowdown() -> None:
    """Evaluations are as frequent during uploads as otherwise."""
    rank = Rank()
    evaluating = [*[0.01] * 99, 4.0]
    rank.steps(evaluating * 2)
    rank.save([0.012] * 50 + [4.0] + [0.012] * 50)
    assert rank.costs.slowdown_fraction == pytest.approx(1 - 0.01 / 0.012)
    assert rank.measured.slowest_step_s == 4.0


def test_an_evaluation_is_excluded_once_one_ran_without_a_save() -> None:
    rank = Rank()
    rank.steps([0.01] * 500)
    rank.save([0.01] * 50 + [4.0] + [0.01] * 50)
    assert rank.costs.slowdown_fraction > 0.7
    rank.steps([*[0.01] * 100, 4.0, 0.01])
    assert rank.costs.slowdown_fraction == pytest.approx(0.0, abs=1e-6)


def test_one_slow_save_does_not_dominate_the_estimate() -> None:
    rank = Rank()
    for first_s, later_s in ((60.0, 0.01), (0.01, 60.0), (0.01, 0.01)):
        rank.steps([0.01] * 500)
        rank.save([first_s, *[0.01] * 100, later_s, *[0.01] * 100])
    assert rank.costs.stall_s < 0.1
    assert rank.costs.slowdown_fraction == pytest.approx(0.0, abs=1e-6)


def test_work_at_the_end_of_an_epoch_is_not_a_stall() -> None:
    """The loop evaluates after the save at the end of the epoch."""
    rank = Rank()
    for _ in range(3):
        rank.steps([0.01] * 500)
        rank.save([60.0, *[0.01] * 100], timed=False)
    assert rank.costs.stall_s == 0.005


def test_upload_speed_is_that_of_the_largest_shard() -> None:
    clock = ManualClock()
    measured = SaveCostTracker(clock)
    measured.record_save(0, 0.25, 1000)
    clock.wait(1.0)
    measured.record_status(0, "uploaded")
    clock.wait(9.0)
    measured.record_status(0, "committed")
    assert measured.upload_bytes_per_s == 100


def test_a_failed_save_is_not_in_flight() -> None:
    measured = SaveCostTracker(ManualClock())
    measured.record_save(0, 0.25, 1000)
    measured.record_status(0, "failed")
    assert measured.in_flight == 0
    assert measured.costs is None


def test_a_restore_is_not_counted_as_a_step() -> None:
    rank = Rank()
    rank.steps([1.0] * 10)
    rank.clock.wait(300.0)
    rank.measured.reset()
    rank.steps([1.0] * 10)
    assert rank.measured.slowest_step_s == 1.0
