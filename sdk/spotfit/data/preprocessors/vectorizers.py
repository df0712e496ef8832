"""Texts as tokens and as vectors of counts."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from spotfit.core.errors import ConfigError, ConfigTypeError
from spotfit.data.formats.column_arrays import tensor_array
from spotfit.data.plans.transforms import set_column
from spotfit.data.preprocessors.column_statistics import Results, Statistic, TokenCountsStatistic
from spotfit.data.preprocessors.columns import (
    bool_array,
    codes_of,
    column_of,
    count_matrix,
    float64_array,
    is_missing,
    list_lengths,
    list_values,
    number_array,
    numeric_column,
)
from spotfit.data.preprocessors.preprocessor_base import (
    ArrowPreprocessor,
    ColumnPreprocessor,
    column_names,
)


@dataclass(frozen=True)
class Tokenization:
    """Lists of tokens for a column of texts; missing texts stay missing."""

    function: Callable[[str], Sequence[Any]] | None

    def __call__(self, column: pa.ChunkedArray) -> pa.ChunkedArray:
        """Return the tokens: parts between spaces, or what the function returns."""
        if pa.types.is_dictionary(column.type):
            column = pc.cast(column, column.type.value_type)
        if pa.types.is_null(column.type):
            column = pc.cast(column, pa.string())
        if self.function is None:
            return pc.split_pattern(_require_text(column), " ")
        rows = [None if text is None else list(self.function(text)) for text in column.to_pylist()]
        tokens = pa.array(rows)
        if pa.types.is_null(tokens.type) or pa.types.is_null(tokens.type.value_type):
            tokens = pc.cast(tokens, pa.list_(pa.string()))
        return pa.chunked_array([tokens])


class TextPreprocessor(ColumnPreprocessor):
    """Base of preprocessors with a `tokenization_fn`; by default texts are split at spaces."""

    tokenization_fn: Callable[[str], Sequence[Any]] | None

    @property
    def runs_user_code(self) -> bool:
        """Whether functions of the user are called."""
        return self.tokenization_fn is not None

    def _tokens(self, table: pa.Table, name: str) -> pa.ChunkedArray:
        return Tokenization(self.tokenization_fn)(column_of(table, name))


class Tokenizer(TextPreprocessor):
    """Replace each text by the list of its tokens; missing texts stay missing."""

    _parameters = ("columns", "tokenization_fn", "output_columns")
    _is_fittable = False

    def __init__(
        self,
        columns: Sequence[str],
        tokenization_fn: Callable[[str], Sequence[Any]] | None = None,
        output_columns: Sequence[str] | None = None,
    ) -> None:
        super().__init__(columns, output_columns)
        self.tokenization_fn = tokenization_fn

    def _transform_column(self, table: pa.Table, name: str) -> pa.ChunkedArray:
        return self._tokens(table, name)


class CountVectorizer(TextPreprocessor):
    """Replace each text by a vector with the number of occurrences of each token.

    The tokens are those of the fitted dataset, or the `max_features` most frequent ones; the most
    frequent is first, and of equally frequent ones the one that occurs first. Missing texts stay
    missing.
    """

    _parameters = ("columns", "tokenization_fn", "max_features", "output_columns")

    def __init__(
        self,
        columns: Sequence[str],
        tokenization_fn: Callable[[str], Sequence[Any]] | None = None,
        max_features: int | None = None,
        *,
        output_columns: Sequence[str] | None = None,
    ) -> None:
        super().__init__(columns, output_columns)
        self.tokenization_fn = tokenization_fn
        self.max_features = max_features

    def statistics(self) -> Sequence[Statistic]:
        tokenization = Tokenization(self.tokenization_fn)
        return [TokenCountsStatistic(name, tokenization) for name in self.columns]

    def _stats_of(self, results: Results) -> dict[str, Any]:
        counts: dict[str, Counter[Any]] = {
            one.column: Counter(results[one]) for one in self.statistics()
        }
        return {
            f"token_counts({name})": Counter(dict(one.most_common(self.max_features)))
            for name, one in counts.items()
        }

    def _transform_column(self, table: pa.Table, name: str) -> pa.Array:
        counts = self.stats_[f"token_counts({name})"]
        indices = {token: index for index, (token, _) in enumerate(counts.most_common())}
        tokens = self._tokens(table, name)
        return _vectors(tokens, codes_of(list_values(tokens), indices), len(indices))


class HashingVectorizer(TextPreprocessor):
    """Replace each text by a vector of counts, in which hashes of the tokens are the indices.

    Missing texts stay missing.
    """

    _parameters = ("columns", "num_features", "tokenization_fn", "output_columns")
    _is_fittable = False

    def __init__(
        self,
        columns: Sequence[str],
        num_features: int,
        tokenization_fn: Callable[[str], Sequence[Any]] | None = None,
        *,
        output_columns: Sequence[str] | None = None,
    ) -> None:
        super().__init__(columns, output_columns)
        self.num_features = _feature_count(num_features)
        self.tokenization_fn = tokenization_fn

    def _transform_column(self, table: pa.Table, name: str) -> pa.Array:
        tokens = self._tokens(table, name)
        flat = list_values(tokens)
        hashes = {token: _hash(token, self.num_features) for token in flat.unique().to_pylist()}
        return _vectors(tokens, codes_of(flat, hashes), self.num_features)


class FeatureHasher(ArrowPreprocessor):
    """Add up columns of token counts in a vector, in which hashes of their names are the indices.

    The vectors have 64-bit integers if all columns have integers, else 64-bit floats, where missing
    values make an element NaN. Raises `ConfigError` for missing integers.
    """

    _parameters = ("columns", "num_features", "output_column")
    _is_fittable = False

    def __init__(self, columns: Sequence[str], num_features: int, output_column: str) -> None:
        super().__init__()
        self.columns = column_names(columns)
        self.num_features = _feature_count(num_features)
        self.output_column = output_column

    def get_output_columns(self) -> list[str]:
        """Return the output column."""
        return [self.output_column]

    def _transform_arrow(self, table: pa.Table) -> pa.Table:
        columns = {name: numeric_column(table, name) for name in self.columns}
        exact = all(pa.types.is_integer(column.type) for column in columns.values())
        shape = (table.num_rows, self.num_features)
        sums = np.zeros(shape, dtype=np.int64 if exact else np.float64)
        for name, column in columns.items():
            values = number_array(column, name) if exact else float64_array(column)
            sums[:, _hash(name, self.num_features)] += values
        return set_column(table, self.output_column, tensor_array(sums))


def _require_text(column: pa.ChunkedArray) -> pa.ChunkedArray:
    if not (pa.types.is_string(column.type) or pa.types.is_large_string(column.type)):
        raise ConfigTypeError(
            f"A column of the type {column.type} cannot be split into tokens.",
            do="Use columns of texts, or pass tokenization_fn=.",
        )
    return column


def _vectors(tokens: pa.ChunkedArray, codes: Any, size: int) -> pa.Array:
    missing = bool_array(is_missing(tokens))
    return tensor_array(count_matrix(codes, list_lengths(tokens), size), missing)


def _hash(value: object, num_features: int) -> int:
    """Return the index that Ray gives to a value: SHA-256 of its text, modulo the size."""
    digest = hashlib.sha256(str(value).encode()).digest()
    return int.from_bytes(digest) % num_features


def _feature_count(num_features: int) -> int:
    if num_features < 1:
        raise ConfigError(
            f"num_features must be a positive integer, not {num_features}.", do="Pass e.g. 1024."
        )
    return num_features
