"""Rows of files: what the formats have in common.

A format divides a file into units and decodes one of them. This module lists the files, unifies
their schemas, and adds the columns that are in the paths.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pyarrow as pa

from spotfit.core.errors import ConfigError
from spotfit.core.input_checks import did_you_mean
from spotfit.data.files import FileSet, path_of
from spotfit.data.formats.tensor_storage import plain_field
from spotfit.data.source import DataFile, Decode, SourceUnits, int_array
from spotfit.data.sources.file_format import FileContent, FileFormat, FileUnit, OpenFile
from spotfit.data.sources.file_listing import inspect_files
from spotfit.data.sources.partitioning import Partitioning
from spotfit.host import log

PATH_COLUMN = "path"
LARGE_UNIT_BYTES = 64 * 2**20
"""Units above this size are reported: several of them are in memory at once."""


@dataclass(frozen=True, eq=False)
class FormatSource:
    """The rows of files of one format."""

    files: FileSet
    format: FileFormat
    columns: tuple[str, ...] | None = None
    """None: all."""
    stated_schema: pa.Schema | None = None
    """None: that of the files."""
    partitioning: Partitioning | None = None
    include_paths: bool = False
    fits_path: str = ""
    """Where fits of preprocessors to these rows are stored; '': nowhere."""

    @property
    def identity(self) -> str:
        """The format and what columns are read."""
        partitions = self.partitioning.identity if self.partitioning else ""
        columns = f"{self.columns} {self.stated_schema}"
        return f"files {self.format.identity} {columns} {partitions} {self.include_paths}"

    def list_units(self) -> SourceUnits:
        """List the files and inspect each of them. Raises `ConfigError`, see `FileSet`."""
        files = self.files.list_files()
        inspected = inspect_files(self.files, self.format, files)
        contents = [
            self._with_path_columns(file, content)
            for file, content in zip(files, inspected, strict=True)
        ]
        units = [unit for content in contents for unit in content.units]
        _warn_if_large(files[0], units)
        return SourceUnits(
            files=files,
            unit_files=int_array([n for n, found in enumerate(contents) for _ in found.units]),
            unit_positions=int_array([unit.position for unit in units]),
            unit_rows=int_array([unit.rows for unit in units]),
            unit_bytes=int_array([unit.size_bytes for unit in units]),
            schema=self._select_columns(self.stated_schema or _unify(files, contents)),
        )

    def schema(self, units: SourceUnits) -> pa.Schema:
        """Return the columns of all files, with types to which those of each can be cast."""
        assert units.schema is not None
        return units.schema

    def read_unit(
        self, units: SourceUnits, unit: int, columns: Sequence[str] | None = None
    ) -> pa.Table:
        """Read and decode one unit; see `Source.read_unit`."""
        return self.fetch_unit(units, unit, columns)()

    def is_fetched(self, units: SourceUnits, unit: int) -> bool:
        """Whether the unit is in a bucket."""
        return units.is_remote(unit)

    def fetch_unit(
        self, units: SourceUnits, unit: int, columns: Sequence[str] | None = None
    ) -> Decode:
        """Fetch the bytes of one unit; see `UnitFetcher`."""
        schema = self.schema(units)
        if columns is not None:
            schema = select_fields(schema, columns)
        file = units.files[int(units.unit_files[unit])]
        part = FileUnit(
            position=int(units.unit_positions[unit]),
            rows=int(units.unit_rows[unit]),
            size_bytes=int(units.unit_bytes[unit]),
        )
        in_path = self._path_columns(path_of(file))
        in_file = pa.schema([field for field in schema if field.name not in in_path])
        decode = self.format.fetch(OpenFile(self.files, file), part, in_file)
        return lambda: conform(decode(), schema, rows=part.rows, constants=in_path)

    def _with_path_columns(self, file: DataFile, content: FileContent) -> FileContent:
        fields = [plain_field(field) for field in content.schema]
        known = {field.name for field in fields}
        fields += [
            pa.field(name, value.type)
            for name, value in self._path_columns(path_of(file)).items()
            if name not in known
        ]
        return FileContent(pa.schema(fields), content.units)

    def _path_columns(self, path: str) -> dict[str, pa.Scalar]:
        return path_columns(path, self.partitioning, include_paths=self.include_paths)

    def _select_columns(self, schema: pa.Schema) -> pa.Schema:
        if self.columns is None:
            return schema
        # Ray adds the path whatever columns are selected.
        added = [PATH_COLUMN] if self.include_paths and PATH_COLUMN not in self.columns else []
        return select_fields(schema, [*self.columns, *added])


def path_columns(
    path: str, partitioning: Partitioning | None, *, include_paths: bool
) -> dict[str, pa.Scalar]:
    """Return the columns that are in the path of a file, and the path itself."""
    columns = partitioning.to_columns(path) if partitioning else {}
    return {**columns, PATH_COLUMN: pa.scalar(path)} if include_paths else columns


def select_fields(schema: pa.Schema, names: Sequence[str]) -> pa.Schema:
    """Return these columns in this order. Raises `ConfigError` for an unknown one."""
    known = dict(zip(schema.names, schema, strict=True))
    for name in names:
        if name not in known:
            raise ConfigError(
                f"The dataset has no column {name!r}.", do=did_you_mean(name, known) or "Check it."
            )
    return pa.schema([known[name] for name in names])


def conform(
    table: pa.Table, schema: pa.Schema, *, rows: int, constants: Mapping[str, pa.Scalar]
) -> pa.Table:
    """Return the columns of `schema`: those of the table cast, else constants, else null values."""
    known = set(table.column_names)

    def column(field: pa.Field) -> pa.ChunkedArray | pa.Array:
        if field.name in known:
            found = table.column(field.name)
            return found if found.type == field.type else found.cast(field.type)
        if field.name in constants:
            return pa.repeat(constants[field.name], rows).cast(field.type)
        return pa.nulls(rows, field.type)

    if not len(schema):
        # A table without columns that has rows: the caller counts them only.
        return pa.table({"": pa.nulls(rows)}).select([])
    return pa.Table.from_arrays([column(field) for field in schema], schema=schema)


def _unify(files: Sequence[DataFile], contents: Sequence[FileContent]) -> pa.Schema:
    unified = contents[0].schema
    for file, content in zip(files, contents, strict=True):
        if content.schema.equals(unified):
            continue
        try:
            unified = pa.unify_schemas([unified, content.schema], promote_options="permissive")
        except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
            raise ConfigError(
                f"The columns of {path_of(file)} do not fit those of {path_of(files[0])}: {error}.",
                do="Read the files separately and cast() or drop the columns before union(), or "
                "state the types of the columns in the call of the reader.",
            ) from error
    # Nullable: a column may be missing in some of the files.
    return pa.schema([field.with_nullable(nullable=True) for field in unified])


def _warn_if_large(file: DataFile, units: Sequence[FileUnit]) -> None:
    largest = max((unit.size_bytes for unit in units), default=0)
    if largest > LARGE_UNIT_BYTES:
        log.warning(
            "data.units_large",
            text=f"the dataset of {path_of(file)} has units of up to {largest / 2**20:.0f} MiB, "
            "which take much memory and delay the first batch; write it with smaller row groups, "
            "for example by materialize() or write_parquet()",
            largest_bytes=largest,
        )


def options_text(options: Mapping[str, object]) -> str:
    """Return options of a format as text for `identity`, the same in every process."""
    return json.dumps({name: repr(value) for name, value in sorted(options.items())})
