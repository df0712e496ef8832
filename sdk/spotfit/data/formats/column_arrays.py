"""Columns of blocks as NumPy arrays, and back.

`Array.to_numpy()` and `pyarrow.array()` import pandas where it is installed, which takes more than
a second of CPU time. Types that are frequent in training data are converted through their buffers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from numbers import Real
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa

from spotfit.core.errors import ConfigTypeError
from spotfit.data.formats.python_objects import PythonObjectType

NumpyArray: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"

_NUMPY_NAMES = {"halffloat": "float16", "float": "float32", "double": "float64"}
"""NumPy's names of Arrow types, where they differ."""


# --- Arrow to NumPy -------------------------------------------------------------------------------


def column_to_numpy(column: pa.ChunkedArray | pa.Array) -> NumpyArray:
    """Return the values of a column as a new writable array, with one element per row.

    Fixed-size lists and tensors become further dimensions. Integers with nulls become float64, null
    values of floating-point numbers NaN, and those of times NaT, as in Ray Data. Lists, strings,
    bytes and all other types become arrays of objects, with None for null values.
    """
    if isinstance(column, pa.ChunkedArray):
        # Null values in one of several chunks change the type of the values in all rows.
        is_list = pa.types.is_list(column.type) or pa.types.is_large_list(column.type)
        if is_list or not column.num_chunks:
            return _chunk_to_numpy(column.combine_chunks())
        # The only copy: chunks are views of Arrow's memory, which must not be written to.
        chunks = [_chunk_to_numpy(chunk) for chunk in column.chunks]
        return np.array(chunks[0]) if len(chunks) == 1 else _concatenate(chunks)
    return np.array(_chunk_to_numpy(column))


def _concatenate(chunks: list[NumpyArray]) -> NumpyArray:
    # A chunk of fixed-size lists with a null row is an array of objects.
    if len({chunk.ndim for chunk in chunks}) > 1:
        return object_array([row for chunk in chunks for row in chunk])
    return np.concatenate(chunks)


def _chunk_to_numpy(array: pa.Array) -> NumpyArray:
    """Return the values of an array; a read-only view of its memory where that is possible."""
    kind = array.type
    if isinstance(kind, pa.FixedShapeTensorType):
        return _tensors_to_numpy(array)
    if isinstance(kind, PythonObjectType):
        return object_array(array.to_pylist())
    if isinstance(kind, pa.BaseExtensionType):
        return _chunk_to_numpy(array.storage)
    types = pa.types
    if types.is_integer(kind) or types.is_floating(kind):
        return _with_nulls(array, _NUMPY_NAMES.get(str(kind), str(kind)))
    if types.is_timestamp(kind) or types.is_duration(kind):
        name = "datetime64" if types.is_timestamp(kind) else "timedelta64"
        return _with_nulls(array, f"{name}[{kind.unit}]")
    for matches, convert in _CONVERTERS:
        if matches(kind):
            values: NumpyArray = convert(array)
            return values
    return object_array(array.to_pylist())


def _with_nulls(array: pa.Array, dtype: str) -> NumpyArray:
    """Return the values of a type that NumPy has too, with NaN or NaT for null values."""
    values = buffer_values(array, dtype)
    if not array.null_count:
        return values
    is_integer = values.dtype.kind in "iu"
    values = values.astype(np.float64) if is_integer else values.copy()
    values[_is_null(array)] = np.nan if values.dtype.kind == "f" else "NaT"
    return values


def buffer_values(array: pa.Array, dtype: str) -> NumpyArray:
    """Return a view of the memory of an array of numbers; undefined where values are null."""
    buffer = array.buffers()[1]
    if buffer is None or not len(array):
        return np.empty(0, dtype)
    size = np.dtype(dtype).itemsize
    return np.frombuffer(buffer, dtype, count=len(array), offset=array.offset * size)


def _is_null(array: pa.Array) -> NumpyArray:
    return ~_bits(array.buffers()[0], array)


