"""Discretizers: the number of the bin of each value, as `pandas.cut` gives it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import pyarrow as pa

from spotfit.core.errors import ConfigError, ConfigTypeError
from spotfit.data.formats.column_arrays import arrow_array
from spotfit.data.preprocessors.column_statistics import (
    Bounds,
    BoundsStatistic,
    Results,
    Statistic,
)
from spotfit.data.preprocessors.columns import (
    Int64Codes,
    dictionary_array,
    float64_array,
    numeric_column,
)
from spotfit.data.preprocessors.preprocessor_base import ColumnPreprocessor

if TYPE_CHECKING:
    import pandas as pd

    BinDtypes: TypeAlias = Mapping[str, pd.CategoricalDtype | type[np.integer[Any]]]
    BinEdges: TypeAlias = Iterable[float] | pd.IntervalIndex

_MARGIN = 0.001
"""Share of the range by which the outer edge is moved, so that the extreme value is in a bin."""


class BinDiscretizer(ColumnPreprocessor):
    """Base of the discretizers: edges of a column to codes of its values.

    Values outside of all bins are missing. The outputs are 64-bit integers; for a column with a
    `pandas.CategoricalDtype` in `dtypes`, its categories name the bins.
    """

    _parameters = (
        "columns", "bins", "right", "include_lowest", "duplicates", "dtypes", "output_columns",
    )  # fmt: skip

    def __init__(
        self,
        columns: Sequence[str],
        bins: Any,
        *,
        right: bool = True,
        include_lowest: bool = False,
        duplicates: str = "raise",
        dtypes: BinDtypes | None = None,
        output_columns: Sequence[str] | None = None,
    ) -> None:
        super().__init__(columns, output_columns)
        if isinstance(bins, Mapping) and (missing := set(self.columns) - set(bins)):
            raise ConfigError(
                f"bins has no entry for {sorted(missing)}.",
                do="If `bins` is a dictionary, add all `columns` to it.",
            )
        if duplicates not in ("raise", "drop"):
            raise ConfigError(
                f"duplicates must be 'raise' or 'drop', not {duplicates!r}.", do="Use 'raise'."
            )
        self.bins = dict(bins) if isinstance(bins, Mapping) else bins
        self.right = right
        self.include_lowest = include_lowest
        self.duplicates = duplicates
        self.dtypes = dtypes

    def _bins_of(self, name: str) -> Any:
        return self.bins[name] if isinstance(self.bins, dict) else self.bins

    def _edges_of(self, name: str) -> Any:
        return self._bins_of(name)

    def _transform_column(self, table: pa.Table, name: str) -> pa.Array:
        values = float64_array(numeric_column(table, name))
        edges = self._edges_of(name)
        codes = (
            _interval_codes(values, edges) if _is_intervals(edges) else self._codes(values, edges)
        )
        labels = getattr((self.dtypes or {}).get(name), "categories", None)
        if labels is None:
            return arrow_array(codes, codes < 0)
        ordered = bool((self.dtypes or {})[name].ordered)  # type: ignore[union-attr]
        return dictionary_array(codes, list(labels), ordered=ordered)

    def _codes(self, values: Any, edges: Any) -> Int64Codes:
        ends = np.searchsorted(edges, values, side="left" if self.right else "right")
        if self.include_lowest:
            ends[values == edges[0]] = 1
        inside = ~np.isnan(values) & (ends > 0) & (ends < len(edges))
        codes: Int64Codes = np.where(inside, ends - 1, -1).astype(np.int64)
        return codes

    def _check_labels(self, name: str, bin_count: int) -> None:
        labels = getattr((self.dtypes or {}).get(name), "categories", None)
        if labels is not None and len(labels) != bin_count:
            raise ConfigError(
                f"The type of column {name!r} has {len(labels)} categories for {bin_count} bins.",
                do="Pass a CategoricalDtype with one category for each bin.",
            )


class CustomKBinsDiscretizer(BinDiscretizer):
    """Replace values by the number of their bin, counted from 0, for bins with given edges.

    `bins` has increasing edges, or is a `pandas.IntervalIndex`, or a dictionary of these by column.
    """

    _is_fittable = False

    def __init__(
        self,
        columns: Sequence[str],
        bins: BinEdges | Mapping[str, BinEdges],
        *,
        right: bool = True,
        include_lowest: bool = False,
        duplicates: str = "raise",
        dtypes: BinDtypes | None = None,
        output_columns: Sequence[str] | None = None,
    ) -> None:
        super().__init__(
            columns, bins, right=right, include_lowest=include_lowest, duplicates=duplicates,
            dtypes=dtypes, output_columns=output_columns,
        )  # fmt: skip
        if isinstance(self.bins, dict):
            self.bins = {name: self._checked_edges(edges) for name, edges in self.bins.items()}
        else:
            self.bins = self._checked_edges(self.bins)
        for name in self.columns:
            edges = self._bins_of(name)
            self._check_labels(name, len(edges) if _is_intervals(edges) else len(edges) - 1)

    def _checked_edges(self, bins: Any) -> Any:
        if _is_intervals(bins):
            return bins
        if not isinstance(bins, Iterable):
            raise ConfigTypeError(
                f"bins must be edges of bins, not {bins!r}.",
                do="Pass a list of increasing numbers; for a number of bins, use "
                "UniformKBinsDiscretizer.",
            )
        edges = [float(edge) for edge in bins]
        unique = list(dict.fromkeys(edges))
        if edges != sorted(edges) or (len(unique) < len(edges) and self.duplicates == "raise"):
            raise ConfigError(
                f"The edges of bins must increase: {edges}.",
                do="Sort them and remove equal ones; duplicates='drop' removes equal ones.",
            )
        return unique


class UniformKBinsDiscretizer(BinDiscretizer):
    """Replace values by the number of their bin, counted from 0, for bins of equal width.

    `bins` is the number of bins, or a dictionary of numbers by column. The bins cover the range of
    the fitted dataset; `fit` raises `ConfigError` for columns without values or with infinite ones.
    """

    def statistics(self) -> Sequence[Statistic]:
        for name in self.columns:
            bins = self._bins_of(name)
            if not isinstance(bins, int) or bins < 1:
                raise ConfigTypeError(
                    f"`bins` must be a positive integer or a dictionary of these, not {bins!r}.",
                    do="For bins with given edges use CustomKBinsDiscretizer.",
                )
            self._check_labels(name, bins)
        return [BoundsStatistic(name) for name in self.columns]

    def _stats_of(self, results: Results) -> dict[str, Any]:
        bounds = {name: results[BoundsStatistic(name)] for name in self.columns}
        return {
            name: _uniform_edges(name, one, self._bins_of(name), right=self.right)
            for name, one in bounds.items()
        }

    def _edges_of(self, name: str) -> Any:
        return self.stats_[name]


def _uniform_edges(name: str, bounds: Bounds, bins: int, *, right: bool) -> Any:
    if bounds.min is None or not (math.isfinite(bounds.min) and math.isfinite(bounds.max)):
        kind = "no values" if bounds.min is None else "infinite values"
        raise ConfigError(
            f"Column {name} has {kind}, so its range cannot be divided into bins.",
            do="Leave the column out of columns=, or filter the dataset.",
        )
    low, high = float(bounds.min), float(bounds.max)
    if low == high:
        # A single value is in the middle of a narrow range.
        low -= _MARGIN * abs(low) if low else _MARGIN
        high += _MARGIN * abs(high) if high else _MARGIN
        return np.linspace(low, high, bins + 1)
    edges = np.linspace(low, high, bins + 1)
    # The open end of the bins is moved, so that the extreme value is inside.
    margin = (high - low) * _MARGIN
    edges[0 if right else -1] += -margin if right else margin
    return edges


def _is_intervals(bins: Any) -> bool:
    return type(bins).__name__ == "IntervalIndex"


def _interval_codes(values: Any, intervals: Any) -> Int64Codes:
    codes: Int64Codes = np.asarray(intervals.get_indexer(values), dtype=np.int64)
    return codes
