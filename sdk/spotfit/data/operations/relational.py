"""Operations that need all rows at once, in memory: sorting, grouping, joining, by PyArrow.

`external_parts` applies them to parts of rows that do not fit into memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from spotfit.core.errors import ConfigError
from spotfit.data.aggregate_base import columns_of
from spotfit.data.formats.batch_formats import concat_blocks, empty_table
from spotfit.data.operations.group_aggregates import aggregate_groups, sort_groups
from spotfit.data.order import hash_key, permutation
from spotfit.data.plans.row_plan import RowPlan
from spotfit.data.plans.transforms import BlockFunction
from spotfit.data.schema import check_columns

SORT_DIRECTIONS: Mapping[str, str] = {"ascending": "ASC", "descending": "DESC"}
"""SQL's names of Arrow's directions."""

_SHUFFLE_STREAM = 3


def read_table(plan: RowPlan, columns: Sequence[str] | None = None) -> pa.Table:
    """Return all rows as one table."""
    return concat_blocks([*plan.blocks(columns)] or [empty_table(plan.schema)])


def sort_order(
    schema: pa.Schema,
    key: str | Sequence[str],
    descending: bool | Sequence[bool],  # noqa: FBT001
) -> list[tuple[str, str]]:
    """Return the columns and directions as PyArrow takes them. Raises `ConfigError`."""
    keys = [key] if isinstance(key, str) else list(key)
    check_columns("sort()", keys, schema.names)
    directions = [descending] * len(keys) if isinstance(descending, bool) else list(descending)
    if len(directions) != len(keys):
        raise ConfigError(
            f"sort(): {len(directions)} values of descending for {len(keys)} columns.",
            do="Pass one boolean for all columns, or one for each.",
        )
    return [
        (name, "descending" if is_descending else "ascending")
        for name, is_descending in zip(keys, directions, strict=True)
    ]


def sort_rows(table: pa.Table, order: Sequence[tuple[str, str]]) -> pa.Table:
    """Return the rows sorted by columns; equal ones keep their order, null values are last."""
    keys = list(dict.fromkeys(name for name, _ in order))
    return table.take(pc.sort_indices(table.select(keys), sort_keys=list(order)))


def sorted_table(
    plan: RowPlan,
    key: str | Sequence[str],
    descending: bool | Sequence[bool],  # noqa: FBT001
) -> pa.Table:
    """Return the rows of a plan sorted by columns, as `sort_rows` does."""
    order = sort_order(plan.schema, key, descending)
    return sort_rows(read_table(plan), order)


def shuffle_key(seed: int | None) -> int:
    """Return the key of the hashes of row numbers whose order is an exact shuffle."""
    return hash_key(_SHUFFLE_STREAM, seed or 0)


def shuffled_table(plan: RowPlan, seed: int | None) -> pa.Table:
    """Return the rows in the order of the hashes of their numbers."""
    table = read_table(plan)
    return table.take(pa.array(permutation(shuffle_key(seed), table.num_rows)))


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


class JoinKeys(NamedTuple):
    """What determines the join of two tables."""

    kind: str
    """One of the values of `JOIN_TYPES`."""
    left: Sequence[str]
    right: Sequence[str]
    suffixes: tuple[str | None, str | None]

    @classmethod
    def of_arguments(
        cls,
        join_type: str,
        on: str | Sequence[str],
        right_on: str | Sequence[str] | None,
        suffixes: tuple[str | None, str | None],
    ) -> JoinKeys:
        """Return the keys for the arguments of `Dataset.join`. Raises `ConfigError`."""
        if join_type not in JOIN_TYPES:
            raise ConfigError(
                f"join(join_type={join_type!r}) is not supported.",
                do=f"Use one of {', '.join(JOIN_TYPES)}.",
            )
        keys = [on] if isinstance(on, str) else list(on)
        others = keys if not right_on else [right_on] if isinstance(right_on, str) else [*right_on]
        return cls(JOIN_TYPES[join_type], keys, others, suffixes)

    @property
    def sides(self) -> tuple[str, ...]:
        """The sides whose columns the result has."""
        only = self.kind.removesuffix(" semi").removesuffix(" anti")
        return ("left", "right") if only == self.kind else (only,)

    def check(self, left: pa.Schema, right: pa.Schema) -> None:
        """Raise `ConfigError` for unknown columns."""
        check_columns("join(on=...)", self.left, left.names)
        check_columns("join(right_on=...)", self.right, right.names)

    def key_values(
        self, tables: Mapping[str, pa.Table], indices: Mapping[str, pa.Array]
    ) -> dict[str, pa.ChunkedArray]:
        """Return the keys of joined rows, by the rows of both tables that they consist of."""
        values: dict[str, pa.ChunkedArray] = {}
        for number, names in enumerate(zip(self.left, self.right, strict=True)):
            found = [
                tables[side].column(name).take(indices[side])
                for side, name in zip(("left", "right"), names, strict=True)
                if side in indices
            ]
            values[f"key{number}"] = found[0] if len(found) == 1 else pc.coalesce(*found)
        return values


def join_rows(left: pa.Table, right: pa.Table, join: JoinKeys) -> pa.Table:
    """Return the join of two tables, in order of the left rows, then of the right ones."""
    # Arrow joins the keys and the numbers of the rows only: it supports few types of columns.
    pairs = _numbered(left, join.left, "left").join(
        _numbered(right, join.right, "right"),
        keys=[f"key{n}" for n in range(len(join.left))],
        join_type=join.kind,
        use_threads=False,
    )
    pairs = pairs.sort_by([(side, "ascending") for side in join.sides])
    return joined_columns(pairs, left, right, join)


def joined_table(left: RowPlan, right: RowPlan, join: JoinKeys) -> pa.Table:
    """Return the join of two plans."""
    join.check(left.schema, right.schema)
    return join_rows(read_table(left), read_table(right), join)


def joined_columns(
    pairs: pa.Table, left_table: pa.Table, right_table: pa.Table, join: JoinKeys
) -> pa.Table:
    """Return the columns of a join whose rows consist of the numbered rows of both tables.

    `pairs` has the columns `key0`, `key1`, …, and those of `join.sides`, which are row numbers.
    Raises `ConfigError` if a name would occur twice.
    """
    keys, right_keys, suffixes = join.left, join.right, join.suffixes
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


def _numbered(table: pa.Table, keys: Sequence[str], side: str) -> pa.Table:
    columns = {f"key{n}": table.column(key) for n, key in enumerate(keys)}
    return pa.table({**columns, side: pa.array(np.arange(table.num_rows))})


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
    columns = aggregated_columns(plan.schema, keys, aggregates)
    result = aggregate_groups(plan.blocks(columns), keys, aggregates)
    if result is not None:
        return result
    names = [*keys, *(aggregate.name for aggregate in aggregates)]
    empty = empty_table(plan.schema)
    return pa.table({name: empty.column(name) if name in keys else pa.nulls(0) for name in names})


def aggregated_columns(
    schema: pa.Schema, keys: Sequence[str], aggregates: Sequence[Any]
) -> list[str] | None:
    """Return the columns that aggregates of groups need; None: all. Raises `ConfigError`."""
    check_columns("groupby()", keys, schema.names)
    needed = columns_of(aggregates)
    if needed is not None:
        check_columns("aggregate()", needed, schema.names)
    is_count = all(aggregate.get_target_column() is None for aggregate in aggregates)
    columns = [*dict.fromkeys([*keys, *(needed or ())])] if needed or is_count else None
    return columns or None


def mapped_groups(plan: RowPlan, keys: Sequence[str], apply: BlockFunction) -> pa.Table:
    """Return the blocks that `apply` returns for each group, sorted by the keys."""
    check_columns("groupby()", keys, plan.schema.names)
    return map_groups(read_table(plan), keys, apply)


def map_groups(table: pa.Table, keys: Sequence[str], apply: BlockFunction) -> pa.Table:
    """Return the blocks that `apply` returns for each group of a table, sorted by the keys."""
    if not table.num_rows:
        return table
    return concat_blocks([apply(group) for group in sort_groups(table, keys).tables()])
