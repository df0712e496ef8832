"""What the formats of files have in common: schemas, columns, reports."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from spotfit.core.errors import ConfigError
from spotfit.data.file_readers import read_parquet
from spotfit.data.sources import file_source
from tests.unit.data.sources.source_suite import read_values


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    table = pa.table({"id": np.arange(75), "tokens": [["a"]] * 75, "missing": pa.nulls(75)})
    for number in range(3):
        part = table.slice(25 * number, 25)
        pq.write_table(part, tmp_path / f"part-{number}.parquet", row_group_size=10)
    return tmp_path


def test_columns_that_some_files_lack_are_null_there(tmp_path: Path) -> None:
    pq.write_table(pa.table({"a": pa.array([1], pa.int32()), "b": ["x"]}), tmp_path / "1.parquet")
    pq.write_table(pa.table({"a": pa.array([2], pa.int64())}), tmp_path / "2.parquet")
    dataset = read_parquet(tmp_path)
    assert dataset.manifest.schema == pa.schema([("a", pa.int64()), ("b", pa.string())])
    assert read_values(dataset) == {"a": [1, 2], "b": ["x", None]}


def test_columns_of_different_kinds_are_refused_by_name(tmp_path: Path) -> None:
    pq.write_table(pa.table({"a": [1]}), tmp_path / "1.parquet")
    pq.write_table(pa.table({"a": [[2]]}), tmp_path / "2.parquet")
    with pytest.raises(ConfigError, match=r"2\.parquet do not fit those of .*1\.parquet"):
        _ = read_parquet(tmp_path).manifest


def test_a_stated_schema_replaces_types_and_adds_columns(folder: Path) -> None:
    schema = pa.schema([("id", pa.float32()), ("new", pa.string())])
    dataset = read_parquet(folder, schema=schema)
    assert dataset.manifest.schema == schema
    assert read_values(dataset) == {"id": [float(n) for n in range(75)], "new": [None] * 75}


def test_no_columns_keep_the_number_of_rows(folder: Path) -> None:
    manifest = read_parquet(folder).manifest
    assert manifest.read_part(0, 0, 10, []).num_rows == 10


def test_an_unknown_column_is_refused_with_the_nearest_one(folder: Path) -> None:
    with pytest.raises(ConfigError, match="Did you mean 'tokens'"):
        _ = read_parquet(folder, columns=["id", "token"]).manifest


def test_columns_of_the_call_are_those_of_the_dataset(folder: Path) -> None:
    dataset = read_parquet(folder, columns=["missing", "id"])
    assert dataset.manifest.schema.names == ["missing", "id"]
    assert read_values(dataset)["id"] == list(range(75))


def test_large_row_groups_are_reported_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(file_source, "LARGE_UNIT_BYTES", 50)
    _ = read_parquet(folder).manifest
    assert [record.message for record in caplog.records] == ["data.units_large"]
