"""Preprocessors one after the other."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from spotfit.core.errors import ConfigError
from spotfit.data.dataset import Dataset
from spotfit.data.preprocessor import PreprocessorNotFittedException
from spotfit.data.preprocessors import (
    BatchMapper,
    Chain,
    Concatenator,
    LabelEncoder,
    MaxAbsScaler,
    MinMaxScaler,
    Normalizer,
    SimpleImputer,
    StandardScaler,
)
from spotfit.data.preprocessors.preprocessor_base import Preprocessor
from tests.unit.data.preprocessors.rows import dataset, rows_of

STATUS = Preprocessor.FitStatus
ROWS = {"a": [1.0, None, 3.0, 8.0], "b": [2, 4, 6, 9], "w": ["x", "y", "x", "z"]}


class CountedDataset(Dataset):
    """A dataset that counts how often it is read."""

    passes = 0

    def map_blocks(self, function: Any, columns: Any = None) -> Any:
        CountedDataset.passes += 1
        return super().map_blocks(function, columns)


def passes_of(chain: Chain) -> int:
    ds = dataset(ROWS, 1)
    CountedDataset.passes = 0
    chain.fit(CountedDataset(ds._plan))
    return CountedDataset.passes


class Mean(Preprocessor):
    """A preprocessor of a user, with a fit of its own."""

    def _fit(self, ds: Any) -> Preprocessor:
        self.stats_ = {"seen": rows_of(ds)["a"].to_pylist()}
        return self

    def _transform_arrow(self, table: Any) -> Any:
        return table


def chain_of_all() -> Chain:
    return Chain(
        SimpleImputer(["a"]),
        StandardScaler(["a", "b"]),
        LabelEncoder("w"),
        Concatenator(["a", "b"], "v", dtype=np.float32),
    )


def test_each_part_is_fitted_to_what_the_one_before_gives() -> None:
    chain = chain_of_all().fit(dataset(ROWS, 2))
    one = SimpleImputer(["a"])
    first = one.fit_transform(dataset(ROWS, 2))
    two = StandardScaler(["a", "b"])
    second = two.fit_transform(first)
    three = LabelEncoder("w")
    expected = Concatenator(["a", "b"], "v", dtype=np.float32).transform(
        three.fit_transform(second)
    )
    assert [part.stats_ for part in chain.preprocessors[:3]] == [
        one.stats_,
        two.stats_,
        three.stats_,
    ]
    assert rows_of(chain.transform(dataset(ROWS))) == rows_of(expected)


@pytest.mark.parametrize(
    ("chain", "passes"),
    [
        (Chain(StandardScaler(["a"]), MinMaxScaler(["b"]), LabelEncoder("w")), 1),
        (Chain(StandardScaler(["a"]), MinMaxScaler(["a"], output_columns=["z"])), 2),
        (Chain(StandardScaler(["a"], output_columns=["z"]), MinMaxScaler(["a"])), 1),
        (Chain(Chain(StandardScaler(["a"])), Chain(MinMaxScaler(["b"]), LabelEncoder("w"))), 1),
        (Chain(Normalizer(["a"]), StandardScaler(["b"])), 1),
        (Chain(Normalizer(["a"]), StandardScaler(["a"])), 1),
        (Chain(BatchMapper(lambda batch: batch, "arrow"), StandardScaler(["a"])), 1),
        (Chain(StandardScaler(["b"]), BatchMapper(lambda b: b, "arrow"), LabelEncoder("w")), 2),
        (Chain(Concatenator(["a", "b"]), LabelEncoder("w")), 1),
    ],
)
def test_parts_that_do_not_depend_on_each_other_share_a_pass(chain: Chain, passes: int) -> None:
    assert passes_of(chain) == passes


def test_a_shared_pass_gives_the_statistics_of_separate_ones() -> None:
    chain = Chain(StandardScaler(["a"], output_columns=["z"]), MaxAbsScaler(["a", "b"]))
    chain.fit(dataset(ROWS, 3))
    assert chain.preprocessors[1].stats_ == MaxAbsScaler(["a", "b"]).fit(dataset(ROWS)).stats_


def test_a_column_that_an_earlier_part_removed_is_missing() -> None:
    with pytest.raises(ConfigError, match="no column 'a'"):
        Chain(Concatenator(["a", "b"]), StandardScaler(["a"])).fit(dataset(ROWS))


def test_an_own_fit_gets_the_transformed_rows() -> None:
    own = Mean()
    Chain(SimpleImputer(["a"], "constant", 0.0), own, StandardScaler(["a"])).fit(dataset(ROWS))
    assert own.stats_["seen"] == [1.0, 0.0, 3.0, 8.0]


def test_the_status_is_that_of_the_parts() -> None:
    fitted = StandardScaler(["b"]).fit(dataset(ROWS))
    assert Chain().fit_status() is STATUS.NOT_FITTABLE
    assert Chain(Normalizer(["a"])).fit_status() is STATUS.NOT_FITTABLE
    assert Chain(LabelEncoder("w"), Normalizer(["a"])).fit_status() is STATUS.NOT_FITTED
    assert Chain(fitted, LabelEncoder("w")).fit_status() is STATUS.PARTIALLY_FITTED
    assert Chain(fitted, Normalizer(["b"])).fit_status() is STATUS.FITTED
    assert Chain(fitted).has_stats()


def test_a_partially_fitted_chain_does_not_transform() -> None:
    chain = Chain(StandardScaler(["b"]).fit(dataset(ROWS)), LabelEncoder("w"))
    with pytest.raises(PreprocessorNotFittedException):
        chain.transform_batch(pa.table(ROWS))


def test_fitting_a_partially_fitted_chain_warns_once() -> None:
    chain = Chain(StandardScaler(["b"]).fit(dataset(ROWS)), LabelEncoder("w"))
    with pytest.warns(UserWarning, match="Chain or a part of it") as caught:
        chain.fit(dataset(ROWS))
    assert len(caught) == 1


def test_a_later_fit_of_a_part_does_not_change_a_dataset() -> None:
    part = StandardScaler(["b"])
    ds = Chain(part).fit_transform(dataset(ROWS))
    before = rows_of(ds)
    with pytest.warns(UserWarning, match="called before"):
        part.fit(dataset({"b": [1000]}))
    assert rows_of(ds) == before


def test_batches_of_arrays_are_transformed() -> None:
    chain = chain_of_all().fit(dataset(ROWS))
    batch = {"a": np.array([1.0, np.nan]), "b": np.array([2, 4]), "w": np.array(["z", "x"])}
    result = chain.transform_batch(batch)
    expected = rows_of(chain.transform(dataset(ROWS)))
    assert sorted(result) == ["v", "w"]
    assert result["w"].tolist() == [2, 0]
    assert result["v"].tolist() == expected["v"].to_pylist()[:2]


def test_columns_are_those_of_all_parts() -> None:
    chain = chain_of_all()
    assert chain.get_input_columns() == ["a", "b", "w"]
    assert chain.get_output_columns() == ["w", "v"]
    assert chain.removed_columns() == {"a", "b"}
    assert chain.knows_columns
    assert not Chain(chain, BatchMapper(lambda batch: batch)).knows_columns


def test_user_code_of_a_part_is_declared() -> None:
    assert not chain_of_all().runs_user_code
    assert Chain(chain_of_all(), BatchMapper(lambda batch: batch)).runs_user_code


def test_an_empty_chain_changes_nothing() -> None:
    assert rows_of(Chain().fit_transform(dataset(ROWS))) == pa.table(ROWS)
