"""What saves cost: also the time that the slowest rank takes, and nothing that is no save's."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from spotfit.model.cadence import Costs
from spotfit.testing.clock import ManualClock
from spotfit.worker.measured import Measured


class Rank:
    """Rank 0, which steps as it is told."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.measured = Measured(self.clock)
        self._saves = 0

    def steps(self, how_long_s: Iterable[float]) -> None:
        for step_s in how_long_s:
            self.clock.wait(step_s)
            self.measured.step()

    def save(
        self, meanwhile_s: Iterable[float], *, stall_s: float = 0.005, timed: bool = True
    ) -> None:
        """One that is committed within the last of those steps."""
        *most_s, last_s = meanwhile_s
        n, self._saves = self._saves, self._saves + 1
        self.clock.wait(stall_s)
        self.measured.saved(n, stall_s, 1000, timed=timed)
        self.steps(most_s)
        self.clock.wait(last_s)
        self.measured.note(n, "committed")
        self.measured.step()

    @property
    def costs(self) -> Costs:
        assert self.measured.costs is not None
        return self.measured.costs


def test_costs_are_known_once_one_is_committed() -> None:
    rank = Rank()
    rank.steps([1.0] * 10)
    assert rank.measured.costs is None
    rank.save([2.0] * 5, stall_s=0.25)
    assert rank.costs == Costs(stall_s=0.25, slowdown=0.5, commit_s=10.0)
    assert (rank.measured.in_flight, rank.measured.size_bytes) == (0, 1000)


def test_a_wait_for_a_rank_that_saves_longer_is_a_stall() -> None:
    """This one hands its part over in 5 ms, another needs 3 s, and the next step waits for it."""
    rank = Rank()
    for _ in range(5):
        rank.steps([0.05] * 200)
        rank.save([3.05, *[0.05] * 400])
    assert rank.costs.stall_s == pytest.approx(3.005)
    assert rank.costs.slowdown == pytest.approx(0.0, abs=1e-6)


def test_the_wait_counts_where_the_save_is_committed_within_it() -> None:
    rank = Rank()
    rank.steps([0.02] * 200)
    rank.save([1.52])
    assert rank.costs.stall_s == pytest.approx(1.505)


def test_slow_steps_are_the_saves_where_only_saves_have_them() -> None:
    """Every tenth step takes 1 s while uploads hold the machine up; none does else."""
    rank = Rank()
    rank.steps([0.1] * 100)
    rank.save([0.1, *[*[0.1] * 9, 1.0] * 10])
    assert rank.costs.slowdown == pytest.approx(1 - 0.1 / 0.19)


def test_evaluations_are_no_saves_costs() -> None:
    """As many fall into the time of uploads as there are else; then they say nothing."""
    rank = Rank()
    evaluating = [*[0.01] * 99, 4.0]
    rank.steps(evaluating * 2)
    rank.save([0.012] * 50 + [4.0] + [0.012] * 50)
    assert rank.costs.slowdown == pytest.approx(1 - 0.01 / 0.012)
    assert rank.measured.slow_step_s == 4.0


def test_an_evaluation_that_nobody_knew_of_is_forgiven_once_there_is_another() -> None:
    rank = Rank()
    rank.steps([0.01] * 500)
    rank.save([0.01] * 50 + [4.0] + [0.01] * 50)
    assert rank.costs.slowdown > 0.7
    rank.steps([*[0.01] * 100, 4.0, 0.01])
    assert rank.costs.slowdown == pytest.approx(0.0, abs=1e-6)


def test_one_save_that_fell_together_with_something_else_does_not_count_for_ever() -> None:
    rank = Rank()
    for first_s, later_s in ((60.0, 0.01), (0.01, 60.0), (0.01, 0.01)):
        rank.steps([0.01] * 500)
        rank.save([first_s, *[0.01] * 100, later_s, *[0.01] * 100])
    assert rank.costs.stall_s < 0.1
    assert rank.costs.slowdown == pytest.approx(0.0, abs=1e-6)


def test_what_is_done_once_an_epoch_is_no_stall() -> None:
    """Its end was saved, and then the loop evaluates."""
    rank = Rank()
    for _ in range(3):
        rank.steps([0.01] * 500)
        rank.save([60.0, *[0.01] * 100], timed=False)
    assert rank.costs.stall_s == 0.005


def test_an_upload_is_as_fast_as_the_slowest_ranks() -> None:
    clock = ManualClock()
    measured = Measured(clock)
    measured.saved(0, 0.25, 1000)
    clock.wait(1.0)
    measured.note(0, "carried")
    clock.wait(9.0)
    measured.note(0, "committed")
    assert measured.bytes_per_s == 100


def test_a_lost_one_is_on_its_way_no_more() -> None:
    measured = Measured(ManualClock())
    measured.saved(0, 0.25, 1000)
    measured.note(0, "lost")
    assert measured.in_flight == 0
    assert measured.costs is None


def test_what_was_done_between_two_states_is_no_step() -> None:
    rank = Rank()
    rank.steps([1.0] * 10)
    rank.clock.wait(300.0)
    rank.measured.begin()
    rank.steps([1.0] * 10)
    assert rank.measured.slow_step_s == 1.0
