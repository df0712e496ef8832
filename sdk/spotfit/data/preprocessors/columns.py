"""Columns of blocks: checks, missing values, and views of their buffers as NumPy arrays."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from spotfit.core.errors import ConfigError
from spotfit.data.formats.column_arrays import arrow_array, buffer_values

if TYPE_CHECKING:
    from typing import TypeAlias

Column: TypeAlias = pa.ChunkedArray
Int64Codes: TypeAlias = "np.ndarray[tuple[int], np.dtype[np.int64]]"
BoolMask: TypeAlias = "np.ndarray[tuple[int], np.dtype[np.bool_]]"


def column_of(block: pa.Table, name: str) -> pa.ChunkedArray:
    """Return a column. Raises `ConfigError` if there is none of this name, or several."""
    indices = block.schema.get_all_field_indices(name)
    if len(indices) != 1:
        problem = "no column" if not indices else "several columns"
        raise ConfigError(
            f"The dataset has {problem} {name!r}; its columns are {block.column_names}.",
            do="Correct columns= of the preprocessor, or rename the columns of the dataset.",
        )
    return block.column(indices[0])


def numeric_column(block: pa.Table, name: str) -> pa.ChunkedArray:
    """Return a column of integers, 32-bit or 64-bit floats.

    Booleans count as 0 and 1, decimals and columns that are all missing become 64-bit floats.
    Raises `ConfigError` for other types.
    """
    column = column_of(block, name)
    kind = column.type
    if pa.types.is_boolean(kind):
        return pc.cast(column, pa.uint8())
    if pa.types.is_float16(kind):
        return pc.cast(column, pa.float32())
    if pa.types.is_decimal(kind) or pa.types.is_null(kind):
        return pc.cast(column, pa.float64())
    if not (pa.types.is_integer(kind) or pa.types.is_floating(kind)):
        raise ConfigError(
            f"The column {name!r} has the type {kind}; this preprocessor needs numbers.",
            do="Leave the column out of columns=, or convert it with map_batches() first.",
        )
    return column


def single_values(block: pa.Table, name: str) -> pa.ChunkedArray:
    """Return a column that has one value in each row. Raises `ConfigError` for other columns."""
    column = column_of(block, name)
    if pa.types.is_nested(column.type) or is_list(column.type):
        raise ConfigError(
            f"The column {name!r} has the type {column.type}; this preprocessor needs one value in "
            "each row.",
            do="Leave the column out of columns=, or convert it with map_batches() first.",
        )
    return column


def to_float(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Return a numeric column as floats: 32-bit ones unchanged, everything else as 64-bit."""
    return column if pa.types.is_float32(column.type) else as_float64(column)


