"""The rows that the ranks trained on, checked at every step against the order of their epoch.

A model state refers to the state before it and to the rows of its step, so that steps which were
lost with a machine and repeated count once: only those that led to the state.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from spotfit.data.iteration.shard import ShardGroup, choose_order
from spotfit.data.loading.slice_tasks import SliceTask
from spotfit.data.loading.slices import SliceReader
from spotfit.data.order import EpochOrder, OrderSettings
from spotfit.data.plans.row_plan import ShuffledRows
from spotfit_localsim.virtual.workload import DatasetWorkload, ModelState

DATASET = "train"

Row = tuple[int, float]
"""The number of a row, and the random number that the user's function has added to it."""


class RankBatch(NamedTuple):
    """The rows of one rank in one step."""

    epoch: int
    order: OrderSettings
    """The order of the epoch, as in a checkpoint."""
    rows: tuple[Row, ...]


class _TrainedStep(NamedTuple):
    before: ModelState
    epoch: int
    order: OrderSettings
    world_size: int
    rows: tuple[Row, ...]


class ReferenceEpochs:
    """The rows of each epoch in their order, as one undisturbed process reads them."""

    def __init__(self, dataset: ShuffledRows) -> None:
        self._dataset = dataset
        self._unit_begins = np.cumsum([0, *dataset.manifest.unit_rows.tolist()])
        self._epochs: dict[tuple[int, OrderSettings], list[Row]] = {}

    def rows(self, epoch: int, settings: OrderSettings) -> list[Row]:
        """Return the rows by their place in the epoch."""
        key = (epoch, settings)
        if key not in self._epochs:
            order = EpochOrder(self._dataset.manifest.unit_rows, settings, epoch)
            lanes = [self._lane_numbers(order, lane) for lane in range(settings.lanes)]
            values = dict(self._transformed(order))
            numbers = (
                lanes[place % settings.lanes][place // settings.lanes]
                for place in range(order.row_count)
            )
            self._epochs[key] = [(number, values[number]) for number in numbers]
        return self._epochs[key]

    def _lane_numbers(self, order: EpochOrder, lane: int) -> list[int]:
        """Return the numbers of the rows of a lane in the dataset, in their order."""
        numbers = list[int]()
        while len(numbers) < order.lane_rows(lane):
            window = order.window_at(lane, len(numbers))
            rows = [
                int(self._unit_begins[part.unit]) + part.first + index
                for part in window.parts
                for index in range(part.rows)
            ]
            permuted = order.permutation(lane, window)
            numbers += rows if permuted is None else [rows[int(index)] for index in permuted]
        return numbers

    def _transformed(self, order: EpochOrder) -> Iterator[Row]:
        settings, reader = order.settings, SliceReader({DATASET: self._dataset})
        for lane in range(settings.lanes):
            for number in range(-(-order.lane_rows(lane) // settings.slice_rows)):
                task = SliceTask(
                    dataset=DATASET, epoch=order.epoch, order=settings, lane=lane, number=number
                )
                yield from table_rows(reader.read(task))


def table_rows(batch: Mapping[str, Any]) -> list[Row]:
    """Return the rows of a batch, or of an Arrow table, with the columns `id` and `value`."""
    ids, values = (np.asarray(batch[name]).tolist() for name in ("id", "value"))
    return list(zip(ids, values, strict=True))


class TrainedRows:
    """All model states of a simulation, and the rows that led to each of them."""

    def __init__(
        self,
        dataset: ShuffledRows,
        plan: DatasetWorkload,
        group: ShardGroup,
        *,
        report_violation: Callable[[str], None],
    ) -> None:
        self._plan = plan
        self._report_violation = report_violation
        self._row_count = dataset.manifest.row_count
        self._reference = ReferenceEpochs(dataset)
        self._steps: dict[ModelState, _TrainedStep] = {}
        self._order: OrderSettings | None = None
        if plan.is_global and plan.buffer_rows is None:
            self._order = choose_order(dataset, group, plan.batch_rows)
        """The order that all epochs have whatever the number of ranks; None: it depends on that."""

    def has(self, state: ModelState) -> bool:
        """Return whether the training has passed through the state."""
        return state in self._steps

    def train(self, before: ModelState, batches: Sequence[RankBatch]) -> ModelState:
        """Record a step of all ranks after the state `before`; return the state after it."""
        rows = tuple(row for batch in batches for row in batch.rows)
        step = _TrainedStep(before, batches[0].epoch, batches[0].order, len(batches), rows)
        if (error := self._find_error(step, batches)) is not None:
            self._report_violation(f"step {before.step + 1} trains on wrong rows: {error}")
        digest = hashlib.sha1(repr(rows).encode(), usedforsecurity=False).hexdigest()
        state = before.advance(digest)
        self._steps[state] = step
        return state

    def world_sizes_by_epoch(self, state: ModelState) -> dict[int, list[int]]:
        """Return the number of ranks of each step that led to the state, by epoch."""
        sizes: dict[int, list[int]] = {}
        for step in self._steps_to(state):
            sizes.setdefault(step.epoch, []).insert(0, step.world_size)
        return sizes

    def check_end(self, state: ModelState) -> None:
        """Check the last epoch of the training if it is finished."""
        steps = self._epoch_steps(state)
        if steps and (error := self._find_epoch_error(steps, 0)) is not None:
            taken = sum(len(step.rows) for step in steps)
            if taken + steps[-1].world_size > self._row_count:
                self._report_violation(error)

    def _find_error(self, step: _TrainedStep, batches: Sequence[RankBatch]) -> str | None:
        if len({(batch.epoch, batch.order) for batch in batches}) > 1:
            return f"the ranks have other orders: {[batch[:2] for batch in batches]}"
        if self._order is not None and step.order != self._order:
            return f"the order is {step.order}, with other numbers of ranks {self._order}"
        before = self._epoch_steps(step.before)
        if before and before[-1].epoch != step.epoch:
            if before[-1].epoch + 1 != step.epoch:
                return f"epoch {step.epoch} follows epoch {before[-1].epoch}"
            if (error := self._find_epoch_error(before, step.world_size)) is not None:
                return error
            before = []
        elif not before and step.epoch:
            return f"the first epoch is {step.epoch}"
        if before and before[-1].order != step.order:
            return f"the order changes from {before[-1].order} to {step.order} within an epoch"
        return self._find_batch_error(step, sum(len(one.rows) for one in before))

    def _find_batch_error(self, step: _TrainedStep, first: int) -> str | None:
        """Compare the rows of all ranks with the next places of the order, lane by lane."""
        factor = 1 if self._plan.is_global else step.world_size
        end = min(first + self._plan.batch_rows * factor, self._row_count)
        lanes = step.order.lanes
        places = sorted(range(first, end), key=lambda place: (place % lanes, place))
        is_last = end - first < self._plan.batch_rows * factor
        # In the last step each rank has the same number of rows.
        count = len(places) // step.world_size * step.world_size if is_last else len(places)
        reference = self._reference.rows(step.epoch, step.order)
        expected = tuple(reference[place] for place in places[:count])
        if step.rows == expected:
            return None
        return (
            f"{step.world_size} ranks have {step.rows} of epoch {step.epoch}, the places {first} "
            f"to {end} have {expected}"
        )

    def _find_epoch_error(self, steps: Sequence[_TrainedStep], next_size: int) -> str | None:
        """Compare the rows of a finished epoch with the manifest."""
        counts = Counter(number for step in steps for number, _ in step.rows)
        missing = [number for number in range(self._row_count) if number not in counts]
        repeated = [number for number, count in counts.items() if count > 1]
        # Equal numbers of rows for all ranks of the last step leave out fewer rows than ranks.
        may_miss = max(steps[-1].world_size, next_size) - 1
        if self._plan.drop_last:
            factor = 1 if self._plan.is_global else max(steps[-1].world_size, next_size)
            may_miss = max(may_miss, self._plan.batch_rows * factor - 1)
        if repeated or len(missing) > may_miss or not counts.keys() <= set(range(self._row_count)):
            return f"epoch {steps[-1].epoch} has the rows {repeated} twice and {missing} not at all"
        return None

    def _epoch_steps(self, state: ModelState) -> list[_TrainedStep]:
        """Return the steps of the state's epoch that led to it, in order."""
        steps: list[_TrainedStep] = []
        for step in self._steps_to(state):
            if steps and step.epoch != steps[-1].epoch:
                break
            steps.append(step)
        return steps[::-1]

    def _steps_to(self, state: ModelState) -> Iterator[_TrainedStep]:
        """Yield the steps that led to the state, the last one first."""
        while (step := self._steps.get(state)) is not None:
            yield step
            state = step.before
