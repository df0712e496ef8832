"""Numbers of bins, against `pandas.cut`."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spotfit.core.errors import ConfigError
from spotfit.data.preprocessors import CustomKBinsDiscretizer, UniformKBinsDiscretizer
from tests.unit.data.preprocessors.rows import dataset, output, rows_of

numbers = st.one_of(st.none(), st.integers(-9, 9).map(lambda n: n / 2))


def codes_of_pandas(values: list[float | None], *args: Any, **kwargs: Any) -> list[int | None]:
    cut = pd.cut(pd.Series(values, dtype=float), *args, labels=False, **kwargs)
    return [None if math.isnan(code) else int(code) for code in cut]


@given(
    st.lists(numbers, max_size=20),
    st.lists(st.integers(-9, 9), min_size=2, max_size=6, unique=True).map(sorted),
    st.booleans(),
    st.booleans(),
)
def test_given_bins_are_those_of_pandas(
    values: list[float | None], bins: list[int], right: bool, include_lowest: bool
) -> None:
    options: dict[str, Any] = {"right": right, "include_lowest": include_lowest}
    discretizer = CustomKBinsDiscretizer(["x"], bins, **options)
    found = output(discretizer, {"x": pa.array(values, pa.float64())}, "x")
    assert found == codes_of_pandas(values, bins, **options)


@given(
    st.lists(numbers, min_size=1, max_size=20).filter(lambda v: any(x is not None for x in v)),
    st.integers(1, 6),
    st.booleans(),
    st.integers(0, 20),
)
def test_uniform_bins_are_those_of_pandas(
    values: list[float | None], bins: int, right: bool, cut: int
) -> None:
    discretizer = UniformKBinsDiscretizer(["x"], bins, right=right)
    ds = dataset({"x": pa.array(values, pa.float64())}, min(cut, len(values)))
    found = rows_of(discretizer.fit_transform(ds))["x"].to_pylist()
    assert found == codes_of_pandas(values, bins, right=right)


def test_intervals_are_those_of_pandas() -> None:
    intervals = pd.IntervalIndex.from_tuples([(0, 1), (4, 9)], closed="left")
    discretizer = CustomKBinsDiscretizer(["x"], intervals)
    assert output(discretizer, {"x": [0.0, 1.0, 4.0, None]}, "x") == [0, None, 1, None]


def test_categories_name_the_bins() -> None:
    grades = pd.CategoricalDtype(["low", "high"], ordered=True)
    discretizer = CustomKBinsDiscretizer(["x"], [0, 1, 2], dtypes={"x": grades})
    table = rows_of(discretizer.transform(dataset({"x": [0.5, 1.5, 9.0]})))
    assert table["x"].to_pylist() == ["low", "high", None]
    assert table.to_pandas()["x"].dtype == grades


def test_a_type_of_integers_gives_numbers() -> None:
    discretizer = CustomKBinsDiscretizer(["x"], [0, 1, 2], dtypes={"x": np.int64})
    assert output(discretizer, {"x": [0.5]}, "x") == [0]


def test_equal_edges_are_removed_on_request() -> None:
    discretizer = CustomKBinsDiscretizer(["x"], [0, 1, 1, 2], duplicates="drop")
    assert output(discretizer, {"x": [1.5]}, "x") == [1]


@pytest.mark.parametrize(
    ("bins", "arguments", "message"),
    [
        ([0, 0, 1], {}, "must increase"),
        ([1, 0], {}, "must increase"),
        (3, {}, "must be edges"),
        ({"y": [0, 1]}, {}, r"no entry for \['x'\]"),
        ([0, 1], {"duplicates": "keep"}, "duplicates must be"),
        ([0, 1], {"dtypes": {"x": pd.CategoricalDtype(["a", "b"])}}, "2 categories for 1 bins"),
    ],
)
def test_invalid_bins_are_rejected(bins: Any, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        CustomKBinsDiscretizer(["x"], bins, **arguments)


@pytest.mark.parametrize("bins", [0, 2.5, [0, 1], {"x": "3"}])
def test_numbers_of_bins_are_positive_integers(bins: Any) -> None:
    with pytest.raises(ConfigError, match="positive integer"):
        UniformKBinsDiscretizer(["x"], bins).fit(dataset({"x": [1.0, 2.0]}))


@pytest.mark.parametrize(
    ("values", "message"), [([None], "no values"), ([1.0, math.inf], "infinite values")]
)
def test_a_column_without_a_range_is_rejected(values: list[Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        UniformKBinsDiscretizer(["x"], 2).fit(dataset({"x": pa.array(values, pa.float64())}))
