"""Options of passes, and the position of the batch in use."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest

from spotfit.core.errors import ConfigError
from spotfit.data.batch_passes import BatchOptions, BatchPasses, BatchProgress
from spotfit.data.step_reader import LocalShuffle

DEFAULTS: dict[str, Any] = {
    "batch_size": 256,
    "prefetch_batches": 1,
    "drop_last": False,
    "local_shuffle_buffer_size": None,
    "local_shuffle_seed": None,
}


def options(**changes: Any) -> BatchOptions:
    return BatchOptions(**(DEFAULTS | changes))


class Positions:
    """Records the positions of taken batches."""

    def __init__(self) -> None:
        self.taken: list[Any] = []

    def batch_taken(self, position: Any) -> None:
        self.taken.append(position)


class CountingReader:
    """Reads steps of one row; its position is the number of rows of all three ranks."""

    def __init__(self, count: int, *, runs_user_code: bool = False) -> None:
        self.runs_user_code = runs_user_code
        self.position = 0
        self.arguments: dict[str, Any] = {}
        self._count = count

    def steps(self, rows_per_step: int | None, **arguments: Any) -> Iterator[pa.Table]:
        self.arguments = {"rows_per_step": rows_per_step} | arguments
        for number in range(self._count):
            self.position = 3 * (number + 1)
            yield pa.table({"id": [number]})
        # Rows that are not enough for another step of all ranks.
        self.position += 2


def passes_of(reader: CountingReader, positions: Positions, **changes: Any) -> BatchPasses:
    return BatchPasses(
        lambda _shuffle: reader,
        BatchProgress(positions),
        options(**changes),
        lambda block: block["id"].to_pylist(),
    )


# --- options --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch_size": 0}, "batch_size=0 is less than 1"),
        ({"global_batch_size": 0}, "global_batch_size=0 is less than 1"),
        ({"prefetch_batches": -1}, "prefetch_batches=-1 is less than 0"),
        ({"batch_size": 8, "global_batch_size": 32}, "Both batch_size=8 and"),
        ({"local_shuffle_buffer_size": 255}, "buffer_size=255 is less than batch_size=256"),
        ({"local_shuffle_buffer_size": 9, "batch_size": None}, "but batch_size is None"),
    ],
)
def test_contradicting_options_are_rejected(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        options(**changes)


def test_a_step_has_the_rows_of_the_global_batch() -> None:
    assert options(global_batch_size=960).rows_per_step == 960


def test_a_local_shuffle_has_the_size_and_seed_of_the_arguments() -> None:
    shuffled = options(local_shuffle_buffer_size=1000, local_shuffle_seed=3)
    assert (options().shuffle, shuffled.shuffle) == (None, LocalShuffle(1000, 3))


# --- positions ------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefetch", [0, 1, 5])
@pytest.mark.parametrize("runs_user_code", [True, False])
def test_a_batch_is_taken_when_the_next_one_is_requested(
    prefetch: int, runs_user_code: bool
) -> None:
    positions = Positions()
    reader = CountingReader(4, runs_user_code=runs_user_code)
    batches = iter(passes_of(reader, positions, prefetch_batches=prefetch))
    seen = []
    for _ in range(4):
        next(batches)
        seen.append(list(positions.taken))
    assert seen == [[], [3], [3, 6], [3, 6, 9]]


@pytest.mark.parametrize("prefetch", [0, 1, 5])
def test_the_end_of_a_pass_counts_the_rows_behind_the_last_batch(prefetch: int) -> None:
    positions = Positions()
    list(passes_of(CountingReader(2), positions, prefetch_batches=prefetch))
    assert positions.taken == [3, 6, 8]


def test_a_batch_that_is_marked_as_taken_is_not_reported_again() -> None:
    positions = Positions()
    passes = passes_of(CountingReader(3), positions)
    batches = iter(passes)
    next(batches)
    passes.progress.mark_taken()
    assert positions.taken == [3]
    next(batches)
    assert positions.taken == [3]


def test_a_reader_without_positions_reports_none() -> None:
    reader = CountingReader(0)
    reader.position = None  # type: ignore[assignment]
    positions = Positions()
    passes = passes_of(reader, positions)
    reader.steps = lambda *_args, **_options: iter([pa.table({"id": [1]})])  # type: ignore[method-assign]
    assert list(passes) == [[1]]
    assert positions.taken == []


# --- passes ---------------------------------------------------------------------------------------


def test_the_reader_gets_the_options() -> None:
    reader = CountingReader(0)
    list(passes_of(reader, Positions(), global_batch_size=9, prefetch_batches=4, drop_last=True))
    assert reader.arguments == {
        "rows_per_step": 9,
        "is_global": True,
        "drop_last": True,
        "prefetch": 4,
    }


def test_the_result_of_the_conversion_is_finished_by_the_caller() -> None:
    passes = BatchPasses(
        lambda _shuffle: CountingReader(2),
        BatchProgress(None),
        options(),
        lambda block: block["id"].to_pylist(),
        lambda numbers: [-number for number in numbers],
    )
    assert list(passes) == [[0], [-1]]


def test_progress_counts_passes_batches_and_rows() -> None:
    passes = passes_of(CountingReader(3), Positions())
    list(passes)
    list(passes)
    assert passes.progress.text().startswith(
        "passes: 2, batches: 6, rows: 6, waiting for batches: "
    )
