"""Columns as NumPy arrays, and back."""

from __future__ import annotations

import math
import random
import subprocess
import sys
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from spotfit.core.errors import ConfigTypeError
from spotfit.data.formats.column_arrays import (
    arrow_array,
    column_from_values,
    column_to_numpy,
    object_array,
    stack_objects,
    tensor_array,
)
from tests.unit.data.batch_cases import columns, describe
from tests.unit.data.random_columns import python_values, random_column

COLUMNS = columns()


@pytest.mark.parametrize("name", COLUMNS)
def test_an_array_is_writable_and_its_column_keeps_its_values(name: str) -> None:
    column = COLUMNS[name]
    before = column.to_pylist()
    array = column_to_numpy(column)
    array[:] = array[::-1].copy()
    for row in array:
        if isinstance(row, np.ndarray) and row.dtype != object:
            row[:] = 0
    assert column.to_pylist() == before


@pytest.mark.parametrize("name", COLUMNS)
def test_a_slice_has_the_rows_of_the_whole_column(name: str) -> None:
    column = COLUMNS[name]
    longer = pa.chunked_array([column.slice(2), column, column]).combine_chunks()
    assert describe(column_to_numpy(longer.slice(3, 5))) == describe(column_to_numpy(column))


@pytest.mark.parametrize("name", COLUMNS)
def test_several_chunks_have_the_rows_of_one(name: str) -> None:
    column = COLUMNS[name]
    chunks = pa.chunked_array([column.slice(0, 2), column.slice(2, 0), column.slice(2)])
    assert describe(column_to_numpy(chunks)) == describe(column_to_numpy(column))


@pytest.mark.parametrize("name", COLUMNS)
def test_a_column_without_rows_keeps_the_dimensions_of_its_rows(name: str) -> None:
    column = COLUMNS[name]
    empty = column_to_numpy(pa.chunked_array([], column.type))
    assert empty.shape == (0, *column_to_numpy(column).shape[1:])


def test_a_null_row_of_fixed_size_lists_is_none() -> None:
    column = pa.array([[1, 2], None], pa.list_(pa.int64(), 2))
    first, second = column_to_numpy(pa.chunked_array([column.slice(0, 1), column.slice(1)]))
    assert (first.tolist(), second) == ([1, 2], None)


def test_a_null_tensor_is_none() -> None:
    storage = pa.array([None, [1, 2, 3, 4]], pa.list_(pa.int8(), 4))
    kind = pa.fixed_shape_tensor(pa.int8(), [2, 2])
    first, second = column_to_numpy(pa.ExtensionArray.from_storage(kind, storage))
    assert first is None
    assert second.tolist() == [[1, 2], [3, 4]]


def test_the_axes_of_a_permuted_tensor_are_in_the_logical_order() -> None:
    kind = pa.fixed_shape_tensor(pa.int64(), [2, 3], permutation=[1, 0])
    storage = pa.FixedSizeListArray.from_arrays(pa.array(range(6)), 6)
    array = column_to_numpy(pa.ExtensionArray.from_storage(kind, storage))
    assert array.tolist() == [[[0, 3], [1, 4], [2, 5]]]


def test_arrays_of_random_columns_have_their_values(rng: random.Random) -> None:
    for _ in range(500):
        column = random_column(rng)
        array = column_to_numpy(column)
        assert array.flags.writeable
        assert python_values(array) == column.to_pylist(), column


# --- NumPy to Arrow -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "values",
    [
        np.arange(6, dtype=np.int16)[::-2],
        np.arange(6, dtype=">i4"),
        np.array([True, False, True] * 5),
        np.arange(24, dtype=np.float16).reshape(2, 3, 4),
        np.asfortranarray(np.arange(6).reshape(2, 3)),
        np.arange(24).reshape(2, 3, 4).transpose(0, 2, 1),
        np.array([[True, False], [False, False]]),
        np.zeros((0, 2, 3), np.uint8),
        np.array(["2026-01-02", "NaT"], "datetime64[ms]"),
        np.array(["a", "é"]),
        object_array([b"a", None]),
        object_array([np.arange(2), None, np.arange(3)]),
        object_array([np.array(["a"], object), np.array(["b", None], object)]),
    ],
    ids=lambda values: f"{values.dtype} {values.shape}",
)
def test_an_array_is_the_same_after_a_conversion_to_a_column(values: Any) -> None:
    array = column_to_numpy(column_from_values(values, name="x"))
    native = values.astype(values.dtype.newbyteorder("="))
    expected = native.astype(object) if native.dtype.kind == "U" else native
    assert describe(array) == describe(expected)


def test_arrays_of_random_columns_are_the_same_after_a_conversion(rng: random.Random) -> None:
    for _ in range(500):
        column = random_column(rng)
        again = column_to_numpy(column_from_values(column_to_numpy(column), name="x"))
        assert python_values(again) == column.to_pylist(), column


