"""Batches as tensors of TensorFlow, with the real one; `make tensorflow` installs it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import spotfit.data
from spotfit.core.errors import ConfigError
from tests.unit.data.batch_cases import (
    columns,
    tensorflow_calls,
    tensorflow_column_calls,
    tensorflow_table,
)
from tests.unit.data.recorded_batches import is_as_in_ray, iterator_of

tf: Any = pytest.importorskip("tensorflow", reason="tensorflow is not installed; `make tensorflow`")

TABLE = tensorflow_table()
CASES = {
    f"{column}: {name}": (pa.table({"c": array}), call)
    for column, array in columns().items()
    for name, call in tensorflow_column_calls().items()
} | {name: (TABLE, call) for name, call in tensorflow_calls().items()}
# docs/guides/data_batches.md lists them for users.
DIFFERENCES = {
    "to_tf of lists",  # Ray has no type for columns of Arrow's own tensors
    *(name for name in CASES if name.startswith("fixed-size list of fixed-size lists: tf")),
    *(name for name in CASES if name.startswith("list of lists of equal lengths: tf")),
}


@pytest.mark.parametrize("items", [1, 3, 10])
def test_batches_that_the_loop_did_not_get_do_not_count(items: int) -> None:
    shard = spotfit.data.range(100).iterator()
    batches = iter(shard.to_tf("id", "id", batch_size=2))
    for _ in range(items):
        next(batches)
    shard.position.count()  # a report
    assert shard.position.consumed == 2 * items


@pytest.mark.parametrize("name", CASES)
def test_a_case_has_the_result_of_ray(name: str) -> None:
    table, call = CASES[name]
    assert is_as_in_ray(name, iterator_of(table), call) == (name not in DIFFERENCES)


def test_the_type_of_a_tensor_has_its_shape() -> None:
    dataset = iterator_of(TABLE).to_tf("t", "id")
    assert dataset.element_spec[0] == tf.TensorSpec((None, 2), tf.float32, name="t")


def test_a_dataset_can_be_iterated_repeatedly() -> None:
    dataset = iterator_of(TABLE).to_tf("x", "id", batch_size=4)
    labels = [[label.numpy().tolist() for _, label in dataset] for _ in range(2)]
    assert labels == [[[0, 1, 2, 3], [4, 5, 6]]] * 2


def test_rows_are_not_divided_again() -> None:
    policy = tf.data.experimental.AutoShardPolicy.OFF
    options = iterator_of(TABLE).to_tf("x", "id").options()
    assert options.experimental_distribute.auto_shard_policy == policy


def test_additional_columns_are_the_third_element() -> None:
    (element,) = iterator_of(TABLE).to_tf("x", "id", additional_columns=["t"], batch_size=7)
    assert element[2]["t"].numpy().tolist() == np.arange(14).reshape(7, 2).tolist()


@pytest.mark.parametrize("columns", [("y", "id"), ("x", ["y"])])
def test_an_unknown_column_is_rejected(columns: Any) -> None:
    with pytest.raises(ConfigError, match="there is no column 'y'"):
        iterator_of(TABLE).to_tf(*columns)


def test_tensors_are_created_on_the_device_of_the_caller() -> None:
    with tf.device("CPU:0"):
        (batch,) = iterator_of(TABLE.select(["id"])).iter_tf_batches()
    assert batch["id"].device.endswith("CPU:0")
