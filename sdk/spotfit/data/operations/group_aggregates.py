"""Aggregates of groups: partial results of each block, which are merged in order of the rows.

Only partial results are held in memory, one for each group. PyArrow computes the usual aggregates
for all groups of a block together; those of the user are called for each group.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from spotfit.core.errors import ConfigError
from spotfit.data.aggregate import WIDE_INTEGER, Count, Max, Mean, Min, Std, Sum, widen_for_sum
from spotfit.data.formats.batch_formats import concat_blocks
from spotfit.data.source import IntArray
from spotfit.data.value_aggregates import hashable

_MAX_PARTIAL_ROWS = 2**20
"""Partial results are merged when there are more of them, and twice as many as groups."""

Array: TypeAlias = Any


def aggregate_groups(
    blocks: Iterable[pa.Table], keys: Sequence[str], aggregates: Sequence[Any]
) -> pa.Table | None:
    """Return a row for each group with the keys and the aggregates, sorted by the keys.

    None without any row.
    """
    if keys and all(type(aggregate) in _PARTIAL_FUNCTIONS for aggregate in aggregates):
        return _aggregate_with_arrow(blocks, keys, aggregates)
    return _aggregate_each(blocks, keys, aggregates)


# --- Groups of a table ----------------------------------------------------------------------------


class SortedGroups(NamedTuple):
    """A table sorted by its keys, in which the rows of a group are together."""

    table: pa.Table
    starts: IntArray
    """The first row of each group."""

    def tables(self) -> Iterator[pa.Table]:
        """Yield the rows of each group, in their original order."""
        for begin, end in pairwise([*self.starts.tolist(), self.table.num_rows]):
            yield self.table.slice(begin, end - begin)


def sort_groups(table: pa.Table, keys: Sequence[str]) -> SortedGroups:
    """Return the groups of equal values in the columns `keys`; all rows if there are none."""
    is_first = np.zeros(table.num_rows, dtype=np.bool_)
    is_first[:1] = True
    if keys:
        order = [(key, "ascending") for key in keys]
        table = table.take(pc.sort_indices(table.select(keys), sort_keys=order)).combine_chunks()
    for key in keys:
        is_first[1:] |= changes(table.column(key))
    return SortedGroups(table, np.flatnonzero(is_first))


def changes(column: pa.ChunkedArray) -> Any:
    """Return for each row but the first whether its value differs from that before. NaN equals NaN.

    0.0 equals -0.0, as they do where rows are sorted.
    """
    if pa.types.is_floating(column.type):
        column = pc.add(column, pa.scalar(0.0, column.type))
    codes = column.combine_chunks().dictionary_encode(null_encoding="encode").indices
    numbers = codes.to_numpy(zero_copy_only=False)
    return numbers[1:] != numbers[:-1]


# --- Aggregates that Arrow knows ------------------------------------------------------------------


_PARTIAL_FUNCTIONS = {
    Count: ("count",),
    Sum: ("sum",),
    Min: ("min",),
    Max: ("max",),
    Mean: ("sum", "count"),
    Std: ("count", "mean", "variance"),
}
"""The functions of `pyarrow` that give the partial results of an aggregate."""
_SUMS = (Sum, Mean)


def _aggregate_with_arrow(
    blocks: Iterable[pa.Table], keys: Sequence[str], aggregates: Sequence[Any]
) -> pa.Table | None:
    partials: list[pa.Table] = []
    limit = _MAX_PARTIAL_ROWS
    schema = pa.schema([])
    for block in blocks:
        schema = block.schema
        partials.append(_partial_results(block, keys, aggregates))
        if sum(partial.num_rows for partial in partials) > limit:
            partials = [_merge(partials, keys, aggregates)]
            limit = max(_MAX_PARTIAL_ROWS, 2 * partials[0].num_rows)
    if not partials:
        return None
    return _final_results(_merge(partials, keys, aggregates), keys, aggregates, schema)


def _partial_results(block: pa.Table, keys: Sequence[str], aggregates: Sequence[Any]) -> pa.Table:
    """Return a row for each group of a block: the keys, and columns named "0 count", "2 sum", …"""
    columns = {f"key{n}": block.column(key) for n, key in enumerate(keys)}
    calls: list[tuple[str, str, Any]] = []
    for n, aggregate in enumerate(aggregates):
        column = block.column(aggregate.on or keys[0])
        columns[str(n)] = widen_for_sum(column) if isinstance(aggregate, _SUMS) else column
        calls += [
            (str(n), function, _options(aggregate, function))
            for function in _PARTIAL_FUNCTIONS[type(aggregate)]
        ]
    key_names = [f"key{n}" for n in range(len(keys))]
    try:
        result = pa.table(columns).group_by(key_names, use_threads=False).aggregate(calls)
    except pa.ArrowNotImplementedError as error:
        names = [aggregate.name for aggregate in aggregates]
        raise ConfigError(
            f"One of {', '.join(names)} is not defined for the type of its column: {error}.",
            do="Name the columns of numbers, as in groupby('key').sum(['x', 'y']).",
        ) from error
    partial = [f"{name} {function}" for name, function, _ in calls]
    return pa.table(
        [result.column(name) for name in key_names]
        + [_partial_column(result, name, function) for name, function, _ in calls],
        names=[*keys, *partial],
    )


def _partial_column(result: pa.Table, name: str, function: str) -> pa.ChunkedArray:
    column = result.column(f"{name}_{function}")
    # The partial results of all blocks are added.
    is_sum = function == "sum" and pa.types.is_integer(column.type)
    return column.cast(WIDE_INTEGER) if is_sum else column


def _options(aggregate: Any, function: str) -> Any:
    if function == "count":
        counts_nulls = aggregate.on is None or not aggregate.ignore_nulls
        return pc.CountOptions(mode="all" if counts_nulls else "only_valid")
    if function == "variance":
        return pc.VarianceOptions(ddof=0, skip_nulls=aggregate.ignore_nulls)
    return pc.ScalarAggregateOptions(skip_nulls=aggregate.ignore_nulls, min_count=1)


def _merge(
    partials: Sequence[pa.Table], keys: Sequence[str], aggregates: Sequence[Any]
) -> pa.Table:
    """Return one row of partial results for each group, sorted by the keys."""
    table, starts = sort_groups(concat_blocks(partials), keys)
    codes = np.zeros(table.num_rows, dtype=np.int64)
    codes[starts[1:]] = 1
    codes = np.cumsum(codes)
    merged = {key: table.column(key).take(pa.array(starts)) for key in keys}
    for n, aggregate in enumerate(aggregates):
        if type(aggregate) is Std:
            merged |= _merge_deviations(table, codes, str(n), ignore_nulls=aggregate.ignore_nulls)
            continue
        for function in _PARTIAL_FUNCTIONS[type(aggregate)]:
            name = f"{n} {function}"
            merged[name] = _merge_column(table.column(name), codes, function, aggregate)
    return pa.table(merged)


def _merge_column(values: pa.ChunkedArray, codes: IntArray, function: str, aggregate: Any) -> Array:
    # Counts are added. A null is a partial result without a value, or of one that is not ignored.
    merge = "sum" if function == "count" else function
    options = pc.ScalarAggregateOptions(
        skip_nulls=aggregate.ignore_nulls or function == "count", min_count=1
    )
    groups = pa.table({"code": codes, "value": values}).group_by("code", use_threads=False)
    return groups.aggregate([("value", merge, options)]).column(f"value_{merge}")


def _merge_deviations(
    table: pa.Table, codes: IntArray, name: str, *, ignore_nulls: bool
) -> dict[str, Array]:
    """Merge number, mean and variance by the formula of Chan, Golub and LeVeque (1979)."""
    counts, means, variances = (
        table.column(f"{name} {function}") for function in _PARTIAL_FUNCTIONS[Std]
    )
    weights = counts.to_numpy().astype(np.float64)
    is_null = means.is_null().to_numpy()
    weights[is_null] = 0.0  # without a value; or, if nulls count, the result is null anyway
    mean = np.nan_to_num(_numbers(means))
    total = np.bincount(codes, weights)
    divisor = np.maximum(total, 1.0)
    merged_mean = np.bincount(codes, weights * mean) / divisor
    squares = weights * (np.nan_to_num(_numbers(variances)) + (mean - merged_mean[codes]) ** 2)
    variance = np.bincount(codes, squares) / divisor
    nulls = np.bincount(codes, is_null) > 0
    mask = total == 0 if ignore_nulls else nulls
    results = (total.astype(np.int64), merged_mean, variance)
    return {
        f"{name} {function}": pa.array(values, mask=mask if function != "count" else None)
        for function, values in zip(_PARTIAL_FUNCTIONS[Std], results, strict=True)
    }


def _numbers(column: pa.ChunkedArray) -> Array:
    return column.cast(pa.float64()).to_numpy()


def _final_results(
    table: pa.Table, keys: Sequence[str], aggregates: Sequence[Any], schema: pa.Schema
) -> pa.Table:
    result = table.select(list(keys))
    for n, aggregate in enumerate(aggregates):
        parts = [table.column(f"{n} {name}") for name in _PARTIAL_FUNCTIONS[type(aggregate)]]
        values = _final_column(aggregate, parts)
        if type(aggregate) is Sum:
            values = _final_sum(aggregate.name, values, schema.field(aggregate.on).type)
        result = result.append_column(aggregate.name, values)
    return result


def _final_sum(name: str, values: Array, kind: pa.DataType) -> Array:
    """Return sums of integers as `pyarrow` does: of 64 bits, with the sign of the column."""
    if not (pa.types.is_integer(kind) or pa.types.is_boolean(kind)):
        return values
    sum_type = pa.int64() if pa.types.is_signed_integer(kind) else pa.uint64()
    try:
        return values.cast(sum_type)
    except pa.ArrowInvalid as error:
        raise ConfigError(
            f"A value of {name} does not fit into {sum_type}.",
            do="Convert the column first, as in ds.with_column('x', col('x').cast('float64')).",
        ) from error


def _final_column(aggregate: Any, parts: Sequence[pa.ChunkedArray]) -> Array:
    if type(aggregate) is Mean:
        return pc.divide(pc.cast(parts[0], pa.float64()), pc.cast(parts[1], pa.float64()))
    if type(aggregate) is Std:
        counts, _, variances = parts
        freedom = pc.subtract(counts, aggregate.ddof)
        squares = pc.multiply(variances, pc.cast(counts, pa.float64()))
        # As with too few values in `Std`: NaN.
        divisor = pc.if_else(pc.greater(freedom, 0), pc.cast(freedom, pa.float64()), np.nan)
        return pc.sqrt(pc.divide(squares, divisor))
    return parts[0]


# --- Any aggregates -------------------------------------------------------------------------------


def _aggregate_each(
    blocks: Iterable[pa.Table], keys: Sequence[str], aggregates: Sequence[Any]
) -> pa.Table | None:
    partials: dict[tuple[Any, ...], list[Any]] = {}
    firsts: list[pa.Table] = []
    for block in blocks:
        for group in sort_groups(block, keys).tables():
            first = group.select(list(keys)).slice(0, 1)
            key = tuple(hashable(column[0].as_py()) for column in first.columns)
            if key not in partials:
                partials[key] = [None] * len(aggregates)
                firsts.append(first.combine_chunks())
            partials[key] = [
                aggregate.fold_block(current, group)
                for aggregate, current in zip(aggregates, partials[key], strict=True)
            ]
    if not partials:
        return None
    groups = concat_blocks(firsts)
    columns = {key: groups.column(key) for key in keys}
    for n, aggregate in enumerate(aggregates):
        values = [aggregate.result(partial[n]) for partial in partials.values()]
        columns[aggregate.name] = pa.array(values)
    return sort_groups(pa.table(columns), keys).table
