"""Values come back from JSON with their types and bits."""

from __future__ import annotations

import datetime
import json
import math
import struct
from collections import Counter
from decimal import Decimal
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spotfit.core.errors import ConfigError
from spotfit.data.preprocessors.json_values import decode_value, encode_value


def stored(value: Any) -> Any:
    return decode_value(json.loads(json.dumps(encode_value(value))))


scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False),
    st.text(),
    st.binary(),
    st.datetimes(),
    st.dates(),
    st.times(),
    st.timedeltas(),
    st.decimals(allow_nan=False, allow_infinity=False),
)
values = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(scalars, inner, max_size=3),
    ),
    max_leaves=8,
)


def typed(value: Any) -> Any:
    """Return a form in which 1, 1.0 and True are different."""
    if isinstance(value, dict):
        return [(typed(key), typed(element)) for key, element in value.items()]
    if isinstance(value, (list, tuple)):
        return type(value).__name__, [typed(element) for element in value]
    return type(value).__name__, value


@given(values)
def test_values_and_types_are_kept(value: Any) -> None:
    assert typed(stored(value)) == typed(value)


@given(st.floats())
def test_floats_keep_their_bits(value: float) -> None:
    found = stored(value)
    if math.isnan(value):
        assert math.isnan(found)
    else:
        assert struct.pack("d", found) == struct.pack("d", value)


def test_the_order_of_dictionaries_and_counters_is_kept() -> None:
    assert list(stored({"b": 1, "a": 2})) == ["b", "a"]
    found = stored(Counter({"b": 2, "a": 2}))
    assert (type(found), found.most_common()) == (Counter, [("b", 2), ("a", 2)])


@pytest.mark.parametrize(
    "array", [np.array([[0.1, math.inf]]), np.array([1, 2], np.int8), np.array([], np.float32)]
)
def test_arrays_keep_their_type_and_shape(array: Any) -> None:
    found = stored(array)
    assert (found.dtype, found.shape) == (array.dtype, array.shape)
    assert np.array_equal(found, array)


def test_types_of_numpy_are_kept() -> None:
    assert stored(np.float32) is np.float32
    assert stored(np.dtype("int16")) == np.dtype("int16")
    assert typed(stored(np.int64(3))) == typed(3)


def test_types_of_pandas_are_kept() -> None:
    dtype = pd.CategoricalDtype(["z", "a"], ordered=True)
    assert stored({"x": dtype}) == {"x": dtype}
    assert list(stored(dtype).categories) == ["z", "a"]
    intervals = pd.IntervalIndex.from_tuples([(0, 1), (4, 9)], closed="left")
    assert stored(intervals).equals(intervals)


def test_a_dictionary_that_looks_like_a_tag_stays_a_dictionary() -> None:
    assert stored({"$tuple": [1]}) == {"$tuple": [1]}


@pytest.mark.parametrize("value", [len, object(), {1, 2}, Decimal])
def test_other_values_are_rejected(value: Any) -> None:
    with pytest.raises(ConfigError, match="cannot be stored as JSON"):
        encode_value(value)


@pytest.mark.parametrize("encoded", [{"$set": [1]}, {"a": 1}, {}, {"$tuple": [], "$dict": []}])
def test_unknown_tags_are_rejected(encoded: Any) -> None:
    with pytest.raises(ConfigError, match="unknown type"):
        decode_value(encoded)


def test_times_with_a_zone_are_kept() -> None:
    zone = datetime.timezone(datetime.timedelta(hours=2))
    assert stored(datetime.datetime(2026, 1, 2, 3, tzinfo=zone)).utcoffset() == zone.utcoffset(None)
