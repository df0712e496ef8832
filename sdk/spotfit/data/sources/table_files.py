"""Tables of Delta Lake and Iceberg: their libraries name the Parquet files of a version.

The files are then read as any others. A table whose rows are not those of its files, because of
deletes or renamed columns, is refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import pyarrow as pa

from spotfit.core.errors import ConfigError
from spotfit.data.files import FileSet, PathOptions
from spotfit.data.source import Decode, SourceUnits
from spotfit.data.sources.file_source import FormatSource
from spotfit.data.sources.parquet import ParquetFormat
from spotfit.data.sources.partitioning import Partitioning
from spotfit.host import plugins


class TableVersion(NamedTuple):
    """The files of a version of a table."""

    paths: Sequence[str]
    schema: pa.Schema


class VersionedTable(Protocol):
    """A table whose library is asked for its files. Immutable, can be pickled."""

    @property
    def identity(self) -> str:
        """The address and the version that the user wants."""
        ...

    def find_files(self) -> TableVersion:
        """Return the files. Raises `ConfigError` and `MissingExtraError`."""
        ...


@dataclass(frozen=True, eq=False)
class TableFilesSource:
    """The rows of a table, as of the version at which it is listed."""

    table: VersionedTable
    columns: tuple[str, ...] | None = None
    include_paths: bool = False

    @property
    def identity(self) -> str:
        """The table and what is read of it."""
        return f"{self.table.identity} {self.columns} {self.include_paths}"

    def list_units(self) -> SourceUnits:
        """Ask the library for the files, and list their row groups. Raises `ConfigError`."""
        found = self.table.find_files()
        if not found.paths:
            raise ConfigError(f"The {self.table.identity} is empty.", do="Write rows to it first.")
        # Sorted: the libraries return them in the order of their metadata.
        files = FileSet.of_paths(sorted(found.paths), PathOptions())
        return self._reader(files, found.schema).list_units()

    def schema(self, units: SourceUnits) -> pa.Schema:
        """Return the columns of the table."""
        assert units.schema is not None
        return units.schema

    def read_unit(
        self, units: SourceUnits, unit: int, columns: Sequence[str] | None = None
    ) -> pa.Table:
        """Read a row group; see `Source.read_unit`."""
        return self.fetch_unit(units, unit, columns)()

    def is_fetched(self, units: SourceUnits, unit: int) -> bool:
        """Whether the unit is in a bucket."""
        return units.is_remote(unit)

    def fetch_unit(
        self, units: SourceUnits, unit: int, columns: Sequence[str] | None = None
    ) -> Decode:
        """Fetch the bytes of a row group; see `UnitFetcher`."""
        # The stores of listed files are opened by their URLs.
        return self._reader(FileSet((), PathOptions()), None).fetch_unit(units, unit, columns)

    def _reader(self, files: FileSet, schema: pa.Schema | None) -> FormatSource:
        return FormatSource(
            files,
            ParquetFormat(),
            columns=self.columns,
            stated_schema=schema,
            partitioning=Partitioning("hive"),
            include_paths=self.include_paths,
        )


@dataclass(frozen=True)
class DeltaTable:
    """A table of Delta Lake, read by the package `deltalake`."""

    path: str
    version: int | str | None = None
    """None: the latest when the table is listed."""
    storage_options: Mapping[str, str] = field(default_factory=dict)

    @property
    def identity(self) -> str:
        """The address and the version."""
        return f"Delta table {self.path} at version {self.version}"

    def find_files(self) -> TableVersion:
        """Return the files of the version."""
        deltalake = plugins.require_module("deltalake", extra="delta")
        try:
            table = deltalake.DeltaTable(
                self.path, version=self.version, storage_options=dict(self.storage_options)
            )
        except deltalake.exceptions.DeltaError as error:
            raise ConfigError(
                f"{self.path} cannot be opened as a Delta table: {error}",
                do="Correct the path or the version.",
            ) from error
        features = {*(table.protocol().reader_features or ())}
        if unread := sorted(features & {"deletionVectors", "columnMapping"}):
            raise ConfigError(
                f"The {self.identity} uses {', '.join(unread)}: its rows are not those of its "
                "files.",
                do="Write a copy without these features, for example with its own engine.",
            )
        return TableVersion(table.file_uris(), pa.schema(table.schema().to_arrow()))


@dataclass(frozen=True)
class IcebergTable:
    """A table of Iceberg, read by the package `pyiceberg`."""

    identifier: str
    snapshot_id: int | None = None
    catalog_options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def identity(self) -> str:
        """The identifier and the snapshot."""
        return f"Iceberg table {self.identifier} at snapshot {self.snapshot_id}"

    def find_files(self) -> TableVersion:
        """Return the files of the snapshot."""
        catalogs = plugins.require_module("pyiceberg.catalog", extra="iceberg")
        arrow = plugins.require_module("pyiceberg.io.pyarrow", extra="iceberg")
        errors = plugins.require_module("pyiceberg.exceptions", extra="iceberg")
        options = dict(self.catalog_options)
        try:
            catalog = catalogs.load_catalog(options.pop("name", None), **options)
            table = catalog.load_table(self.identifier)
        except (errors.NoSuchTableError, errors.NoSuchNamespaceError, ValueError) as error:
            raise ConfigError(
                f"The {self.identity} cannot be opened: {error}",
                do="Correct the identifier, or catalog_kwargs.",
            ) from error
        self._check_columns(table)
        scan = table.scan(snapshot_id=self.snapshot_id)
        tasks = list(scan.plan_files())
        if any(task.delete_files for task in tasks):
            raise ConfigError(
                f"The {self.identity} has deleted rows that are still in its files.",
                do="Compact the table with its own engine, which rewrites these files.",
            )
        schema = arrow.schema_to_pyarrow(scan.projection(), include_field_ids=False)
        return TableVersion([task.file.file_path for task in tasks], schema)

    def _check_columns(self, table: Any) -> None:
        """Raise `ConfigError` if a column was renamed: files have the names of their time."""
        names: dict[int, set[str]] = {}
        for schema in table.schemas().values():
            for column in schema.columns:
                names.setdefault(column.field_id, set()).add(column.name)
        if renamed := next((sorted(found) for found in names.values() if len(found) > 1), None):
            raise ConfigError(
                f"A column of the {self.identity} was renamed: {', '.join(renamed)}.",
                do="Write the table again with its own engine: files are read by their names.",
            )
