"""Decoded sizes of rows."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from spotfit.data.source import IntArray


def row_sizes(rows: pa.Table) -> IntArray:
    """Return the decoded size of each row in bytes, without dictionaries, which rows share."""
    sizes = np.zeros(rows.num_rows, dtype=np.int64)
    for column in rows.columns:
        first = 0
        for chunk in column.chunks:
            sizes[first : first + len(chunk)] += _value_sizes(chunk)
            first += len(chunk)
    return sizes


def _value_sizes(values: pa.Array) -> IntArray | int:
    """Return the size of each value, or one number if all have the same size."""
    kind = values.type
    sizes: IntArray | int
    if isinstance(values, pa.ExtensionArray):
        sizes = _value_sizes(values.storage)
    elif pa.types.is_struct(kind):
        sizes = sum((_value_sizes(values.field(n)) for n in range(kind.num_fields)), 0)
    elif pa.types.is_fixed_size_list(kind):
        length = kind.list_size
        items = _value_sizes(values.values.slice(values.offset * length, len(values) * length))
        sizes = (
            items * length
            if isinstance(items, int)
            else items.reshape(len(values), length).sum(axis=1)
        )
    elif pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_map(kind):
        sizes = _list_sizes(values)
    elif pa.types.is_string(kind) or pa.types.is_binary(kind):
        sizes = _lengths(values) + 4
    elif pa.types.is_large_string(kind) or pa.types.is_large_binary(kind):
        sizes = _lengths(values) + 8
    else:
        try:
            sizes = -(-int(kind.bit_width) // 8)
        except ValueError:  # null values, views and unions
            sizes = values.nbytes // max(1, len(values))
    return sizes


def _list_sizes(values: pa.Array) -> IntArray:
    offsets = values.offsets.to_numpy()
    items = _value_sizes(values.values.slice(offsets[0], offsets[-1] - offsets[0]))
    if isinstance(items, int):
        sizes = np.diff(offsets).astype(np.int64) * items
    else:
        sizes = np.diff(np.concatenate([[0], np.cumsum(items)])[offsets - offsets[0]])
    result: IntArray = sizes + offsets.itemsize
    return result


def _lengths(values: pa.Array) -> IntArray:
    lengths: IntArray = pc.binary_length(values).fill_null(0).to_numpy(zero_copy_only=False)
    return lengths.astype(np.int64)
