"""Preprocessors of several columns of a row."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn import preprocessing

from spotfit.core.errors import ConfigError
from spotfit.data.preprocessors import Concatenator, Normalizer
from tests.unit.data.preprocessors.rows import dataset, output, rows_of


@pytest.mark.parametrize("norm", ["l1", "l2", "max"])
def test_norms_are_those_of_scikit_learn(norm: str) -> None:
    values = np.random.default_rng(2).normal(size=(50, 3))
    columns = {name: values[:, index] for index, name in enumerate("abc")}
    table = rows_of(Normalizer(["a", "b", "c"], norm).transform(dataset(columns, 20)))
    found = np.stack([table[name].to_numpy() for name in "abc"], axis=1)
    np.testing.assert_allclose(found, preprocessing.normalize(values, norm=norm), rtol=1e-12)


@pytest.mark.parametrize("norm", ["l1", "l2", "max"])
def test_a_missing_value_is_not_part_of_the_norm(norm: str) -> None:
    table = rows_of(Normalizer(["a", "b"], norm).transform(dataset({"a": [-2, 1], "b": [None, 0]})))
    assert table.to_pydict() == {"a": [-1.0, 1.0], "b": [None, 0.0]}


def test_a_row_of_zeros_has_no_direction() -> None:
    found = output(Normalizer(["a"]), {"a": [0, 3]}, "a")
    assert math.isnan(found[0])
    assert found[1] == 1.0


def test_32_bit_floats_stay_so_only_among_themselves() -> None:
    columns = {"a": pa.array([3.0], pa.float32()), "b": pa.array([4.0], pa.float32()), "c": [1]}
    alone = rows_of(Normalizer(["a", "b"]).transform(dataset(columns)))
    assert alone.schema.field("a").type == pa.float32()
    mixed = rows_of(Normalizer(["a", "c"]).transform(dataset(columns)))
    assert mixed.schema.field("a").type == pa.float64()


def test_an_unknown_norm_is_rejected() -> None:
    with pytest.raises(ConfigError, match="'l3' is not supported"):
        Normalizer(["a"], "l3")


def test_columns_are_combined_in_the_given_order_and_removed() -> None:
    ds = dataset({"a": [1, 2], "b": [0.5, None], "c": ["x", "y"]})
    table = rows_of(Concatenator(["b", "a"], "v").transform(ds))
    assert table.column_names == ["c", "v"]
    assert table["v"][0].as_py() == [0.5, 1.0]
    assert math.isnan(table["v"][1].as_py()[0])


@pytest.mark.parametrize(
    ("columns", "dtype", "expected"),
    [
        ({"a": pa.array([1], pa.int32()), "b": pa.array([2], pa.int64())}, None, pa.int64()),
        ({"a": pa.array([1], pa.int32()), "b": pa.array([2.0], pa.float32())}, None, pa.float64()),
        ({"a": pa.array([1.0], pa.float32())}, None, pa.float32()),
        ({"a": [True], "b": [2]}, None, pa.int64()),
        ({"a": [1], "b": [2.5]}, np.float32, pa.float32()),
        ({"a": [1.0]}, "int8", pa.int8()),
    ],
)
def test_the_type_is_the_common_one_or_the_given(
    columns: dict[str, Any], dtype: Any, expected: pa.DataType
) -> None:
    table = rows_of(Concatenator(list(columns), "v", dtype).transform(dataset(columns)))
    assert table.schema.field("v").type == pa.fixed_shape_tensor(expected, (len(columns),))


def test_missing_integers_need_a_type_of_floats() -> None:
    with pytest.raises(ConfigError, match="'a' has missing values"):
        output(Concatenator(["a"]), {"a": [1, None]}, "concat_out")
    found = output(Concatenator(["a"], dtype=np.float32), {"a": [1, None]}, "concat_out")
    assert math.isnan(found[1][0])


def test_tensors_are_flattened_into_the_vector() -> None:
    tensor = pa.FixedShapeTensorArray.from_numpy_ndarray(np.arange(8.0).reshape(2, 2, 2))
    columns = {"a": [9, 10], "t": tensor}
    table = rows_of(Concatenator(["t", "a"], "v", flatten=True).transform(dataset(columns, 1)))
    assert table["v"].to_pylist() == [[0, 1, 2, 3, 9], [4, 5, 6, 7, 10]]


@given(
    st.lists(st.lists(st.integers(0, 9), max_size=3), min_size=1, max_size=10), st.integers(0, 9)
)
def test_lists_are_flattened_into_lists(rows: list[list[int]], cut: int) -> None:
    lists = pa.array(rows, pa.list_(pa.int64()))
    columns = {"a": list(range(len(rows))), "l": lists, "m": lists}
    ds = dataset(columns, min(cut, len(rows)))
    table = rows_of(Concatenator(["l", "a", "m"], "v", flatten=True).transform(ds))
    assert table["v"].to_pylist() == [[*row, index, *row] for index, row in enumerate(rows)]


@pytest.mark.parametrize(
    ("columns", "arguments", "message"),
    [
        ({"a": [[1]]}, {}, "a list in each row"),
        ({"a": [[1], None]}, {"flatten": True}, "contain null values"),
        ({"a": ["x"]}, {}, "needs numbers"),
        ({"b": [1]}, {"raise_if_missing": True}, "no column 'a'"),
        ({"b": [1]}, {}, "no column 'a'"),
    ],
)
def test_columns_that_make_no_vector_are_rejected(
    columns: dict[str, Any], arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        output(Concatenator(["a"], **arguments), columns, "concat_out")


def test_no_columns_are_rejected() -> None:
    with pytest.raises(ConfigError, match="no columns"):
        Concatenator([])
