"""Preprocessors of several columns of a row together: `Normalizer`, `Concatenator`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa

from spotfit.core.errors import ConfigError
from spotfit.data.formats.column_arrays import arrow_array, list_array, tensor_array
from spotfit.data.plans.transforms import set_column
from spotfit.data.preprocessors.columns import (
    bool_array,
    column_of,
    float64_array,
    is_list,
    is_missing,
    list_lengths,
    list_values,
    number_array,
    numeric_column,
    require_no_missing,
    row_width,
)
from spotfit.data.preprocessors.preprocessor_base import (
    ArrowPreprocessor,
    ColumnPreprocessor,
    column_names,
)


class Normalizer(ColumnPreprocessor):
    """Divide the columns of each row by the norm of the row: "l1", "l2" or "max".

    A missing value counts as 0 in the norm and stays missing; a row of zeros gives NaN. The outputs
    are 32-bit floats if all columns are, else 64-bit floats.
    """

    _parameters = ("columns", "norm", "output_columns")
    _is_fittable = False

    def __init__(
        self,
        columns: Sequence[str],
        norm: str = "l2",
        *,
        output_columns: Sequence[str] | None = None,
    ) -> None:
        super().__init__(columns, output_columns)
        if norm not in ("l1", "l2", "max"):
            raise ConfigError(f"The norm {norm!r} is not supported.", do="Use 'l1', 'l2' or 'max'.")
        self.norm = norm

    def _transform_arrow(self, table: pa.Table) -> pa.Table:
        columns = [numeric_column(table, name) for name in self.columns]
        if not columns:
            return table
        rows = np.stack([float64_array(column) for column in columns], axis=1)
        norms = self._norms(np.abs(np.nan_to_num(rows, posinf=np.inf, neginf=-np.inf)))
        with np.errstate(divide="ignore", invalid="ignore"):
            scaled = rows / norms[:, None]
        single = all(pa.types.is_float32(column.type) for column in columns)
        result = table
        for index, name in enumerate(self.output_columns):
            values = scaled[:, index].astype(np.float32 if single else np.float64)
            missing = bool_array(is_missing(columns[index]))
            result = set_column(result, name, arrow_array(values, missing))
        return result

    def _norms(self, sizes: Any) -> Any:
        if self.norm == "l1":
            return sizes.sum(axis=1)
        return np.sqrt((sizes**2).sum(axis=1)) if self.norm == "l2" else sizes.max(axis=1)


class Concatenator(ArrowPreprocessor):
    """Combine numeric columns into one column of vectors, in the order of `columns`.

    The columns are removed. `dtype` is that of the vectors, by default the common type of the
    columns; missing floats become NaN. With `flatten=True` columns of lists and tensors are
    combined too: the output is a tensor column, or a column of lists if one of them has lists of
    any length. Raises `ConfigError` for columns that do not exist, whatever `raise_if_missing` is,
    as Ray 2.60 does, and for missing integers without a `dtype` of floats.
    """

    _parameters: ClassVar[tuple[str, ...]] = (
        "columns", "output_column_name", "dtype", "raise_if_missing", "flatten",
    )  # fmt: skip
    _is_fittable = False

    def __init__(
        self,
        columns: Sequence[str],
        output_column_name: str = "concat_out",
        dtype: Any = None,
        raise_if_missing: bool = False,  # noqa: FBT001, FBT002 - the signature of Ray
        flatten: bool = False,  # noqa: FBT001, FBT002
    ) -> None:
        super().__init__()
        self.columns = column_names(columns)
        if not self.columns:
            raise ConfigError("Concatenator has no columns.", do="Pass columns=[...].")
        self.output_column_name = output_column_name
        self.dtype = dtype
        self.raise_if_missing = raise_if_missing
        self.flatten = flatten

    def get_output_columns(self) -> list[str]:
        """Return the output column."""
        return [self.output_column_name]

    def removed_columns(self) -> set[str]:
        """Return the columns."""
        return set(self.columns) - {self.output_column_name}

    def _transform_arrow(self, table: pa.Table) -> pa.Table:
        columns = [column_of(table, name) for name in self.columns]
        widths = [row_width(column.type) for column in columns]
        values = [self._values(table, name) for name in self.columns]
        dtype = np.dtype(self.dtype) if self.dtype is not None else np.result_type(*values)
        values = [array.astype(dtype) for array in values]
        if None not in widths:
            rows = [
                array.reshape(table.num_rows, width)
                for array, width in zip(values, widths, strict=True)
            ]
            combined = tensor_array(np.concatenate(rows, axis=1))
        else:
            lengths = [_lengths(column) for column in columns]
            combined = list_array(sum(lengths), arrow_array(_interleave(values, lengths)))
        return set_column(
            table.drop_columns(list(self.removed_columns())), self.output_column_name, combined
        )

    def _values(self, table: pa.Table, name: str) -> Any:
        column = column_of(table, name)
        if not is_list(column.type):
            column = column if pa.types.is_boolean(column.type) else numeric_column(table, name)
        elif self.flatten:
            require_no_missing(table, [name])
            column = numeric_column(pa.table({name: list_values(column)}), name)
        else:
            raise ConfigError(
                f"The column {name!r} has a list in each row.", do="Pass flatten=True."
            )
        floats = self.dtype is not None and np.dtype(self.dtype).kind == "f"
        return float64_array(column) if floats else number_array(column, name)


def _lengths(column: pa.ChunkedArray) -> Any:
    if is_list(column.type):
        return list_lengths(column)
    return np.ones(len(column), dtype=np.int64)


def _interleave(values: Sequence[Any], lengths: Sequence[Any]) -> Any:
    """Return for each row the elements of all columns, one after the other."""
    totals = np.sum(lengths, axis=0)
    places = np.cumsum(totals) - totals
    combined = np.empty(totals.sum(), dtype=values[0].dtype)
    for array, counts in zip(values, lengths, strict=True):
        within = np.arange(len(array)) - np.repeat(np.cumsum(counts) - counts, counts)
        combined[np.repeat(places, counts) + within] = array
        places = places + counts
    return combined
