"""A dataset whose transform draws random numbers, and the result that every feeder must return."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
import pyarrow as pa

from spotfit.core.ids import RunId
from spotfit.data.dataset import Dataset
from spotfit.data.loading.slice_tasks import SliceTask
from spotfit.data.loading.slices import SliceReader
from spotfit.data.order import EpochOrder, OrderSettings
from spotfit.data.plans.transforms import BlockFunction
from spotfit.data.readers import from_items

NAME = "train"
RUN_ID = RunId("run")


@dataclass(frozen=True)
class Augment:
    """Adds columns with random numbers of the global generators of Python and NumPy."""

    name: str = "map_batches(augment)"
    runs_user_code: bool = True
    identity: str = "augment"

    def bind(self) -> BlockFunction:
        return _augment


def _augment(block: pa.Table) -> pa.Table:
    noise = np.random.normal(size=block.num_rows)
    flips = [random.random() < 0.5 for _ in range(block.num_rows)]
    return block.append_column("noise", pa.array(noise)).append_column("flip", pa.array(flips))


@dataclass(frozen=True)
class RaiseAt:
    """Raises for the slices that contain a row with this id."""

    row_id: int
    name: str = "map_batches(raise_at)"
    runs_user_code: bool = True
    identity: str = "raise_at"

    def bind(self) -> BlockFunction:
        return self._check

    def _check(self, block: pa.Table) -> pa.Table:
        if self.row_id in block.column("id").to_pylist():
            raise ValueError(f"bad row {self.row_id}")
        return block


def dataset_of(count: int, *transforms: object) -> Dataset:
    rows = [{"id": number, "text": f"row {number}"} for number in range(count)]
    dataset = from_items(rows)
    for transform in transforms or (Augment(),):
        dataset = dataset.with_transform(transform)  # type: ignore[arg-type]
    return dataset


@dataclass
class Pass:
    """All slices of one epoch, with the lanes side by side, as a loader needs them."""

    dataset: Dataset
    seed: int = 0
    epoch: int = 0
    lanes: int = 3
    slice_rows: int = 4
    expected: list[pa.Table] = field(default_factory=list)

    def __post_init__(self) -> None:
        reader = SliceReader({NAME: self.dataset})
        self.expected = [reader.read(task) for task in self.tasks()]
        reader.close()

    @property
    def settings(self) -> OrderSettings:
        return OrderSettings(
            seed=self.seed,
            lanes=self.lanes,
            window_rows=8,
            shuffle="rows",
            slice_rows=self.slice_rows,
        )

    def tasks(self) -> Iterator[SliceTask]:
        order = EpochOrder(self.dataset.manifest.unit_rows, self.settings, self.epoch)
        for number in range(-(-order.lane_rows(0) // self.slice_rows)):
            for lane in range(self.lanes):
                if number * self.slice_rows < order.lane_rows(lane):
                    yield SliceTask(
                        dataset=NAME,
                        epoch=self.epoch,
                        order=self.settings,
                        lane=lane,
                        number=number,
                    )


def shipped(dataset: Dataset) -> SimpleNamespace:
    """What a trainer pickles for its feeders."""
    return SimpleNamespace(datasets={NAME: dataset})
