"""DataConfig: what it takes; and what is told while workers are not fed."""

from __future__ import annotations

import pytest

from spotfit.model.data import TRAIN_DATASET_KEY, DataConfig, unknown_dataset


def test_it_remembers_what_to_split() -> None:
    assert DataConfig().datasets_to_split == "all"
    config = DataConfig([TRAIN_DATASET_KEY], enable_shard_locality=False)
    assert (config.datasets_to_split, config.enable_shard_locality) == (["train"], False)


@pytest.mark.parametrize("wrong", ["train", ("train",), None, 3])
def test_what_to_split_is_all_or_a_list(wrong: object) -> None:
    with pytest.raises(TypeError, match="'all' or a list of names"):
        DataConfig(wrong)  # type: ignore[arg-type]


def test_workers_are_not_fed_yet() -> None:
    with pytest.raises(ValueError, match="not fed"):
        DataConfig().configure({}, 2, None, None)
    with pytest.raises(ValueError, match="not fed"):
        DataConfig.default_ingest_options()


def test_a_name_nobody_gave_is_a_key_error_with_the_nearest() -> None:
    error = unknown_dataset("trian", ["train", "valid"])
    assert isinstance(error, KeyError)
    assert "Did you mean 'train'?" in str(error)
    assert "datasets={'train'" in str(unknown_dataset(None, []))
