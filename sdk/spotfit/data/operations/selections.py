"""Sources of rows that are left out or multiplied: `filter`, samples, `flat_map`.

A unit of such a source is the result for one unit of the dataset. A pass over the dataset counts
the rows of each unit; the rows themselves are selected again when the unit is read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from spotfit.core.cached import cached_property
from spotfit.core.errors import ConfigError
from spotfit.data.operations.row_filters import (
    HashFilter,
    Mask,
    MaskFunction,
    RowFilter,
    count_end,
    kth_smallest,
    row_hashes,
    rows_by_class,
)
from spotfit.data.plans.row_functions import block_rows, check_row, rows_to_block
from spotfit.data.plans.row_plan import RowPlan, ShuffleSettings
from spotfit.data.plans.unit_manifest import UnitManifest
from spotfit.data.progress import with_progress
from spotfit.data.source import IntArray, SourceUnits, int_array
from spotfit.data.user_functions import UserFunction


@dataclass(frozen=True, eq=False)
class CountedSource:
    """A source of a unit for each unit of a plan, with a number of rows that a pass finds out."""

    plan: RowPlan

    name = "a counted source"

    @property
    def plans(self) -> tuple[RowPlan]:
        """The plan from which rows are selected."""
        return (self.plan,)

    def list_units(self) -> SourceUnits:
        """Return the units; reads what is necessary to count their rows."""
        manifest = self.plan.manifest
        units = np.flatnonzero(manifest.unit_rows).tolist()
        rows = np.zeros(manifest.unit_count, dtype=np.int64)
        for unit, block in zip(
            with_progress(units, self.name), self.counting_blocks(), strict=True
        ):
            rows[unit] = self.count_rows(unit, block)
        sizes = manifest.unit_bytes * rows // np.maximum(manifest.unit_rows, 1)
        zeros, counts = int_array(rows * 0), int_array(rows)
        schema = self.find_schema(counts)
        return SourceUnits((), zeros, zeros, counts, int_array(sizes), schema)

    def schema(self, units: SourceUnits) -> pa.Schema:
        """Return the columns, which the counting pass has found."""
        assert units.schema is not None
        return units.schema

    def find_schema(self, _counts: IntArray) -> pa.Schema:
        """Return the columns; `_counts` are the numbers of rows of the units."""
        return self.plan.schema

    def read_unit(
        self, units: SourceUnits, unit: int, columns: Sequence[str] | None = None
    ) -> pa.Table:
        """Return the rows of a unit. Raises `ConfigError` if their number has changed."""
        block = self.select_rows(unit, columns)
        if block.num_rows != units.unit_rows[unit]:
            raise ConfigError(
                f"{self.name} returned {block.num_rows} rows for a part of the dataset for which "
                f"it returned {units.unit_rows[unit]} when they were counted.",
                do="Let the function depend on its row only, not on random numbers, the time or "
                "the process.",
            )
        return block

    def counting_blocks(self) -> Iterator[pa.Table]:
        """Yield what is read to count the rows of each unit of the plan that has rows."""
        return self.plan.blocks()

    def count_rows(self, unit: int, block: pa.Table) -> int:
        """Return the number of rows for a unit of the plan, of which `block` was read."""
        raise TypeError("a counted source filters or multiplies rows")

    def select_rows(self, unit: int, columns: Sequence[str] | None) -> pa.Table:
        """Return the rows of a unit."""
        raise TypeError("a counted source filters or multiplies rows")


@dataclass(frozen=True, eq=False)
class FilteredSource(CountedSource):
    """The rows of a plan for which a filter is true."""

    row_filter: RowFilter

    @property
    def name(self) -> str:  # type: ignore[override]  # a field of the base class
        """The call."""
        return self.row_filter.name

    @property
    def runs_user_code(self) -> bool:
        """Whether the filter, or a transform before it, calls a function of the user."""
        return self.row_filter.runs_user_code or self.plan.runs_user_code

    @property
    def captured(self) -> RowFilter:
        """The filter."""
        return self.row_filter

    @property
    def identity(self) -> str:
        """The rows and the filter."""
        return f"{self.plan.identity} {self.row_filter.identity}"

    def counting_blocks(self) -> Iterator[pa.Table]:
        """Yield the columns of the filter."""
        columns = self.row_filter.columns
        if columns is None or columns:
            return self.plan.blocks(columns)
        rows = self.plan.manifest.unit_rows
        # A column without values: a table without columns has no rows.
        return (pa.table({"": pa.nulls(count)}) for count in rows[rows > 0].tolist())

    def count_rows(self, unit: int, block: pa.Table) -> int:
        """Return the number of rows that stay."""
        return int(self._mask(unit, block).sum())

    def select_rows(self, unit: int, columns: Sequence[str] | None) -> pa.Table:
        """Return the rows that stay."""
        own = self.row_filter.columns
        needed = None if columns is None or own is None else [*dict.fromkeys([*columns, *own])]
        block = self.plan.read_unit(unit, needed)
        kept = block.filter(pa.array(self._mask(unit, block)))
        return kept if columns is None else kept.select(list(columns))

    def _mask(self, unit: int, block: pa.Table) -> Mask:
        return self._bound(block, int(self.plan.row_offsets[unit]))

    @cached_property
    def _bound(self) -> MaskFunction:
        return self.row_filter.bind()

    def __getstate__(self) -> dict[str, Any]:
        return {"plan": self.plan, "row_filter": self.row_filter}


@dataclass(frozen=True, eq=False)
class FlatMapSource(CountedSource):
    """The rows that a function of the user returns for each row of a plan, any number of them."""

    function: UserFunction

    runs_user_code = True

    @property
    def name(self) -> str:  # type: ignore[override]  # a field of the base class
        """The call."""
        return self.function.name

    @property
    def captured(self) -> UserFunction:
        """The function."""
        return self.function

    @property
    def identity(self) -> str:
        """The rows and the function."""
        return f"{self.plan.identity} {self.function.identity}"

    def find_schema(self, counts: IntArray) -> pa.Schema:
        """Return the columns of the first unit that has rows; none if there is none."""
        filled = np.flatnonzero(counts)
        return self.select_rows(int(filled[0]), None).schema if len(filled) else pa.schema([])

    def select_rows(self, unit: int, columns: Sequence[str] | None) -> pa.Table:
        """Return the rows that the function returns for those of the unit."""
        block = self._expand(self.plan.read_unit(unit))
        return block if columns is None else block.select(list(columns))

    def count_rows(self, _unit: int, block: pa.Table) -> int:
        """Return how many rows the function returns for those of the block."""
        rows: int = self._expand(block).num_rows
        return rows

    def _expand(self, block: pa.Table) -> pa.Table:
        return rows_to_block(
            [
                check_row(self.name, result)
                for row in block_rows(block)
                for result in self._results(row)
            ]
        )

    def _results(self, row: dict[str, Any]) -> Sequence[Any]:
        results = self._bound(row)
        return (results,) if isinstance(results, Mapping) else results

    @cached_property
    def _bound(self) -> Callable[..., Any]:
        return self.function.bind()

    def __getstate__(self) -> dict[str, Any]:
        return {"plan": self.plan, "function": self.function}


def stratified_ends(plan: RowPlan, column: str, share: float) -> dict[Any, int]:
    """Return the ends for `StratifiedFilter`, for which it selects int(share · rows) of each class.

    Reads the column. Raises `ConfigError` if there is none of this name.
    """
    hashes: dict[Any, list[Any]] = {}
    units = np.flatnonzero(plan.manifest.unit_rows).tolist()
    for unit, block in zip(units, plan.blocks([column]), strict=True):
        unit_hashes = row_hashes(0, int(plan.row_offsets[unit]), block.num_rows)
        for value, rows in rows_by_class(block.column(column)):
            hashes.setdefault(value, []).append(unit_hashes[rows])
    classes = {value: np.concatenate(parts) for value, parts in hashes.items()}
    return {
        value: kth_smallest(numbers, int(len(numbers) * share))
        for value, numbers in classes.items()
    }


def select_places(plan: RowPlan, shuffle: ShuffleSettings, begin: int, end: int) -> UnitManifest:
    """Return the rows at the places [begin, end) of a shuffled dataset, before its transforms.

    Unshuffled: a slice. Shuffled units: a slice of the permuted units. Shuffled rows: a uniform
    sample, disjoint from that of other places, in unshuffled order.
    """
    manifest, seed = plan.manifest, shuffle.seed or 0
    begin, end = min(begin, manifest.row_count), min(end, manifest.row_count)
    if shuffle.kind == "none":
        return manifest.slice(begin, end - begin)
    if shuffle.kind == "units":
        order = np.argsort(row_hashes(seed, 0, manifest.unit_count))
        return manifest.select_units(order).slice(begin, end - begin)
    ends = [count_end(seed, manifest.row_count, place) for place in (begin, end)]
    ends[0] = ends[0] if begin else 0
    hash_filter = HashFilter(seed, *ends)
    return UnitManifest.of_source(FilteredSource(RowPlan(plan.rows), hash_filter))
