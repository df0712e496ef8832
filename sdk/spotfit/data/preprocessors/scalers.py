"""Scalers: each column by its mean, range, largest value or quantiles."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from spotfit.core.errors import ConfigError
from spotfit.data.preprocessors.column_statistics import (
    BoundsStatistic,
    MomentsStatistic,
    QuantilesStatistic,
    Results,
    Statistic,
)
from spotfit.data.preprocessors.columns import (
    as_float64,
    is_missing,
    number,
    numeric_column,
)
from spotfit.data.preprocessors.preprocessor_base import ColumnPreprocessor

_NEAR_ZERO = 1e-8
"""A deviation or range below it counts as 1, as in Ray: rounding errors must not be amplified."""


class StandardScaler(ColumnPreprocessor):
    """Subtract the mean of each column and divide by its population standard deviation.

    A deviation below 1e-8 counts as 1. The outputs are 64-bit floats; missing values stay missing.
    """

    def statistics(self) -> Sequence[Statistic]:
        return [MomentsStatistic(name) for name in self.columns]

    def _stats_of(self, results: Results) -> dict[str, Any]:
        moments = {name: results[MomentsStatistic(name)] for name in self.columns}
        means = {f"mean({name})": one.mean for name, one in moments.items()}
        return means | {f"std({name})": one.std for name, one in moments.items()}

    def _transform_column(self, table: pa.Table, name: str) -> pa.ChunkedArray:
        mean, std = self.stats_[f"mean({name})"], self.stats_[f"std({name})"]
        column = as_float64(numeric_column(table, name))
        return scale(column, mean, std if std is None or std >= _NEAR_ZERO else 1.0)


class MinMaxScaler(ColumnPreprocessor):
    """Map the smallest value of each column to 0 and the largest to 1.

    A range below 1e-8 counts as 1. The outputs are 64-bit floats; missing values stay missing.
    """

    def statistics(self) -> Sequence[Statistic]:
        return [BoundsStatistic(name) for name in self.columns]

    def _stats_of(self, results: Results) -> dict[str, Any]:
        bounds = {name: results[BoundsStatistic(name)] for name in self.columns}
        smallest = {f"min({name})": one.min for name, one in bounds.items()}
        return smallest | {f"max({name})": one.max for name, one in bounds.items()}

    def _transform_column(self, table: pa.Table, name: str) -> pa.ChunkedArray:
        smallest, largest = self.stats_[f"min({name})"], self.stats_[f"max({name})"]
        width = None if smallest is None or largest is None else largest - smallest
        width = 1 if width is not None and width < _NEAR_ZERO else width
        return scale(as_float64(numeric_column(table, name)), smallest, width)


class MaxAbsScaler(ColumnPreprocessor):
    """Divide each column by its largest absolute value; one of 0 counts as 1.

    The outputs are 64-bit floats; missing values stay missing.
    """

    def statistics(self) -> Sequence[Statistic]:
        return [BoundsStatistic(name) for name in self.columns]

    def _stats_of(self, results: Results) -> dict[str, Any]:
        bounds = {name: results[BoundsStatistic(name)] for name in self.columns}
        return {
            f"abs_max({name})": None if one.min is None else max(abs(one.min), abs(one.max))
            for name, one in bounds.items()
        }

    def _transform_column(self, table: pa.Table, name: str) -> pa.ChunkedArray:
        largest = self.stats_[f"abs_max({name})"]
        return scale(as_float64(numeric_column(table, name)), 0, 1 if largest == 0 else largest)


class RobustScaler(ColumnPreprocessor):
    """Subtract the median of each column and divide by the distance of two quantiles.

    A distance of 0 gives zeros. The outputs are 64-bit floats; missing values stay missing.

    Quantiles are exact up to 8 × `quantile_precision` rows; beyond, the rank of a quantile among N
    rows is wrong by at most N × levels / (8 × `quantile_precision`), where levels =
    log2(N / (4 × `quantile_precision`)): by 0.3 % of a billion rows.
    """

    DEFAULT_QUANTILE_PRECISION = 800
    _parameters = ("columns", "quantile_range", "output_columns", "quantile_precision")

    def __init__(
        self,
        columns: Sequence[str],
        quantile_range: tuple[float, float] = (0.25, 0.75),
        output_columns: Sequence[str] | None = None,
        quantile_precision: int = DEFAULT_QUANTILE_PRECISION,
    ) -> None:
        super().__init__(columns, output_columns)
        low, high = quantile_range
        if not 0 <= low <= high <= 1:
            raise ConfigError(
                f"quantile_range must be two increasing numbers from 0 to 1, not {quantile_range}.",
                do="Use the default (0.25, 0.75).",
            )
        if quantile_precision < 1:
            raise ConfigError(
                f"quantile_precision must be a positive integer, not {quantile_precision}.",
                do=f"Use the default {self.DEFAULT_QUANTILE_PRECISION}.",
            )
        self.quantile_range = (low, high)
        self.quantile_precision = quantile_precision

    def _quantiles(self, name: str) -> QuantilesStatistic:
        return QuantilesStatistic(name, 4 * self.quantile_precision)

    def statistics(self) -> Sequence[Statistic]:
        return [self._quantiles(name) for name in self.columns]

    def _stats_of(self, results: Results) -> dict[str, Any]:
        low, high = self.quantile_range
        stats: dict[str, Any] = {}
        for name in self.columns:
            values = results[self._quantiles(name)].quantiles([low, 0.5, high]) or [None] * 3
            keys = ("low_quantile", "median", "high_quantile")
            stats |= {f"{key}({name})": value for key, value in zip(keys, values, strict=True)}
        return stats

    def _transform_column(self, table: pa.Table, name: str) -> pa.ChunkedArray:
        low, median, high = (
            self.stats_[f"{key}({name})"] for key in ("low_quantile", "median", "high_quantile")
        )
        column = as_float64(numeric_column(table, name))
        if median is None or low != high:
            return scale(column, median, None if median is None else high - low)
        # Multiplied by 0, infinite values would become NaN.
        return pc.if_else(is_missing(column), column, number(0.0))


def scale(column: pa.ChunkedArray, center: Any, width: Any) -> pa.ChunkedArray:
    """Return (column - center) / width of 64-bit floats; all missing if one is None."""
    if center is None or width is None:
        return pa.chunked_array([pa.nulls(len(column), pa.float64())])
    return pc.divide(pc.subtract(column, number(float(center))), number(float(width)))
