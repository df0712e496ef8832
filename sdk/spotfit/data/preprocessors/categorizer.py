"""`Categorizer`: columns of categories, which are dictionaries in Arrow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from spotfit.data.preprocessors.column_statistics import Results, Statistic, ValueCountsStatistic
from spotfit.data.preprocessors.columns import codes_of, dictionary_array, single_values
from spotfit.data.preprocessors.encoders import indices_of
from spotfit.data.preprocessors.preprocessor_base import ColumnPreprocessor
from spotfit.host.plugins import require_module

if TYPE_CHECKING:
    import pandas as pd


class Categorizer(ColumnPreprocessor):
    """Convert columns to categories: the sorted values of the fitted dataset, or those of `dtypes`.

    The outputs are dictionary columns, which pandas reads as categorical. Missing values, and
    values that are no category, are missing. Needs pandas (`MissingExtraError`).
    """

    _parameters = ("columns", "dtypes", "output_columns")

    def __init__(
        self,
        columns: Sequence[str],
        dtypes: Mapping[str, pd.CategoricalDtype] | None = None,
        output_columns: Sequence[str] | None = None,
    ) -> None:
        super().__init__(columns, output_columns)
        self.dtypes = dict(dtypes or {})

    def statistics(self) -> Sequence[Statistic]:
        return [ValueCountsStatistic(name) for name in self.columns if name not in self.dtypes]

    def _stats_of(self, results: Results) -> dict[str, Any]:
        pandas = require_module("pandas", extra="pandas")
        stats: dict[str, Any] = dict(self.dtypes)
        for statistic in self.statistics():
            counts = {k: v for k, v in results[statistic].items() if k is not None}
            stats[statistic.column] = pandas.CategoricalDtype(
                list(indices_of(statistic.column, counts))
            )
        return stats

    def _transform_column(self, table: pa.Table, name: str) -> pa.Array:
        dtype = self.stats_[name]
        categories = list(dtype.categories)
        indices = {value: index for index, value in enumerate(categories)}
        codes = codes_of(single_values(table, name), indices)
        return dictionary_array(codes, categories, ordered=bool(dtype.ordered))
