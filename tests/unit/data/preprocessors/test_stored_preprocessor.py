"""The preprocessor in the metadata of a checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest

from spotfit.checkpoint.checkpoint_dir import Checkpoint
from spotfit.core.errors import ConfigError
from spotfit.data.preprocessors import (
    OrdinalEncoder,
    StandardScaler,
    Tokenizer,
    checkpoint_metadata,
    preprocessor_of_metadata,
)
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
