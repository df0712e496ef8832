"""Columns of categories."""

from __future__ import annotations

import sys

import pandas as pd
import pyarrow as pa
import pytest

from spotfit.core.errors import ConfigError, MissingExtraError
from spotfit.data.preprocessors import Categorizer
from tests.unit.data.preprocessors.rows import dataset, output, rows_of


def test_categories_are_the_sorted_values() -> None:
    ds = dataset({"x": ["b", None, "a"], "n": [2, 1, 2]}, 1)
    categorizer = Categorizer(["x", "n"]).fit(ds)
    assert categorizer.stats_["x"] == pd.CategoricalDtype(["a", "b"])
    frame = rows_of(categorizer.transform(ds)).to_pandas()
    assert list(frame["x"].cat.codes) == [1, -1, 0]
    assert list(frame["n"].cat.categories) == [1, 2]


def test_values_that_are_no_category_are_missing() -> None:
    categorizer = Categorizer(["x"]).fit(dataset({"x": ["b"]}))
    assert output(categorizer, {"x": ["a", "b"]}, "x") == [None, "b"]


def test_given_categories_are_not_fitted() -> None:
    dtype = pd.CategoricalDtype(["z", "a"], ordered=True)
    categorizer = Categorizer(["x"], dtypes={"x": dtype}).fit(dataset({"x": ["a", "q"]}))
    table = rows_of(categorizer.transform(dataset({"x": ["a", "q"]})))
    assert table["x"].combine_chunks().dictionary.to_pylist() == ["z", "a"]
    assert table.to_pandas()["x"].dtype == dtype


@pytest.mark.parametrize(("count", "index"), [(126, pa.int8()), (127, pa.int16())])
def test_indices_are_as_small_as_in_pandas(count: int, index: pa.DataType) -> None:
    ds = Categorizer(["x"]).fit_transform(dataset({"x": list(range(count))}))
    assert rows_of(ds).schema.field("x").type.index_type == index
    assert str(pd.Series(range(count)).astype("category").cat.codes.dtype) == str(index)


def test_lists_are_no_categories() -> None:
    categorizer = Categorizer(["x"]).fit(dataset({"x": ["a"]}))
    with pytest.raises(ConfigError, match="one value in each row"):
        output(categorizer, {"x": [["a"]]}, "x")


def test_pandas_is_named_if_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(MissingExtraError, match="needs the package 'pandas'"):
        Categorizer(["x"]).fit(dataset({"x": ["a"]}))
