"""Encoders: categories as integers, or as vectors of counts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from spotfit.core.errors import ConfigError
from spotfit.data.dataset import Dataset
from spotfit.data.formats.column_arrays import arrow_array, list_array, tensor_array
from spotfit.data.plans.transforms import BlockFunction, set_column
from spotfit.data.preprocessors.column_statistics import (
    Results,
    Statistic,
    ValueCounts,
    ValueCountsStatistic,
)
from spotfit.data.preprocessors.columns import (
    Int64Codes,
    codes_of,
    column_of,
    count_matrix,
    int64_array,
    is_list,
    list_lengths,
    list_values,
    require_no_missing,
    single_values,
)
from spotfit.data.preprocessors.preprocessor_base import ArrowPreprocessor, ColumnPreprocessor


class CategoryEncoder(ColumnPreprocessor):
    """Base of encoders with an index for each value of the fitted dataset."""

    _parameters = ("columns", "max_categories", "output_columns")
    encode_lists = False
    """Whether the elements of lists are the values, not the lists."""

    def __init__(
        self,
        columns: Sequence[str],
        *,
        max_categories: Mapping[str, int] | None = None,
        output_columns: Sequence[str] | None = None,
    ) -> None:
        super().__init__(columns, output_columns)
        self.max_categories = dict(max_categories or {})
        if unknown := sorted(set(self.max_categories) - set(self.columns)):
            raise ConfigError(
                f"max_categories has {unknown}, which are not in columns={self.columns}.",
                do="Add them to columns, or remove them from max_categories.",
            )

    def statistics(self) -> Sequence[Statistic]:
        return [ValueCountsStatistic(name, self.encode_lists) for name in self.columns]

    def _stats_of(self, results: Results) -> dict[str, Any]:
        counts = {one.column: results[one] for one in self.statistics()}
        return {
            f"unique_values({name})": indices_of(name, one, self.max_categories.get(name))
            for name, one in counts.items()
        }

    def _transform_arrow(self, table: pa.Table) -> pa.Table:
        require_no_missing(table, self.columns)
        return super()._transform_arrow(table)


class OrdinalEncoder(CategoryEncoder):
    """Replace each value by its index in the sorted values of the fitted dataset.

    Values that the dataset did not have become null. Lists are encoded element by element, or as
    a whole with `encode_lists=False`. `fit` and `transform` refuse missing values (`ConfigError`).
    """

    _parameters = ("columns", "encode_lists", "output_columns")

    def __init__(
        self,
        columns: Sequence[str],
        *,
        encode_lists: bool = True,
        output_columns: Sequence[str] | None = None,
    ) -> None:
        super().__init__(columns, output_columns=output_columns)
        self.encode_lists = encode_lists

    def _transform_column(self, table: pa.Table, name: str) -> pa.Array:
        column = column_of(table, name)
        indices = self.stats_[f"unique_values({name})"]
        if not (is_list(column.type) and self.encode_lists):
            return _nullable(codes_of(column, indices))
        codes = codes_of(list_values(column), indices)
        return list_array(list_lengths(column), _nullable(codes))


class OneHotEncoder(CategoryEncoder):
    """Replace each value by a vector of 8-bit integers: 1 at the index of the value, 0 elsewhere.

    With `max_categories={column: n}` only the n most frequent values have an index; of equally
    frequent ones those that occur first. All other values give zeros. Lists are values as a whole.
    `fit` and `transform` refuse missing values (`ConfigError`).
    """

    def _transform_column(self, table: pa.Table, name: str) -> pa.Array:
        indices = self.stats_[f"unique_values({name})"]
        codes = codes_of(column_of(table, name), indices)
        matrix = np.zeros((len(codes), len(indices)), dtype=np.uint8)
        known = np.flatnonzero(codes >= 0)
        matrix[known, codes[known]] = 1
        return tensor_array(matrix)


class MultiHotEncoder(CategoryEncoder):
    """Replace each list by a vector with the number of occurrences of each value in it.

    Single values count as lists of one. `max_categories` is that of `OneHotEncoder`. `fit` refuses
    missing values in lists, `transform` also missing lists (`ConfigError`).
    """

    encode_lists = True

    def _transform_column(self, table: pa.Table, name: str) -> pa.Array:
        column = column_of(table, name)
        lengths = np.ones(len(column), dtype=np.int64)
        values = column
        if is_list(column.type):
            lengths, values = list_lengths(column), list_values(column)
        indices = self.stats_[f"unique_values({name})"]
        return tensor_array(count_matrix(codes_of(values, indices), lengths, len(indices)))


class LabelEncoder(ArrowPreprocessor):
    """Replace each label by its index in the sorted labels of the fitted dataset.

    Labels that the dataset did not have become null. `fit` and `transform` refuse missing labels
    (`ConfigError`).
    """

    _parameters = ("label_column", "output_column")

    def __init__(self, label_column: str, *, output_column: str | None = None) -> None:
        super().__init__()
        self.label_column = label_column
        self.output_column = output_column or label_column

    def get_input_columns(self) -> list[str]:
        """Return the label column."""
        return [self.label_column]

    def get_output_columns(self) -> list[str]:
        """Return the output column."""
        return [self.output_column]

    def inverse_transform(self, ds: Dataset) -> Dataset:
        """Return the dataset with the labels of `output_column` in `label_column`.

        Raises `PreprocessorNotFittedException` if `fit` is missing.
        """
        self._require_fitted("inverse_transform")
        labels = tuple(self.stats_[self._key])
        return ds.with_transform(LabelDecoding(self.output_column, self.label_column, labels))

    @property
    def _key(self) -> str:
        return f"unique_values({self.label_column})"

    def statistics(self) -> Sequence[Statistic]:
        return [ValueCountsStatistic(self.label_column, explode_lists=False)]

    def _stats_of(self, results: Results) -> dict[str, Any]:
        counts = results[ValueCountsStatistic(self.label_column, explode_lists=False)]
        return {self._key: indices_of(self.label_column, counts)}

    def _transform_arrow(self, table: pa.Table) -> pa.Table:
        require_no_missing(table, [self.label_column])
        codes = codes_of(single_values(table, self.label_column), self.stats_[self._key])
        return set_column(table, self.output_column, _nullable(codes))


@dataclass(frozen=True)
class LabelDecoding:
    """The transform from indices back to labels; indices without label become null."""

    column: str
    output_column: str
    labels: tuple[Any, ...]

    name = "LabelEncoder.inverse_transform"
    runs_user_code = False

    @property
    def identity(self) -> str:
        """The columns and the labels."""
        return repr(self)

    def bind(self) -> BlockFunction:
        """Return the function for blocks."""
        labels = pa.array(self.labels)

        def decode(block: pa.Table) -> pa.Table:
            codes = int64_array(column_of(block, self.column).fill_null(-1))
            unknown = (codes < 0) | (codes >= len(labels))
            taken = labels.take(arrow_array(np.where(unknown, 0, codes), unknown))
            return set_column(block, self.output_column, taken)

        return decode


def indices_of(column: str, counts: ValueCounts, limit: int | None = None) -> dict[Any, int]:
    """Return the sorted values, or the `limit` most frequent ones, with their indices.

    Raises `ConfigError` if there are missing values.
    """
    if None in counts:
        raise ConfigError(
            f"Unable to fit column {column!r} because it contains null values.",
            do="Replace missing values first, for example with SimpleImputer.",
        )
    frequent = sorted(counts, key=counts.__getitem__, reverse=True)[:limit]
    return {value: index for index, value in enumerate(sorted(frequent))}


def _nullable(codes: Int64Codes) -> pa.Array:
    return arrow_array(codes, codes < 0)
