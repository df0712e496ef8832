"""DataIterator: what its methods make of the steps of a reader."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

import spotfit.data
from spotfit.core.errors import ConfigError
from spotfit.data.dataset import Dataset
from spotfit.data.expressions import col
from spotfit.data.formats.batch_formats import to_block
from spotfit.data.iteration.data_iterator import DataIterator
from spotfit.data.iteration.shard import ShardGroup, ShardPosition
from spotfit.data.sources.tables import TableSource


def shard_of(rows: int, rank: int, world_size: int = 2) -> DataIterator:
    group = ShardGroup(rank=rank, world_size=world_size, world_sizes=(world_size,))
    return DataIterator(ShardPosition(spotfit.data.range(rows), group))


def iterator_of(**columns: Any) -> DataIterator:
    return Dataset.of_source(TableSource(to_block(columns))).iterator()


def numbers(count: int) -> DataIterator:
    return iterator_of(id=np.arange(count))


def ids(batches: Any) -> list[Any]:
    return [batch["id"].tolist() for batch in batches]


# --- batches --------------------------------------------------------------------------------------


def test_each_iteration_is_a_full_pass() -> None:
    batches = numbers(5).iter_batches(batch_size=3)
    assert ids(batches) == ids(batches) == [[0, 1, 2], [3, 4]]


def test_an_iteration_can_begin_before_another_ends() -> None:
    batches = numbers(3).iter_batches(batch_size=1)
    pairs = [(a["id"].item(), b["id"].item()) for a, b in zip(batches, batches, strict=True)]
    assert pairs == [(0, 0), (1, 1), (2, 2)]


def test_arrays_can_be_written_to_in_every_pass() -> None:
    batches = numbers(3).iter_batches()
    for batch in batches:
        batch["id"] += 10
    assert ids(batches) == [[0, 1, 2]]


def test_a_global_batch_is_divided_among_the_ranks() -> None:
    batches = [ids(shard_of(12, rank).iter_batches(global_batch_size=4)) for rank in range(2)]
    assert batches == [[[0, 1], [4, 5], [8, 9]], [[2, 3], [6, 7], [10, 11]]]


def test_a_local_shuffle_permutes_the_rows_of_an_epoch() -> None:
    batches = numbers(100).iter_batches(
        batch_size=10, local_shuffle_buffer_size=50, local_shuffle_seed=3
    )
    rows = [row for batch in ids(batches) for row in batch]
    assert rows != sorted(rows)
    assert sorted(rows) == list(range(100))


@pytest.mark.parametrize(
    "method", ["iter_batches", "iter_torch_batches", "iter_tf_batches", "iter_jax_batches"]
)
def test_contradicting_sizes_are_rejected_by_the_call(method: str) -> None:
    with pytest.raises(ConfigError, match="Both batch_size=8 and global_batch_size=16"):
        getattr(numbers(3), method)(batch_size=8, global_batch_size=16)


def test_an_unknown_format_is_rejected_by_the_call() -> None:
    with pytest.raises(ConfigError, match="batch_format='polars'"):
        numbers(3).iter_batches(batch_format="polars")  # type: ignore[arg-type]


@pytest.mark.parametrize("prefetch", [0, 1, 5])
def test_a_batch_counts_when_the_next_one_is_requested(prefetch: int) -> None:
    iterator = shard_of(12, 0)
    batches = iter(iterator.iter_batches(batch_size=2, prefetch_batches=prefetch))
    seen = []
    for _ in range(3):
        next(batches)
        seen.append(iterator.position.consumed)
    assert seen == [0, 4, 8]


# --- torch ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["auto", "cpu"])
def test_tensors_are_on_the_cpu_outside_of_a_training(device: str) -> None:
    (batch,) = numbers(3).iter_torch_batches(device=device)
    assert batch["id"].device == torch.device("cpu")


def test_the_device_of_a_training_is_the_default() -> None:
    position = ShardPosition(spotfit.data.range(2), ShardGroup())
    iterator = DataIterator(position, default_device=lambda: torch.device("meta"))
    devices = [batch["id"].device.type for batch in iterator.iter_torch_batches(batch_size=1)]
    assert devices == ["meta", "meta"]


def test_a_collate_function_is_called_in_another_thread() -> None:
    threads = set(numbers(9).iter_torch_batches(collate_fn=lambda _: threading.get_ident()))
    assert threading.get_ident() not in threads


def test_an_error_of_a_collate_function_is_raised_by_the_iteration() -> None:
    def fail(_batch: Any) -> None:
        raise LookupError("of the user")

    batches = numbers(3).iter_torch_batches(collate_fn=fail)
    with pytest.raises(LookupError, match="of the user"):
        list(batches)


def test_dtypes_with_a_collate_function_are_rejected() -> None:
    with pytest.raises(ConfigError, match="dtypes and collate_fn are both set"):
        numbers(3).iter_torch_batches(collate_fn=len, dtypes=torch.int8)


def test_to_torch_yields_features_and_labels() -> None:
    iterator = iterator_of(x=np.arange(2.0), y=np.arange(2))
    (pair,) = iterator.to_torch(label_column="y", feature_columns=["x"], batch_size=2)
    assert [tensor.tolist() for tensor in pair] == [[[0.0], [1.0]], [[0], [1]]]


def test_to_torch_without_a_label_yields_none() -> None:
    (pair,) = numbers(1).to_torch()
    assert pair[1] is None


# --- restarts -------------------------------------------------------------------------------------

RESTART_ROWS = 1100


def as_ids(value: Any) -> list[int]:
    """The ids of a batch, of a row, or of a pair of features and label."""
    if isinstance(value, dict):
        value = value["id"]
    elif isinstance(value, tuple):
        value = value[0]
    return [int(number) for number in np.ravel(np.asarray(value))]


READS: dict[str, Callable[[DataIterator], Iterable[Any]]] = {
    "iter_rows": lambda shard: shard.iter_rows(),
    "iter_batches": lambda shard: shard.iter_batches(batch_size=7),
    "iter_batches, global": lambda shard: shard.iter_batches(global_batch_size=12),
    "iter_batches, blocks": lambda shard: shard.iter_batches(batch_size=None),
    "iter_batches, no thread": lambda shard: shard.iter_batches(batch_size=7, prefetch_batches=0),
    "iter_batches, ahead": lambda shard: shard.iter_batches(batch_size=7, prefetch_batches=9),
    "iter_batches, local shuffle": lambda shard: shard.iter_batches(
        batch_size=7, local_shuffle_buffer_size=50, local_shuffle_seed=3
    ),
    "iter_torch_batches": lambda shard: shard.iter_torch_batches(batch_size=7),
    "iter_torch_batches, blocks": lambda shard: shard.iter_torch_batches(batch_size=None),
    "to_torch": lambda shard: shard.to_torch(feature_columns=["id"]),
    "to_torch, DataLoader": lambda shard: (
        features for features, _ in DataLoader(WithoutLabel(shard), batch_size=5)
    ),
}


class WithoutLabel(IterableDataset[Any]):
    """Features of `to_torch`, and a number as the label, which a DataLoader can stack."""

    def __init__(self, shard: DataIterator) -> None:
        self._pairs = shard.to_torch(feature_columns=["id"])

    def __iter__(self) -> Iterator[Any]:
        return ((features, 0) for features, _ in self._pairs)


def shards_at(
    dataset: Dataset, world_size: int, state: dict[str, Any] | None = None
) -> list[DataIterator]:
    return [
        DataIterator(
            ShardPosition(
                dataset,
                ShardGroup(rank=rank, world_size=world_size, world_sizes=(1, 2, 3), seed=5),
                restore=lambda: state,
            )
        )
        for rank in range(world_size)
    ]


def read_until_report(
    read: Callable[[DataIterator], Iterable[Any]], shards: list[DataIterator], items: int
) -> tuple[list[int], dict[str, Any]]:
    """Return the ids of the first items of all ranks, and the position that a report saves."""
    rows, states = [], []
    for shard in shards:
        iterator = iter(read(shard))
        rows += [number for item in islice(iterator, items) for number in as_ids(item)]
        shard.position.count()
        states.append(shard.position.state())
    assert all(state == states[0] for state in states)
    return rows, states[0]


@pytest.mark.parametrize("world_sizes", [(1, 1), (2, 2), (2, 3), (3, 1)])
@pytest.mark.parametrize("is_shuffled", [True, False])
@pytest.mark.parametrize("name", READS)
def test_every_row_is_read_once_if_the_loop_ends_after_any_item(
    name: str, *, is_shuffled: bool, world_sizes: tuple[int, int]
) -> None:
    units = [spotfit.data.range(RESTART_ROWS // 4) for _ in range(4)]
    numbered = [
        unit.with_column("id", col("id") + number * (RESTART_ROWS // 4))
        for number, unit in enumerate(units)
    ]
    dataset = numbered[0].union(*numbered[1:])
    dataset = dataset.random_shuffle(seed=3) if is_shuffled else dataset
    before, after = world_sizes
    for items in (1, 2, 13, 40):
        shards = shards_at(dataset, before)
        rows, state = read_until_report(READS[name], shards, items)
        if state["epoch"]:  # there are fewer blocks
            break
        for shard in shards_at(dataset, after, state):
            rows += [number for item in READS[name](shard) for number in as_ids(item)]
        assert len(set(rows)) == len(rows)
        assert len(rows) > RESTART_ROWS - max(world_sizes)


@pytest.mark.parametrize("world_size", [1, 3])
def test_rows_are_in_the_order_of_batches_of_one_row(world_size: int) -> None:
    dataset = spotfit.data.range(600)
    for rank in range(world_size):
        rows = [row["id"] for row in shard_of(600, rank, world_size).iter_rows()]
        batches = shards_at(dataset, world_size)[rank].iter_batches(batch_size=1)
        assert len(rows) == 600 // world_size
        assert rows == [number for batch in batches for number in as_ids(batch)]


def test_a_row_counts_when_the_next_one_is_requested() -> None:
    shard = shard_of(900, 0)
    rows = iter(shard.iter_rows())
    next(rows)
    rows_2 = iter(shard.iter_rows())  # the first pass was only looked at
    assert shard.position.epoch == 0
    next(rows_2), next(rows_2)
    iter(shard.iter_rows())
    assert shard.position.epoch == 1


def test_a_loop_over_rows_that_is_left_ends_the_epoch() -> None:
    shard = shard_of(900, 0)
    for row in shard.iter_rows():
        if row["id"] == 5:
            break
    assert (shard.position.epoch, shard.position.consumed) == (1, 0)


def test_a_step_counts_all_rows_that_the_loop_has_got() -> None:
    shard = shard_of(900, 0)
    shard.position.counts_steps = True
    rows = iter(shard.iter_rows())
    seen = []
    for _ in range(3):
        list(islice(rows, 150))
        shard.position.count_step()
        shard.position.count()  # a report
        seen.append(shard.position.consumed)
    assert seen == [300, 600, 900]


# --- rows -----------------------------------------------------------------------------------------


def test_rows_are_dictionaries_with_arrays_for_tensors() -> None:
    rows = list(iterator_of(id=np.arange(300), x=np.ones((300, 2, 2))).iter_rows())
    assert [row["id"] for row in rows] == list(range(300))
    assert rows[299]["x"].tolist() == [[1, 1], [1, 1]]


def test_rows_can_be_iterated_repeatedly() -> None:
    rows = numbers(3).iter_rows()
    assert list(rows) == list(rows) == [{"id": 0}, {"id": 1}, {"id": 2}]


# --- other ----------------------------------------------------------------------------------------


def test_a_materialized_dataset_has_the_rows_of_the_shard() -> None:
    parts = [shard_of(7, rank).materialize() for rank in range(2)]
    rows = [row["id"] for part in parts for row in part.iterator().iter_rows()]
    assert sorted(rows) == [0, 1, 2, 3, 4, 5]


def test_materializing_does_not_change_the_position() -> None:
    shard = shard_of(12, 0)
    shard.materialize()
    assert ids(shard.iter_batches(batch_size=6)) == [[0, 1, 2, 3, 4, 5]]
    assert shard.position.epoch == 1


def test_a_materialized_dataset_without_rows_keeps_its_columns() -> None:
    assert numbers(0).materialize().schema().names == ["id"]


def test_the_schema_is_that_of_the_dataset() -> None:
    assert numbers(3).schema().base_schema == pa.schema({"id": pa.int64()})


def test_the_context_is_that_of_the_dataset() -> None:
    dataset = spotfit.data.range(1)
    assert dataset.iterator().get_context() is dataset.context


def test_statistics_count_the_batches() -> None:
    iterator = numbers(5)
    list(iterator.iter_batches(batch_size=2))
    assert iterator.stats().startswith("passes: 1, batches: 3, rows: 5, ")


def test_the_representation_names_the_dataset() -> None:
    dataset = spotfit.data.range(1)
    assert repr(dataset.iterator()) == f"DataIterator({dataset!r})"


def test_the_name_of_ray_is_public() -> None:
    assert spotfit.data.DataIterator is DataIterator
