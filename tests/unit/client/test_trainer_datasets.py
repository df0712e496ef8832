"""The `datasets=` of a trainer, before machines are rented."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import spotfit.data
from spotfit.client.trainer_datasets import (
    check_configuration,
    check_datasets,
    check_names,
    datasets_identity,
    open_datasets,
)
from spotfit.core.errors import ConfigError, ConfigErrors
from spotfit.data.data_config import DataConfig


def test_datasets_and_functions_are_accepted() -> None:
    check_datasets({"train": spotfit.data.range(3), "valid": lambda: None}, num_workers=2)


def test_any_object_is_accepted_without_workers() -> None:
    check_datasets({"train": [1, 2]}, num_workers=0)


def test_another_object_is_refused_with_the_function_that_converts_it() -> None:
    with pytest.raises(ConfigError, match=r"spotfit\.data\.from_pandas"):
        check_datasets({"train": pd.DataFrame({"x": [1]})}, num_workers=2)


def test_all_wrong_datasets_are_reported_together() -> None:
    with pytest.raises(ConfigErrors, match=r"(?s)'train' is a list.*'valid' is a int"):
        check_datasets({"train": [1], "valid": 3}, num_workers=2)


def test_a_function_is_called_for_its_dataset() -> None:
    opened = open_datasets({"train": lambda: spotfit.data.range(3)})
    assert opened["train"].manifest.row_count == 3


def test_a_function_must_return_a_dataset() -> None:
    with pytest.raises(ConfigError, match="'train' is a list"):
        open_datasets({"train": lambda: [1, 2]})


def test_an_empty_dataset_is_logged(capsys: pytest.CaptureFixture[str]) -> None:
    open_datasets({"valid": spotfit.data.range(0)})
    assert "data.empty" in capsys.readouterr().err


def test_unknown_columns_of_transforms_are_found() -> None:
    datasets = {"train": spotfit.data.range(3).rename_columns({"nope": "x"})}
    with pytest.raises(ConfigError, match="nope"):
        open_datasets(datasets)


def write_ids(path: Path, *ids: int) -> None:
    pq.write_table(pa.table({"id": list(ids)}), path)


@pytest.mark.parametrize("change", ["replaced", "deleted"])
@pytest.mark.parametrize(
    "derive",
    [
        lambda rows: rows,
        lambda rows: rows.limit(3).map_batches(lambda batch: batch),
        lambda rows: rows.zip(rows.rename_columns({"id": "other"})),
        lambda rows: rows.mix(rows),
    ],
    ids=["rows", "limit", "zip", "mix"],
)
def test_files_that_have_changed_since_an_earlier_listing_are_found(
    tmp_path: Path, derive: Any, change: str
) -> None:
    for number in range(2):
        write_ids(tmp_path / f"{number}.parquet", 1, 2)
    rows = spotfit.data.read_parquet(str(tmp_path))
    assert rows.count() == 4
    dataset = derive(rows)
    open_datasets({"train": dataset})
    if change == "replaced":
        write_ids(tmp_path / "1.parquet", 1, 2, 3)
    else:
        (tmp_path / "1.parquet").unlink()
    with pytest.raises(ConfigError, match=r"changed or deleted after .*1\.parquet"):
        open_datasets({"train": dataset})


def test_fewer_rows_than_workers_are_logged(capsys: pytest.CaptureFixture[str]) -> None:
    datasets = {"train": spotfit.data.range(8), "valid": spotfit.data.range(3)}
    check_configuration(datasets, DataConfig(), num_workers=4)
    assert "data.fewer_rows_than_workers dataset=valid rows=3" in capsys.readouterr().err
    check_configuration(datasets, DataConfig(["train"]), num_workers=4)
    assert capsys.readouterr().err == ""


def test_a_function_that_fails_on_the_client_is_logged(capsys: pytest.CaptureFixture[str]) -> None:
    def needs_a_gpu(_batch: Any) -> Any:
        raise RuntimeError("no GPU")

    open_datasets({"train": spotfit.data.range(3).map_batches(needs_a_gpu)})
    assert "data.transforms_failed" in capsys.readouterr().err


def test_a_misspelled_dataset_to_split_is_found() -> None:
    with pytest.raises(ConfigError, match="Did you mean 'train'"):
        check_names(DataConfig(["trian"]), {"train": spotfit.data.range(3)})


class NoIterators(DataConfig):
    def configure(self, datasets: dict[str, Any], *args: Any, **kwargs: Any) -> list[Any]:
        return [datasets] * 2


def test_a_configuration_of_the_user_is_called() -> None:
    with pytest.raises(ConfigError, match="configure returned a Dataset"):
        check_configuration({"train": spotfit.data.range(3)}, NoIterators(), num_workers=2)


@pytest.mark.parametrize(
    "changed",
    [
        lambda: {"train": spotfit.data.range(4)},
        lambda: {"valid": spotfit.data.range(3)},
        lambda: {"train": spotfit.data.range(3).split_at_indices([1])[1]},
    ],
)
def test_the_identity_depends_on_name_and_rows(changed: Any) -> None:
    before = datasets_identity({"train": spotfit.data.range(3)})
    assert before == datasets_identity({"train": spotfit.data.range(3)})
    assert before != datasets_identity(changed())


def typo_of_rows(rows: spotfit.data.Dataset) -> spotfit.data.Dataset:
    return rows.map(lambda row: {"z": row["labels"]})


def typo_of_arrays(rows: spotfit.data.Dataset) -> spotfit.data.Dataset:
    return rows.map_batches(lambda batch: {"z": batch["labels"]})


def typo_of_frames(rows: spotfit.data.Dataset) -> spotfit.data.Dataset:
    return rows.map_batches(
        lambda frame: frame[["label"]].assign(z=frame["labels"]), batch_format="pandas"
    )


def typo_of_tables(rows: spotfit.data.Dataset) -> spotfit.data.Dataset:
    return rows.map_batches(
        lambda table: table.append_column("z", table["labels"]), batch_format="pyarrow"
    )


def typo_of_an_attribute(rows: spotfit.data.Dataset) -> spotfit.data.Dataset:
    return rows.map_batches(lambda frame: frame.assign(z=frame.labels), batch_format="pandas")


def typo_of_several_columns(rows: spotfit.data.Dataset) -> spotfit.data.Dataset:
    return rows.map_batches(lambda frame: frame[["label", "labels"]], batch_format="pandas")


def typo_of_a_filter(rows: spotfit.data.Dataset) -> spotfit.data.Dataset:
    return rows.filter(lambda row: row["labels"] > 1)


def typo_of_a_later_function(rows: spotfit.data.Dataset) -> spotfit.data.Dataset:
    return rows.map(lambda row: {"label": row["label"]}).map(lambda row: {"z": row["labels"]})


@pytest.mark.parametrize(
    "change",
    [
        typo_of_rows,
        typo_of_arrays,
        typo_of_frames,
        typo_of_tables,
        typo_of_an_attribute,
        typo_of_several_columns,
        typo_of_a_filter,
        typo_of_a_later_function,
    ],
)
def test_unknown_columns_within_functions_are_found(change: Any) -> None:
    rows = spotfit.data.from_items([{"label": 1}, {"label": 2}])
    with pytest.raises(ConfigError, match=r"no column 'labels'") as raised:
        open_datasets({"train": change(rows)})
    assert "Did you mean 'label'?" in str(raised.value)


@pytest.mark.parametrize("batch_format", ["numpy", "pandas", "pyarrow"])
def test_a_missing_key_of_another_mapping_is_logged(
    batch_format: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    of_the_machine: dict[str, int] = {}

    def look_up(batch: Any) -> Any:
        return {"z": [of_the_machine["labels"]] * len(batch)}

    rows = spotfit.data.from_items([{"label": 1}])
    open_datasets({"train": rows.map_batches(look_up, batch_format=batch_format)})
    assert "KeyError: 'labels'" in capsys.readouterr().err


def test_the_missing_column_of_another_frame_is_logged(capsys: pytest.CaptureFixture[str]) -> None:
    other = pd.DataFrame({"a": [1]})

    def join(frame: pd.DataFrame) -> pd.DataFrame:
        return frame.assign(z=other["labels"])

    rows = spotfit.data.from_items([{"label": 1}])
    open_datasets({"train": rows.map_batches(join, batch_format="pandas")})
    assert "KeyError: 'labels'" in capsys.readouterr().err
