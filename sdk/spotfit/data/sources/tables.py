"""Rows in memory, and rows that are computed from their number."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from spotfit.core.cached import cached_property
from spotfit.data.formats.column_arrays import column_from_values
from spotfit.data.source import Source, SourceUnits, int_array

_UNIT_BYTES = 4 * 2**20
"""Size of a unit of rows in memory; a window of an order consists of several units."""


def even_units(row_count: int, total_bytes: int) -> SourceUnits:
    """Return units of a few MiB, whose position is their first row."""
    unit_count = max(1, min(row_count, -(-total_bytes // _UNIT_BYTES)))
    bounds = np.linspace(0, row_count, unit_count + 1).astype(np.int64)
    rows = np.diff(bounds)
    return SourceUnits(
        files=(),
        unit_files=int_array(np.zeros(unit_count, dtype=np.int64)),
        unit_positions=int_array(bounds[:-1]),
        unit_rows=int_array(rows),
        unit_bytes=int_array(rows * total_bytes // max(row_count, 1)),
    )


table_storage: ContextVar[Callable[[TableSource], Source | None] | None] = ContextVar(
    "spotfit-table-storage", default=None
)
"""Called when a table is pickled; what it returns is pickled instead, if it is not None."""


def _same(source: Source) -> Source:
    return source


@dataclass(frozen=True, eq=False)
class TableSource:
    """The rows of an Arrow table in memory, which travels with the source's pickle."""

    table: pa.Table

    def __reduce__(self) -> tuple[Any, ...]:
        store_table = table_storage.get()
        stored = None if store_table is None else store_table(self)
        return (TableSource, (self.table,)) if stored is None else (_same, (stored,))

    @cached_property
    def identity(self) -> str:
        """Hash of the table's content."""
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, self.table.schema) as writer:
            writer.write_table(self.table.combine_chunks())
        return f"table {hashlib.sha256(sink.getvalue()).hexdigest()}"

    def list_units(self) -> SourceUnits:
        """Return units of a few MiB."""
        return even_units(self.table.num_rows, self.table.nbytes)

    def schema(self, _units: SourceUnits) -> pa.Schema:
        """Return the table's schema."""
        return self.table.schema

    def read_unit(
        self, units: SourceUnits, unit: int, columns: Sequence[str] | None = None
    ) -> pa.Table:
        """Return a slice of the table, without a copy."""
        table = self.table if columns is None else self.table.select(list(columns))
        return table.slice(int(units.unit_positions[unit]), int(units.unit_rows[unit]))


@dataclass(frozen=True)
class RangeSource:
    """The integers from 0 to `count` - 1, as those of `ray.data.range` and `range_tensor`."""

    count: int
    shape: tuple[int, ...] | None = None
    """None: numbers in the column `id`; else tensors of this shape, filled with one, in `data`."""

    @property
    def identity(self) -> str:
        """The number of rows, and the shape."""
        return f"range {self.count}" + (f" {self.shape}" if self.shape else "")

    def list_units(self) -> SourceUnits:
        """Return units of a few MiB."""
        return even_units(self.count, 8 * math.prod(self.shape or ()) * self.count)

    def schema(self, _units: SourceUnits) -> pa.Schema:
        """Return the schema of one column of integers or tensors."""
        return self._block(0, 1).schema

    def read_unit(
        self, units: SourceUnits, unit: int, columns: Sequence[str] | None = None
    ) -> pa.Table:
        """Return the integers of a unit."""
        table = self._block(int(units.unit_positions[unit]), int(units.unit_rows[unit]))
        return table if columns is None else table.select(list(columns))

    def _block(self, first: int, rows: int) -> pa.Table:
        numbers = np.arange(first, first + rows, dtype=np.int64)
        if self.shape is None:
            return pa.table({"id": numbers})
        ones = (1,) * len(self.shape)
        tensors = np.broadcast_to(numbers.reshape(-1, *ones), (rows, *self.shape))
        return pa.table({"data": column_from_values(tensors, name="data")})