@pytest.mark.parametrize(
    "values",
    [
        np.zeros((2, 0)),
        np.array([["a", "b"], ["c", "d"]]),
        object_array(["a", "b", None, "d"]).reshape(2, 2),
        np.zeros((2, 1, 3), "datetime64[ns]"),
    ],
    ids=["no values", "text", "objects", "times"],
)
def test_an_array_that_cannot_be_a_tensor_becomes_lists(values: Any) -> None:
    rows = column_to_numpy(column_from_values(values, name="x"))
    assert python_values(rows) == python_values(values)


def test_an_array_of_numbers_as_objects_is_a_tensor() -> None:
    column = column_from_values(np.array([[1, 2.5], [True, 4]], object), name="x")
    assert column.type == pa.fixed_shape_tensor(pa.float64(), [2])


def test_images_of_different_sizes_keep_their_type_and_shape() -> None:
    images = [np.full((height, height + 1, 3), height, np.uint8) for height in (2, 1, 4)]
    rows = column_to_numpy(column_from_values(images, name="image"))
    assert [describe(row) for row in rows] == [describe(image) for image in images]


def test_a_column_does_not_share_the_memory_of_its_array() -> None:
    values = np.arange(3)
    column = column_from_values(values, name="x")
    values[:] = -1
    assert column.to_pylist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        ([1, None], pa.int64()),
        ([1.5, 2], pa.float64()),
        (["a", None], pa.string()),
        ([[1], [2, 3]], pa.list_(pa.int64())),
        ([np.float32(1), np.float32(2)], pa.float32()),
        ([np.zeros(2, np.int8)] * 2, pa.fixed_shape_tensor(pa.int8(), [2])),
        ([{"a": 1}], pa.struct({"a": pa.int64()})),
    ],
)
def test_a_list_has_the_type_of_its_values(values: list[Any], kind: pa.DataType) -> None:
    assert column_from_values(values, name="x").type == kind


def test_a_column_of_arrow_is_not_converted() -> None:
    column = COLUMNS["map"]
    assert column_from_values(column, name="x") is column


@pytest.mark.parametrize(
    "values",
    [3, np.array(3), object_array([object()]), [object()], np.zeros(2, complex), {1: 2}],
    ids=lambda values: type(values).__name__,
)
def test_values_that_arrow_cannot_hold_are_rejected_with_their_column(values: Any) -> None:
    with pytest.raises(ConfigTypeError, match="column 'speed'"):
        column_from_values(values, name="speed")


# --- objects --------------------------------------------------------------------------------------


def test_rows_of_equal_shapes_are_stacked() -> None:
    stacked = stack_objects(object_array([np.zeros(2), np.ones(2)]))
    assert stacked.tolist() == [[0, 0], [1, 1]]


@pytest.mark.parametrize("rows", [[np.zeros(2), np.zeros(3)], [np.zeros(2), None], []])
def test_rows_of_different_shapes_stay_objects(rows: list[Any]) -> None:
    column = object_array(rows)
    assert stack_objects(column) is column


@pytest.mark.parametrize(
    "values", [[], [1.5, None, -2.0], [None] * 9, [True, None, False] * 5, [3, 4]]
)
def test_missing_places_are_null(values: list[Any]) -> None:
    missing = np.array([value is None for value in values], dtype=bool)
    first = next((value for value in values if value is not None), 0.0)
    filled = np.array([first if value is None else value for value in values])
    array = arrow_array(filled, missing)
    array.validate(full=True)
    assert array.to_pylist() == values


@pytest.mark.parametrize("shape", [(3, 2), (3, 2, 4), (3, 0), (0, 2)])
def test_tensors_have_the_shape_of_the_rows(shape: tuple[int, ...]) -> None:
    values = np.arange(math.prod(shape)).reshape(shape)
    column = tensor_array(values)
    column.validate(full=True)
    assert column.type.shape == list(shape[1:])
    assert column.to_numpy_ndarray().tolist() == values.tolist() or 0 in shape


def test_missing_rows_of_tensors_are_null() -> None:
    column = tensor_array(np.ones((2, 2)), np.array([False, True]))
    assert column.to_pylist() == [[1.0, 1.0], None]


def test_conversions_of_frequent_types_do_not_import_pandas() -> None:
    program = """
import sys
import numpy as np, pyarrow as pa
from spotfit.data.formats.batch_formats import to_batch, to_block
lists = np.empty(2, object)
lists[:] = [np.arange(2), np.arange(3)]
block = to_block({"i": np.arange(2), "b": np.ones(2, bool), "t": np.ones((2, 3)), "l": lists})
text = block["i"].cast("string")
batch = to_batch(block.append_column("s", text))
assert batch["s"].tolist() == ["0", "1"], batch
assert "pandas" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True)
