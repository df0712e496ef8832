"""The interface through which a rank reads its rows, and its implementation for one process."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import NamedTuple, Protocol, TypeAlias

import numpy as np
import pyarrow as pa

from spotfit.data.batches import concat_blocks
from spotfit.host.system import new_secret_bytes


class LocalShuffle(NamedTuple):
    """A shuffle of the rows that are in memory at the same time."""

    buffer_rows: int
    """Rows of this rank to draw from; at least those of a step."""
    seed: int | None
    """None for another order in every pass."""


class StepReader(Protocol):
    """Reads this rank's rows of one pass over a dataset, step by step.

    A step is what all ranks read together at the same time.
    """

    @property
    def runs_user_code(self) -> bool:
        """Whether `steps` calls functions of the user.

        It is then advanced in the thread that asks for batches, else in a thread beside it.
        """
        ...

    @property
    def position(self) -> object:
        """The position after the step that `steps` yielded last; at its end, after the pass.

        The reader defines its type; None if positions cannot be saved.
        """
        ...

    def steps(
        self, rows_per_step: int | None, *, is_global: bool, drop_last: bool, prefetch: int
    ) -> Iterator[pa.Table]:
        """Yield this rank's rows of each step, in order. Called once.

        `rows_per_step` is the number of rows of this rank or, if `is_global`, that of all ranks;
        None for steps as large as the reader's blocks. `drop_last` omits the last step on all ranks
        if it has fewer rows. `prefetch` is the number of steps to read ahead.
        """
        ...


ReaderFactory: TypeAlias = Callable[[LocalShuffle | None], StepReader]
"""Returns the reader of a new pass."""


class SequentialReader:
    """Reads all rows of a dataset in one process, block after block.

    Its position cannot be saved. Nothing is read ahead: `open_blocks` is advanced when rows are
    needed.
    """

    def __init__(
        self,
        open_blocks: Callable[[], Iterator[pa.Table]],
        *,
        runs_user_code: bool,
        shuffle: LocalShuffle | None = None,
    ) -> None:
        self._open_blocks = open_blocks
        self._shuffle = shuffle
        self.runs_user_code = runs_user_code
        self.position: object = None

    def steps(
        self,
        rows_per_step: int | None,
        *,
        is_global: bool = False,
        drop_last: bool = False,
        prefetch: int = 0,
    ) -> Iterator[pa.Table]:
        """Yield `rows_per_step` rows at a time, or whole blocks: there are no other ranks."""
        blocks: Iterator[pa.Table] = (block for block in self._open_blocks() if block.num_rows)
        if self._shuffle is not None:
            blocks = shuffle_blocks(blocks, self._shuffle)
        return blocks if rows_per_step is None else cut_blocks(blocks, rows_per_step, drop_last)


def cut_blocks(
    blocks: Iterator[pa.Table],
    rows: int,
    drop_last: bool,  # noqa: FBT001
) -> Iterator[pa.Table]:
    """Yield `rows` rows at a time, across the borders of blocks; without a copy.

    The last ones are fewer, unless `drop_last`.
    """
    # Slices of record batches cost the same wherever they begin; those of tables with many chunks
    # do not.
    pending: deque[pa.Table] = deque()
    count = 0
    for block in blocks:
        for part in block.to_batches():
            pending.append(pa.Table.from_batches([part]))
            count += part.num_rows
            while count >= rows:
                yield concat_blocks(_take_rows(pending, rows))
                count -= rows
    if count and not drop_last:
        yield concat_blocks(list(pending))


def _take_rows(pending: deque[pa.Table], rows: int) -> list[pa.Table]:
    taken: list[pa.Table] = []
    while rows:
        block = pending.popleft()
        if block.num_rows > rows:
            pending.appendleft(block.slice(rows))
            block = block.slice(0, rows)
        taken.append(block)
        rows -= block.num_rows
    return taken


def shuffle_blocks(blocks: Iterator[pa.Table], shuffle: LocalShuffle) -> Iterator[pa.Table]:
    """Yield the rows in random order: each is drawn from `buffer_rows` rows, fewer at the end."""
    seed = int.from_bytes(new_secret_bytes(8)) if shuffle.seed is None else shuffle.seed
    rng = np.random.default_rng(seed)
    buffer: list[pa.Table] = []
    count = 0
    for block in blocks:
        buffer.append(block)
        count += block.num_rows
        # Half of the buffer's size at a time: a row is copied about three times, not once per step.
        if count < shuffle.buffer_rows * 3 // 2 or count == shuffle.buffer_rows:
            continue
        rows = _permuted(buffer, rng)
        yield rows.slice(0, count - shuffle.buffer_rows)
        buffer, count = [rows.slice(count - shuffle.buffer_rows)], shuffle.buffer_rows
    if count:
        yield _permuted(buffer, rng)


def _permuted(blocks: list[pa.Table], rng: np.random.Generator) -> pa.Table:
    block = concat_blocks(blocks)
    order = rng.permutation(block.num_rows)
    indices = pa.Array.from_buffers(pa.int64(), len(order), [None, pa.py_buffer(order)])
    # One chunk per column first: `take` on chunks has to look up the chunk of every row.
    return block.combine_chunks().take(indices)
