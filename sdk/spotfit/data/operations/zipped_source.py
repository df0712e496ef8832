"""The columns of several datasets side by side, row by row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pyarrow as pa

from spotfit.core.errors import ConfigError
from spotfit.data.formats.batch_formats import concat_blocks
from spotfit.data.plans.row_plan import RowPlan
from spotfit.data.source import SourceUnits, int_array


@dataclass(frozen=True, eq=False)
class ZippedSource:
    """Row i of every plan as one row. Its units are those of the first plan."""

    plans: tuple[RowPlan, ...]

    @property
    def runs_user_code(self) -> bool:
        """Whether a transform calls a function of the user."""
        return any(plan.runs_user_code for plan in self.plans)

    @property
    def identity(self) -> str:
        """The plans."""
        return f"zip {[plan.identity for plan in self.plans]}"

    def list_units(self) -> SourceUnits:
        """Return the units. Raises `ConfigError` if the plans have different numbers of rows."""
        counts = [plan.manifest.row_count for plan in self.plans]
        if len(set(counts)) > 1:
            raise ConfigError(
                f"zip() needs datasets of one size, not of {counts} rows.",
                do="Use limit() to cut the longer ones.",
            )
        first = self.plans[0].manifest
        zeros = first.unit_rows * 0
        share = sum(int(plan.manifest.unit_bytes.sum()) for plan in self.plans)
        sizes = first.unit_rows * share // max(first.row_count, 1)
        schema = _side_by_side([plan.schema.empty_table() for plan in self.plans]).schema
        return SourceUnits((), zeros, zeros, first.unit_rows, int_array(sizes), schema)

    def schema(self, units: SourceUnits) -> pa.Schema:
        """Return the columns of all plans."""
        assert units.schema is not None
        return units.schema

    def read_unit(
        self, units: SourceUnits, unit: int, columns: Sequence[str] | None = None
    ) -> pa.Table:
        """Return the rows of a unit; all columns are read."""
        count = int(units.unit_rows[unit])
        first = int(self.plans[0].row_offsets[unit])
        parts = [self.plans[0].read_unit(unit)]
        for plan in self.plans[1:]:
            rows = plan.map_manifest(lambda manifest: manifest.slice(first, count))
            parts.append(concat_blocks([*rows.blocks()] or [plan.schema.empty_table()]))
        block = _side_by_side(parts)
        return block if columns is None else block.select(list(columns))


def _side_by_side(blocks: Sequence[pa.Table]) -> pa.Table:
    """Return the columns of all blocks; a name that is in use gets "_1", "_2", … as in Ray."""
    result = blocks[0]
    for block in blocks[1:]:
        for name in block.column_names:
            unused, number = name, 1
            while unused in result.column_names:
                unused, number = f"{name}_{number}", number + 1
            result = result.append_column(unused, block.column(name))
    return result
