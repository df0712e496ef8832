"""Statistics of columns, as partial results of blocks that are merged in order of the rows.

The names are those of `ray.data.aggregate`. `Dataset.aggregate` and `GroupedData.aggregate` take
instances; `AggregateFnV2` is the base class for those of the user.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from spotfit.core.errors import ConfigError
from spotfit.data.row_functions import block_rows


class AggregateFnV2:
    """A statistic of one column, or of all rows where `on` is None.

    Subclasses define `aggregate_block` and `combine`, and `finalize` where the partial result is
    not the statistic. `ignore_nulls` leaves null values out; without it, a column that has one
    gives None.
    """

    def __init__(
        self,
        name: str,
        zero_factory: Callable[[], Any] = lambda: None,
        *,
        on: str | None,
        ignore_nulls: bool = True,
    ) -> None:
        self.name = name
        self.on = on
        self.ignore_nulls = ignore_nulls
        self.zero_factory = zero_factory

    def get_target_column(self) -> str | None:
        """Return the column, or None for all rows."""
        return self.on

    def aggregate_block(self, block: pa.Table) -> Any:
        """Return the partial result of the rows of a block; None if there is nothing to count."""
        raise TypeError(f"{type(self).__name__} does not define aggregate_block()")

    def combine(self, current_accumulator: Any, new: Any) -> Any:
        """Return the partial result of the rows of two partial results, the earlier one first."""
        raise TypeError(f"{type(self).__name__} does not define combine()")

    def finalize(self, accumulator: Any) -> Any:
        """Return the statistic of a partial result."""
        return accumulator

    def fold(self, blocks: Iterable[pa.Table]) -> Any:
        """Return the statistic of all blocks; None without rows, or if a null is not ignored."""
        result = None
        for block in blocks:
            result = self.fold_block(result, block)
        return self.result(result)

    def fold_block(self, current: Any, block: pa.Table) -> Any:
        """Return the partial result after another block. `current` is None before the first."""
        if current is _NULL or self._has_null(block):
            return _NULL
        new = self.aggregate_block(block)
        return current if new is None else new if current is None else self.combine(current, new)

    def result(self, current: Any) -> Any:
        """Return the statistic of what `fold_block` returned."""
        if current is _NULL:
            return None
        current = self.zero_factory() if current is None else current
        return None if current is None else self.finalize(current)

    def _has_null(self, block: pa.Table) -> bool:
        return (
            not self.ignore_nulls and self.on is not None and block.column(self.on).null_count > 0
        )


_NULL = object()
"""The partial result of a column that has a null value which is not ignored."""


class AggregateFn:
    """A statistic of the user, made of functions, as in older versions of Ray."""

    on = None

    def __init__(
        self,
        init: Callable[[Any], Any],
        merge: Callable[[Any, Any], Any],
        name: str,
        accumulate_row: Callable[[Any, dict[str, Any]], Any] | None = None,
        accumulate_block: Callable[[Any, Any], Any] | None = None,
        finalize: Callable[[Any], Any] | None = None,
    ) -> None:
        if (accumulate_row is None) == (accumulate_block is None):
            raise ConfigError(
                "AggregateFn needs either accumulate_row or accumulate_block.",
                do="Pass exactly one of them.",
            )
        self.name = name
        self._init, self._merge = init, merge
        self._accumulate_row, self._accumulate_block = accumulate_row, accumulate_block
        self._finalize = finalize or (lambda result: result)

    def get_target_column(self) -> None:
        """Return None: the functions get whole rows."""

    def fold(self, blocks: Iterable[pa.Table]) -> Any:
        """Return the statistic of all blocks."""
        result = None
        for block in blocks:
            result = self.fold_block(result, block)
        return self.result(result)

    def fold_block(self, current: Any, block: pa.Table) -> Any:
        """Return the partial result after another block, in a list; None before the first."""
        new = self._init(None)
        if self._accumulate_block is not None:
            new = self._accumulate_block(new, block)
        elif self._accumulate_row is not None:
            for row in block_rows(block):
                new = self._accumulate_row(new, row)
        return [new if current is None else self._merge(current[0], new)]

    def result(self, current: Any) -> Any:
        """Return the statistic of what `fold_block` returned."""
        return self._finalize(self._init(None) if current is None else current[0])


class Count(AggregateFnV2):
    """The number of rows, or of values of a column."""

    def __init__(
        self,
        on: str | None = None,
        ignore_nulls: bool = False,  # noqa: FBT001, FBT002 - as in Ray
        alias_name: str | None = None,
    ) -> None:
        super().__init__(
            alias_name or f"count({on or ''})", lambda: 0, on=on, ignore_nulls=ignore_nulls
        )

    def aggregate_block(self, block: pa.Table) -> int:
        """Return the number in a block."""
        nulls: int = block.column(self.on).null_count if self.on and self.ignore_nulls else 0
        rows: int = block.num_rows
        return rows - nulls

    def combine(self, current_accumulator: int, new: int) -> int:
        """Return the sum."""
        return current_accumulator + new

    def _has_null(self, _block: pa.Table) -> bool:
        return False  # a null is counted like any other value


class _ColumnStatistic(AggregateFnV2):
    """A statistic of the values of one column that are not null."""

    label = ""

    def __init__(
        self,
        on: str | None = None,
        ignore_nulls: bool = True,  # noqa: FBT001, FBT002 - as in Ray
        alias_name: str | None = None,
        zero_factory: Callable[[], Any] = lambda: None,
    ) -> None:
        if on is None:
            raise ConfigError(
                f"{type(self).__name__}() needs a column.", do=f"{type(self).__name__}(on='x')."
            )
        super().__init__(
            alias_name or f"{self.label}({on})", zero_factory, on=on, ignore_nulls=ignore_nulls
        )

    def aggregate_block(self, block: pa.Table) -> Any:
        """Return the partial result of the values of a block; None if there are none."""
        column = block.column(self.on)
        return None if column.null_count == len(column) else self.aggregate_column(column)

    def aggregate_column(self, column: pa.ChunkedArray) -> Any:
        """Return the partial result of a column with at least one value."""
        raise TypeError(f"{type(self).__name__} does not define aggregate_column()")


class Sum(_ColumnStatistic):
    """The sum."""

    label = "sum"

    def aggregate_column(self, column: pa.ChunkedArray) -> Any:
        """Return the sum."""
        return compute_scalar(self.name, pc.sum, column)

    def combine(self, current_accumulator: Any, new: Any) -> Any:
        """Return the sum."""
        return current_accumulator + new


class Min(_ColumnStatistic):
    """The minimum."""

    label = "min"

    def aggregate_column(self, column: pa.ChunkedArray) -> Any:
        """Return the minimum."""
        return compute_scalar(self.name, pc.min, column)

    def combine(self, current_accumulator: Any, new: Any) -> Any:
        """Return the smaller one."""
        return min(current_accumulator, new)


class Max(_ColumnStatistic):
    """The maximum."""

    label = "max"

    def aggregate_column(self, column: pa.ChunkedArray) -> Any:
        """Return the maximum."""
        return compute_scalar(self.name, pc.max, column)

    def combine(self, current_accumulator: Any, new: Any) -> Any:
        """Return the larger one."""
        return max(current_accumulator, new)


class AbsMax(Max):
    """The maximum of the absolute values."""

    label = "abs_max"

    def aggregate_column(self, column: pa.ChunkedArray) -> Any:
        """Return the maximum of the absolute values."""
        return compute_scalar(self.name, lambda values: pc.max(pc.abs(values)), column)


class Mean(_ColumnStatistic):
    """The mean."""

    label = "mean"

    def aggregate_column(self, column: pa.ChunkedArray) -> tuple[Any, int]:
        """Return sum and number of values."""
        return compute_scalar(self.name, pc.sum, column), len(column) - column.null_count

    def combine(self, current_accumulator: Any, new: Any) -> tuple[Any, int]:
        """Return sum and number of all values."""
        return current_accumulator[0] + new[0], current_accumulator[1] + new[1]

    def finalize(self, accumulator: Any) -> float:
        """Return the mean."""
        return float(accumulator[0] / accumulator[1])


class Std(_ColumnStatistic):
    """The standard deviation, by the merge of Chan, Golub and LeVeque (1979)."""

    label = "std"

    def __init__(
        self,
        on: str | None = None,
        ddof: int = 1,
        ignore_nulls: bool = True,  # noqa: FBT001, FBT002 - as in Ray
        alias_name: str | None = None,
    ) -> None:
        super().__init__(on, ignore_nulls, alias_name)
        self.ddof = ddof

    def aggregate_column(self, column: pa.ChunkedArray) -> tuple[int, float, float]:
        """Return number, mean, and sum of the squared deviations from it."""
        count = len(column) - column.null_count
        mean = float(compute_scalar(self.name, pc.mean, column))
        return count, mean, count * float(compute_scalar(self.name, pc.variance, column))

    def combine(self, current_accumulator: Any, new: Any) -> tuple[int, float, float]:
        """Return number, mean and squared deviations of all values."""
        (count_a, mean_a, squares_a), (count_b, mean_b, squares_b) = current_accumulator, new
        count, difference = count_a + count_b, mean_b - mean_a
        mean = mean_a + difference * count_b / count
        squares = squares_a + squares_b + difference**2 * count_a * count_b / count
        return count, mean, squares

    def finalize(self, accumulator: Any) -> float:
        """Return the standard deviation; NaN with too few values."""
        count, _, squares = accumulator
        return math.sqrt(squares / (count - self.ddof)) if count > self.ddof else math.nan


class Quantile(_ColumnStatistic):
    """A quantile, by linear interpolation. Holds all values of the column."""

    label = "quantile"

    def __init__(
        self,
        on: str | None = None,
        q: float = 0.5,
        ignore_nulls: bool = True,  # noqa: FBT001, FBT002 - as in Ray
        alias_name: str | None = None,
    ) -> None:
        super().__init__(on, ignore_nulls, alias_name)
        self._q = q

    def aggregate_column(self, column: pa.ChunkedArray) -> list[pa.ChunkedArray]:
        """Return the values."""
        return [column.drop_null()]

    def combine(self, current_accumulator: Any, new: Any) -> Any:
        """Return all values."""
        return [*current_accumulator, *new]

    def finalize(self, accumulator: Any) -> Any:
        """Return the quantile."""
        chunks = [chunk for column in accumulator for chunk in column.chunks]
        return pc.quantile(pa.chunked_array(chunks), q=self._q)[0].as_py()


class Unique(AggregateFnV2):
    """The distinct values, in order of first occurrence."""

    def __init__(
        self,
        on: str,
        ignore_nulls: bool = True,  # noqa: FBT001, FBT002 - as in Ray
        alias_name: str | None = None,
        encode_lists: Any = None,
    ) -> None:
        name = alias_name or f"unique({on})"
        super().__init__(name, dict, on=on, ignore_nulls=ignore_nulls)
        self._encode_lists = encode_lists

    def aggregate_block(self, block: pa.Table) -> dict[Any, Any]:
        """Return the values as keys."""
        column = block.column(self.on)
        if pa.types.is_list(column.type) or pa.types.is_large_list(column.type):
            rows = column.to_pylist()
            values = [x for row in rows for x in row or ()] if self._encode_lists else rows
        elif pa.types.is_nested(column.type) or isinstance(column.type, pa.BaseExtensionType):
            values = column.to_pylist()
        else:
            values = column.unique().to_pylist()
        return {
            _hashable(value): value for value in values if not (self.ignore_nulls and value is None)
        }

    def combine(self, current_accumulator: dict[Any, Any], new: dict[Any, Any]) -> dict[Any, Any]:
        """Return the values of both."""
        return {**current_accumulator, **new}

    def finalize(self, accumulator: dict[Any, Any]) -> Any:
        """Return the list of values."""
        return list(accumulator.values())

    def _has_null(self, _block: pa.Table) -> bool:
        return False  # null is a value


def _hashable(value: Any) -> Any:
    if isinstance(value, float) and math.isnan(value):
        return "nan", None  # NaN differs from itself
    if isinstance(value, Mapping):
        return tuple((key, _hashable(item)) for key, item in value.items())
    if isinstance(value, list | np.ndarray):
        return tuple(map(_hashable, value))
    return value


class CountDistinct(Unique):
    """The number of distinct values."""

    def __init__(
        self,
        on: str,
        ignore_nulls: bool = True,  # noqa: FBT001, FBT002 - as in Ray
        alias_name: str | None = None,
    ) -> None:
        super().__init__(on, ignore_nulls, alias_name or f"count_distinct({on})")

    def finalize(self, accumulator: dict[Any, Any]) -> int:
        """Return the number of values."""
        return len(accumulator)


class AsList(AggregateFnV2):
    """All values, in order of the rows."""

    def __init__(
        self,
        on: str,
        alias_name: str | None = None,
        ignore_nulls: bool = False,  # noqa: FBT001, FBT002 - as in Ray
    ) -> None:
        name = alias_name or f"list({on})"
        super().__init__(name, list, on=on, ignore_nulls=ignore_nulls)

    def aggregate_block(self, block: pa.Table) -> list[Any]:
        """Return the values of a block."""
        column = block.column(self.on)
        values: list[Any] = (column.drop_null() if self.ignore_nulls else column).to_pylist()
        return values

    def combine(self, current_accumulator: list[Any], new: list[Any]) -> list[Any]:
        """Return all values."""
        return current_accumulator + new

    def _has_null(self, _block: pa.Table) -> bool:
        return False  # null is a value


class _Percentage(AggregateFnV2):
    """The percentage of values with a property."""

    def aggregate_block(self, block: pa.Table) -> tuple[int, int]:
        """Return how many values have the property, and how many there are."""
        column = block.column(self.on)
        if not self.ignore_nulls:
            return self.count_matches(column), len(column)
        return self.count_matches(column), len(column) - column.null_count

    def count_matches(self, column: pa.ChunkedArray) -> int:
        """Return how many values have the property."""
        raise TypeError(f"{type(self).__name__} does not define count_matches()")

    def combine(self, current_accumulator: Any, new: Any) -> tuple[int, int]:
        """Return the sums."""
        return current_accumulator[0] + new[0], current_accumulator[1] + new[1]

    def finalize(self, accumulator: Any) -> float | None:
        """Return the percentage; None without values."""
        return 100.0 * accumulator[0] / accumulator[1] if accumulator[1] else None

    def _has_null(self, _block: pa.Table) -> bool:
        return False


class MissingValuePercentage(_Percentage):
    """The percentage of values that are null or NaN."""

    def __init__(self, on: str, alias_name: str | None = None) -> None:
        super().__init__(alias_name or f"missing_pct({on})", on=on, ignore_nulls=False)

    def count_matches(self, column: pa.ChunkedArray) -> int:
        """Return how many values are missing."""
        return int(pc.sum(column.is_null(nan_is_null=True)).as_py() or 0)


class ZeroPercentage(_Percentage):
    """The percentage of zeros."""

    def __init__(
        self,
        on: str,
        ignore_nulls: bool = True,  # noqa: FBT001, FBT002 - as in Ray
        alias_name: str | None = None,
    ) -> None:
        super().__init__(alias_name or f"zero_pct({on})", on=on, ignore_nulls=ignore_nulls)

    def count_matches(self, column: pa.ChunkedArray) -> int:
        """Return how many values are zero."""
        return int(pc.sum(pc.equal(column, 0)).as_py() or 0)


def compute_scalar(
    name: str, function: Callable[[pa.ChunkedArray], pa.Scalar], column: pa.ChunkedArray
) -> Any:
    """Return a statistic as a Python value. Raises `ConfigError` for other types of columns."""
    try:
        return function(column).as_py()
    except pa.ArrowNotImplementedError as error:
        raise ConfigError(
            f"{name} is not defined for a column of type {column.type}.",
            do="Name the columns of numbers, as in ds.sum(['x', 'y']).",
        ) from error


def fold_all(
    aggregates: Sequence[Any], blocks: Callable[[list[str] | None], Iterable[pa.Table]]
) -> dict[str, Any]:
    """Return the value of each aggregate under its name, in one pass.

    `blocks` returns the blocks with the given columns; None: with all.
    """
    results: list[Any] = [None] * len(aggregates)
    for block in blocks(columns_of(aggregates)):
        results = [
            aggregate.fold_block(current, block)
            for aggregate, current in zip(aggregates, results, strict=True)
        ]
    return {
        aggregate.name: aggregate.result(current)
        for aggregate, current in zip(aggregates, results, strict=True)
    }


def columns_of(aggregates: Sequence[Any]) -> list[str] | None:
    """Return the columns that the aggregates need; None: all."""
    columns = [aggregate.get_target_column() for aggregate in aggregates]
    if any(
        column is None and not isinstance(aggregate, Count)
        for column, aggregate in zip(columns, aggregates, strict=True)
    ):
        return None
    named = list(dict.fromkeys(column for column in columns if column is not None))
    return named or None
