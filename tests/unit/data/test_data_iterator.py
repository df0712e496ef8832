"""DataIterator: what its methods make of the steps of a reader."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

import spotfit.data
from spotfit.core.errors import ConfigError
from spotfit.data.batches import to_block
from spotfit.data.data_iterator import DataIterator
from spotfit.data.dataset import Dataset
from spotfit.data.sources.tables import TableSource
from spotfit.data.step_reader import LocalShuffle


class RankReader:
    """Reads the rows of the first of two ranks: two steps."""

    runs_user_code = False

    def __init__(self) -> None:
        self.position: object = 0
        self.arguments: list[Any] = []

    def open(self, shuffle: LocalShuffle | None) -> RankReader:
        self.arguments.append(shuffle)
        return self

    def steps(self, rows_per_step: int | None, **options: Any) -> Iterator[pa.Table]:
        self.arguments.append((rows_per_step, options))
        for number in range(2):
            self.position = number + 1
            yield pa.table({"id": [2 * number]})


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


def test_a_global_batch_is_divided_by_the_reader() -> None:
    reader = RankReader()
    iterator = DataIterator(reader.open, None)
    assert ids(iterator.iter_batches(global_batch_size=960, drop_last=True)) == [[0], [2]]
    options = {"is_global": True, "drop_last": True, "prefetch": 1}
    assert reader.arguments == [None, (960, options)]


def test_a_local_shuffle_is_done_by_the_reader() -> None:
    reader = RankReader()
    iterator = DataIterator(reader.open, None)
    list(iterator.iter_batches(local_shuffle_buffer_size=1000, local_shuffle_seed=3))
    assert reader.arguments[0] == LocalShuffle(1000, 3)


@pytest.mark.parametrize(
    "method", ["iter_batches", "iter_torch_batches", "iter_tf_batches", "iter_jax_batches"]
)
def test_contradicting_sizes_are_rejected_by_the_call(method: str) -> None:
    with pytest.raises(ConfigError, match="Both batch_size=8 and global_batch_size=16"):
        getattr(numbers(3), method)(batch_size=8, global_batch_size=16)


def test_an_unknown_format_is_rejected_by_the_call() -> None:
    with pytest.raises(ConfigError, match="batch_format='polars'"):
        numbers(3).iter_batches(batch_format="polars")  # type: ignore[arg-type]


def test_positions_are_reported_to_the_observer() -> None:
    taken = []

    class Observer:
        def batch_taken(self, position: Any) -> None:
            taken.append(position)

    iterator = DataIterator(RankReader().open, None, observer=Observer())
    batches = iter(iterator.iter_batches())
    next(batches)
    assert taken == []
    iterator.mark_batch_taken()
    assert taken == [1]
    assert len(list(batches)) == 1
    assert taken == [1, 2, 2]


# --- torch ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["auto", "cpu"])
def test_tensors_are_on_the_cpu_outside_of_a_training(device: str) -> None:
    (batch,) = numbers(3).iter_torch_batches(device=device)
    assert batch["id"].device == torch.device("cpu")


def test_the_device_of_a_training_is_the_default() -> None:
    iterator = DataIterator(RankReader().open, None, default_device=lambda: torch.device("meta"))
    devices = [batch["id"].device.type for batch in iterator.iter_torch_batches()]
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
    reader = RankReader()
    iterator = DataIterator(reader.open, Dataset.of_source(TableSource(pa.table({"id": [1]}))))
    dataset = iterator.materialize()
    assert list(dataset.iterator().iter_rows()) == [{"id": 0}, {"id": 2}]


def test_a_materialized_dataset_without_rows_keeps_its_columns() -> None:
    assert numbers(0).materialize().schema().names == ["id"]


def test_the_schema_is_that_of_the_dataset() -> None:
    assert numbers(3).schema() == pa.schema({"id": pa.int64()})


def test_the_context_is_that_of_the_dataset() -> None:
    class Described:
        context = object()

    assert DataIterator(RankReader().open, Described()).get_context() is Described.context


def test_statistics_count_the_batches() -> None:
    iterator = numbers(5)
    list(iterator.iter_batches(batch_size=2))
    assert iterator.stats().startswith("passes: 1, batches: 3, rows: 5, ")


def test_the_representation_names_the_dataset() -> None:
    assert repr(DataIterator(RankReader().open, "train")) == "DataIterator('train')"


def test_the_name_of_ray_is_public() -> None:
    assert spotfit.data.DataIterator is DataIterator
