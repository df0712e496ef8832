"""Keys that DuckDB and PyArrow compare alike."""

from __future__ import annotations

import datetime

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from spotfit.core.errors import ConfigError
from spotfit.data.operations.sort_keys import can_be_key, equality_key, order_key

NUMBERS = [2.5, -0.0, float("nan"), None, float("-inf"), 0.0, -1e-310, float("inf"), -7.0, 1e-310]


@pytest.mark.parametrize("direction", ["ascending", "descending"])
@pytest.mark.parametrize("kind", [pa.float32(), pa.float64()])
def test_keys_of_floats_are_integers_in_the_order_of_pyarrow(
    kind: pa.DataType, direction: str
) -> None:
    column = pa.chunked_array([NUMBERS[:4], NUMBERS[4:]], kind)
    keys = order_key("x", column, descending=direction == "descending")
    assert keys.type == pa.int64()
    table = pa.table({"x": column, "key": keys})
    by_column, by_key = (
        pc.sort_indices(table, sort_keys=[(name, direction)]).to_pylist() for name in ("x", "key")
    )
    assert by_key == by_column


def test_equality_of_floats_is_that_of_their_bits() -> None:
    keys = equality_key("x", pa.chunked_array([[0.0, -0.0, float("nan"), float("nan"), None]]))
    zero, minus_zero, nan, other_nan, null = keys.to_pylist()
    assert zero != minus_zero
    assert nan == other_nan
    assert null is None


def test_times_keep_their_nanoseconds() -> None:
    column = pa.chunked_array([pa.array([1_700_000_000_000_000_001], pa.timestamp("ns", "UTC"))])
    assert order_key("t", column).to_pylist() == [1_700_000_000_000_000_001]


def test_texts_are_compared_by_their_bytes() -> None:
    assert order_key("s", pa.chunked_array([["é"]])).to_pylist() == ["é".encode()]


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        ([datetime.date(2020, 1, 2)], pa.date32()),
        ([True], pa.bool_()),
        ([b"ab"], pa.binary(2)),
        ([None], pa.null()),
        ([np.uint64(2**63)], pa.uint64()),
    ],
)
def test_keys_of_empty_columns_have_the_type_of_others(
    values: list[object], kind: pa.DataType
) -> None:
    filled = order_key("x", pa.chunked_array([pa.array(values, kind)]))
    assert order_key("x", pa.chunked_array([], kind)).type == filled.type
    assert can_be_key(kind)


@pytest.mark.parametrize(
    "kind", [pa.list_(pa.int64()), pa.struct([("a", pa.int64())]), pa.decimal256(50, 2)]
)
def test_types_without_an_order_are_refused(kind: pa.DataType) -> None:
    assert not can_be_key(kind)
    with pytest.raises(ConfigError, match="'x' of type") as caught:
        order_key("x", pa.chunked_array([], kind))
    assert "cast('string')" in caught.value.do
