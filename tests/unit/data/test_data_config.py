"""`DataConfig`: its arguments and the errors of unsupported datasets."""

from __future__ import annotations

import pytest

from spotfit.model.config import TRAIN_DATASET_KEY, DataConfig, unknown_dataset_error


def test_datasets_to_split_is_stored() -> None:
    assert DataConfig().datasets_to_split == "all"
    config = DataConfig([TRAIN_DATASET_KEY], enable_shard_locality=False)
    assert (config.datasets_to_split, config.enable_shard_locality) == (["train"], False)


@pytest.mark.parametrize("wrong", ["train", ("train",), None, 3])
def test_datasets_to_split_must_be_all_or_a_list(wrong: object) -> None:
    with pytest.raises(TypeError, match="'all' or a list of names"):
        DataConfig(wrong)  # type: ignore[arg-type]


def test_datasets_for_workers_are_not_supported() -> None:
    with pytest.raises(ValueError, match="not supported yet"):
        DataConfig().configure({}, 2, None, None)
    with pytest.raises(ValueError, match="not supported yet"):
        DataConfig.default_ingest_options()


def test_an_unknown_dataset_is_a_key_error_with_a_suggestion() -> None:
    error = unknown_dataset_error("trian", ["train", "valid"])
    assert isinstance(error, KeyError)
    assert "Did you mean 'train'?" in str(error)
    assert "datasets={'train'" in str(unknown_dataset_error(None, []))
