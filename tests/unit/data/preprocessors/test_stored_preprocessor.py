"""The preprocessor in the metadata of a checkpoint."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest

from spotfit.checkpoint.checkpoint_dir import Checkpoint
from spotfit.core.errors import ConfigError
from spotfit.data.dataset import Dataset
from spotfit.data.preprocessors import (
    Chain,
    OrdinalEncoder,
    StandardScaler,
    Tokenizer,
    checkpoint_metadata,
    preprocessor_of_metadata,
)
from spotfit.data.preprocessors.stored_preprocessor import default_metadata
from tests.unit.data.preprocessors.rows import dataset


def test_a_checkpoint_keeps_the_preprocessor(tmp_path: Path) -> None:
    encoder = OrdinalEncoder(["x"]).fit(dataset({"x": [3, 1]}))
    checkpoint = Checkpoint.from_directory(tmp_path)
    checkpoint.update_metadata({"epoch": 3})
    checkpoint.update_metadata(checkpoint_metadata(encoder))
    metadata = Checkpoint(tmp_path).get_metadata()
    found = preprocessor_of_metadata(metadata)
    assert found is not None
    assert found.stats_ == {"unique_values(x)": {1: 0, 3: 1}}
    assert metadata["epoch"] == 3


def test_a_checkpoint_without_preprocessor_has_none() -> None:
    assert preprocessor_of_metadata({"epoch": 3}) is None


def test_code_is_read_only_if_it_is_trusted() -> None:
    metadata = checkpoint_metadata(Tokenizer(["t"], str.split))
    with pytest.raises(ConfigError, match="trusted=True"):
        preprocessor_of_metadata(metadata)
    found = preprocessor_of_metadata(metadata, trusted=True)
    assert isinstance(found, Tokenizer)


def test_a_later_preprocessor_replaces_an_earlier_one() -> None:
    with_code = checkpoint_metadata(Tokenizer(["t"], str.split))
    with_data = checkpoint_metadata(StandardScaler(["x"]))
    assert isinstance(preprocessor_of_metadata(with_code | with_data), StandardScaler)
    restored = preprocessor_of_metadata(with_data | with_code, trusted=True)
    assert isinstance(restored, Tokenizer)


def scaled(*names: str) -> Dataset:
    rows = dataset({"x": [1.0, 3.0], "y": [2.0, 6.0]})
    for name in names:
        rows = StandardScaler([name]).fit_transform(rows)
    return rows


def columns_of(train: Dataset) -> list[str] | None:
    found = preprocessor_of_metadata(default_metadata({"train": train, "valid": scaled("y")}))
    return found.get_input_columns() if found is not None else None


def test_the_preprocessors_of_the_training_rows_are_one_chain() -> None:
    assert columns_of(scaled("x")) == ["x"]
    assert columns_of(scaled("x", "y")) == ["x", "y"]
    found = preprocessor_of_metadata(default_metadata({"train": scaled("x", "y")}))
    assert isinstance(found, Chain)


@pytest.mark.parametrize(
    "change",
    [
        lambda rows: rows.random_shuffle(seed=1),
        lambda rows: rows.random_shuffle(seed=1, exact=True),
        lambda rows: rows.sort("y"),
        lambda rows: rows.filter(expr="y > 0"),
        lambda rows: rows.materialize(),
        lambda rows: rows.cache(memory_bytes=1000),
        lambda rows: rows.select_columns(["x"]),
        lambda rows: rows.map_batches(lambda batch: batch),
        lambda rows: rows.train_test_split(0.5)[0],
        lambda rows: rows.union(rows),
    ],
)
def test_steps_that_keep_the_values_keep_the_preprocessor(change: Any) -> None:
    assert columns_of(change(scaled("x"))) == ["x"]


def test_preprocessors_before_and_after_materialize_are_one_chain() -> None:
    assert columns_of(StandardScaler(["y"]).fit_transform(scaled("x").materialize())) == ["x", "y"]


def test_functions_before_the_first_preprocessor_are_not_part_of_it() -> None:
    prepared = scaled().map_batches(lambda batch: batch)
    assert columns_of(StandardScaler(["y"]).fit_transform(prepared)) == ["y"]


@pytest.mark.parametrize(
    "change",
    [
        lambda rows: StandardScaler(["y"]).fit_transform(rows.map_batches(lambda batch: batch)),
        lambda rows: StandardScaler(["y"]).fit_transform(rows.flat_map(lambda row: [row])),
        lambda rows: rows.union(scaled()),
        lambda rows: rows.zip(scaled().rename_columns({"x": "a", "y": "b"})),
        lambda rows: rows.join(scaled(), "inner", on=["y"], right_suffix="_r"),
        lambda rows: rows.groupby("y").count(),
        lambda rows: pickle.loads(pickle.dumps(rows)),
    ],
)
def test_an_ambiguous_preprocessor_is_not_stored(change: Any) -> None:
    assert columns_of(change(scaled("x"))) is None


def test_a_preprocessor_with_code_is_not_stored(capsys: pytest.CaptureFixture[str]) -> None:
    split = Tokenizer(["t"], str.split).transform(dataset({"t": ["a b"]}))
    assert default_metadata({"train": split}) == {}
    assert "data.preprocessor_not_stored" in capsys.readouterr().err


def test_only_the_dataset_train_has_a_stored_preprocessor() -> None:
    assert default_metadata({"fit": scaled("x")}) == default_metadata({"train": [1]}) == {}
