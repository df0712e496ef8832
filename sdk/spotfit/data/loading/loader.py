"""Reads the rows of one rank, step by step, with threads that read ahead.

Threads read and decode *windows* (`order.py`) before they are needed, within a limit in bytes.
Without transforms, a step is cut from windows. Otherwise the transforms are applied to *slices* of
lanes, which do not depend on the steps or the number of ranks, and a step is cut from slices: rows
are augmented in the same way after a restart and with any number of ranks. Transforms without user
code run in the threads, a few steps ahead. User code runs in feeders (`feeding`), or else in the
thread that asks for the step.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple
from weakref import WeakKeyDictionary

import pyarrow as pa

from spotfit.core.errors import ConfigError, InfrastructureError
from spotfit.data.formats.batch_formats import concat_blocks
from spotfit.data.formats.column_arrays import arrow_array
from spotfit.data.loading.lane_blocks import BlockCache, BlockPiece, LaneBlock
from spotfit.data.loading.slices import call_seeded, slice_key
from spotfit.data.loading.task_pool import TaskPool
from spotfit.data.loading.window_reader import FETCH_THREADS, WindowReader
from spotfit.data.order import EpochOrder, LaneRange, OrderSettings
from spotfit.data.plans.transforms import BlockFunction, bind_all

if TYPE_CHECKING:
    from spotfit.data.loading.slice_tasks import SliceFeeders
    from spotfit.data.plans.row_plan import ShuffledRows
    from spotfit.data.source import IntArray

_STEPS_PER_REQUEST = 4
"""Steps that are planned when one is taken, so that the first step does not wait for all plans."""

_MAX_STEPS_AHEAD = 1_000
_PREFETCH_BYTES = 256 * 2**20
"""Limit on the windows in memory. The next step exceeds it if it needs more."""
_THREADS = 4


class ReadPosition(NamedTuple):
    """A position in the epochs of a dataset, valid for any number of ranks."""

    epoch: int = 0
    consumed: int = 0
    """Rows of this epoch that all ranks together have taken."""


_FIRST_ROW = ReadPosition()


class RankReader:
    """The rows of a rank in one epoch, step by step.

    With `equal`, all ranks have the same number of steps, and of rows of a last step that is not
    complete: fewer rows than there are ranks are left out at the end. Otherwise the ranks' rows of
    the last step differ by at most one, and a rank without a row has no last step.

    `feeders` transform the slices of the dataset; without, this process does.
    """

    def __init__(
        self,
        dataset: ShuffledRows,
        settings: OrderSettings,
        *,
        start: ReadPosition = _FIRST_ROW,
        world_size: int = 1,
        rank: int = 0,
        equal: bool = True,
        feeders: SliceFeeders | None = None,
    ) -> None:
        self._dataset = dataset
        self._settings = settings
        self._epoch, self._consumed = start
        self._world_size = world_size
        self._rank = rank
        self._equal = equal
        self._feeders = feeders

    @property
    def position(self) -> ReadPosition:
        """The position after the step that was yielded last."""
        return ReadPosition(self._epoch, self._consumed)

    def steps(
        self,
        rows_per_step: int | None,
        *,
        is_global: bool = False,
        prefetch: int = 1,
        by_row: bool = False,
    ) -> Iterator[pa.Table]:
        """Yield this rank's rows of each step, from `position` on.

        `rows_per_step` is the number of rows of this rank, or of all ranks if `is_global`. With
        None, a step ends with a window of the first lane. `by_row` yields several steps of one row
        of each rank together, so that the position after each row is known. `prefetch` is the
        number of steps to which transforms are applied before they are needed.

        Raises `ConfigError` if a step has fewer rows than there are ranks, and what a source or a
        transform raises.
        """
        least = self._world_size if is_global else 1
        if rows_per_step is not None and rows_per_step < least:
            raise ConfigError(
                f"Steps of {rows_per_step} rows cannot be shared by {least} ranks."
                if is_global
                else f"A batch has at least one row, not {rows_per_step}.",
                do=f"Set the batch size to {least} or more.",
            )
        factor = 1 if is_global else self._world_size
        return self._steps(rows_per_step and rows_per_step * factor, prefetch, by_row=by_row)

    def _steps(self, global_rows: int | None, prefetch: int, *, by_row: bool) -> Iterator[pa.Table]:
        manifest = self._dataset.manifest
        order = EpochOrder(manifest.unit_rows, self._settings, self._epoch)
        loader = _StepLoader(self._dataset, order, self._feeders)
        try:
            plan = self._plan(order, global_rows, by_row=by_row)
            for end, block in loader.steps(plan, self._consumed, prefetch):
                self._consumed = end
                yield block
        finally:
            loader.close()
        self._consumed = order.row_count

    def _plan(self, order: EpochOrder, global_rows: int | None, *, by_row: bool) -> Iterator[_Step]:
        """Yield the steps in which this rank has rows."""
        size, rank = self._world_size, self._rank
        position, end = self._consumed, order.row_count
        while position < end:
            wanted = global_rows or self._rows_of_windows(order, position)
            count = min(wanted, end - position)
            is_last = count < wanted
            if is_last and self._equal and count < size:
                return
            if by_row:
                count -= count % size if self._equal else 0
                ranges, indices = order.rank_places(position, count, size, rank)
            else:
                equal = is_last and self._equal
                ranges, indices = order.rank_rows(position, count, size, rank, equal=equal), None
            position += count
            if ranges:
                yield _Step(position, ranges, indices)

    def _rows_of_windows(self, order: EpochOrder, position: int) -> int:
        """Return the rows of a step that ends where a window of the first lane ends.

        It is a multiple of the number of ranks, so that all ranks have equally many rows.
        """
        row = order.lane_rows_before(0, position)
        end = order.window_at(0, row).end if row < order.lane_rows(0) else row + 1
        count = end * self._settings.lanes - position
        return -(-count // self._world_size) * self._world_size


class _Step(NamedTuple):
    end: int
    """Rows of the epoch that all ranks have taken after this step."""
    ranges: list[LaneRange]
    indices: IntArray | None
    """The rows of the ranges in the order of the step; None: all, in this order."""


class _StepPieces(NamedTuple):
    number: int
    end: int
    pieces: list[BlockPiece]
    indices: IntArray | None

    @property
    def blocks(self) -> list[LaneBlock]:
        return [piece.block for piece in self.pieces]

    def unrequested_windows(self) -> list[LaneBlock]:
        """Return the windows that are not requested yet, each once."""
        blocks = [part.block for piece in self.pieces for part in piece.block.pieces or (piece,)]
        return list(dict.fromkeys(block for block in blocks if block.future is None))


class _StepLoader:
    """Requests the blocks of the next steps, and assembles the steps from them."""

    def __init__(
        self, dataset: ShuffledRows, order: EpochOrder, feeders: SliceFeeders | None
    ) -> None:
        self._order = order
        self._pool = TaskPool(_THREADS, "spotfit-data")
        self._fetch_pool = TaskPool(FETCH_THREADS, "spotfit-fetch")
        has_transforms = bool(dataset.transforms)
        self._reader = WindowReader(
            dataset.manifest,
            order,
            columns=dataset.columns_to_read(),
            limit_bytes=_PREFETCH_BYTES,
            pool=self._pool,
            fetch_pool=self._fetch_pool,
        )
        self._slice_rows = max(order.settings.slice_rows, 1)
        multiple = self._slice_rows if has_transforms else 1
        self._windows = BlockCache(order, self._reader.locate, multiple)
        self._slices = BlockCache(order, self._locate_slice) if has_transforms else None
        self._in_threads, self._user_code = _bound_transforms(dataset)
        # Other transforms cost less than sending their results.
        self._feeders = feeders if self._user_code is not None else None
        self._requested: deque[_StepPieces] = deque()

    def close(self) -> None:
        """Stop reading ahead. Idempotent."""
        self._pool.close()
        self._fetch_pool.close()
        for step in self._requested:
            self._cancel(step.blocks)

    def steps(
        self, plan: Iterator[_Step], position: int, prefetch: int
    ) -> Iterator[tuple[int, pa.Table]]:
        """Yield the position after each step, and the rows of the step."""
        unrequested = map(self._with_pieces, itertools.count(), plan)
        waiting = next(unrequested, None)
        while True:
            self._check_process()
            self._release(position)
            for _ in range(max(_STEPS_PER_REQUEST, prefetch + 1)):
                if waiting is None or not self._request(waiting):
                    break
                waiting = next(unrequested, None)
            if not self._requested:
                return
            if self._slices is not None and self._feeders is None:
                for step in itertools.islice(self._requested, prefetch + 1):
                    self._request_slices(step)
            step = self._requested.popleft()
            position = step.end
            yield position, self._assemble(step)

    def _with_pieces(self, number: int, step: _Step) -> _StepPieces:
        cache = self._windows if self._slices is None else self._slices
        pieces = [piece for rows in step.ranges for piece in cache.pieces(rows)]
        return _StepPieces(number, step.end, pieces, step.indices)

    def _locate_slice(self, lane: int, row: int) -> LaneBlock:
        number = row // self._slice_rows
        first = number * self._slice_rows
        end = min(first + self._slice_rows, self._order.lane_rows(lane))
        if self._feeders is not None:
            return LaneBlock(lane, first, end, number)
        pieces = self._windows.pieces(LaneRange(lane, first, end - first))
        return LaneBlock(lane, first, end, number, pieces=pieces)

    def _check_process(self) -> None:
        if self._pool.is_forked:
            raise InfrastructureError(
                "This iterator over a dataset was created before the process was forked; its "
                "threads do not exist here.",
                do="Create the iterator in the process that uses it.",
            )

    def _release(self, position: int) -> None:
        for window in self._windows.release(position):
            self._reader.release(window)
        if self._slices is not None:
            # The list, because only the iteration releases the slices.
            self._cancel(list(self._slices.release(position)))

    def _request(self, step: _StepPieces) -> bool:
        """Request what a step needs if there is space, or if it is the very next step."""
        if self._feeders is not None:
            return self._request_of_feeders(self._feeders, step)
        windows = step.unrequested_windows()
        if self._requested and (
            len(self._requested) >= _MAX_STEPS_AHEAD or not self._reader.has_space(windows)
        ):
            return False
        self._reader.request_all(windows, step.number)
        self._requested.append(step)
        return True

    def _request_of_feeders(self, feeders: SliceFeeders, step: _StepPieces) -> bool:
        if self._requested and not feeders.has_credit:
            return False
        for block in step.blocks:
            if block.pending is None and block.result is None:
                block.pending = feeders.request(self._order, block.lane, block.number)
        self._requested.append(step)
        return True

    def _cancel(self, blocks: Iterable[LaneBlock]) -> None:
        if self._feeders is not None:
            for block in blocks:
                if block.pending is not None:
                    self._feeders.cancel(block.pending)
                    block.pending = None

    def _request_slices(self, step: _StepPieces) -> None:
        for block in step.blocks:
            if block.future is None:
                windows = [piece.block.future for piece in block.pieces]
                cut = partial(self._cut_slice, block.pieces)
                block.future = self._pool.after(
                    [window for window in windows if window is not None], step.number, cut
                )
                block.pieces = ()

    def _cut_slice(self, pieces: Sequence[BlockPiece], windows: list[pa.Table]) -> pa.Table:
        cuts = [piece.cut(window) for piece, window in zip(pieces, windows, strict=True)]
        return self._in_threads(concat_blocks(cuts))

    def _assemble(self, step: _StepPieces) -> pa.Table:
        if self._user_code is not None:
            for block in step.blocks:
                if block.result is None:
                    block.result = self._with_user_code(self._user_code, block)
        block = concat_blocks([piece.cut(piece.block.table()) for piece in step.pieces])
        return block if step.indices is None else block.take(arrow_array(step.indices))

    def _with_user_code(self, function: BlockFunction, block: LaneBlock) -> pa.Table:
        """Return the rows of a slice after the transforms with user code."""
        if self._feeders is not None:
            pending, block.pending = block.pending, None
            assert pending is not None, "the slices of a step are requested before it is assembled"
            return self._feeders.take(pending)
        key = slice_key(self._order.settings, self._order.epoch, block.lane, block.number)
        return call_seeded(function, block.table(), key)


_BOUND_TRANSFORMS: WeakKeyDictionary[ShuffledRows, tuple[BlockFunction, BlockFunction | None]] = (
    WeakKeyDictionary()
)


def _bound_transforms(dataset: ShuffledRows) -> tuple[BlockFunction, BlockFunction | None]:
    """Return the transforms before the first with user code, and the others, if there are any.

    They are bound once in a process, not in every epoch.
    """
    if dataset not in _BOUND_TRANSFORMS:
        user_code = [transform.runs_user_code for transform in dataset.transforms]
        first = user_code.index(True) if any(user_code) else len(user_code)
        _BOUND_TRANSFORMS[dataset] = (
            bind_all(dataset.transforms[:first]),
            bind_all(dataset.transforms[first:]) if any(user_code) else None,
        )
    return _BOUND_TRANSFORMS[dataset]