def _bits(buffer: pa.Buffer, array: pa.Array) -> NumpyArray:
    first = array.offset // 8
    last = -(-(array.offset + len(array)) // 8)
    packed = np.frombuffer(buffer, np.uint8)[first:last]
    bits = np.unpackbits(packed, count=array.offset % 8 + len(array), bitorder="little")
    return bits[array.offset % 8 :].view(np.bool_)


def _booleans_to_numpy(array: pa.Array) -> NumpyArray:
    if not len(array):
        return np.empty(0, np.bool_)
    values = _bits(array.buffers()[1], array)
    if not array.null_count:
        return values
    objects = values.astype(object)
    objects[_is_null(array)] = None
    return objects


def _days_to_numpy(array: pa.Array) -> NumpyArray:
    return _with_nulls(array.view(pa.int32()), "int32").astype("datetime64[D]")


def _dates_to_numpy(array: pa.Array) -> NumpyArray:
    return _with_nulls(array, "datetime64[ms]")


def _nulls_to_numpy(array: pa.Array) -> NumpyArray:
    # The type of Ray Data, so that a column of which nothing is known can become a tensor.
    return np.full(len(array), np.nan, np.float32)


def _tensors_to_numpy(array: pa.Array) -> NumpyArray:
    rows = _fixed_lists_to_numpy(array.storage)
    kind = array.type
    shape = tuple(kind.shape)
    if array.null_count:
        return object_array([None if row is None else row.reshape(shape) for row in rows])
    tensors = rows.reshape(len(array), *shape)
    if kind.permutation is None:
        return tensors
    # The shape is that of the memory; the permutation gives the order of its axes for the user.
    return tensors.transpose(0, *(axis + 1 for axis in kind.permutation))


def _fixed_lists_to_numpy(array: pa.Array) -> NumpyArray:
    size = array.type.list_size
    values = _chunk_to_numpy(array.values.slice(array.offset * size, len(array) * size))
    rows = values.reshape(len(array), size, *values.shape[1:])
    if not array.null_count:
        return rows
    nulls = _is_null(array)
    return object_array(
        [None if is_null else row.copy() for row, is_null in zip(rows, nulls, strict=True)]
    )


def _lists_to_numpy(array: pa.Array) -> NumpyArray:
    """Return one array per row, all of them slices of one writable array."""
    width = "int64" if pa.types.is_large_list(array.type) else "int32"
    buffer = array.buffers()[1]
    if buffer is None or not len(array):
        return np.empty(0, object)
    offsets = np.frombuffer(buffer, width)[array.offset :][: len(array) + 1]
    first = int(offsets[0])
    values = np.array(_chunk_to_numpy(array.values.slice(first, int(offsets[-1]) - first)))
    rows: list[Any] = [
        _stack_rows(values[begin:end]) for begin, end in pairwise((offsets - first).tolist())
    ]
    if array.null_count:
        for index in np.flatnonzero(_is_null(array)):
            rows[index] = None
    return object_array(rows)


def _stack_rows(values: NumpyArray) -> NumpyArray:
    """Return arrays of one shape and type as one array with a further dimension, others as given.

    Rows of images and other tensors of different shapes are lists of lists.
    """
    if values.dtype != object or not len(values) or not isinstance(values[0], np.ndarray):
        return values
    first = values[0]
    is_uniform = first.dtype != object and all(
        isinstance(one, np.ndarray) and one.shape == first.shape and one.dtype == first.dtype
        for one in values
    )
    return np.stack(list(values)) if is_uniform else values


_CONVERTERS: tuple[tuple[Callable[[pa.DataType], bool], Callable[[pa.Array], Any]], ...] = (
    (pa.types.is_boolean, _booleans_to_numpy),
    (pa.types.is_fixed_size_list, _fixed_lists_to_numpy),
    (pa.types.is_list, _lists_to_numpy),
    (pa.types.is_large_list, _lists_to_numpy),
    (pa.types.is_dictionary, lambda array: _chunk_to_numpy(array.dictionary_decode())),
    (pa.types.is_date32, _days_to_numpy),
    (pa.types.is_date64, _dates_to_numpy),
    (pa.types.is_null, _nulls_to_numpy),
)


def object_array(values: Sequence[Any]) -> NumpyArray:
    """Return a one-dimensional array of Python objects, also of lists and arrays."""
    return np.fromiter(values, dtype=object, count=len(values))


def stack_objects(column: NumpyArray) -> NumpyArray:
    """Return an array of objects as an array of numbers or text, if all have one shape.

    Other arrays are returned unchanged.
    """
    if column.dtype != object:
        return column
    arrays = [np.asarray(value) for value in column]
    if len({array.shape for array in arrays}) != 1:
        return column
    return np.stack(arrays)


# --- NumPy to Arrow -------------------------------------------------------------------------------


def column_from_values(values: Any, *, name: str) -> pa.Array:
    """Return a column of these values: an array, a tensor on the CPU, a series or a list.

    Arrays with further dimensions become tensors (`arrow.fixed_shape_tensor`), and arrays or lists
    of arrays of different shapes become lists. Numbers are copied, so that the caller may write to
    its arrays again. Raises `ConfigTypeError`, which names the column, for values that Arrow cannot
    hold.
    """
    if isinstance(values, pa.Array):
        return values
    if isinstance(values, pa.ChunkedArray):
        return values.combine_chunks()
    try:
        return _array_from(_as_array_or_list(values))
    except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
        raise ConfigTypeError(
            f"The column {name!r} cannot be stored as rows: {error}",
            do="Return numbers, text, bytes, dates, or arrays and lists of them, one per row. "
            "Convert or pickle other objects to bytes.",
        ) from error


def _as_array_or_list(values: Any) -> NumpyArray | list[Any]:
    if isinstance(values, np.ndarray):
        return values
    if hasattr(values, "__array__"):
        return np.asarray(values)
    if isinstance(values, list | tuple):
        return _rows_as_arrays(values)
    raise TypeError(f"its values are a {type(values).__name__}, not an array or a list")


def _rows_as_arrays(values: Sequence[Any]) -> NumpyArray | list[Any]:
    """Return rows that are arrays or tensors as an array, other rows as a list."""
    if not values or not all(hasattr(value, "__array__") for value in values):
        return list(values)
    arrays = [np.asarray(value) for value in values]
    is_uniform = len({(array.shape, array.dtype) for array in arrays}) == 1
    return np.stack(arrays) if is_uniform else object_array(arrays)


def _array_from(values: NumpyArray | list[Any]) -> pa.Array:
    if isinstance(values, list):
        return pa.array(values)
    if values.ndim == 0:
        raise TypeError("it is a single value, not an array with one value per row")
    if values.ndim == 1:
        return _array_from_objects(values) if values.dtype == object else _flat_array(values)
    if values.dtype.kind not in "biuf" or 0 in values.shape[1:]:
        return _nested_lists(values)
    return tensor_array(_native_copy(values))


def _flat_array(values: NumpyArray) -> pa.Array:
    """Return a copy of a one-dimensional array, through its buffer where Arrow has its type."""
    is_number = values.dtype.kind in "biuf" and values.dtype.itemsize <= 8
    return arrow_array(_native_copy(values)) if is_number else pa.array(values)


def _native_copy(values: NumpyArray) -> NumpyArray:
    return np.array(values, dtype=values.dtype.newbyteorder("="), order="C")


def arrow_array(values: NumpyArray, missing: NumpyArray | None = None) -> pa.Array:
    """Return a one-dimensional array of numbers or booleans; null where `missing`.

    Numbers share the memory of `values`, which must not be written to any more.
    """
    packed = np.packbits(values, bitorder="little") if values.dtype == bool else values
    buffers = [_validity(missing), pa.py_buffer(np.ascontiguousarray(packed))]
    return pa.Array.from_buffers(pa.from_numpy_dtype(values.dtype), len(values), buffers)


def tensor_array(values: NumpyArray, missing: NumpyArray | None = None) -> pa.ExtensionArray:
    """Return arrays of one shape as tensors, also without a copy; null where `missing`."""
    flat = arrow_array(values.reshape(-1))
    kind = pa.fixed_shape_tensor(flat.type, values.shape[1:])
    storage = pa.Array.from_buffers(
        kind.storage_type, len(values), [_validity(missing)], children=[flat]
    )
    return pa.ExtensionArray.from_storage(kind, storage)


def _validity(missing: NumpyArray | None) -> pa.Buffer | None:
    if missing is None or not missing.any():
        return None
    return pa.py_buffer(np.packbits(~missing, bitorder="little"))


def _nested_lists(values: NumpyArray) -> pa.Array:
    """Return an array that cannot be a tensor of Arrow as lists, one level per dimension."""
    if values.dtype == object:
        if values.size and all(isinstance(value, Real) for value in values.flat):
            return _array_from(np.array(values.tolist()))
        return pa.array([_to_python(row) for row in values])
    lists = _array_from(values.reshape(-1))
    for axis in range(values.ndim - 1, 0, -1):
        count = int(np.prod(values.shape[:axis]))
        lists = list_array(np.full(count, values.shape[axis]), lists)
    return lists


def _array_from_objects(values: NumpyArray) -> pa.Array:
    rows = list(values)
    arrays = [row for row in rows if isinstance(row, np.ndarray)]
    if not arrays:
        return pa.array(rows)
    stacked = _rows_as_arrays(rows)
    if isinstance(stacked, np.ndarray) and stacked.dtype != object:
        return _array_from(stacked)
    kinds = {(array.ndim, array.dtype) for array in arrays}
    is_tensor = len(kinds) == 1 and arrays[0].ndim > 0 and arrays[0].dtype.kind in "biuf"
    if is_tensor and all(row is None or isinstance(row, np.ndarray) for row in rows):
        return list_column(rows)
    return pa.array([_to_python(row) for row in rows])


def _to_python(row: Any) -> Any:
    # Arrow takes one-dimensional arrays as lists, and keeps their types.
    if isinstance(row, np.ndarray) and (row.dtype == object or row.ndim > 1):
        return [_to_python(value) for value in row]
    return row


def list_column(rows: Sequence[NumpyArray | None]) -> pa.Array:
    """Return arrays of numbers of different shapes, or None, as lists, one level per dimension.

    Requires at least one array; all have the same type and number of dimensions.
    """
    arrays = [row for row in rows if row is not None]
    ndim = arrays[0].ndim
    last = {array.shape[-1] for array in arrays}
    values = _flat_array(np.concatenate([array.reshape(-1) for array in arrays]))
    # Channels of images: lists of a fixed size need no offset for every pixel.
    is_last_fixed = ndim > 2 and len(last) == 1 and 0 not in last
    if is_last_fixed:
        values = pa.FixedSizeListArray.from_arrays(values, last.pop())
    for axis in reversed(range(1, ndim - is_last_fixed)):
        sizes = [np.full(int(np.prod(a.shape[:axis])), a.shape[axis]) for a in arrays]
        values = list_array(np.concatenate(sizes), values)
    return list_array(np.array([-1 if row is None else len(row) for row in rows]), values)


def list_array(lengths: NumpyArray, values: pa.Array) -> pa.Array:
    """Return lists of these lengths, None for length -1, with the values one after the other."""
    is_null = lengths < 0
    offsets = np.concatenate([[0], np.cumsum(np.maximum(lengths, 0))])
    is_small = offsets[-1] < 2**31
    kind = pa.ListArray if is_small else pa.LargeListArray
    mask = _flat_array(is_null) if is_null.any() else None
    return kind.from_arrays(
        _flat_array(offsets.astype(np.int32 if is_small else np.int64)), values, mask=mask
    )
