"""Files of which each is one row, such as images. A unit is a group of files."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from spotfit.data.files import FileSet, path_of
from spotfit.data.source import DataFile, SourceUnits, int_array
from spotfit.data.sources.file_source import conform, path_columns, select_fields
from spotfit.data.sources.partitioning import Partitioning
from spotfit.store.transfer import concurrent_map

UNIT_FILES = 64
UNIT_BYTES = 16 * 2**20
"""A unit has as many files as fit into this size, at least one and at most `UNIT_FILES`."""

Probe = Callable[[bytes, str], Mapping[bytes, bytes]]


@dataclass(frozen=True, eq=False)
class WholeFileSource:
    """Rows with the bytes of files in one column."""

    files: FileSet
    column: str
    partitioning: Partitioning | None = None
    include_paths: bool = False
    probe: Probe | None = None
    """Returns metadata of the column for bytes and path of the first file."""

    @property
    def identity(self) -> str:
        """The columns."""
        partitions = self.partitioning.identity if self.partitioning else ""
        return f"whole files {self.column} {partitions} {self.include_paths}"

    def list_units(self) -> SourceUnits:
        """List the files; reads none of them but the first, if `probe` is set."""
        files = self.files.list_files()
        sizes = np.array([file.size_bytes for file in files], dtype=np.int64)
        begins = _group(sizes)
        return SourceUnits(
            files=files,
            unit_files=int_array(begins),
            unit_positions=int_array(begins),
            unit_rows=int_array(np.diff([*begins, len(files)])),
            unit_bytes=int_array(np.add.reduceat(sizes, begins)),
            schema=self._find_schema(files[0]),
        )

    def schema(self, units: SourceUnits) -> pa.Schema:
        """Return the column of bytes, and the columns of the paths."""
        assert units.schema is not None
        return units.schema

    def read_unit(
        self, units: SourceUnits, unit: int, columns: Sequence[str] | None = None
    ) -> pa.Table:
        """Read the files of a unit, of a bucket concurrently; see `Source.read_unit`."""
        schema = self.schema(units)
        if columns is not None:
            schema = select_fields(schema, columns)
        first, rows = int(units.unit_positions[unit]), int(units.unit_rows[unit])
        files = units.files[first : first + rows]
        in_paths = [self._path_columns(file) for file in files]
        values: dict[str, Any] = {name: [row[name] for row in in_paths] for name in in_paths[0]}
        if self.column in schema.names:
            values[self.column] = pa.array(self._read(files), pa.binary())
        return conform(pa.table(values), schema, rows=rows, constants={})

    def _read(self, files: Sequence[DataFile]) -> list[bytes]:
        if not files[0].is_remote:  # threads do not make a local disk faster
            return [self.files.read(file) for file in files]
        return concurrent_map(self.files.read, files)

    def _find_schema(self, first: DataFile) -> pa.Schema:
        metadata = self.probe(self.files.read(first), path_of(first)) if self.probe else None
        in_path = self._path_columns(first)
        return pa.schema(
            [
                pa.field(self.column, pa.binary(), metadata=metadata),
                *(pa.field(name, value.type) for name, value in in_path.items()),
            ]
        )

    def _path_columns(self, file: DataFile) -> dict[str, pa.Scalar]:
        columns = path_columns(path_of(file), self.partitioning, include_paths=self.include_paths)
        return {name: value for name, value in columns.items() if name != self.column}


def _group(sizes: np.ndarray[tuple[int], np.dtype[np.int64]]) -> list[int]:
    """Return the index of the first file of each unit."""
    begins: list[int] = []
    unit_bytes = 0
    for index, size in enumerate(sizes.tolist()):
        is_full = not begins or index - begins[-1] >= UNIT_FILES or unit_bytes + size > UNIT_BYTES
        if is_full:
            begins.append(index)
            unit_bytes = 0
        unit_bytes += size
    return begins
