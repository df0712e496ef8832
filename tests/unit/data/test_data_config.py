"""`DataConfig`: its arguments, and the shards that it gives to the ranks."""

from __future__ import annotations

from typing import Any

import pytest

from spotfit.data.data_config import DataConfig


def test_all_datasets_are_split_by_default() -> None:
    assert DataConfig().is_split("train")


def test_only_the_named_datasets_are_split() -> None:
    config = DataConfig(["train"], enable_shard_locality=False)
    assert (config.is_split("train"), config.is_split("valid")) == (True, False)


@pytest.mark.parametrize("wrong", ["train", ("train",), None, 3])
def test_datasets_to_split_must_be_all_or_a_list(wrong: Any) -> None:
    with pytest.raises(TypeError, match="'all' or a list of names"):
        DataConfig(wrong)


def test_an_unknown_way_to_resume_is_refused() -> None:
    with pytest.raises(ValueError, match="must be 'exact' or 'epoch'"):
        DataConfig(resume="never")  # type: ignore[arg-type]


@pytest.mark.parametrize("wrong", [4, (1,), (0, 4), (4, 2), (1.0, 2.0), "12"])
def test_num_workers_must_be_two_numbers(wrong: Any) -> None:
    with pytest.raises(TypeError, match="the smallest and the largest number of workers"):
        DataConfig(num_workers=wrong)


def test_num_workers_has_no_effect_beside_an_own_configure() -> None:
    class Configured(DataConfig):
        def configure(self, *args: Any, **kwargs: Any) -> list[dict[str, Any]]:
            return []

    with pytest.raises(ValueError, match=r"Configured\.configure chooses the order"):
        Configured(num_workers=(1, 2))
