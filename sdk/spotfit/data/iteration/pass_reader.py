"""A pass over a shard: the rows of a rank, from the shard's position on."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa

from spotfit.data.iteration.shard import LocalShuffle, PassPosition, ShardPosition
from spotfit.data.loading.loader import RankReader, ReadPosition

_BLOCK_STEP_ROWS = 1024
"""Assumed size of a step where the loop reads blocks, for the choice of an order."""


def read_pass(
    shard: ShardPosition,
    rows_per_step: int | None,
    *,
    is_global: bool = False,
    drop_last: bool = False,
    prefetch: int = 0,
    local_shuffle: LocalShuffle | None = None,
    by_row: bool = False,
) -> tuple[PassPosition, Iterator[tuple[pa.Table, int]]]:
    """Begin a pass; return it, and an iterator over its steps.

    A step has the rows of this rank, and the number of rows of the epoch that all ranks together
    have taken after it. `rows_per_step` is the number of rows of this rank or, if `is_global`, that
    of all ranks; None for steps as large as the windows. `drop_last` omits the last step on all
    ranks if it has fewer rows. `by_row` puts together several steps of one row of each rank, in the
    order of these steps. `prefetch` is the number of steps to transform ahead. Raises
    `ConfigError` if the position to resume belongs to other rows, or for steps with fewer rows than
    ranks.
    """
    group = shard.group
    step_rows = (rows_per_step or _BLOCK_STEP_ROWS) * (1 if is_global else group.world_size)
    # Not in the generator, which a thread of the iterator may advance.
    begun = shard.begin_pass(step_rows, drop_last=drop_last, local_shuffle=local_shuffle)
    reader = RankReader(
        shard.dataset,
        begun.order,
        start=ReadPosition(begun.epoch, begun.first_row),
        world_size=group.world_size,
        rank=group.rank,
        equal=group.equal,
        feeders=shard.feeders,
    )
    blocks = reader.steps(rows_per_step, is_global=is_global, prefetch=prefetch, by_row=by_row)
    least_rows = step_rows if drop_last and rows_per_step is not None else 1
    return begun, _with_positions(reader, blocks, least_rows)


def _with_positions(
    reader: RankReader, blocks: Iterator[pa.Table], least_rows: int
) -> Iterator[tuple[pa.Table, int]]:
    before = reader.position.consumed
    for block in blocks:
        consumed = reader.position.consumed
        if consumed - before < least_rows:  # the last step, which is incomplete
            return
        yield block, consumed
        before = consumed
