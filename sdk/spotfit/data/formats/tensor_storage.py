"""Tensor columns in Parquet files: those of Ray Data, and those that spotfit writes.

A list costs a level for each value; bytes of a fixed size are read six times as fast. Tensors are
therefore written as `fixed_size_binary`, with element type and shape in the field's metadata.
"""

from __future__ import annotations

import io
import json
import math
import pickle
from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa

from spotfit.core.errors import ConfigError
from spotfit.data.formats.column_arrays import column_to_numpy, list_column

_DTYPE = b"spotfit.dtype"
_SHAPE = b"spotfit.shape"
_RAGGED = b"spotfit.ragged"
_EXTENSION_NAME = b"ARROW:extension:name"
_EXTENSION_METADATA = b"ARROW:extension:metadata"
_RAY_FIXED = (b"ray.data.arrow_tensor", b"ray.data.arrow_tensor_v2")
_RAY_VARIABLE = (b"ray.data.arrow_variable_shaped_tensor",)


def ragged_tensor_field(name: str, kind: pa.DataType, *, nullable: bool = True) -> pa.Field:
    """Return the field of a column of nested lists that are tensors of different shapes.

    Rows have arrays in it, instead of lists of lists.
    """
    return pa.field(name, kind, nullable, {_RAGGED: b""})


def is_tensor_field(field: pa.Field) -> bool:
    """Whether the values of a column are tensors, of one shape or of different ones."""
    return isinstance(field.type, pa.FixedShapeTensorType) or _RAGGED in (field.metadata or {})


def plain_field(field: pa.Field) -> pa.Field:
    """Return the field without metadata, except that of `ragged_tensor_field`."""
    if _RAGGED in (field.metadata or {}):
        return ragged_tensor_field(field.name, field.type, nullable=field.nullable)
    return field.remove_metadata()


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
    table = _without_types_of_ray(table)
    for index, field in enumerate(table.schema):
        decoded = decoded_field(field)
        kind = decoded.type
        if kind == field.type:
            continue
        chunks = table.column(index).chunks
        if _RAGGED in (decoded.metadata or {}):
            arrays = [_ragged_to_lists(chunk, kind) for chunk in chunks]
        else:
            arrays = [_to_tensors(chunk, kind) for chunk in chunks]
        table = table.set_column(index, decoded, pa.chunked_array(arrays, kind))
    return table


def decoded_field(field: pa.Field) -> pa.Field:
    """Return the field that `decode_tensors` gives to a column."""
    field = _without_type_of_ray(field)
    metadata = field.metadata or {}
    name = metadata.get(_EXTENSION_NAME)
    if pa.types.is_fixed_size_binary(field.type) and _DTYPE in metadata:
        dtype = pa.from_numpy_dtype(np.dtype(metadata[_DTYPE].decode()))
        return pa.field(
            field.name, pa.fixed_shape_tensor(dtype, json.loads(metadata[_SHAPE])), field.nullable
        )
    if name in _RAY_FIXED:
        kind = pa.fixed_shape_tensor(field.type.value_type, _ray_parameter(field, metadata))
        return pa.field(field.name, kind, field.nullable)
    if name in _RAY_VARIABLE:
        kind = field.type.field("data").type.value_type
        for _ in range(_ray_parameter(field, metadata)):
            kind = pa.list_(kind)
        return ragged_tensor_field(field.name, kind, nullable=field.nullable)
    return plain_field(field)


def tensors_from_bytes(column: pa.ChunkedArray, dtype: Any, shape: tuple[int, ...]) -> pa.Array:
    """Return tensors whose bytes, in C order, are the values of a binary column.

    Raises `ValueError` if a value has another size.
    """
    array = column.combine_chunks()
    size = np.dtype(dtype).itemsize * math.prod(shape)
    kind = pa.fixed_shape_tensor(pa.from_numpy_dtype(np.dtype(dtype)), list(shape))
    return _to_tensors(array.cast(pa.binary(size)), kind)


def _without_types_of_ray(table: pa.Table) -> pa.Table:
    for index, field in enumerate(table.schema):
        stored = _without_type_of_ray(field)
        if stored is not field:
            storage = [chunk.storage for chunk in table.column(index).chunks]
            table = table.set_column(index, stored, pa.chunked_array(storage, stored.type))
    return table


def _without_type_of_ray(field: pa.Field) -> pa.Field:
    """Return a field of a type of Ray as processes see it that have not imported Ray."""
    kind = field.type
    name = getattr(kind, "extension_name", "").encode()
    if name not in (*_RAY_FIXED, *_RAY_VARIABLE):
        return field
    metadata = {_EXTENSION_NAME: name, _EXTENSION_METADATA: kind.__arrow_ext_serialize__()}
    return pa.field(field.name, kind.storage_type, field.nullable, metadata)


def _can_be_bytes(kind: pa.FixedShapeTensorType) -> bool:
    is_in_c_order = kind.permutation is None or [*kind.permutation] == sorted(kind.permutation)
    return is_in_c_order and kind.value_type.bit_width % 8 == 0  # booleans are bits


class _ShapeUnpickler(pickle.Unpickler):
    """Loads numbers and tuples; refuses whatever would call code."""

    def find_class(self, _module: str, _name: str) -> Any:
        raise pickle.UnpicklingError("it is not a tuple of numbers")


def _ray_parameter(field: pa.Field, metadata: Mapping[bytes, bytes]) -> Any:
    """Return a shape or a number of dimensions; Ray 2.49 to 2.54 stored them as a pickle."""
    stored = metadata[_EXTENSION_METADATA]
    try:
        return json.loads(stored)
    except ValueError:
        pass
    try:
        return _ShapeUnpickler(io.BytesIO(stored)).load()
    except (pickle.UnpicklingError, EOFError, IndexError, ValueError) as error:
        raise ConfigError(
            f"The shape of the tensor column {field.name!r} cannot be read: {error}.",
            do="Write the files again with Ray 2.55 or later, or read other columns with "
            "columns=[…].",
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


def _ragged_to_lists(array: pa.StructArray, kind: pa.DataType) -> pa.Array:
    """Return tensors of Ray of different shapes, which have one number of dimensions, as lists."""
    values, shapes = map(column_to_numpy, array.flatten())
    rows = [
        None if data is None else data.reshape(shape)
        for data, shape in zip(values, shapes, strict=True)
    ]
    if all(row is None for row in rows):
        return pa.nulls(len(rows), kind)
    return list_column(rows).cast(kind)
