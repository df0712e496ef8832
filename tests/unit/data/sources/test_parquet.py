"""Parquet files: row groups, versions, tensors."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest

from spotfit.core.errors import ConfigError
from spotfit.data.file_readers import read_parquet
from spotfit.data.files import FileSet
from spotfit.data.source import Source
from spotfit.data.sources.partitioning import Partitioning
from tests.unit.data.sources.source_suite import (
    FetchedSourceSuite,
    read_values,
    rows_of,
    source_of,
    values_of,
)


def make_table(rows: int, first: int = 0) -> pa.Table:
    numbers = np.arange(first, first + rows)
    return pa.table(
        {
            "id": numbers,
            "name": [f"row {n}" for n in numbers],
            "tokens": [list(range(n % 4)) for n in numbers],
            "nested": [{"left": int(n), "right": {"deep": [str(n)]}} for n in numbers],
            "kind": pa.array([("even", "odd")[n % 2] for n in numbers]).dictionary_encode(),
            "missing": [None if n % 3 else float(n) for n in numbers],
        }
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for number in range(3):
        pq.write_table(
            make_table(25, 25 * number), tmp_path / f"part-{number}.parquet", row_group_size=10
        )
    return tmp_path


class TestParquet(FetchedSourceSuite):
    @pytest.fixture
    def source(self, folder: Path) -> Source:
        return source_of(read_parquet(folder))

    @pytest.fixture
    def expected(self, folder: Path) -> pa.Table:
        return ds.dataset(folder, format="parquet").to_table()


class TestPartitionedParquet(FetchedSourceSuite):
    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        for year in (2023, 2024):
            (tmp_path / f"year={year}").mkdir()
            pq.write_table(make_table(5, year), tmp_path / f"year={year}" / "a.parquet")
        return tmp_path

    @pytest.fixture
    def source(self, folder: Path) -> Source:
        types = Partitioning("hive", field_types={"year": int})
        return source_of(read_parquet(folder, partitioning=types, include_paths=True))

    @pytest.fixture
    def expected(self, folder: Path) -> pa.Table:
        table = ds.dataset(folder, format="parquet", partitioning="hive").to_table()
        paths = [str(folder / f"year={year}" / "a.parquet") for year in table["year"].to_pylist()]
        return table.append_column("path", pa.array(paths))


def test_a_unit_is_a_row_group(folder: Path) -> None:
    assert read_parquet(folder).manifest.unit_rows.tolist() == [10, 10, 5] * 3


ROWS = 50_000
MOSTLY_ZERO = np.where(np.arange(ROWS) % 1_000, 0.0, 1.0)
COLUMNS = {
    "zeros": pa.array(MOSTLY_ZERO),
    "booleans": pa.array(MOSTLY_ZERO > 0),
    "narrow": pa.array(MOSTLY_ZERO.astype(np.int8)),
    "decimals": pa.array(MOSTLY_ZERO.astype(np.int64)).cast(pa.decimal128(20, 1)),
    "structs": pa.StructArray.from_arrays([pa.array(MOSTLY_ZERO)] * 2, ["a", "b"]),
    "tensors": pa.FixedSizeListArray.from_arrays(pa.array(MOSTLY_ZERO), 50),
    "lists": pa.ListArray.from_arrays(pa.array(range(0, ROWS + 1, 100)), pa.array(MOSTLY_ZERO)),
    "classes": pa.array([f"a class with a long name {n % 7}" for n in range(ROWS)]),
    "text": pa.array([f"{n} " * (n % 80) for n in range(ROWS)]),
    "dictionary": pa.array([f"class {n % 7}" for n in range(ROWS)]).dictionary_encode(),
}


@pytest.mark.parametrize("kind", COLUMNS)
def test_the_size_of_a_unit_is_that_of_its_rows_in_memory(tmp_path: Path, kind: str) -> None:
    rows = pa.table({"column": COLUMNS[kind]})
    pq.write_table(rows, tmp_path / "a.parquet", compression="zstd")
    manifest = read_parquet(tmp_path).manifest
    decoded = manifest.read_part(0, 0, rows.num_rows)
    # Without the bits of null values, which take up to an eighth of a byte per value.
    assert manifest.unit_bytes[0] == pytest.approx(decoded.nbytes, rel=0.15)


def test_missing_text_takes_no_space(tmp_path: Path) -> None:
    rows = pa.table({"column": pa.array([None] * ROWS + ["one long value " * 50], pa.string())})
    pq.write_table(rows, tmp_path / "a.parquet")
    assert read_parquet(tmp_path).manifest.unit_bytes[0] < 4 * ROWS


def test_the_size_of_text_without_statistics_is_that_of_its_encoding(tmp_path: Path) -> None:
    rows = pa.table({"column": COLUMNS["classes"]})
    pq.write_table(rows, tmp_path / "a.parquet", write_statistics=False)
    chunk = pq.read_metadata(tmp_path / "a.parquet").row_group(0).column(0)
    assert read_parquet(tmp_path).manifest.unit_bytes[0] == chunk.total_uncompressed_size


def test_only_the_wanted_columns_are_requested(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = 400_000
    wide = pa.table({"a": np.arange(rows), "b": np.arange(rows) * 7, "c": np.arange(rows)})
    pq.write_table(wide, folder / "wide.parquet", compression=None, use_dictionary=False)
    dataset = read_parquet(folder / "wide.parquet")
    dataset.manifest.read_part(0, 0, 1)  # loads the footer
    requests: list[int] = []
    read = FileSet.read_view

    def counted(self: FileSet, *arguments: object) -> bytes | memoryview:
        body = read(self, *arguments)  # type: ignore[arg-type]
        requests.append(len(body))
        return body

    monkeypatch.setattr(FileSet, "read_view", counted)
    block = dataset.manifest.read_part(0, 0, rows, ["b"])
    assert block["b"].equals(wide["b"])
    assert len(requests) == 1
    assert 8 * rows <= requests[0] < 9 * rows
    # Chunks that are far apart are read by two requests, not with the one in between.
    requests.clear()
    assert dataset.manifest.read_part(0, 0, rows, ["a", "c"]).equals(wide.select(["a", "c"]))
    assert len(requests) == 2
    assert sum(requests) < 18 * rows


def test_a_footer_longer_than_the_first_request_is_read(tmp_path: Path) -> None:
    wide = pa.table({f"column {n:04}": [n] for n in range(1500)})
    pq.write_table(wide, tmp_path / "wide.parquet")
    assert pq.read_metadata(tmp_path / "wide.parquet").serialized_size > 64 * 2**10
    assert rows_of(source_of(read_parquet(tmp_path))).equals(wide)


def test_files_without_rows_and_without_row_groups_are_read(tmp_path: Path) -> None:
    table = make_table(3)
    pq.write_table(table.slice(0, 0), tmp_path / "a.parquet")
    pq.write_table(table, tmp_path / "b.parquet")
    with pq.ParquetWriter(tmp_path / "c.parquet", table.schema):
        pass
    assert read_values(read_parquet(tmp_path)) == values_of(table)


def test_a_file_of_another_format_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_bytes(b"no footer")
    with pytest.raises(ConfigError, match=r"a\.parquet is not a Parquet file"):
        _ = read_parquet(tmp_path).manifest