def as_float64(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Return a numeric column as 64-bit floats; integers beyond 2**53 are rounded."""
    return pc.cast(column, pa.float64(), safe=False)


def is_missing(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Return for each row whether the value is null or NaN."""
    return pc.is_null(column, nan_is_null=True)


def drop_missing(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Return the values that are neither null nor NaN."""
    if pa.types.is_floating(column.type):
        return pc.filter(column, pc.invert(is_missing(column)))
    return pc.drop_null(column)


def is_list(kind: pa.DataType) -> bool:
    """Whether each row has several values: a list or a tensor."""
    return (
        pa.types.is_list(kind)
        or pa.types.is_large_list(kind)
        or pa.types.is_fixed_size_list(kind)
        or isinstance(kind, pa.FixedShapeTensorType)
    )


def row_width(kind: pa.DataType) -> int | None:
    """Return the number of values in each row; None for lists of any length."""
    if isinstance(kind, pa.FixedShapeTensorType):
        return int(math.prod(kind.shape))
    if pa.types.is_fixed_size_list(kind):
        return int(kind.list_size)
    return None if is_list(kind) else 1


def list_values(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Return the elements of all lists of a column, or of tensors, one after the other."""
    return pc.list_flatten(_as_lists(column))


def list_lengths(column: pa.ChunkedArray) -> Int64Codes:
    """Return the number of elements in each row; 0 where the row is missing."""
    return int64_array(
        pc.fill_null(pc.cast(pc.list_value_length(_as_lists(column)), pa.int64()), number(0))
    )


def _as_lists(column: pa.ChunkedArray) -> pa.ChunkedArray:
    if not isinstance(column.type, pa.FixedShapeTensorType):
        return column
    return pa.chunked_array(
        [chunk.storage for chunk in column.chunks], type=column.type.storage_type
    )


def python_values(column: pa.Array | pa.ChunkedArray) -> list[Any]:
    """Return hashable values of Python; lists as tuples, missing values and NaN as None."""
    return [_hashable(value) for value in column.to_pylist()]


def _hashable(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(_hashable(element) for element in value)
    return None if isinstance(value, float) and math.isnan(value) else value


def codes_of(column: pa.ChunkedArray, codes: Mapping[Any, int]) -> Int64Codes:
    """Return the code of each value, or -1 for values that have none."""
    if is_list(column.type):
        rows = python_values(column)
        return np.fromiter((codes.get(row, -1) for row in rows), np.int64, len(rows))
    encoded = as_dictionary(column)
    known = [codes.get(value, -1) for value in python_values(encoded.dictionary)]
    # The last element is for missing values, whose index is -1.
    table = np.array([*known, codes.get(None, -1)], dtype=np.int64)
    return table[int64_array(pc.fill_null(pc.cast(encoded.indices, pa.int64()), number(-1)))]


def as_dictionary(column: pa.ChunkedArray) -> pa.DictionaryArray:
    """Return a column as one array of distinct values and indices into them."""
    encoded = column if pa.types.is_dictionary(column.type) else pc.dictionary_encode(column)
    if not encoded.num_chunks:
        return pa.DictionaryArray.from_arrays(
            pa.array([], encoded.type.index_type),
            pa.array([], encoded.type.value_type),
            ordered=encoded.type.ordered,
        )
    return pa.concat_arrays(encoded.unify_dictionaries().chunks)


def require_no_missing(block: pa.Table, columns: Sequence[str]) -> None:
    """Raise `ConfigError` if one of the columns has missing values."""
    missing = [name for name in columns if has_missing(column_of(block, name))]
    if missing:
        raise ConfigError(
            f"Unable to transform columns {missing} because they contain null values.",
            do="Replace missing values first, for example with SimpleImputer.",
        )


def has_missing(column: pa.ChunkedArray) -> bool:
    """Whether a value of the column is null or NaN."""
    if pa.types.is_floating(column.type):
        return bool(pc.any(is_missing(column)).as_py())
    return bool(column.null_count)


# ── between Arrow and NumPy ──
# `to_numpy()`, `pyarrow.array()` and `pyarrow.scalar()` import pandas where it is installed, which
# takes 1.6 CPU seconds before the first batch; views of the buffers do not.


def number(value: float) -> pa.Scalar:
    """Return a scalar for a function of Arrow: a 64-bit integer, or float."""
    return arrow_array(np.array([value]))[0]


def number_array(column: pa.ChunkedArray, name: str) -> Any:
    """Return a numeric or boolean column with its own type; missing floats are NaN.

    Raises `ConfigError` for missing integers: their type would depend on the values of a block.
    """
    if pa.types.is_floating(column.type):
        values = pc.fill_null(column, pc.cast(number(math.nan), column.type))
        return _flat_array(values, "float32" if pa.types.is_float32(column.type) else "float64")
    if has_missing(column):
        raise ConfigError(
            f"The integer column {name!r} has missing values, which a vector of integers cannot "
            "contain.",
            do="Replace them with SimpleImputer first, or pass a dtype of floats if there is one.",
        )
    if pa.types.is_boolean(column.type):
        return bool_array(column)
    return _flat_array(column, str(column.type))


def int64_array(column: pa.Array | pa.ChunkedArray) -> Int64Codes:
    """Return a numeric column without missing values as 64-bit integers."""
    array: Int64Codes = _flat_array(pc.cast(column, pa.int64(), safe=False), "int64")
    return array


def float64_array(column: pa.Array | pa.ChunkedArray) -> Any:
    """Return a numeric column as 64-bit floats, with NaN for missing values."""
    return _flat_array(pc.fill_null(as_float64(column), number(math.nan)), "float64")


def bool_array(column: pa.Array | pa.ChunkedArray) -> BoolMask:
    """Return a column of booleans without missing values."""
    mask: BoolMask = _flat_array(pc.cast(column, pa.uint8()), "uint8").astype(bool)
    return mask


def _flat_array(column: pa.Array | pa.ChunkedArray, dtype: str) -> Any:
    chunks = column.chunks if isinstance(column, pa.ChunkedArray) else [column]
    views = [buffer_values(chunk, dtype) for chunk in chunks if len(chunk)]
    if len(views) == 1:
        return views[0]
    return np.concatenate(views) if views else np.empty(0, dtype)


def count_matrix(codes: Int64Codes, lengths: Int64Codes, size: int) -> Any:
    """Return for each row how often each of `size` codes occurs in it.

    Row i has `lengths[i]` of the codes; codes below 0 are not counted.
    """
    rows = np.repeat(np.arange(len(lengths)), lengths)
    known = codes >= 0
    cells = rows[known] * size + codes[known]
    return np.bincount(cells, minlength=len(lengths) * size).reshape(len(lengths), size)


def dictionary_array(codes: Int64Codes, categories: list[Any], *, ordered: bool) -> pa.Array:
    """Return a column of categories; null where a code is below 0."""
    fitting = [
        kind for kind in (np.int8, np.int16, np.int32) if len(categories) < np.iinfo(kind).max
    ]
    indices = arrow_array(codes.astype(fitting[0]), codes < 0)
    return pa.DictionaryArray.from_arrays(indices, pa.array(categories), ordered=ordered)
