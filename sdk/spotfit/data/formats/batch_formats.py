"""Batches, as users and their functions see rows: NumPy arrays, DataFrames or Arrow tables."""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias

import pyarrow as pa

from spotfit.core.errors import ConfigError, ConfigTypeError
from spotfit.core.input_checks import is_dataframe
from spotfit.data.formats.column_arrays import column_from_values, column_to_numpy, list_column
from spotfit.data.formats.python_objects import object_column
from spotfit.host.plugins import require_module

BatchFormat: TypeAlias = Literal["default", "numpy", "pandas", "pyarrow"] | None
"""The type of a batch. "default" is "numpy"; None is a block as it is, an Arrow table."""

BATCH_FORMATS = ("default", "numpy", "pandas", "pyarrow", None)


def check_batch_format(batch_format: object) -> None:
    """Raise `ConfigError` if this is not a `BatchFormat`."""
    if batch_format in BATCH_FORMATS:
        return
    known = ", ".join(repr(one) for one in BATCH_FORMATS)
    raise ConfigError(
        f"batch_format={batch_format!r} is not one of {known}.",
        do="Use one of these. For cuDF, pass a batch of 'pyarrow' to cudf.DataFrame.from_arrow().",
    )


def to_batch(block: pa.Table, batch_format: BatchFormat = "default") -> Any:
    """Return the rows of a block as a batch.

    "numpy" gives a dictionary of new, writable arrays, as `column_to_numpy` creates them. "pandas"
    gives a DataFrame with the Arrow types of pandas, and tensors as objects, as in Ray Data. Raises
    `ConfigError` for another format, and `MissingExtraError` if pandas is not installed.
    """
    check_batch_format(batch_format)
    if batch_format in ("numpy", "default"):
        return {name: column_to_numpy(block[name]) for name in block.column_names}
    return _to_pandas(block) if batch_format == "pandas" else block


def _to_pandas(block: pa.Table) -> Any:
    pandas = require_module("pandas", extra="pandas")

    def pandas_type(kind: pa.DataType) -> Any:
        is_other = pa.types.is_dictionary(kind) or pa.types.is_null(kind)
        return None if is_other else pandas.ArrowDtype(kind)

    # pandas has no type for tensors and Python objects.
    extensions = {
        index: name
        for index, (name, kind) in enumerate(
            zip(block.column_names, block.schema.types, strict=True)
        )
        if isinstance(kind, pa.BaseExtensionType)
    }
    frame = block.drop_columns(list(extensions.values())).to_pandas(
        ignore_metadata=True, types_mapper=pandas_type
    )
    for index, name in extensions.items():
        frame.insert(index, name, pandas.Series(list(column_to_numpy(block[name])), dtype=object))
    return frame


def to_block(batch: Any) -> pa.Table:
    """Return the rows of a batch as a block: the inverse of `to_batch`.

    `batch` is a dictionary of arrays, tensors or lists, a DataFrame (without its index), an Arrow
    table or record batch. Arrays with further dimensions become columns of tensors
    (`arrow.fixed_shape_tensor`), and objects without a type of Arrow are pickled, as in Ray Data.
    Values are copied, except those of Arrow. Raises `ConfigTypeError` for other values, and
    `ConfigError` if the columns have different lengths.
    """
    if isinstance(batch, pa.Table):
        return batch
    if isinstance(batch, pa.RecordBatch):
        return pa.Table.from_batches([batch])
    if is_dataframe(batch):
        return _from_pandas(batch)
    if not isinstance(batch, Mapping):
        raise ConfigTypeError(
            f"A batch must be a dictionary of arrays, a DataFrame or an Arrow table, not "
            f"{type(batch).__name__}.",
            do="Return one of these; for a single array, {'data': array}.",
        )
    columns = {str(name): _column(values, str(name)) for name, values in batch.items()}
    lengths = {name: len(column) for name, column in columns.items()}
    if len(set(lengths.values())) > 1:
        raise ConfigError(
            f"The columns of a batch have different lengths: {lengths}.",
            do="Return one value per row in each column.",
        )
    return pa.table(columns)


def _column(values: Any, name: str) -> pa.Array:
    try:
        return column_from_values(values, name=name)
    except ConfigTypeError as error:
        is_column = isinstance(values, list | tuple) or getattr(values, "ndim", 0) > 0
        if not is_column:
            raise
        try:
            return object_column(list(values))
        except (TypeError, AttributeError, pickle.PicklingError):
            raise error from None


def _from_pandas(frame: Any) -> pa.Table:
    columns = {}
    for position, label in enumerate(frame.columns):
        series = frame.iloc[:, position]
        try:
            columns[str(label)] = pa.Array.from_pandas(series)
        except (pa.ArrowException, TypeError, ValueError):
            # Arrays with several dimensions and Python objects, which Arrow's conversion rejects.
            columns[str(label)] = _column(series.to_numpy(), str(label))
    return pa.table(columns)


# --- blocks ---------------------------------------------------------------------------------------


def empty_table(schema: pa.Schema) -> pa.Table:
    """Return a table without rows; `Schema.empty_table` fails for some columns of tensors."""
    return pa.Table.from_batches([], schema)


def concat_blocks(blocks: Sequence[pa.Table]) -> pa.Table:
    """Return the rows of all blocks, without a copy if their columns have equal types.

    Tensors of different shapes become lists, and numbers the wider type. Requires at least one
    block. Raises `ConfigError` if the types of a column cannot be unified.
    """
    blocks = [block for block in blocks if block.num_rows] or blocks[:1]
    if len(blocks) == 1:
        return blocks[0]
    if all(block.schema.equals(blocks[0].schema) for block in blocks[1:]):
        return pa.concat_tables(blocks)
    try:
        return pa.concat_tables(_without_mixed_tensors(blocks), promote_options="permissive")
    except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
        raise ConfigError(
            f"Parts of the dataset have columns of different types: {error}.",
            do="Return columns of one type for every batch from map() and map_batches().",
        ) from error


def _without_mixed_tensors(blocks: Sequence[pa.Table]) -> list[pa.Table]:
    """Return the blocks with lists instead of tensors in columns of several types."""
    types: dict[str, set[pa.DataType]] = {}
    for block in blocks:
        for name, kind in zip(block.column_names, block.schema.types, strict=True):
            types.setdefault(name, set()).add(kind)
    mixed = {name for name, kinds in types.items() if len(kinds) > 1}
    return [_with_lists(block, mixed) for block in blocks]


def _with_lists(block: pa.Table, names: set[str]) -> pa.Table:
    for index, (name, kind) in enumerate(zip(block.column_names, block.schema.types, strict=True)):
        if name in names and _is_tensor(kind):
            block = block.set_column(index, name, list_column(list(column_to_numpy(block[name]))))
    return block


def _is_tensor(kind: pa.DataType) -> bool:
    return isinstance(kind, pa.FixedShapeTensorType)
