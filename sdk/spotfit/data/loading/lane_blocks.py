"""Blocks of lanes: the windows and slices that the next steps of a rank are cut from."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import pyarrow as pa

from spotfit.data.order import EpochOrder, LaneRange, UnitPart

if TYPE_CHECKING:
    from spotfit.data.loading.slice_tasks import PendingSlice


@dataclass(eq=False)
class LaneBlock:
    """Rows of a lane that are read or transformed together, while they are needed."""

    lane: int
    first: int
    end: int
    number: int
    """Of the window or the slice in its lane."""
    parts: Sequence[UnitPart] = ()
    """Of a window: what it is read from."""
    pieces: Sequence[BlockPiece] = ()
    """Of a slice: what it is cut from; () when it was cut."""
    future: Future[pa.Table] | None = None
    """None: not requested yet."""
    result: pa.Table | None = None
    """Of a slice: its rows after the transforms with user code."""
    pending: PendingSlice | None = None
    """Of a slice that was requested of feeders and not taken."""
    held_bytes: int = 0
    """Of a window: what it counts for the limit on bytes."""

    @property
    def rows(self) -> int:
        """Number of rows."""
        return self.end - self.first

    def table(self) -> pa.Table:
        """Return the rows, when they have been read. Raises what reading them has raised."""
        if self.result is not None:
            return self.result
        assert self.future is not None, "the blocks of a step are requested before it is assembled"
        return self.future.result()


class BlockPiece(NamedTuple):
    """`rows` rows of a block, from its row `first` on."""

    block: LaneBlock
    first: int
    rows: int

    def cut(self, table: pa.Table) -> pa.Table:
        """Return the rows, of the block's table, without a copy."""
        return table if self.rows == table.num_rows else table.slice(self.first, self.rows)


@dataclass(eq=False)
class BlockCache:
    """The blocks of those steps that are planned and not taken yet."""

    order: EpochOrder
    locate: Callable[[int, int], LaneBlock]
    """Return a new block that contains a row of a lane."""
    release_multiple: int = 1
    """A block is released when its lane has passed its end, rounded up to such a row."""
    _blocks: dict[tuple[int, int], LaneBlock] = field(default_factory=dict)
    _latest: dict[int, LaneBlock] = field(default_factory=dict)
    _releases: list[tuple[int, int, int]] = field(default_factory=list)

    def pieces(self, rows: LaneRange) -> list[BlockPiece]:
        """Return what the rows consist of, in order."""
        row, pieces = rows.first, []
        block = self._latest.get(rows.lane)
        while row < rows.end:
            if block is None or not block.first <= row < block.end:
                block = self._latest[rows.lane] = self._at(rows.lane, row)
            end = min(rows.end, block.end)
            pieces.append(BlockPiece(block, row - block.first, end - row))
            row = end
        return pieces

    def release(self, position: int) -> Iterator[LaneBlock]:
        """Forget, and yield, the blocks whose rows are all before a place of the epoch."""
        while self._releases and self._releases[0][0] <= position:
            _, lane, first = heapq.heappop(self._releases)
            block = self._blocks.pop((lane, first))
            if self._latest.get(lane) is block:
                del self._latest[lane]
            yield block

    def _at(self, lane: int, row: int) -> LaneBlock:
        block = self.locate(lane, row)
        key = (lane, block.first)
        if key not in self._blocks:
            self._blocks[key] = block
            end = -(-block.end // self.release_multiple) * self.release_multiple
            end = min(end, self.order.lane_rows(lane))
            # The place after the row `end` - 1 of the lane.
            heapq.heappush(self._releases, ((end - 1) * self.order.settings.lanes + lane + 1, *key))
        return self._blocks[key]
