"""Datasets of trainers that own the loop."""

from typing import Any

import pytest

from spotfit.boosting.row_datasets import check_datasets, load_table, rows_of_rank
from spotfit.core.errors import ConfigError

pandas = pytest.importorskip("pandas")


def frame(rows: int = 5) -> Any:
    return pandas.DataFrame({"x": range(rows), "y": [n % 2 for n in range(rows)]})


def test_ranks_take_disjoint_parts_of_the_rows() -> None:
    table = load_table(frame(), "train", "y")
    parts = [rows_of_rank(table, "train", rank=rank, world_size=2) for rank in (0, 1)]
    assert [list(part.features["x"]) for part in parts] == [[0, 2, 4], [1, 3]]
    assert [list(part.labels) for part in parts] == [[0, 0, 0], [1, 1]]


def test_the_label_is_no_feature() -> None:
    table = load_table(frame, "train", "y")
    assert list(table.features.columns) == ["x"]


def test_more_workers_than_rows_are_rejected() -> None:
    table = load_table(frame(), "train", "y")
    with pytest.raises(ConfigError, match="5 rows for 6 workers"):
        rows_of_rank(table, "train", rank=0, world_size=6)


@pytest.mark.parametrize(
    ("datasets", "label", "message"),
    [
        (None, "y", "must have a dataset 'train'"),
        ({"test": frame()}, "y", "must have a dataset 'train'"),
        ({"train": frame()}, None, "label_column=None"),
        ({"train": [1, 2]}, "y", "the dataset 'train' is a list"),
        ({"train": frame()}, "z", "no column 'z'"),
        ({"train": frame(), "test": frame()[["x"]]}, "y", "The dataset 'test' has no column"),
    ],
)
def test_invalid_datasets_are_rejected(datasets: Any, label: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_datasets("XGBoostTrainer", datasets, label)


def test_functions_are_called_in_the_worker_only() -> None:
    def fail() -> Any:
        raise AssertionError("called")

    assert check_datasets("XGBoostTrainer", {"train": fail}, "y") == {"train": fail}


def test_a_function_without_a_table_is_rejected() -> None:
    with pytest.raises(ConfigError, match="'train' returned a dict"):
        load_table(dict, "train", "y")
