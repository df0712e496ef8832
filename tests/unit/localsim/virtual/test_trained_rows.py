"""Rows that are repeated, left out, in another order or of another epoch are violations."""

from __future__ import annotations

import pytest

from spotfit.data.iteration.shard import ShardGroup, choose_order
from spotfit.data.order import EpochOrder
from spotfit_localsim.virtual.sim_dataset import open_dataset
from spotfit_localsim.virtual.trained_rows import RankBatch, Row, TrainedRows
from spotfit_localsim.virtual.workload import DatasetWorkload, ModelState
from tests.unit.data.order_rows import rows_of

PLAN = DatasetWorkload(unit_rows=(7, 0, 9, 10), batch_rows=6)
"""26 rows: four steps of six rows, and one of two rows."""
STEPS = [6, 6, 6, 6, 2]


class Training:
    """A training whose ranks get the rows of the production order."""

    def __init__(self, plan: DatasetWorkload = PLAN) -> None:
        self.violations: list[str] = []
        self.group = ShardGroup(world_sizes=(1, 2, 3, 4))
        self.dataset = open_dataset(plan)
        self.settings = choose_order(self.dataset, self.group, plan.batch_rows)
        self.history = TrainedRows(
            self.dataset, plan, self.group, report_violation=self.violations.append
        )
        self.state = ModelState()
        self.position = (0, 0)

    def batches(self, count: int, world_size: int) -> list[RankBatch]:
        """The rows of all ranks in a step of `count` rows at the position, which advances."""
        epoch, first = self.position
        order = EpochOrder(self.dataset.manifest.unit_rows, self.settings, epoch)
        self.position = (epoch, first + count)
        return [
            RankBatch(
                epoch, self.settings, tuple(self._rows(order, first, count, world_size, rank))
            )
            for rank in range(world_size)
        ]

    def _rows(
        self, order: EpochOrder, first: int, count: int, world_size: int, rank: int
    ) -> list[Row]:
        rows = rows_of(order, order.rank_rows(first, count, world_size, rank, equal=True))
        begins = self.dataset.manifest.unit_rows.cumsum() - self.dataset.manifest.unit_rows
        numbers = [int(begins[unit]) + row for unit, row in rows]
        return [(number, number * 0.5) for number in numbers]

    def step(self, batches: list[RankBatch]) -> None:
        self.state = self.history.train(self.state, batches)

    def finish_epoch(self, world_size: int) -> None:
        for count in STEPS:
            self.step(self.batches(count, world_size))
        self.position = (self.position[0] + 1, 0)


def test_epochs_of_any_number_of_ranks_have_no_violation() -> None:
    training = Training()
    for world_size in (1, 2, 3):
        training.finish_epoch(world_size)
    training.history.check_end(training.state)
    assert training.violations == []
    assert training.history.world_sizes_by_epoch(training.state) == {
        0: [1] * 5,
        1: [2] * 5,
        2: [3] * 5,
    }


def test_steps_that_were_lost_and_repeated_count_once() -> None:
    training = Training()
    training.step(training.batches(6, 2))
    saved, position = training.state, training.position
    training.step(training.batches(6, 2))
    lost = training.state
    training.state, training.position = saved, position
    training.step(training.batches(6, 3))
    assert training.state == lost, "the global batch does not depend on the number of ranks"
    for count in STEPS[2:]:
        training.step(training.batches(count, 3))
    training.history.check_end(training.state)
    assert training.violations == []
    assert training.history.has(lost)
    assert not training.history.has(ModelState(2, "another link"))


def find_violation(training: Training) -> str:
    assert len(training.violations) == 1
    return training.violations[0]


def test_repeated_batch_is_a_violation() -> None:
    training = Training()
    batches = training.batches(6, 2)
    training.step(batches)
    training.step(batches)
    assert "2 ranks have ((" in find_violation(training)


def test_rows_in_another_order_are_a_violation() -> None:
    training = Training()
    training.step(training.batches(6, 2)[::-1])
    assert "trains on wrong rows" in find_violation(training)


def test_other_values_of_the_right_rows_are_a_violation() -> None:
    training = Training()
    [batch] = training.batches(6, 1)
    training.step([batch._replace(rows=tuple((number, value + 1) for number, value in batch.rows))])
    assert "the places 0 to 6 have" in find_violation(training)


def test_ranks_in_two_epochs_are_a_violation() -> None:
    training = Training()
    first, second = training.batches(6, 2)
    training.step([first, second._replace(epoch=1)])
    assert "other orders" in find_violation(training)


def test_order_of_another_group_is_a_violation() -> None:
    training = Training()
    training.settings = training.settings._replace(lanes=5)
    training.step(training.batches(6, 2))
    assert "with other numbers of ranks" in find_violation(training)


def test_changed_order_within_an_epoch_is_a_violation() -> None:
    training = Training(DatasetWorkload(unit_rows=PLAN.unit_rows, batch_rows=3, is_global=False))
    training.step(training.batches(6, 2))
    training.settings = training.settings._replace(lanes=5)
    training.step(training.batches(6, 2))
    assert "within an epoch" in find_violation(training)


@pytest.mark.parametrize(("epoch", "violation"), [(1, "has the rows"), (2, "follows epoch 0")])
def test_epoch_that_begins_before_the_end_of_the_last_one_is_a_violation(
    epoch: int, violation: str
) -> None:
    training = Training()
    training.step(training.batches(6, 2))
    training.position = (epoch, 0)
    training.step(training.batches(6, 2))
    assert violation in find_violation(training)


def test_first_epoch_is_number_0() -> None:
    training = Training()
    training.position = (1, 0)
    training.step(training.batches(6, 1))
    assert "the first epoch is 1" in find_violation(training)
