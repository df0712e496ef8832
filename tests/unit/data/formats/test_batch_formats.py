"""Blocks as batches, and back."""

from __future__ import annotations

import random
import threading
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from spotfit.core.errors import ConfigError, ConfigTypeError
from spotfit.data.formats.batch_formats import check_batch_format, concat_blocks, to_batch, to_block
from tests.unit.data.batch_cases import describe
from tests.unit.data.random_columns import python_values, random_column


def block_of(**columns: Any) -> pa.Table:
    return to_block(columns)


def test_numpy_is_the_default_format() -> None:
    block = block_of(x=np.arange(3))
    assert describe(to_batch(block)) == describe(to_batch(block, "numpy"))


@pytest.mark.parametrize("batch_format", ["pyarrow", None])
def test_a_block_is_returned_as_it_is(batch_format: Any) -> None:
    block = block_of(x=np.arange(3))
    assert to_batch(block, batch_format) is block


def test_a_tensor_is_an_array_in_each_row_of_a_dataframe() -> None:
    frame = to_batch(block_of(x=np.arange(8).reshape(2, 2, 2)), "pandas")
    assert frame["x"][1].tolist() == [[4, 5], [6, 7]]


@pytest.mark.parametrize("batch_format", ["polars", "cudf", 1])
def test_an_unknown_format_is_rejected(batch_format: Any) -> None:
    with pytest.raises(ConfigError, match="is not one of 'default'"):
        check_batch_format(batch_format)


@pytest.mark.parametrize("batch_format", ["numpy", "pandas", "pyarrow"])
def test_a_block_is_the_same_after_a_conversion(batch_format: Any) -> None:
    block = block_of(
        id=np.arange(2),
        text=["a", "b"],
        image=np.arange(8, dtype=np.uint8).reshape(2, 2, 2),
        tokens=[np.arange(2), np.arange(3)],
        flag=np.array([True, False]),
    )
    again = to_block(to_batch(block, batch_format))
    assert again.to_pylist() == block.to_pylist()
    assert again.schema.field("image").type == block.schema.field("image").type


def test_the_index_of_a_dataframe_is_no_column() -> None:
    assert to_block(pd.DataFrame({"x": [1, 2]}, index=["a", "b"])).column_names == ["x"]


def test_arrays_in_a_dataframe_are_tensors() -> None:
    block = to_block(pd.DataFrame({"x": list(np.zeros((2, 3, 4), np.float32))}))
    assert block.schema.field("x").type == pa.fixed_shape_tensor(pa.float32(), [3, 4])


def test_a_record_batch_is_a_block() -> None:
    assert to_block(pa.record_batch({"x": [1, 2]})).equals(pa.table({"x": [1, 2]}))


@pytest.mark.parametrize("batch_format", ["numpy", "pandas"])
@pytest.mark.parametrize("objects", [[1j, (1, {2})], [True, 2], [[1], ["a"]]], ids=repr)
def test_objects_without_a_type_of_arrow_are_the_same_after_a_conversion(
    objects: list[Any], batch_format: Any
) -> None:
    batch = to_batch(block_of(x=objects, n=np.arange(2)), batch_format)
    again = to_block(batch)
    assert list(batch["x"]) == again["x"].to_pylist() == objects
    assert again.column_names == ["x", "n"]


def test_objects_that_cannot_be_pickled_are_rejected() -> None:
    with pytest.raises(ConfigTypeError, match="The column 'x' cannot be stored"):
        block_of(x=[threading.Lock(), threading.Lock()])


@pytest.mark.parametrize("batch", [np.arange(3), [1, 2], None, "x"])
def test_a_value_that_is_no_batch_is_rejected(batch: Any) -> None:
    with pytest.raises(ConfigTypeError, match="A batch must be a dictionary"):
        to_block(batch)


def test_columns_of_different_lengths_are_rejected() -> None:
    with pytest.raises(ConfigError, match=r"different lengths: \{'x': 2, 'y': 3\}"):
        block_of(x=np.arange(2), y=np.arange(3))


# --- concatenation --------------------------------------------------------------------------------


def test_blocks_of_equal_types_are_concatenated_without_a_copy() -> None:
    blocks = [block_of(x=np.arange(3)), block_of(x=np.arange(2))]
    joined = concat_blocks(blocks)
    addresses = [chunk.buffers()[1].address for chunk in joined["x"].chunks]
    assert addresses == [block["x"].chunk(0).buffers()[1].address for block in blocks]


def test_numbers_of_different_types_have_the_wider_type() -> None:
    joined = concat_blocks([block_of(x=np.arange(2)), block_of(x=np.array([0.5]))])
    assert joined["x"].to_pylist() == [0, 1, 0.5]


@pytest.mark.parametrize(
    "shapes", [[(2, 3), (4, 3)], [(2, 3), (2, 4)], [(2,), (3,)], [(5, 4, 3), (5, 6, 3)]]
)
def test_tensors_of_different_shapes_stay_arrays(shapes: list[tuple[int, ...]]) -> None:
    tensors = [np.full((2, *shape), n, np.uint8) for n, shape in enumerate(shapes)]
    joined = concat_blocks([block_of(x=tensor) for tensor in tensors])
    rows = [row for tensor in tensors for row in tensor]
    assert [describe(row) for row in to_batch(joined)["x"]] == [describe(row) for row in rows]


def test_random_columns_are_joined_with_their_arrays(rng: random.Random) -> None:
    for _ in range(300):
        column = random_column(rng)
        blocks = [pa.table({"x": column}), block_of(x=to_batch(pa.table({"x": column}))["x"])]
        rng.shuffle(blocks)
        values = [*column.to_pylist(), *column.to_pylist()]
        assert python_values(to_batch(concat_blocks(blocks))["x"]) == values, column


def test_tensors_and_lists_are_joined_as_lists() -> None:
    joined = concat_blocks([block_of(x=np.zeros((1, 2), np.int64)), block_of(x=[[1], [2, 3]])])
    assert joined["x"].to_pylist() == [[0, 0], [1], [2, 3]]


def test_a_block_without_rows_does_not_change_the_type() -> None:
    tensors = block_of(x=np.zeros((2, 2)))
    assert concat_blocks([block_of(x=np.zeros((0, 3))), tensors]).schema == tensors.schema


def test_types_that_cannot_be_unified_are_rejected() -> None:
    with pytest.raises(ConfigError, match="columns of different types"):
        concat_blocks([block_of(x=np.arange(2)), block_of(x=["a"])])
