"""Operations that need all rows at once: sorting, grouping, joining. PyArrow computes them.

They hold the dataset in memory. A larger one is written to the bucket, and processed there by
DuckDB, Dask or Spark.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from spotfit.core.errors import ConfigError
from spotfit.data.aggregate_base import columns_of
from spotfit.data.formats.batch_formats import concat_blocks
from spotfit.data.operations.group_aggregates import aggregate_groups, sort_groups
from spotfit.data.plans.row_plan import RowPlan
from spotfit.data.plans.transforms import BlockFunction
from spotfit.data.schema import check_columns
from spotfit.host.memory import read_memory_usage

_MEMORY_FACTOR = 4
"""A sorted or joined table exists twice, and decoded rows take about twice their encoded size."""


def read_table(plan: RowPlan, call: str, columns: Sequence[str] | None = None) -> pa.Table:
    """Return all rows as one table. Raises `ConfigError` if they would not fit into memory."""
    size = int(plan.manifest.unit_bytes.sum())
    usage = read_memory_usage()
    if usage is not None and size * _MEMORY_FACTOR > usage.limit_bytes - usage.used_bytes:
        raise ConfigError(
            f"{call} holds all rows in memory: {size / 2**30:.1f} GiB encoded, about "
            f"{_MEMORY_FACTOR} times as much in use.",
            do="Write the dataset with write_parquet(url), let DuckDB, Dask or Spark process the "
            "files, and read their result with read_parquet().",
            size_bytes=size,
        )
    return concat_blocks([*plan.blocks(columns)] or [plan.schema.empty_table()])


def sorted_table(
    plan: RowPlan,
    key: str | Sequence[str],
    descending: bool | Sequence[bool],  # noqa: FBT001
) -> pa.Table:
    """Return the rows sorted by columns; equal ones keep their order, null values are last."""
    keys = [key] if isinstance(key, str) else list(key)
    check_columns("sort()", keys, plan.schema.names)
    directions = [descending] * len(keys) if isinstance(descending, bool) else list(descending)
    if len(directions) != len(keys):
        raise ConfigError(
            f"sort(): {len(directions)} values of descending for {len(keys)} columns.",
            do="Pass one boolean for all columns, or one for each.",
        )
    table = read_table(plan, "sort()")
    order = [
        (name, "descending" if is_descending else "ascending")
        for name, is_descending in zip(keys, directions, strict=True)
    ]
    return table.take(pc.sort_indices(table.select(keys), sort_keys=order))


JOIN_TYPES: Mapping[str, str] = {
    "inner": "inner",
    "left_outer": "left outer",
    "right_outer": "right outer",
    "full_outer": "full outer",
    "left_semi": "left semi",
    "right_semi": "right semi",
    "left_anti": "left anti",
    "right_anti": "right anti",
}
"""Arrow's names of Ray's types of joins."""


def joined_table(
    left: RowPlan,
    right: RowPlan,
    join_type: str,
    on: Sequence[str],
    right_on: Sequence[str] | None,
    suffixes: tuple[str | None, str | None],
) -> pa.Table:
    """Return the join of two plans, in order of the left rows, then of the right ones."""
    if join_type not in JOIN_TYPES:
        raise ConfigError(
            f"join(join_type={join_type!r}) is not supported.",
            do=f"Use one of {', '.join(JOIN_TYPES)}.",
        )
    keys = [on] if isinstance(on, str) else list(on)
    right_keys = keys if not right_on else [right_on] if isinstance(right_on, str) else [*right_on]
    check_columns("join(on=...)", keys, left.schema.names)
    check_columns("join(right_on=...)", right_keys, right.schema.names)
    left_table, right_table = read_table(left, "join()"), read_table(right, "join()")
    # Arrow joins the keys and the numbers of the rows only: it supports few types of columns.
    pairs = _numbered(left_table, keys, "left").join(
        _numbered(right_table, right_keys, "right"),
        keys=[f"key{n}" for n in range(len(keys))],
        join_type=JOIN_TYPES[join_type],
        use_threads=False,
    )
    sides = [side for side in ("left", "right") if side in pairs.column_names]
    pairs = pairs.sort_by([(side, "ascending") for side in sides])
    return _joined_columns(pairs, (left_table, keys), (right_table, right_keys), suffixes)


def _numbered(table: pa.Table, keys: Sequence[str], side: str) -> pa.Table:
    columns = {f"key{n}": table.column(key) for n, key in enumerate(keys)}
    return pa.table({**columns, side: pa.array(np.arange(table.num_rows))})


def _joined_columns(
    pairs: pa.Table,
    left: tuple[pa.Table, Sequence[str]],
    right: tuple[pa.Table, Sequence[str]],
    suffixes: tuple[str | None, str | None],
) -> pa.Table:
    (left_table, keys), (right_table, right_keys) = left, right
    result: dict[str, Any] = {}
    if "left" in pairs.column_names:
        for name in left_table.column_names:
            is_repeated = "right" in pairs.column_names and name in right_table.column_names
            is_renamed = is_repeated and name not in keys
            values = left_table.column(name).take(pairs.column("left"))
            if name in keys:  # also of rows that only the right side has
                values = pairs.column(f"key{keys.index(name)}")
            _add_column(result, f"{name}{suffixes[0] or ''}" if is_renamed else name, values)
    if "right" in pairs.column_names:
        for name in right_table.column_names:
            if name in right_keys and "left" in pairs.column_names:
                continue
            is_renamed = "left" in pairs.column_names and name in left_table.column_names
            values = right_table.column(name).take(pairs.column("right"))
            _add_column(result, f"{name}{suffixes[1] or ''}" if is_renamed else name, values)
    return pa.table(result)


def _add_column(result: dict[str, Any], name: str, values: pa.ChunkedArray) -> None:
    if name in result:
        raise ConfigError(
            f"join(): both datasets have a column {name!r}.",
            do="Pass left_suffix= and right_suffix=, or rename one of them.",
        )
    result[name] = values


# --- Groups ---------------------------------------------------------------------------------------


def aggregated_table(plan: RowPlan, keys: Sequence[str], aggregates: Sequence[Any]) -> pa.Table:
    """Return a row for each group with the keys and the aggregates, sorted by the keys.

    Rows are not held in memory, but the partial results of all groups are.
    """
    check_columns("groupby()", keys, plan.schema.names)
    needed = columns_of(aggregates)
    if needed is not None:
        check_columns("aggregate()", needed, plan.schema.names)
    is_count = all(aggregate.get_target_column() is None for aggregate in aggregates)
    columns = [*dict.fromkeys([*keys, *(needed or ())])] if needed or is_count else None
    result = aggregate_groups(plan.blocks(columns or None), keys, aggregates)
    if result is not None:
        return result
    names = [*keys, *(aggregate.name for aggregate in aggregates)]
    empty = plan.schema.empty_table()
    return pa.table({name: empty.column(name) if name in keys else pa.nulls(0) for name in names})


def mapped_groups(plan: RowPlan, keys: Sequence[str], apply: BlockFunction) -> pa.Table:
    """Return the blocks that `apply` returns for each group, sorted by the keys."""
    check_columns("groupby()", keys, plan.schema.names)
    groups = sort_groups(read_table(plan, "map_groups()"), keys)
    results = [apply(group) for group in groups.tables()] if groups.table.num_rows else []
    return concat_blocks(results) if results else plan.schema.empty_table()
