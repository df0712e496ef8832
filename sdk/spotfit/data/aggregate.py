"""Statistics of columns, with the names of `ray.data.aggregate`.

`Dataset.aggregate` and `GroupedData.aggregate` take instances. `AggregateFnV2` is the base class of
those that users define.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from spotfit.core.errors import ConfigError
from spotfit.data.aggregate_base import AggregateFn as AggregateFn
from spotfit.data.aggregate_base import AggregateFnV2 as AggregateFnV2
from spotfit.data.value_aggregates import ApproximateTopK as ApproximateTopK
from spotfit.data.value_aggregates import AsList as AsList
from spotfit.data.value_aggregates import CountDistinct as CountDistinct
from spotfit.data.value_aggregates import Unique as Unique
from spotfit.data.value_aggregates import ValueCounter as ValueCounter


class Count(AggregateFnV2):
    """The number of rows, or of values of a column."""

    counts_rows = True
    null_is_value = True

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
        """Return the sum, of integers as a Python integer."""
        return exact_sum(self.name, column)

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
        return exact_sum(self.name, column), len(column) - column.null_count

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

    holds_values = True

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
        return self.interpolate(accumulator, [self._q])[0]

    def interpolate(self, accumulator: Any, quantiles: list[float]) -> list[Any]:
        """Return quantiles of all values."""
        chunks = [chunk for column in accumulator for chunk in column.chunks]
        result: list[Any] = pc.quantile(pa.chunked_array(chunks), q=quantiles).to_pylist()
        return result


class ApproximateQuantile(Quantile):
    """Several quantiles, which are exact here. Holds all values of the column."""

    label = "approx_quantile"

    def __init__(
        self,
        on: str,
        quantiles: Sequence[float],
        quantile_precision: int = 800,
        alias_name: str | None = None,
    ) -> None:
        super().__init__(on, alias_name=alias_name)
        self._quantiles = list(quantiles)

    def finalize(self, accumulator: Any) -> Any:
        """Return the quantiles."""
        return self.interpolate(accumulator, self._quantiles)


class _Percentage(AggregateFnV2):
    """The percentage of values with a property."""

    null_is_value = True

    def aggregate_block(self, block: pa.Table) -> tuple[int, int]:
        """Return how many values have the property, and how many there are."""
        column = block.column(self.on)
        nulls = column.null_count if self.ignore_nulls else 0
        return self.count_matches(column), len(column) - nulls

    def count_matches(self, column: pa.ChunkedArray) -> int:
        """Return how many values have the property."""
        raise TypeError(f"{type(self).__name__} does not define count_matches()")

    def combine(self, current_accumulator: Any, new: Any) -> tuple[int, int]:
        """Return the sums."""
        return current_accumulator[0] + new[0], current_accumulator[1] + new[1]

    def finalize(self, accumulator: Any) -> float | None:
        """Return the percentage; None without values."""
        return 100.0 * accumulator[0] / accumulator[1] if accumulator[1] else None


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


WIDE_INTEGER = pa.decimal128(38, 0)
"""Holds sums of 64-bit integers."""


def widen_for_sum(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Return integers whose sum may exceed 64 bits as `WIDE_INTEGER`, other columns unchanged.

    The sum of `pyarrow` wraps around.
    """
    if not pa.types.is_integer(column.type):
        return column
    bounds = pc.min_max(column).as_py().values()
    largest = max((abs(bound) for bound in bounds if bound is not None), default=0)
    return column if largest * len(column) < 2**63 else column.cast(WIDE_INTEGER)


def exact_sum(name: str, column: pa.ChunkedArray) -> Any:
    """Return the sum as a Python value. Raises `ConfigError` for columns without a sum."""
    total = compute_scalar(name, pc.sum, widen_for_sum(column))
    return int(total) if pa.types.is_integer(column.type) else total


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
