"""Columns as arrays of NumPy and back, with slices, chunks and missing values."""

from __future__ import annotations

import math

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spotfit.core.errors import ConfigError
from spotfit.data.formats.column_arrays import list_array
from spotfit.data.preprocessors.columns import (
    codes_of,
    column_of,
    count_matrix,
    float64_array,
    list_lengths,
    list_values,
)

optional_floats = st.lists(st.one_of(st.none(), st.integers(-9, 9).map(float)), max_size=20)


@given(optional_floats, st.integers(0, 20), st.integers(0, 20))
def test_missing_values_are_nan_in_any_slice(
    values: list[float | None], first: int, cut: int
) -> None:
    array = pa.array(values, pa.float64())
    column = pa.chunked_array([array[first:], array[:cut]])
    expected = [math.nan if v is None else v for v in column.to_pylist()]
    np.testing.assert_array_equal(float64_array(column), expected)


@given(st.lists(st.one_of(st.none(), st.lists(st.integers(0, 3), max_size=3)), max_size=10))
def test_lists_are_taken_apart_and_put_together(rows: list[list[int] | None]) -> None:
    column = pa.chunked_array([pa.array(rows, pa.list_(pa.int64()))])
    missing = np.array([row is None for row in rows], dtype=bool)
    values = list_values(column)
    flat = pa.concat_arrays(values.chunks) if values.num_chunks else pa.array([], pa.int64())
    rebuilt = list_array(np.where(missing, -1, list_lengths(column)), flat)
    rebuilt.validate(full=True)
    assert rebuilt.to_pylist() == rows


@given(st.lists(st.sampled_from(["a", "b", None, "z"]), max_size=20), st.integers(0, 20))
def test_codes_do_not_depend_on_the_chunks(values: list[str | None], cut: int) -> None:
    array = pa.array(values, pa.string())
    column = pa.chunked_array([array[:cut], array[cut:]])
    codes = {"a": 0, "b": 1}
    expected = [codes.get(value, -1) if value is not None else -1 for value in values]
    assert codes_of(column, codes).tolist() == expected
    dictionaries = pa.chunked_array([chunk.dictionary_encode() for chunk in column.chunks])
    assert codes_of(dictionaries, codes).tolist() == expected


def test_codes_below_zero_are_not_counted() -> None:
    counts = count_matrix(np.array([0, -1, 1, 1]), np.array([2, 0, 2]), 2)
    assert counts.tolist() == [[1, 0], [0, 0], [0, 2]]


def test_two_columns_of_one_name_are_rejected() -> None:
    table = pa.Table.from_arrays([pa.array([1]), pa.array([2])], ["a", "a"])
    with pytest.raises(ConfigError, match="several columns 'a'"):
        column_of(table, "a")
