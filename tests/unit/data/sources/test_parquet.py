"""Parquet files: row groups, versions, tensors."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest

from spotfit.core.errors import ConfigError
from spotfit.data.dataset import Dataset
from spotfit.data.file_readers import read_parquet
from spotfit.data.files import FileSet
from spotfit.data.partitioning import Partitioning
from spotfit.data.source import Source
from spotfit.data.sources import file_source
from spotfit.data.tensor_storage import encode_tensors
from tests.unit.data.sources.source_suite import FileSourceSuite, rows_of, values_of


def source_of(dataset: Dataset) -> Source:
    (source,) = dataset.manifest.sources
    return source


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


def read_values(dataset: Dataset) -> dict[str, list[object]]:
    return values_of(rows_of(source_of(dataset)))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for number in range(3):
        pq.write_table(
            make_table(25, 25 * number), tmp_path / f"part-{number}.parquet", row_group_size=10
        )
    return tmp_path


class TestParquet(FileSourceSuite):
    @pytest.fixture
    def source(self, folder: Path) -> Source:
        return source_of(read_parquet(folder))

    @pytest.fixture
    def expected(self, folder: Path) -> pa.Table:
        return ds.dataset(folder, format="parquet").to_table()


class TestPartitionedParquet(FileSourceSuite):
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


def test_a_unit_is_a_row_group_whose_size_is_that_of_its_chunks(folder: Path) -> None:
    manifest = read_parquet(folder).manifest
    assert manifest.unit_rows.tolist() == [10, 10, 5] * 3
    group = pq.read_metadata(folder / "part-0.parquet").row_group(1)
    chunks = [group.column(index).total_compressed_size for index in range(group.num_columns)]
    assert manifest.unit_bytes[1] == sum(chunks)


def test_only_the_wanted_columns_are_requested(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = 400_000
    wide = pa.table({"a": np.arange(rows), "b": np.arange(rows) * 7, "c": np.arange(rows)})
    pq.write_table(wide, folder / "wide.parquet", compression=None, use_dictionary=False)
    dataset = read_parquet(folder / "wide.parquet")
    dataset.manifest.read_part(0, 0, 1)  # loads the footer
    requests: list[int] = []
    read = FileSet.read

    def counted(self: FileSet, *arguments: object) -> bytes:
        body = read(self, *arguments)  # type: ignore[arg-type]
        requests.append(len(body))
        return body

    monkeypatch.setattr(FileSet, "read", counted)
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


def test_an_unknown_column_is_refused_with_the_nearest_one(folder: Path) -> None:
    with pytest.raises(ConfigError, match="Did you mean 'tokens'"):
        _ = read_parquet(folder, columns=["id", "token"]).manifest


def test_columns_of_the_call_are_those_of_the_dataset(folder: Path) -> None:
    dataset = read_parquet(folder, columns=["missing", "id"])
    assert dataset.manifest.schema.names == ["missing", "id"]
    assert read_values(dataset)["id"] == list(range(75))


def test_no_columns_keep_the_number_of_rows(folder: Path) -> None:
    manifest = read_parquet(folder).manifest
    assert manifest.read_part(0, 0, 10, []).num_rows == 10


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


def test_large_row_groups_are_reported_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(file_source, "LARGE_UNIT_BYTES", 500)
    _ = read_parquet(folder).manifest
    assert [record.message for record in caplog.records] == ["data.units_large"]


# --- tensors --------------------------------------------------------------------------------------


TENSORS = np.arange(2 * 3 * 4, dtype=np.float32).reshape(4, 2, 3)


def test_arrow_tensors_are_read_as_tensors(tmp_path: Path) -> None:
    column = pa.FixedShapeTensorArray.from_numpy_ndarray(TENSORS)
    pq.write_table(pa.table({"x": column}), tmp_path / "a.parquet")
    assert_tensors(rows_of(source_of(read_parquet(tmp_path))), TENSORS)


def test_tensors_stored_as_bytes_are_read_as_tensors(tmp_path: Path) -> None:
    column = pa.FixedShapeTensorArray.from_numpy_ndarray(TENSORS)
    stored = encode_tensors(pa.table({"x": column}))
    assert stored.schema.field("x").type == pa.binary(24)
    pq.write_table(stored, tmp_path / "a.parquet")
    assert_tensors(rows_of(source_of(read_parquet(tmp_path))), TENSORS)


def test_encoding_keeps_the_rows_of_slices_and_null_values() -> None:
    kind = pa.fixed_shape_tensor(pa.int16(), [2])
    storage = pa.array([[1, 2], None, [5, 6], [7, 8]], pa.list_(pa.int16(), 2))
    column = pa.ExtensionArray.from_storage(kind, storage).slice(1, 2)
    stored = encode_tensors(pa.table({"x": column}))["x"]
    assert stored.to_pylist() == [None, np.array([5, 6], np.int16).tobytes()]


def test_tensors_written_by_ray_are_read_as_tensors(tmp_path: Path) -> None:
    for name, kind in (("arrow_tensor", pa.list_), ("arrow_tensor_v2", pa.large_list)):
        metadata = ray_metadata(name, [2, 3])
        rows = [row.ravel().tolist() for row in TENSORS]
        column = pa.array(rows, kind(pa.float32()))
        write_with_metadata(column, metadata, tmp_path / f"{name}.parquet")
        assert_tensors(rows_of(source_of(read_parquet(tmp_path / f"{name}.parquet"))), TENSORS)


def test_ray_tensors_of_different_shapes_are_read_as_lists(tmp_path: Path) -> None:
    kind = pa.struct([("data", pa.list_(pa.uint8())), ("shape", pa.list_(pa.int64()))])
    rows = [{"data": [1, 2, 3, 4], "shape": [2, 2]}, {"data": [5, 6], "shape": [1, 2]}, None]
    metadata = ray_metadata("arrow_variable_shaped_tensor", 2)
    write_with_metadata(pa.array(rows, kind), metadata, tmp_path / "a.parquet")
    found = rows_of(source_of(read_parquet(tmp_path)))
    assert found["x"].to_pylist() == [[[1, 2], [3, 4]], [[5, 6]], None]


def test_a_pickled_shape_is_refused(tmp_path: Path) -> None:
    metadata = ray_metadata("arrow_tensor", [1])
    metadata[b"ARROW:extension:metadata"] = b"\x80\x05]."
    write_with_metadata(pa.array([[1.0]]), metadata, tmp_path / "a.parquet")
    with pytest.raises(ConfigError, match="'x' is not stored as JSON"):
        _ = read_parquet(tmp_path).manifest


def test_bytes_of_tensors_are_read_with_a_stated_type(tmp_path: Path) -> None:
    column = pa.array([row.tobytes() for row in TENSORS], pa.binary())
    pq.write_table(pa.table({"x": column}), tmp_path / "a.parquet")
    dataset = read_parquet(tmp_path, tensor_column_schema={"x": (np.float32, (2, 3))})
    assert_tensors(rows_of(source_of(dataset)), TENSORS)


def test_bytes_of_another_size_than_the_stated_tensors_are_refused(tmp_path: Path) -> None:
    pq.write_table(pa.table({"x": [b"12345"]}), tmp_path / "a.parquet")
    dataset = read_parquet(tmp_path, tensor_column_schema={"x": (np.float32, (2, 3))})
    with pytest.raises(ConfigError, match=r"'x' of .* does not have tensors"):
        dataset.manifest.read_part(0, 0, 1)


def ray_metadata(name: str, parameter: object) -> dict[bytes, bytes]:
    return {
        b"ARROW:extension:name": f"ray.data.{name}".encode(),
        b"ARROW:extension:metadata": json.dumps(parameter).encode(),
    }


def write_with_metadata(column: pa.Array, metadata: dict[bytes, bytes], path: Path) -> None:
    schema = pa.schema([pa.field("x", column.type, metadata=metadata)])
    sink = io.BytesIO()
    pq.write_table(pa.table([column], schema=schema), sink)
    path.write_bytes(sink.getvalue())


def assert_tensors(table: pa.Table, expected: np.ndarray) -> None:
    column = table["x"].combine_chunks()
    assert isinstance(column.type, pa.FixedShapeTensorType)
    assert column.to_numpy_ndarray().dtype == expected.dtype
    assert np.array_equal(column.to_numpy_ndarray(), expected)
