"""Slices of an epoch's order: read, shuffled and transformed as a pure function of their address.

A lane is cut into slices of `OrderSettings.slice_rows` rows, whatever the number of ranks. The same
address gives the same bytes in any process: user code that draws random numbers finds the global
generators seeded by the address.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import pyarrow as pa

from spotfit.data.formats.batch_formats import concat_blocks
from spotfit.data.loading.global_generators import seeded_generators
from spotfit.data.loading.lane_blocks import LaneBlock
from spotfit.data.loading.slice_tasks import SliceTask
from spotfit.data.loading.task_pool import TaskPool
from spotfit.data.loading.window_reader import FETCH_THREADS, WindowReader
from spotfit.data.order import EpochOrder, OrderSettings, hash_key
from spotfit.data.plans.transforms import BlockFunction, bind_all

if TYPE_CHECKING:
    from spotfit.data.plans.row_plan import ShuffledRows

# Streams 0 and 1 are those of the permutations in `order`.
_SLICES_STREAM = 2
# Windows of several lanes, and the next one of each; they are usually a few MiB.
_CACHE_BYTES = 256 * 2**20
# A slice that crosses the border of two windows needs both.
_MIN_CACHED_WINDOWS = 2
_READ_THREADS = 2
"""Threads that read the next windows while user code runs in the thread of the caller."""
_CACHED_EPOCHS = 4
"""Orders of epochs that are kept: one for each dataset that is iterated at the same time."""


class _Epoch(NamedTuple):
    order: EpochOrder
    windows: WindowReader


class SliceReader:
    """Reads slices of datasets. Not thread-safe: its owner calls one method at a time.

    Args:
        datasets: By the names that tasks contain.
        cache_bytes: Windows of at most this size are kept, but at least two.
    """

    def __init__(
        self, datasets: Mapping[str, ShuffledRows], *, cache_bytes: int = _CACHE_BYTES
    ) -> None:
        self._datasets = datasets
        self._cache_bytes = cache_bytes
        self._threads = TaskPool(_READ_THREADS, "spotfit-read-window")
        self._fetch_threads = TaskPool(FETCH_THREADS, "spotfit-fetch-window")
        self._epochs: OrderedDict[tuple[str, int, OrderSettings], _Epoch] = OrderedDict()
        self._functions: dict[str, BlockFunction] = {}
        self._windows: OrderedDict[tuple[SliceTask, int], LaneBlock] = OrderedDict()
        """The windows that were used last, and those that are being read."""

    def prefetch(self, task: SliceTask) -> None:
        """Begin to read the windows of a slice in another thread."""
        for _ in self._parts(task):
            pass

    def read(self, task: SliceTask) -> pa.Table:
        """Return the rows of a slice after the dataset's transforms, in one chunk per column.

        Fewer rows than `slice_rows` at the end of the lane. Raises `KeyError` for an unknown
        dataset, the errors of its source, `RowCountChangedError`, and what user code raises.
        """
        parts = list(self._parts(task))
        try:
            blocks = [window.table().slice(begin, rows) for window, begin, rows in parts]
        except BaseException:
            # The next call reads them again: the storage may have been unavailable.
            self._windows.clear()
            raise
        self._drop_oldest_windows()
        return self._transform(task, concat_blocks(blocks)).combine_chunks()

    def close(self) -> None:
        """End the reading threads; does not wait for them."""
        self._threads.close()
        self._fetch_threads.close()

    def _parts(self, task: SliceTask) -> Iterator[tuple[LaneBlock, int, int]]:
        """Yield the windows of a slice, with the first row and the number of its rows in each."""
        epoch = self._epoch(task)
        row = task.number * task.order.slice_rows
        end = min(row + task.order.slice_rows, epoch.order.lane_rows(task.lane))
        while row < end:
            window = self._window(task, epoch, row)
            part_end = min(end, window.end)
            yield window, row - window.first, part_end - row
            row = part_end

    def _epoch(self, task: SliceTask) -> _Epoch:
        key = (task.dataset, task.epoch, task.order)
        if key not in self._epochs:
            dataset = self._datasets[task.dataset]
            order = EpochOrder(dataset.manifest.unit_rows, task.order, task.epoch)
            reader = WindowReader(
                dataset.manifest,
                order,
                columns=dataset.columns_to_read(),
                limit_bytes=self._cache_bytes,
                pool=self._threads,
                fetch_pool=self._fetch_threads,
            )
            self._epochs[key] = _Epoch(order, reader)
            if len(self._epochs) > _CACHED_EPOCHS:
                self._epochs.popitem(last=False)
        return self._epochs[key]

    def _window(self, task: SliceTask, epoch: _Epoch, row: int) -> LaneBlock:
        """Return the window that contains a row of the task's lane; it may be being read."""
        located = epoch.windows.locate(task.lane, row)
        key = (msgspec.structs.replace(task, number=0), located.first)
        if key not in self._windows:
            epoch.windows.request(located, 0)
            self._windows[key] = located
        self._windows.move_to_end(key)
        return self._windows[key]

    def _drop_oldest_windows(self) -> None:
        """Keep the bound of bytes; windows that are being read count once they were read."""
        sizes = {
            key: future.result().nbytes
            for key, window in self._windows.items()
            if (future := window.future) is not None
            and future.done()
            and not future.cancelled()
            and future.exception() is None
        }
        excess = sum(sizes.values()) - self._cache_bytes
        for key, size in list(sizes.items())[:-_MIN_CACHED_WINDOWS]:
            if excess <= 0:
                return
            del self._windows[key]
            excess -= size

    def _transform(self, task: SliceTask, block: pa.Table) -> pa.Table:
        transforms = self._datasets[task.dataset].transforms
        if task.dataset not in self._functions:
            self._functions[task.dataset] = bind_all(transforms)
        function = self._functions[task.dataset]
        if not any(transform.runs_user_code for transform in transforms):
            return function(block)
        return call_seeded(
            function, block, slice_key(task.order, task.epoch, task.lane, task.number)
        )


def slice_key(order: OrderSettings, epoch: int, lane: int, number: int) -> int:
    """Return the seed of the random generators that the transforms of a slice use, of 64 bits."""
    return hash_key(order.seed, epoch, _SLICES_STREAM, lane, number)


def call_seeded(function: BlockFunction, block: pa.Table, key: int) -> pa.Table:
    """Return `function(block)`, called with the global random generators seeded by `key`.

    Not thread-safe; the generators have the states of before afterwards.
    """
    had_torch = "torch" in sys.modules
    with seeded_generators() as seed:
        seed(key)
        result = function(block)
    # The function has imported PyTorch, and may have drawn numbers of it. In another process it may
    # find it imported and seeded: repeated, so that both results are equal.
    if not had_torch and "torch" in sys.modules:
        return call_seeded(function, block, key)
    return result
