"""Sizes of rows, by the type of their columns."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from spotfit.data.operations.row_sizes import row_sizes

_STRUCT = pa.struct([("a", pa.int8()), ("b", pa.string())])
_TENSORS = pa.FixedShapeTensorArray.from_numpy_ndarray(np.zeros((3, 2, 5), np.float32))


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (pa.array([1, None, 3], pa.int16()), [2, 2, 2]),
        (pa.array([True, False, None]), [1, 1, 1]),
        (pa.array([b"ab", None, b"cd"], pa.binary(2)), [2, 2, 2]),
        (pa.array(["", None, "é"]), [4, 4, 6]),
        (pa.array([b"abc", None, b""], pa.large_binary()), [11, 8, 8]),
        (pa.array([None] * 3), [0, 0, 0]),
        (pa.array([[1, 2], None, []], pa.list_(pa.int32())), [12, 4, 4]),
        (pa.array([["a"], ["bc", ""], []], pa.large_list(pa.string())), [13, 18, 8]),
        (pa.array([[1, 2], None, [3, 4]], pa.list_(pa.int8(), 2)), [2, 2, 2]),
        (pa.array([["a", "b"], None, ["", "cd"]], pa.list_(pa.string(), 2)), [10, 8, 10]),
        (pa.array([{"a": 1, "b": "x"}, None, {"a": 2, "b": ""}], _STRUCT), [6, 5, 5]),
        (pa.array([[(1, 2)], [], None], pa.map_(pa.int8(), pa.int64())), [13, 4, 4]),
        (_TENSORS, [40, 40, 40]),
        (pa.DictionaryArray.from_arrays(np.array([0, 0, 1], np.int8), ["x" * 99, "y"]), [1] * 3),
        (
            pa.array([["x" * 99], [], ["x" * 99]]).cast(
                pa.list_(pa.dictionary(pa.int32(), pa.string()))
            ),
            [8, 4, 8],
        ),
    ],
    ids=lambda one: str(one.type) if isinstance(one, pa.Array) else "",
)
def test_each_value_is_measured(values: Any, expected: list[int]) -> None:
    assert row_sizes(pa.table({"v": values})).tolist() == expected
    assert row_sizes(pa.table({"v": values.slice(1)})).tolist() == expected[1:]


def test_rows_have_the_sizes_of_all_columns_and_chunks() -> None:
    text = pa.chunked_array([["a"], [], ["bcd", None]], pa.string())
    assert row_sizes(pa.table({"n": [1, 2, 3], "text": text})).tolist() == [13, 15, 12]


def test_views_have_the_average_size() -> None:
    sizes = row_sizes(pa.table({"v": pa.array(["x" * 50, "y" * 50], pa.string_view())}))
    assert sizes[0] == sizes[1] >= 50


def test_no_rows_have_no_sizes() -> None:
    schema = pa.schema([("n", pa.list_(pa.string())), ("v", pa.string_view())])
    assert row_sizes(schema.empty_table()).tolist() == []
