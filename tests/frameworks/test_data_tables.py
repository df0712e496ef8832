"""Tables of Delta Lake, Iceberg and Lance, written by their own libraries."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest

from spotfit.core.errors import ConfigError
from spotfit.data.dataset import Dataset
from spotfit.data.source import Source
from spotfit.data.sources import lance_tables
from spotfit.data.table_readers import read_delta, read_iceberg, read_lance
from tests.unit.data.sources.source_suite import SourceSuite, rows_of, source_of

TABLE = pa.table(
    {
        "id": pa.array(range(20), pa.int32()),
        "kind": [["a", "b", None][n % 3] for n in range(20)],
        "value": [n / 2 for n in range(20)],
    }
)


def ids_of(dataset: Dataset) -> list[int]:
    ids: list[int] = pa.concat_tables(dataset.blocks())["id"].to_pylist()
    return sorted(ids)


# --- Delta Lake -----------------------------------------------------------------------------------


class TestDelta(SourceSuite):
    @pytest.fixture
    def path(self, tmp_path: Path) -> str:
        delta = pytest.importorskip("deltalake")
        path = str(tmp_path / "table")
        for first in (0, 10):
            delta.write_deltalake(path, TABLE.slice(first, 10), mode="append")
        return path

    @pytest.fixture
    def source(self, path: str) -> Source:
        return source_of(read_delta(path))

    @pytest.fixture
    def expected(self, path: str) -> pa.Table:
        deltalake = pytest.importorskip("deltalake")

        # In the order of the names of the files.
        files = sorted(deltalake.DeltaTable(path).file_uris())
        return pa.concat_tables(pa.parquet.read_table(file) for file in files)

    def test_a_listed_version_stays_while_the_table_grows(self, path: str) -> None:
        deltalake = pytest.importorskip("deltalake")

        dataset = read_delta(path)
        _ = dataset.manifest
        deltalake.write_deltalake(path, TABLE, mode="append")
        assert ids_of(dataset) == list(range(20))
        assert len(ids_of(read_delta(path))) == 40
        assert ids_of(read_delta(path, version=0)) == list(range(10))

    def test_partitions_have_the_types_of_the_table(self, tmp_path: Path) -> None:
        delta = pytest.importorskip("deltalake")
        path = str(tmp_path / "partitioned")
        delta.write_deltalake(path, TABLE, partition_by=["id", "kind"])
        found = rows_of(source_of(read_delta(path, columns=["value", "id", "kind"])))
        assert found.schema.field("id").type == pa.int32()
        assert found.sort_by("id").to_pylist() == TABLE.select(found.column_names).to_pylist()

    def test_a_missing_table_is_reported(self, tmp_path: Path) -> None:
        pytest.importorskip("deltalake")
        with pytest.raises(ConfigError, match="cannot be opened as a Delta table"):
            _ = read_delta(str(tmp_path / "missing")).manifest

    def test_deletion_vectors_are_refused(self, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
        deltalake = pytest.importorskip("deltalake")

        class Protocol:
            reader_features = ("deletionVectors",)

        monkeypatch.setattr(deltalake.DeltaTable, "protocol", lambda _: Protocol())
        with pytest.raises(ConfigError, match="uses deletionVectors"):
            _ = read_delta(path).manifest


# --- Iceberg --------------------------------------------------------------------------------------


class TestIceberg(SourceSuite):
    @pytest.fixture
    def catalog(self, tmp_path: Path) -> dict[str, Any]:
        return {
            "name": "local",
            "type": "sql",
            "uri": f"sqlite:///{tmp_path}/catalog.db",
            "warehouse": f"file://{tmp_path}/warehouse",
        }

    @pytest.fixture
    def table(self, catalog: dict[str, Any]) -> Any:
        load_catalog = pytest.importorskip("pyiceberg.catalog").load_catalog
        pytest.importorskip("sqlalchemy")
        opened = load_catalog(**catalog)
        opened.create_namespace("space")
        table = opened.create_table("space.table", schema=TABLE.schema)
        for first in (0, 10):
            table.append(TABLE.slice(first, 10))
        return table

    def read(self, catalog: dict[str, Any], **options: Any) -> Dataset:
        return read_iceberg(table_identifier="space.table", catalog_kwargs=catalog, **options)

    @pytest.fixture
    def source(self, table: Any, catalog: dict[str, Any]) -> Source:
        return source_of(self.read(catalog))

    @pytest.fixture
    def expected(self, table: Any) -> pa.Table:
        files = sorted(task.file.file_path for task in table.scan().plan_files())
        names = [file.removeprefix("file://") for file in files]
        return pa.concat_tables(pa.parquet.read_table(name) for name in names)

    def test_a_snapshot_is_read(self, table: Any, catalog: dict[str, Any]) -> None:
        first = table.history()[0].snapshot_id
        assert ids_of(self.read(catalog, snapshot_id=first)) == list(range(10))
        fields = self.read(catalog, selected_fields=("value", "id"))
        assert fields.manifest.schema.names == ["value", "id"]

    def test_a_renamed_column_is_refused(self, table: Any, catalog: dict[str, Any]) -> None:
        with table.update_schema() as update:
            update.rename_column("value", "amount")
        with pytest.raises(ConfigError, match="was renamed: amount, value"):
            _ = self.read(catalog).manifest

    def test_a_missing_table_is_reported(self, table: Any, catalog: dict[str, Any]) -> None:
        with pytest.raises(ConfigError, match="cannot be opened"):
            _ = read_iceberg(table_identifier="space.other", catalog_kwargs=catalog).manifest


# --- Lance ----------------------------------------------------------------------------------------


class TestLance(SourceSuite):
    @pytest.fixture
    def path(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
        lance = pytest.importorskip("lance")
        monkeypatch.setattr(lance_tables, "UNIT_BYTES", 500)
        lance.write_dataset(TABLE, tmp_path / "table", max_rows_per_file=8)
        return str(tmp_path / "table")

    @pytest.fixture
    def source(self, path: str) -> Source:
        return source_of(read_lance(path))

    @pytest.fixture
    def expected(self) -> pa.Table:
        return TABLE

    def test_a_listed_version_stays_while_the_table_changes(self, path: str) -> None:
        lance = pytest.importorskip("lance")

        dataset = read_lance(path)
        manifest = pickle.loads(pickle.dumps(dataset.manifest))
        lance.write_dataset(TABLE, path, mode="append")
        lance.dataset(path).delete("id < 10")
        rows = [manifest.read_part(n, 0, int(c)) for n, c in enumerate(manifest.unit_rows)]
        assert pa.concat_tables(rows)["id"].to_pylist() == list(range(20))
        assert len(ids_of(read_lance(path))) == 20
        assert ids_of(read_lance(path, version=1)) == list(range(20))

    def test_columns_are_selected(self, path: str) -> None:
        assert read_lance(path, columns=["value"]).manifest.schema.names == ["value"]
        with pytest.raises(ConfigError, match="Did you mean 'value'"):
            _ = read_lance(path, columns=["values"]).manifest

    def test_a_missing_table_is_reported(self, tmp_path: Path) -> None:
        pytest.importorskip("lance")
        with pytest.raises(ConfigError, match="cannot be opened as a Lance table"):
            _ = read_lance(str(tmp_path / "missing")).manifest
