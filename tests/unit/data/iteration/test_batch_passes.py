"""Options of passes, and the position of the batch in use."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import spotfit.data
from spotfit.core.errors import ConfigError
from spotfit.data.iteration.batch_passes import BatchOptions, BatchPasses, BatchProgress
from spotfit.data.iteration.shard import LocalShuffle, ShardGroup, ShardPosition

DEFAULTS: dict[str, Any] = {
    "batch_size": 256,
    "prefetch_batches": 1,
    "drop_last": False,
    "local_shuffle_buffer_size": None,
    "local_shuffle_seed": None,
}


def options(**changes: Any) -> BatchOptions:
    return BatchOptions(**(DEFAULTS | changes))


def passes_over(rows: int, *, user_code: bool = False, **changes: Any) -> BatchPasses:
    """Passes of the first of three ranks, with steps of one row of each."""
    dataset = spotfit.data.range(rows)
    if user_code:
        dataset = dataset.map_batches(lambda batch: batch)
    group = ShardGroup(rank=0, world_size=3, world_sizes=(3,))
    return BatchPasses(
        ShardPosition(dataset, group),
        BatchProgress(),
        options(**({"batch_size": 1} | changes)),
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
@pytest.mark.parametrize("user_code", [True, False])
def test_a_batch_is_taken_when_the_next_one_is_requested(prefetch: int, user_code: bool) -> None:
    passes = passes_over(12, user_code=user_code, prefetch_batches=prefetch)
    batches = iter(passes)
    seen = []
    for _ in range(4):
        next(batches)
        seen.append(passes.position.consumed)
    assert seen == [0, 3, 6, 9]


@pytest.mark.parametrize("prefetch", [0, 1, 5])
def test_the_end_of_a_pass_ends_the_epoch(prefetch: int) -> None:
    passes = passes_over(8, prefetch_batches=prefetch)
    list(passes)
    assert (passes.position.epoch, passes.position.consumed) == (1, 0)


def test_a_loop_that_is_left_ends_the_epoch() -> None:
    passes = passes_over(12)
    for batch in passes:
        if batch == [6]:
            break
    assert passes.position.epoch == 1


# --- passes ---------------------------------------------------------------------------------------


def test_an_incomplete_last_step_is_dropped_on_request() -> None:
    passes = passes_over(8, batch_size=2, drop_last=True)
    assert list(passes) == [[0, 1]]


def test_the_result_of_the_conversion_is_finished_by_the_caller() -> None:
    passes = replace(passes_over(6), finish=lambda numbers: [-number for number in numbers])
    assert list(passes) == [[0], [-3]]


def test_progress_counts_passes_batches_and_rows() -> None:
    passes = passes_over(9)
    list(passes)
    list(passes)
    assert passes.progress.text().startswith(
        "passes: 2, batches: 6, rows: 6, waiting for batches: "
    )


class RowsOfDataset(torch.utils.data.IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(passes_over(6))


def test_several_processes_of_a_loader_are_refused() -> None:
    loader = DataLoader(RowsOfDataset(), num_workers=2, batch_size=None)
    with pytest.raises(ConfigError, match="in 2 processes of a DataLoader"):
        list(loader)


def test_a_loader_in_the_training_process_reads_all_batches() -> None:
    assert list(DataLoader(RowsOfDataset(), batch_size=None)) == [[0], [3]]
