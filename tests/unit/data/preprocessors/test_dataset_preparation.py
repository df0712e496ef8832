"""One preprocessor for all datasets of a trainer."""

from __future__ import annotations

import pytest

from spotfit.core.errors import ConfigError
from spotfit.data.preprocessors import Normalizer, StandardScaler, preprocess_datasets
from tests.unit.data.preprocessors.rows import dataset, rows_of

DATASETS = {"train": dataset({"x": [1.0, 3.0]}), "val": dataset({"x": [5.0]})}


def test_the_statistics_are_those_of_the_training_data() -> None:
    scaler = StandardScaler(["x"])
    prepared = preprocess_datasets(scaler, DATASETS)
    assert scaler.stats_ == {"mean(x)": 2.0, "std(x)": 1.0}
    assert {name: rows_of(ds)["x"].to_pylist() for name, ds in prepared.items()} == {
        "train": [-1.0, 1.0],
        "val": [3.0],
    }


def test_some_datasets_can_be_left_as_they_are() -> None:
    prepared = preprocess_datasets(StandardScaler(["x"]), DATASETS, only=["train"])
    assert prepared["val"] is DATASETS["val"]
    assert prepared["train"] is not DATASETS["train"]


def test_another_dataset_can_be_named() -> None:
    scaler = StandardScaler(["x"])
    preprocess_datasets(scaler, DATASETS, fit_to="val")
    assert scaler.stats_["mean(x)"] == 5.0


def test_a_fitted_preprocessor_is_not_fitted_again() -> None:
    scaler = StandardScaler(["x"]).fit(dataset({"x": [0.0, 20.0]}))
    preprocess_datasets(scaler, DATASETS)
    assert scaler.stats_["mean(x)"] == 10.0


def test_a_missing_dataset_is_named_only_if_it_is_needed() -> None:
    with pytest.raises(ConfigError, match=r"no dataset 'train' for it: the datasets are \['val'\]"):
        preprocess_datasets(StandardScaler(["x"]), {"val": DATASETS["val"]})
    assert list(preprocess_datasets(Normalizer(["x"]), {"val": DATASETS["val"]})) == ["val"]
