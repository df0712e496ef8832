"""`SimpleImputer`: values for missing values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from spotfit.core.errors import ConfigError
from spotfit.data.preprocessors.column_statistics import (
    MomentsStatistic,
    Results,
    Statistic,
    ValueCountsStatistic,
)
from spotfit.data.preprocessors.columns import (
    as_dictionary,
    column_of,
    is_missing,
    numeric_column,
    to_float,
)
from spotfit.data.preprocessors.preprocessor_base import ColumnPreprocessor

_STRATEGIES = ("mean", "most_frequent", "constant")


class SimpleImputer(ColumnPreprocessor):
    """Replace missing values (null and NaN) by the mean, the most frequent or a constant value.

    A column that a batch does not have is created. With "mean", integers become 64-bit floats. Of
    equally frequent values the one that occurs first is taken. `transform` raises `ConfigError` for
    a column that had no values, or if the value does not fit the column's type.
    """

    _parameters = ("columns", "strategy", "fill_value", "output_columns")

    def __init__(
        self,
        columns: Sequence[str],
        strategy: str = "mean",
        fill_value: str | float | None = None,
        *,
        output_columns: Sequence[str] | None = None,
    ) -> None:
        super().__init__(columns, output_columns)
        if strategy not in _STRATEGIES:
            raise ConfigError(
                f"The strategy {strategy!r} is not supported.",
                do=f"Use one of {list(_STRATEGIES)}.",
            )
        if strategy == "constant" and fill_value is None:
            raise ConfigError(
                'fill_value is missing, which strategy="constant" needs.', do="Pass fill_value=."
            )
        self.strategy = strategy
        self.fill_value = fill_value
        self._is_fittable = strategy != "constant"

    def required_columns(self) -> list[str]:
        """Return no columns: missing ones are created."""
        return []

    def statistics(self) -> Sequence[Statistic]:
        if self.strategy == "mean":
            return [MomentsStatistic(name) for name in self.columns]
        return [ValueCountsStatistic(name, explode_lists=False) for name in self.columns]

    def _stats_of(self, results: Results) -> dict[str, Any]:
        values = {one.column: results[one] for one in self.statistics()}
        if self.strategy == "mean":
            return {f"mean({name})": moments.mean for name, moments in values.items()}
        return {f"most_frequent({name})": _most_frequent(one) for name, one in values.items()}

    def _transform_column(self, table: pa.Table, name: str) -> pa.Array | pa.ChunkedArray:
        value = self._value_of(name)
        if name not in table.column_names:
            return pa.repeat(pa.scalar(value), table.num_rows)
        if self.strategy == "mean":
            column = to_float(numeric_column(table, name))
        else:
            column = column_of(table, name)
        if pa.types.is_dictionary(column.type):
            return _fill_dictionary(column, value, name)
        return _fill(column, value, name)

    def _value_of(self, name: str) -> Any:
        if self.strategy == "constant":
            return self.fill_value
        value = self.stats_[f"{self.strategy}({name})"]
        if value is None:
            raise ConfigError(
                f"Column {name} has no fill value: the dataset of fit() had only missing values.",
                do="Leave the column out of columns=, or use the strategy 'constant'.",
            )
        return value


def _most_frequent(counts: dict[Any, int]) -> Any:
    present = {value: count for value, count in counts.items() if value is not None}
    return max(present, key=present.__getitem__, default=None)


def _fill(column: pa.ChunkedArray, value: Any, name: str) -> pa.ChunkedArray:
    try:
        if pa.types.is_integer(column.type) and isinstance(value, float):
            column = pc.cast(column, pa.float64(), safe=False)
        if pa.types.is_null(column.type):
            return pa.chunked_array([pa.repeat(pa.scalar(value), len(column))])
        return pc.if_else(is_missing(column), pa.scalar(value, column.type), column)
    except (pa.ArrowInvalid, pa.ArrowTypeError, TypeError, ValueError) as error:
        raise ConfigError(
            f"The fill value {value!r} of column {name!r} does not fit its type {column.type}.",
            do="Use a value of the column's type.",
        ) from error


def _fill_dictionary(column: pa.ChunkedArray, value: Any, name: str) -> pa.Array:
    # The categories keep their order; a new one is added at the end.
    whole = as_dictionary(column)
    categories = whole.dictionary.to_pylist()
    if value not in categories:
        categories.append(value)
    try:
        dictionary = pa.array(categories, whole.dictionary.type)
    except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
        raise ConfigError(
            f"The fill value {value!r} of column {name!r} does not fit its categories.",
            do=f"Use a value of the type {whole.dictionary.type}.",
        ) from error
    indices = pc.fill_null(whole.indices, categories.index(value))
    return pa.DictionaryArray.from_arrays(indices, dictionary, ordered=whole.type.ordered)
