"""Passes over the rows of a rank: options, prefetching, and the position of the batch in use."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import pyarrow as pa

from spotfit.core.errors import ConfigError
from spotfit.data.iteration.pass_reader import read_pass
from spotfit.data.iteration.prefetching import ConvertedSteps
from spotfit.data.iteration.shard import LocalShuffle, ShardPosition
from spotfit.host import log
from spotfit.host.system import SystemClock

DEFAULT_BATCH_SIZE = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchOptions:
    """The arguments that all `iter_*` methods share. Raises `ConfigError` for contradictions."""

    batch_size: int | None
    global_batch_size: int | None = None
    prefetch_batches: int
    drop_last: bool
    local_shuffle_buffer_size: int | None
    local_shuffle_seed: int | None
    by_row: bool = False
    """Whether the loop gets rows, each of which counts like a batch."""

    def __post_init__(self) -> None:
        row_counts = ("batch_size", "global_batch_size", "local_shuffle_buffer_size")
        for name, minimum in {**dict.fromkeys(row_counts, 1), "prefetch_batches": 0}.items():
            value = getattr(self, name)
            if value is not None and value < minimum:
                raise ConfigError(
                    f"{name}={value} is less than {minimum}.", do=f"Use {minimum} or more."
                )
        if self.global_batch_size is not None and self.batch_size != DEFAULT_BATCH_SIZE:
            raise ConfigError(
                f"Both batch_size={self.batch_size} and global_batch_size="
                f"{self.global_batch_size} are set.",
                do="Pass batch_size for the rows of each rank, or global_batch_size for those of "
                "all ranks together.",
            )
        if self.local_shuffle_buffer_size is not None:
            self._check_buffer_size(self.local_shuffle_buffer_size)

    def _check_buffer_size(self, buffer_rows: int) -> None:
        if self.rows_per_step is None:
            raise ConfigError(
                "local_shuffle_buffer_size is set, but batch_size is None.",
                do="Pass the batch_size of the shuffled batches.",
            )
        if self.global_batch_size is None and buffer_rows < self.rows_per_step:
            raise ConfigError(
                f"local_shuffle_buffer_size={buffer_rows} is less than batch_size="
                f"{self.batch_size}.",
                do="Use a buffer of several batches: the rows of a batch are drawn from it.",
            )

    @property
    def rows_per_step(self) -> int | None:
        """Rows of this rank or, with `global_batch_size`, of all ranks."""
        return self.batch_size if self.global_batch_size is None else self.global_batch_size

    @property
    def shuffle(self) -> LocalShuffle | None:
        """The local shuffle."""
        if self.local_shuffle_buffer_size is None:
            return None
        return LocalShuffle(self.local_shuffle_buffer_size, self.local_shuffle_seed)


@dataclass(slots=True)
class BatchProgress:
    """What the passes of an iterator have read so far."""

    passes: int = 0
    batches: int = 0
    rows: int = 0
    waiting_s: float = 0.0
    """Time in which the training loop waited for batches."""

    def text(self) -> str:
        """Return one line for users."""
        return (
            f"passes: {self.passes}, batches: {self.batches}, rows: {self.rows}, "
            f"waiting for batches: {self.waiting_s:.3f} s"
        )


@dataclass(frozen=True, slots=True)
class BatchPasses:
    """An iterable of batches; each iteration is a new pass.

    `convert` is called for every block in the prefetching thread, and `finish` for its result in
    the thread that iterates. With `options.by_row` the values are iterators over rows, and the
    result of `finish` is a list of rows.
    """

    position: ShardPosition
    progress: BatchProgress
    options: BatchOptions
    convert: Callable[[pa.Table], Any]
    finish: Callable[[Any], Any] | None = None

    def __iter__(self) -> Iterator[Any]:
        _check_loader_process()
        return _Pass(self)


def _check_loader_process() -> None:
    """Raise `ConfigError` in one of several processes of a DataLoader: each would read all rows."""
    data = sys.modules.get("torch.utils.data")
    worker = None if data is None else data.get_worker_info()
    if worker is None:
        return
    if worker.num_workers > 1:
        raise ConfigError(
            f"A dataset is iterated in {worker.num_workers} processes of a DataLoader; each would "
            "read all rows.",
            do="Iterate over iter_torch_batches() without a DataLoader; it prepares batches ahead.",
        )
    log.warning(
        "data.position_unknown",
        reason="the dataset is iterated in a process of a DataLoader: its position is not saved",
    )


class _Batch(NamedTuple):
    value: Any
    rows: int
    position: int


class _Pass(Iterator[Any]):
    """One pass over the batches, which counts those that it has returned."""

    def __init__(self, passes: BatchPasses) -> None:
        options, convert = passes.options, passes.convert
        self._progress = passes.progress
        self._progress.passes += 1
        self._finish = passes.finish
        self._by_row = options.by_row
        self._pass, steps = read_pass(
            passes.position,
            options.rows_per_step,
            is_global=options.global_batch_size is not None,
            drop_last=options.drop_last,
            prefetch=options.prefetch_batches,
            local_shuffle=options.shuffle,
            by_row=options.by_row,
        )

        def convert_step(step: tuple[pa.Table, int]) -> _Batch:
            block, position = step
            return _Batch(convert(block), block.num_rows, position)

        self._batches = ConvertedSteps(
            steps,
            convert_step,
            ahead=options.prefetch_batches,
            advance_in_thread=not passes.position.dataset.runs_user_code,
        )
        self._clock = SystemClock()

    def __next__(self) -> Any:
        progress = self._progress
        began_s = self._clock.now()
        try:
            batch = next(self._batches)
        except StopIteration:
            self._pass.end(is_exhausted=True)
            raise
        progress.waiting_s += self._clock.now() - began_s
        progress.batches += 1
        progress.rows += batch.rows
        if self._by_row:
            assert self._finish is not None
            return self._pass.record_rows(self._finish(batch.value), batch.position)
        self._pass.record_yielded(batch.position)
        return batch.value if self._finish is None else self._finish(batch.value)

    def __del__(self) -> None:
        # A loop that is left, for example by `break`, has no other reference. Without an attribute
        # the pass has not begun.
        if (begun := getattr(self, "_pass", None)) is not None:
            begun.end(is_exhausted=False)
