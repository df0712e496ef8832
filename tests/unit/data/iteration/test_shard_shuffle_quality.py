"""How well shuffles mix, on the worst data: rows that are sorted by their class.

The guide on datasets has these figures. 200,000 rows of 1 KiB, 10 classes, row groups of 2,500 rows
or 625, batches of 256 of one worker. Chi-squared per degree of freedom of the classes in a
batch is 1 for a perfect shuffle, and 256 where each batch has one class. The drift is the largest
distance (total variation) of the classes in a tenth of the epoch from those of all rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pytest

from spotfit.data.dataset import Dataset
from spotfit.data.iteration.shard import LocalShuffle, ShardGroup, choose_order
from spotfit.data.order import EpochOrder, hash_key, permutation
from spotfit.data.source import IntArray, SourceUnits, int_array

ROWS, ROW_BYTES = 200_000, 1_024
CLASSES, BATCH_ROWS = 10, 256


@dataclass(frozen=True, eq=False)
class RowGroups:
    """Row groups that are ordered, but not read."""

    unit_rows: int

    identity = "row groups"

    def list_units(self) -> SourceUnits:
        rows = int_array([self.unit_rows] * (ROWS // self.unit_rows))
        zeros = int_array(rows * 0)
        return SourceUnits((), zeros, zeros, rows, int_array(rows * ROW_BYTES))

    def schema(self, _units: SourceUnits) -> pa.Schema:
        return pa.schema([])

    def read_unit(
        self, units: SourceUnits, unit: int, columns: Sequence[str] | None = None
    ) -> pa.Table:
        raise AssertionError("the rows are not read")


def epoch_of(dataset: Dataset, local_shuffle: LocalShuffle | None = None) -> IntArray:
    """The number of the row at each place of the first epoch."""
    settings = choose_order(dataset, ShardGroup(), BATCH_ROWS, local_shuffle)
    order = EpochOrder(dataset.manifest.unit_rows, settings, epoch=0)
    unit_begins = np.cumsum(dataset.manifest.unit_rows) - dataset.manifest.unit_rows
    places = np.empty(ROWS, np.int64)
    for lane in range(settings.lanes):
        row = 0
        while row < order.lane_rows(lane):
            window = order.window_at(lane, row)
            rows = np.concatenate(
                [
                    unit_begins[unit] + first + np.arange(count)
                    for unit, first, count in window.parts
                ]
            )
            permuted = order.permutation(lane, window)
            rows = rows if permuted is None else rows[permuted]
            places[lane + settings.lanes * np.arange(window.first, window.end)] = rows
            row = window.end
    return int_array(places)


def quality_of(places: IntArray) -> tuple[float, float]:
    """Chi-squared per degree of freedom of a batch on average, and the drift."""
    classes = places * CLASSES // ROWS
    batches = classes[: ROWS // BATCH_ROWS * BATCH_ROWS].reshape(-1, BATCH_ROWS)
    counts = np.stack([np.bincount(batch, minlength=CLASSES) for batch in batches])
    expected = BATCH_ROWS / CLASSES
    chi_squared = ((counts - expected) ** 2 / expected).sum(axis=1) / (CLASSES - 1)
    tenths = np.stack([np.bincount(part, minlength=CLASSES) for part in np.split(classes, 10)])
    drift = np.abs(tenths / tenths.sum(axis=1, keepdims=True) - 1 / CLASSES).sum(axis=1) / 2
    return float(chi_squared.mean()), float(drift.max())


ROW_GROUPS = Dataset.of_source(RowGroups(2_500))
SMALL_ROW_GROUPS = Dataset.of_source(RowGroups(625))


def shuffled_exactly() -> IntArray:
    """Rows by the hash of their number, as `random_shuffle(exact=True)` writes them, in windows."""
    return int_array(permutation(hash_key(1), ROWS)[epoch_of(ROW_GROUPS.random_shuffle(seed=1))])


@pytest.mark.parametrize(
    ("shuffle", "chi_squared", "drift"),
    [
        pytest.param(lambda: epoch_of(ROW_GROUPS), 255, 0.9, id="none"),
        pytest.param(
            lambda: epoch_of(ROW_GROUPS.randomize_block_order(seed=1)), 247, 0.6, id="row groups"
        ),
        pytest.param(
            lambda: epoch_of(ROW_GROUPS, LocalShuffle(10_000, seed=1)), 55, 0.5, id="local"
        ),
        pytest.param(lambda: epoch_of(ROW_GROUPS.random_shuffle(seed=1)), 12, 0.36, id="windows"),
        pytest.param(
            lambda: epoch_of(SMALL_ROW_GROUPS.random_shuffle(seed=1)), 2.7, 0.13, id="small"
        ),
        pytest.param(shuffled_exactly, 1.0, 0.013, id="exact"),
    ],
)
def test_a_shuffle_mixes_as_stated_in_the_guide(
    shuffle: Callable[[], IntArray], chi_squared: float, drift: float
) -> None:
    places = shuffle()
    assert sorted(places.tolist()) == list(range(ROWS))
    assert quality_of(places) == pytest.approx((chi_squared, drift), rel=0.05)
