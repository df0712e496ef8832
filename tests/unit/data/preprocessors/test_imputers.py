"""Values for missing values."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from sklearn import impute

from spotfit.core.errors import ConfigError
from spotfit.data.preprocessors import SimpleImputer
from spotfit.data.preprocessors.preprocessor_base import Preprocessor
from tests.unit.data.preprocessors.rows import dataset, output, rows_of


def test_means_are_those_of_scikit_learn() -> None:
    rng = np.random.default_rng(5)
    values = np.where(rng.random(100) < 0.3, np.nan, rng.normal(size=100))
    column = [None if math.isnan(value) else value for value in values]
    found = rows_of(SimpleImputer(["x"]).fit_transform(dataset({"x": column}, 30)))["x"]
    expected = impute.SimpleImputer().fit_transform(values[:, None])[:, 0]
    np.testing.assert_allclose(found.to_pylist(), expected, rtol=1e-12)


def test_integers_become_floats_with_or_without_missing_values() -> None:
    imputer = SimpleImputer(["x"]).fit(dataset({"x": [1, None, 2]}))
    ds = imputer.transform(dataset({"x": pa.array([1, 2, None], pa.int32())}, 2))
    assert rows_of(ds).schema.field("x").type == pa.float64()
    assert rows_of(ds)["x"].to_pylist() == [1.0, 2.0, 1.5]


def test_nan_is_replaced() -> None:
    imputer = SimpleImputer(["x"], "constant", 7.0)
    assert output(imputer, {"x": [math.nan, 1.0]}, "x") == [7.0, 1.0]


def test_of_equally_frequent_values_the_first_is_taken() -> None:
    imputer = SimpleImputer(["x"], "most_frequent").fit(dataset({"x": ["b", None, "a", None]}))
    assert imputer.stats_ == {"most_frequent(x)": "b"}
    assert output(imputer, {"x": [None, "c"]}, "x") == ["b", "c"]


@pytest.mark.parametrize(
    ("column", "value", "expected"),
    [
        (pa.array([1, None], pa.int8()), 5, [1, 5]),
        (pa.array([1, None], pa.int8()), 0.5, [1.0, 0.5]),
        (pa.array([True, None]), False, [True, False]),
        (pa.array(["a", None], pa.large_string()), "b", ["a", "b"]),
        (pa.nulls(2), "b", ["b", "b"]),
        (pa.array(["a", None]).dictionary_encode(), "a", ["a", "a"]),
        (pa.array(["a", None]).dictionary_encode(), "b", ["a", "b"]),
    ],
)
def test_constants_are_filled_in(column: pa.Array, value: Any, expected: list[Any]) -> None:
    assert output(SimpleImputer(["x"], "constant", value), {"x": column}, "x") == expected


def test_categories_keep_their_type_and_order() -> None:
    categories = pa.DictionaryArray.from_arrays([1, 0, None], ["z", "a"], ordered=True)
    table = rows_of(SimpleImputer(["x"], "constant", "b").transform(dataset({"x": categories})))
    column = table["x"].combine_chunks()
    assert (column.dictionary.to_pylist(), column.type.ordered) == (["z", "a", "b"], True)


def test_a_column_that_the_batch_does_not_have_is_created() -> None:
    imputer = SimpleImputer(["x"]).fit(dataset({"x": [1.0, 3.0]}))
    assert output(imputer, {"y": [0, 0]}, "x") == [2.0, 2.0]


def test_the_original_column_is_kept_beside_the_output() -> None:
    imputer = SimpleImputer(["x"], "constant", 0, output_columns=["z"])
    table = rows_of(imputer.transform(dataset({"x": [1, None]})))
    assert table.to_pydict() == {"x": [1, None], "z": [1, 0]}


@pytest.mark.parametrize("strategy", ["mean", "most_frequent"])
def test_a_column_without_values_cannot_be_filled(strategy: str) -> None:
    imputer = SimpleImputer(["x"], strategy).fit(dataset({"x": pa.nulls(2, pa.float64())}))
    with pytest.raises(ConfigError, match="Column x has no fill value"):
        rows_of(imputer.transform(dataset({"x": [1.0]})))


@pytest.mark.parametrize(
    "column",
    [pa.array([1, None]), pa.array([1, None]).dictionary_encode()],
    ids=["int", "category"],
)
def test_a_value_of_another_type_is_rejected(column: pa.Array) -> None:
    with pytest.raises(ConfigError, match="'b' of column 'x' does not fit"):
        output(SimpleImputer(["x"], "constant", "b"), {"x": column}, "x")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [({"strategy": "median"}, "'median' is not supported"), ({"strategy": "constant"}, "fill_val")],
)
def test_invalid_strategies_are_rejected(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SimpleImputer(["x"], **arguments)


def test_a_constant_needs_no_fit() -> None:
    status = SimpleImputer(["x"], "constant", 0).fit_status()
    assert status is Preprocessor.FitStatus.NOT_FITTABLE
