"""The reader of a pass over a shard: the rows of a rank, from the shard's position on."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa

from spotfit.data.iteration.shard import LocalShuffle, PassPosition, ShardPosition
from spotfit.data.loading.loader import RankReader, ReadPosition

_BLOCK_STEP_ROWS = 1024
"""Assumed size of a step where the loop reads blocks, for the choice of an order."""


class PassReader:
    """Reads the rest of an epoch, or a whole one, and records what the training loop gets."""

    def __init__(self, shard: ShardPosition, shuffle: LocalShuffle | None = None) -> None:
        self._shard = shard
        self._shuffle = shuffle
        self._pass: PassPosition | None = None
        self.position = 0
        """Rows of the epoch that all ranks have taken after the step that was yielded last."""
        self.runs_user_code = shard.dataset.runs_user_code

    def steps(
        self,
        rows_per_step: int | None,
        *,
        is_global: bool = False,
        drop_last: bool = False,
        prefetch: int = 0,
    ) -> Iterator[pa.Table]:
        """Begin the pass and return an iterator over this rank's rows of each step.

        `rows_per_step` is the number of rows of this rank or, if `is_global`, that of all ranks;
        None for steps as large as the windows. `drop_last` omits the last step on all ranks if it
        has fewer rows. `prefetch` is the number of steps to transform ahead. Raises `ConfigError`
        if the position to resume belongs to other rows, or for steps with fewer rows than ranks.
        """
        group = self._shard.group
        step_rows = (rows_per_step or _BLOCK_STEP_ROWS) * (1 if is_global else group.world_size)
        # Not in the generator, which a thread of the iterator may advance.
        self._pass = self._shard.begin_pass(
            step_rows, drop_last=drop_last, local_shuffle=self._shuffle
        )
        reader = RankReader(
            self._shard.dataset,
            self._pass.order,
            start=ReadPosition(self._pass.epoch, self._pass.first_row),
            world_size=group.world_size,
            rank=group.rank,
            feeders=self._shard.feeders,
        )
        blocks = reader.steps(rows_per_step, is_global=is_global, prefetch=prefetch)
        least = step_rows if drop_last and rows_per_step is not None else 1
        return self._read(reader, blocks, self._pass.first_row, least)

    def _read(
        self, reader: RankReader, blocks: Iterator[pa.Table], first_row: int, least_rows: int
    ) -> Iterator[pa.Table]:
        self.position = first_row
        for block in blocks:
            consumed = reader.position.consumed
            if consumed - self.position < least_rows:  # the last step, which is incomplete
                return
            self.position = consumed
            yield block

    def record_yielded(self, position: int) -> None:
        """Record that the training loop gets the batch after which `position` rows are taken."""
        assert self._pass is not None, "steps() begins the pass"
        self._pass.record_yielded(position)

    def end(self, *, is_exhausted: bool) -> None:
        """Record the end of the pass: all batches were taken, or the loop has left it."""
        if self._pass is not None:
            self._pass.end(is_exhausted=is_exhausted)
