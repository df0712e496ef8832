"""Lance tables, read by the package `lance`. A unit is a range of rows of a fragment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import pyarrow as pa

from spotfit.core.errors import ConfigError
from spotfit.data.schema import fixed_width_bytes
from spotfit.data.source import SourceUnits, int_array
from spotfit.data.sources.file_source import select_fields
from spotfit.host import plugins

UNIT_BYTES = 8 * 2**20
_VERSION = b"spotfit.lance_version"


@dataclass(frozen=True)
class LanceSource:
    """The rows of a table, as of the version at which it is listed.

    A version is immutable, so that files need no check.
    """

    uri: str
    version: int | str | None = None
    """None: the latest when the table is listed."""
    columns: tuple[str, ...] | None = None
    storage_options: Mapping[str, str] = field(default_factory=dict)

    def __hash__(self) -> int:
        return hash((self.uri, self.version, self.columns))

    @property
    def identity(self) -> str:
        """The address, the version and the columns."""
        return f"Lance table {self.uri} at version {self.version} {self.columns}"

    def list_units(self) -> SourceUnits:
        """Return ranges of rows of the fragments. Raises `ConfigError` and `MissingExtraError`."""
        table = _open(self, self.version)
        units = [unit for fragment in table.get_fragments() for unit in _ranges(fragment)]
        schema = table.schema if self.columns is None else select_fields(table.schema, self.columns)
        row_bytes = sum(fixed_width_bytes(field.type) for field in table.schema)
        return SourceUnits(
            files=(),
            unit_files=int_array([fragment for fragment, *_ in units]),
            unit_positions=int_array([first for _, first, *_ in units]),
            unit_rows=int_array([rows for *_, rows, _ in units]),
            unit_bytes=int_array([max(size, int(rows * row_bytes)) for *_, rows, size in units]),
            # The version is found here, and is needed to read.
            schema=schema.with_metadata({_VERSION: str(table.version).encode()}),
        )

    def schema(self, units: SourceUnits) -> pa.Schema:
        """Return the columns."""
        assert units.schema is not None
        return units.schema.remove_metadata()

    def read_unit(
        self, units: SourceUnits, unit: int, columns: Sequence[str] | None = None
    ) -> pa.Table:
        """Read a range of rows; see `Source.read_unit`."""
        assert units.schema is not None
        schema = self.schema(units)
        if columns is not None:
            schema = select_fields(schema, columns)
        table = _open(self, int(units.schema.metadata[_VERSION]))
        fragment = table.get_fragment(int(units.unit_files[unit]))
        found = fragment.to_table(
            columns=schema.names,
            offset=int(units.unit_positions[unit]),
            limit=int(units.unit_rows[unit]),
        )
        return found.select(schema.names).cast(schema)


@lru_cache(maxsize=16)
def _open(source: LanceSource, version: int | str | None) -> Any:
    lance = plugins.require_module("lance", extra="lance")
    try:
        options = dict(source.storage_options) or None
        return lance.dataset(source.uri, version=version, storage_options=options)
    except (ValueError, OSError) as error:
        raise ConfigError(
            f"{source.uri} cannot be opened as a Lance table: {error}",
            do="Correct the path or the version.",
        ) from error


def _ranges(fragment: Any) -> list[tuple[int, int, int, int]]:
    """Return fragment, first row, rows and stored size of the units of a fragment."""
    count = fragment.count_rows()
    total_bytes = sum(file.file_size_bytes or 0 for file in fragment.data_files())
    row_bytes = total_bytes / max(count, 1)
    step = max(1, int(UNIT_BYTES / max(row_bytes, 1)))
    return [
        (fragment.fragment_id, first, rows, int(rows * row_bytes))
        for first in range(0, count, step)
        for rows in (min(step, count - first),)
    ]
