"""Tensor columns in Parquet files: those of Ray Data, and those that spotfit writes.

A list costs a level for each value; bytes of a fixed size are read six times as fast. Tensors are
therefore written as `fixed_size_binary`, with element type and shape in the field's metadata.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa

from spotfit.core.errors import ConfigError

_DTYPE = b"spotfit.dtype"
_SHAPE = b"spotfit.shape"
_EXTENSION_NAME = b"ARROW:extension:name"
_EXTENSION_METADATA = b"ARROW:extension:metadata"
_RAY_FIXED = (b"ray.data.arrow_tensor", b"ray.data.arrow_tensor_v2")
_RAY_VARIABLE = (b"ray.data.arrow_variable_shaped_tensor",)


def encode_tensors(table: pa.Table) -> pa.Table:
    """Return the table with tensors of one shape as bytes, for files; see `decode_tensors`."""
    for index, field in enumerate(table.schema):
        kind = field.type
        if not isinstance(kind, pa.FixedShapeTensorType) or not _can_be_bytes(kind):
            continue
        chunks = [_to_bytes(chunk) for chunk in table.column(index).chunks]
        metadata = {
            **(field.metadata or {}),
            _DTYPE: str(kind.value_type.to_pandas_dtype().__name__).encode(),
            _SHAPE: json.dumps(list(kind.shape)).encode(),
        }
        stored = pa.binary(kind.value_type.bit_width // 8 * math.prod(kind.shape))
        table = table.set_column(
            index,
            pa.field(field.name, stored, field.nullable, metadata),
            pa.chunked_array(chunks, stored),
        )
    return table


def decode_tensors(table: pa.Table) -> pa.Table:
    """Return the table with tensors that Ray Data or spotfit stored as `arrow.fixed_shape_tensor`.

    Tensors of different shapes become nested lists.
    """
    for index, field in enumerate(table.schema):
        kind = decoded_type(field)
        if kind == field.type:
            continue
        metadata = field.metadata or {}
        chunks = table.column(index).chunks
        if metadata.get(_EXTENSION_NAME) in _RAY_VARIABLE:
            arrays = [_nested_lists(chunk, kind) for chunk in chunks]
        else:
            arrays = [_to_tensors(chunk, kind) for chunk in chunks]
        table = table.set_column(
            index, pa.field(field.name, kind, field.nullable), pa.chunked_array(arrays, kind)
        )
    return table


def decoded_type(field: pa.Field) -> pa.DataType:
    """Return the type that `decode_tensors` gives to a column."""
    metadata = field.metadata or {}
    name = metadata.get(_EXTENSION_NAME)
    if pa.types.is_fixed_size_binary(field.type) and _DTYPE in metadata:
        dtype = pa.from_numpy_dtype(np.dtype(metadata[_DTYPE].decode()))
        return pa.fixed_shape_tensor(dtype, json.loads(metadata[_SHAPE]))
    if name in _RAY_FIXED:
        return pa.fixed_shape_tensor(field.type.value_type, _ray_parameter(field, metadata))
    if name in _RAY_VARIABLE:
        kind = field.type.field("data").type.value_type
        for _ in range(_ray_parameter(field, metadata)):
            kind = pa.list_(kind)
        return kind
    return field.type


def tensors_from_bytes(column: pa.ChunkedArray, dtype: Any, shape: tuple[int, ...]) -> pa.Array:
    """Return tensors whose bytes, in C order, are the values of a binary column.

    Raises `ValueError` if a value has another size.
    """
    array = column.combine_chunks()
    size = np.dtype(dtype).itemsize * math.prod(shape)
    kind = pa.fixed_shape_tensor(pa.from_numpy_dtype(np.dtype(dtype)), list(shape))
    return _to_tensors(array.cast(pa.binary(size)), kind)


def _can_be_bytes(kind: pa.FixedShapeTensorType) -> bool:
    is_in_c_order = kind.permutation is None or [*kind.permutation] == sorted(kind.permutation)
    return is_in_c_order and kind.value_type.bit_width % 8 == 0  # booleans are bits


def _ray_parameter(field: pa.Field, metadata: Mapping[bytes, bytes]) -> Any:
    try:
        return json.loads(metadata[_EXTENSION_METADATA])
    except ValueError as error:
        raise ConfigError(
            f"The shape of the tensor column {field.name!r} is not stored as JSON, but as a "
            "pickle, which is not read from files.",
            do="Write the files with RAY_DATA_ARROW_EXTENSION_SERIALIZATION_FORMAT=JSON, or read "
            "other columns with columns=[…].",
        ) from error


def _to_bytes(array: pa.FixedShapeTensorArray) -> pa.Array:
    """Return the tensors of an array as bytes, without a copy."""
    kind = array.type
    size = math.prod(kind.shape)
    values = array.storage.values.slice(array.offset * size, len(array) * size)
    width = kind.value_type.bit_width // 8
    data = values.buffers()[1]
    begin = values.offset * width
    buffers = [_validity(array), data.slice(begin, len(array) * size * width) if data else None]
    return pa.Array.from_buffers(pa.binary(size * width), len(array), buffers)


def _to_tensors(array: pa.Array, kind: pa.FixedShapeTensorType) -> pa.Array:
    """Return bytes or lists, of one length each, as tensors, without a copy of the values."""
    size = math.prod(kind.shape)
    storage_type = kind.storage_type
    if pa.types.is_fixed_size_binary(array.type):
        width = array.type.byte_width
        data = array.buffers()[1].slice(array.offset * width, len(array) * width)
        values = pa.Array.from_buffers(kind.value_type, len(array) * size, [None, data])
    elif array.null_count:
        # Null lists have no values, but null tensors have.
        values = array.cast(pa.list_(kind.value_type, size)).values
    else:
        values = array.flatten()
    storage = pa.Array.from_buffers(storage_type, len(array), [_validity(array)], children=[values])
    return pa.ExtensionArray.from_storage(kind, storage)


def _validity(array: pa.Array) -> pa.Buffer | None:
    """Return the bits of values that are not null, from offset 0; None if all are valid."""
    if not array.null_count:
        return None
    return array.is_valid().buffers()[1]


def _nested_lists(array: pa.StructArray, kind: pa.DataType) -> pa.Array:
    rows = [
        None if row is None else np.reshape(row["data"], row["shape"]).tolist()
        for row in array.to_pylist()
    ]
    return pa.array(rows, kind)
