"""Sources for tests: rows in units of stated sizes, and a record of what was read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa

from spotfit.data.plans.row_plan import RowPlan
from spotfit.data.source import SourceUnits, int_array


@dataclass(eq=False)
class UnitSource:
    """The rows of a table in units of the given sizes. `reads` records unit and columns."""

    table: pa.Table
    unit_rows: tuple[int, ...]
    reads: list[tuple[int, tuple[str, ...] | None]] = field(default_factory=list)

    identity = "units"

    def list_units(self) -> SourceUnits:
        count = len(self.unit_rows)
        return SourceUnits(
            files=(),
            unit_files=int_array(np.zeros(count, dtype=np.int64)),
            unit_positions=int_array(np.cumsum([0, *self.unit_rows])[:-1]),
            unit_rows=int_array(self.unit_rows),
            unit_bytes=int_array(np.array(self.unit_rows) * 100),
        )

    def schema(self, _units: SourceUnits) -> pa.Schema:
        return self.table.schema

    def read_unit(
        self, units: SourceUnits, unit: int, columns: Sequence[str] | None = None
    ) -> pa.Table:
        self.reads.append((unit, None if columns is None else tuple(columns)))
        rows = self.table.slice(int(units.unit_positions[unit]), int(units.unit_rows[unit]))
        return rows if columns is None else rows.select(list(columns))


def number_source(*unit_rows: int) -> UnitSource:
    """Rows with their number in `id`, its square in `square`, and `id` mod 3 in `group`."""
    numbers = np.arange(sum(unit_rows))
    table = pa.table({"id": numbers, "square": numbers**2, "group": numbers % 3})
    return UnitSource(table, unit_rows)


def number_plan(*unit_rows: int) -> RowPlan:
    return RowPlan.of_source(number_source(*unit_rows))


def column_of(plan: RowPlan, name: str = "id") -> list[int]:
    """The values of a column of all rows, in order."""
    return [value for block in plan.blocks([name]) for value in block.column(name).to_pylist()]
