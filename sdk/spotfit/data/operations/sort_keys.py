"""Key columns as integers, bytes and decimals whose order and equality DuckDB and PyArrow share.

The two differ in the place of NaN and null values, in what equals NaN and -0.0, and in the range
and precision of times.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from spotfit.core.errors import ConfigError

_BITS = {16: np.int16, 32: np.int32, 64: np.int64}


def can_be_key(kind: pa.DataType) -> bool:
    """Return whether `order_key` and `equality_key` accept a type."""
    return kind != pa.float16() and (pa.types.is_floating(kind) or _plain_type(kind) is not None)


def order_key(name: str, column: pa.ChunkedArray, *, descending: bool = False) -> pa.ChunkedArray:
    """Return values that are sorted, nulls last, as PyArrow sorts those of a column.

    `descending` is the direction in which they will be sorted: NaN follows the other numbers in
    both. Raises `ConfigError` for types without an order of both libraries.
    """
    kind = column.type
    if pa.types.is_floating(kind) and kind != pa.float16():
        return _map_chunks(column, lambda chunk: _float_order(chunk, descending=descending))
    return _plain_key(name, column)


def equality_key(name: str, column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Return values that are equal where PyArrow's join takes those of a column as equal.

    That is bit by bit: NaN equals NaN, and -0.0 differs from 0.0. Raises `ConfigError` for types
    that DuckDB cannot compare.
    """
    kind = column.type
    if pa.types.is_floating(kind):
        return _map_chunks(column, lambda chunk: chunk.view(pa.from_numpy_dtype(_bits(kind))))
    return _plain_key(name, column)


def _bits(kind: pa.DataType) -> Any:
    return _BITS[kind.bit_width]


def _map_chunks(column: pa.ChunkedArray, function: Any) -> pa.ChunkedArray:
    chunks = column.chunks or [pa.array([], column.type)]
    return pa.chunked_array([function(chunk) for chunk in chunks])


def _float_order(values: pa.Array, *, descending: bool) -> pa.Array:
    """Return 64-bit integers in the order of the numbers, with NaN after all of them."""
    # -0.0 + 0.0 is 0.0, which PyArrow takes as equal when it sorts.
    numbers = pc.fill_null(values.cast(pa.float64()), 0.0).to_numpy(zero_copy_only=False) + 0.0
    bits = numbers.view(np.int64)
    order = bits ^ ((bits >> 63) & np.int64(2**63 - 1))
    limits = np.iinfo(np.int64)
    order[np.isnan(numbers)] = limits.min if descending else limits.max
    mask = values.is_null().to_numpy(zero_copy_only=False) if values.null_count else None
    return pa.array(order, mask=mask)


def _plain_key(name: str, column: pa.ChunkedArray) -> pa.ChunkedArray:
    kind = _plain_type(column.type)
    if kind is None:
        raise ConfigError(
            f"The column {name!r} of type {column.type} cannot be a key of rows that do not fit "
            "into memory.",
            do="Convert it to numbers, text or bytes first, as in ds.with_column('key', "
            f"col({name!r}).cast('string')).",
        )
    return column.cast(kind)


def _plain_type(kind: pa.DataType) -> pa.DataType | None:
    """Return the type as which DuckDB compares values; None if it cannot."""
    if pa.types.is_null(kind) or pa.types.is_date32(kind) or pa.types.is_time32(kind):
        return pa.int32()
    if pa.types.is_temporal(kind) and kind != pa.month_day_nano_interval():
        return pa.int64()
    if pa.types.is_boolean(kind) or pa.types.is_integer(kind) or pa.types.is_decimal128(kind):
        return kind
    # Text by its bytes, as PyArrow compares it.
    return pa.large_binary() if any(check(kind) for check in _BINARY_TYPES) else None


_BINARY_TYPES = (
    pa.types.is_string,
    pa.types.is_large_string,
    pa.types.is_binary,
    pa.types.is_large_binary,
    pa.types.is_fixed_size_binary,
)
