"""Descriptions of datasets: `stats()` and `summary()`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from spotfit.core.units import format_bytes
from spotfit.data.aggregate import (
    Count,
    Max,
    Mean,
    Min,
    MissingValuePercentage,
    Std,
    ZeroPercentage,
)
from spotfit.data.aggregate_base import AggregateFnV2, fold_all
from spotfit.data.formats.batch_formats import to_batch
from spotfit.data.plans.row_plan import RowPlan, ShuffleSettings


@dataclass(frozen=True)
class DatasetSummary:
    """Statistics of columns: a row for each statistic, a column for each column of the dataset."""

    statistics: dict[str, dict[str, Any]]
    """By column, then by name of the statistic."""

    def get_column_stats(self, column: str) -> dict[str, Any]:
        """Return the statistics of a column by their names."""
        return self.statistics[column]

    def to_pandas(self) -> Any:
        """Return a DataFrame with the column `statistic`, and one for each column."""
        names = sorted({name for values in self.statistics.values() for name in values})
        columns: dict[str, list[Any]] = {"statistic": names}
        for column, values in self.statistics.items():
            columns[column] = [values.get(name) for name in names]
        return to_batch(
            pa.table({name: _column(values) for name, values in columns.items()}), "pandas"
        )


def _column(values: list[Any]) -> pa.Array:
    kinds = {type(value) for value in values if value is not None}
    return pa.array(values if kinds <= {int, float} or len(kinds) < 2 else map(_text, values))


def _text(value: Any) -> str | None:
    return None if value is None else str(value)


def summarize(plan: RowPlan, columns: list[str]) -> DatasetSummary:
    """Return statistics of these columns, by their types, in one pass."""
    chosen = [(column, _statistics(column, plan.schema.field(column).type)) for column in columns]
    aggregates = [aggregate for _, group in chosen for aggregate in group]
    values = fold_all(aggregates, plan.blocks)
    return DatasetSummary(
        {
            column: {_label(aggregate): values[aggregate.name] for aggregate in group}
            for column, group in chosen
        }
    )


def _statistics(column: str, kind: pa.DataType) -> list[AggregateFnV2]:
    types = pa.types
    group: list[AggregateFnV2] = [Count(column, ignore_nulls=False), MissingValuePercentage(column)]
    if types.is_integer(kind) or types.is_floating(kind):
        group += [Mean(column), Min(column), Max(column), Std(column), ZeroPercentage(column)]
    elif types.is_temporal(kind):
        group += [Min(column), Max(column)]
    return group


def _label(aggregate: AggregateFnV2) -> str:
    return aggregate.name.partition("(")[0]


def describe(plan: RowPlan, shuffle: ShuffleSettings, name: str | None) -> str:
    """Return a text with what is read and how it is transformed. Lists the units."""
    manifest = plan.manifest
    size = format_bytes(int(manifest.unit_bytes.sum()))
    lines = [
        f"Dataset {name or ''}".rstrip(),
        f"  rows: {manifest.row_count} in {manifest.unit_count} units, {size}",
        f"  files: {len(plan.input_files)}",
        f"  shuffle: {shuffle.kind}" + ("" if shuffle.seed is None else f", seed {shuffle.seed}"),
    ]
    read = plan.columns_to_read()
    if read is not None:
        lines.append(f"  columns read: {', '.join(read)}")
    return "\n".join([*lines, *(f"  {step.name}" for step in plan.transforms)])
