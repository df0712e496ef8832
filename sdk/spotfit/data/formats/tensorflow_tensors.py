"""Batches as tensors of TensorFlow, and datasets of tf.data. tensorflow is imported on use."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import pyarrow as pa

from spotfit.data.formats.column_arrays import NumpyArray, stack_objects
from spotfit.data.schema import check_columns
from spotfit.host.plugins import require_module

Columns: TypeAlias = str | Sequence[str]


def _require_tensorflow() -> Any:
    return require_module("tensorflow", extra="tensorflow")


def to_tf_tensors(batch: Mapping[str, NumpyArray], dtypes: Any = None) -> dict[str, Any]:
    """Return one tensor per column. `dtypes` is the type of all tensors, or types by column.

    Raises what TensorFlow raises for columns that cannot become tensors, a ValueError for lists of
    different lengths.
    """
    return {
        name: to_tf_tensor(column, dtypes.get(name) if isinstance(dtypes, Mapping) else dtypes)
        for name, column in batch.items()
    }


def to_tf_tensor(column: NumpyArray, dtype: Any = None, spec: Any = None) -> Any:
    """Return a column as a tensor, ragged if `spec` is a `tf.RaggedTensorSpec`."""
    tensorflow = _require_tensorflow()
    if dtype is None and spec is not None:
        dtype = spec.dtype
    if isinstance(spec, tensorflow.RaggedTensorSpec):
        return tensorflow.ragged.constant([list(row) for row in column], dtype=dtype)
    return tensorflow.convert_to_tensor(stack_objects(column), dtype=dtype)


def tf_dataset(
    batches: Callable[[], Iterator[Mapping[str, NumpyArray]]],
    columns: Sequence[tuple[Columns, Any]],
    schema: Callable[[], pa.Schema],
) -> Any:
    """Return a `tf.data.Dataset` of tuples: one element for each pair of columns and type spec.

    A name gives a tensor, a list of names a dictionary of tensors. A spec of None is derived from
    the schema. Raises `ConfigError` for an unknown column.
    """
    tensorflow = _require_tensorflow()
    specs = [_specs_of(schema(), names) if spec is None else spec for names, spec in columns]

    def generate() -> Iterator[tuple[Any, ...]]:
        for batch in batches():
            yield tuple(
                _tensors(batch, names, spec)
                for (names, _), spec in zip(columns, specs, strict=True)
            )

    dataset = tensorflow.data.Dataset.from_generator(generate, output_signature=tuple(specs))
    # Every rank reads its own rows; TensorFlow must not divide them again.
    options = tensorflow.data.Options()
    options.experimental_distribute.auto_shard_policy = (
        tensorflow.data.experimental.AutoShardPolicy.OFF
    )
    # Batches that TensorFlow reads ahead would count as trained on.
    options.experimental_optimization.inject_prefetch = False
    return dataset.with_options(options)


def _tensors(batch: Mapping[str, NumpyArray], names: Columns, spec: Any) -> Any:
    if isinstance(names, str):
        return to_tf_tensor(batch[names], spec=spec)
    return {name: to_tf_tensor(batch[name], spec=spec[name]) for name in names}


def _specs_of(schema: pa.Schema, names: Columns) -> Any:
    if isinstance(names, str):
        return _spec_of(schema, names)
    return {name: _spec_of(schema, name) for name in names}


def _spec_of(schema: pa.Schema, name: str) -> Any:
    check_columns("to_tf()", [name], schema.names)
    tensorflow = _require_tensorflow()
    kind = schema.field(name).type
    shape: tuple[int | None, ...] = (None,)
    while not pa.types.is_primitive(kind) and hasattr(kind, "value_type"):
        if isinstance(kind, pa.FixedShapeTensorType):
            shape += tuple(kind.shape)
        else:
            shape += (kind.list_size if pa.types.is_fixed_size_list(kind) else None,)
        kind = kind.value_type
    dtype = tensorflow.dtypes.as_dtype(_tf_name(kind))
    # The first dimension is that of the rows; another one of unknown size makes a tensor ragged.
    if shape.count(None) > 1:
        return tensorflow.RaggedTensorSpec(shape, dtype=dtype)
    return tensorflow.TensorSpec(shape, dtype=dtype, name=name)


def _tf_name(kind: pa.DataType) -> Any:
    is_text = pa.types.is_string(kind) or pa.types.is_large_string(kind)
    if is_text or pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
        return "string"
    return kind.to_pandas_dtype()
