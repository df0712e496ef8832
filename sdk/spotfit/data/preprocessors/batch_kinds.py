"""Batches of a preprocessor: DataFrames, dictionaries of NumPy arrays, Arrow tables."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import pyarrow as pa

from spotfit.core.errors import ConfigTypeError

if TYPE_CHECKING:
    import pandas as pd

    Batch: TypeAlias = "pd.DataFrame | Mapping[str, np.ndarray[Any, Any]] | pa.Table"


class BatchFormat(StrEnum):
    """The kinds of batches, with the names of Ray."""

    PANDAS = "pandas"
    ARROW = "arrow"
    NUMPY = "numpy"


def format_of(batch: Any) -> BatchFormat:
    """Return the kind of a batch. Raises `ConfigTypeError` for anything else."""
    if isinstance(batch, pa.Table):
        return BatchFormat.ARROW
    if isinstance(batch, Mapping):
        return BatchFormat.NUMPY
    # A DataFrame exists only where pandas has been imported.
    pandas = sys.modules.get("pandas")
    if pandas is not None and isinstance(batch, pandas.DataFrame):
        return BatchFormat.PANDAS
    raise ConfigTypeError(
        f"A batch must be a DataFrame, a dictionary of NumPy arrays or an Arrow table, not a "
        f"{type(batch).__name__}.",
        do="Convert it, for example with pyarrow.table(batch).",
    )


def block_of(batch: Any, columns: Sequence[str] | None = None) -> pa.Table:
    """Return the columns of a batch that it has of `columns`, or all, as an Arrow table."""
    match format_of(batch):
        case BatchFormat.ARROW:
            return batch
        case BatchFormat.NUMPY:
            names = [name for name in batch if columns is None or name in columns]
            return pa.table({name: arrow_of(batch[name]) for name in names})
        case BatchFormat.PANDAS:
            frame = batch if columns is None else batch[[c for c in batch if c in columns]]
            table = pa.Table.from_pandas(frame, preserve_index=False)
            return table.replace_schema_metadata(None)


def numpy_columns(block: pa.Table) -> dict[str, Any]:
    """Return the columns as NumPy arrays: tensors with their shape, ragged lists as objects."""
    return {name: numpy_of(block.column(name)) for name in block.column_names}


def data_frame(block: pa.Table) -> pd.DataFrame:
    """Return a DataFrame; each row of a tensor column is an array."""
    return _frame(block, block.column_names, index=None)


def with_result(batch: Any, result: pa.Table, outputs: Sequence[str], inputs: Sequence[str]) -> Any:
    """Return a batch of the kind of `batch` with the columns of a transformed block.

    `outputs` are replaced or added; of the `inputs`, those that `result` has no more are left out.
    Other columns stay as they are. `batch` itself is not modified.
    """
    dropped = [name for name in inputs if name not in result.column_names]
    match format_of(batch):
        case BatchFormat.ARROW:
            return result
        case BatchFormat.NUMPY:
            kept = {name: array for name, array in batch.items() if name not in dropped}
            return kept | numpy_columns(result.select(list(outputs)))
        case BatchFormat.PANDAS:
            frame = batch.drop(columns=[name for name in dropped if name in batch])
            new = _frame(result, outputs, index=batch.index)
            return frame.assign(**{name: new[name] for name in outputs})


def _frame(block: pa.Table, names: Sequence[str], *, index: Any) -> pd.DataFrame:
    import pandas as pd

    columns = {name: _pandas_values(block.column(name)) for name in names}
    return pd.DataFrame(columns, index=index)


def _pandas_values(column: pa.ChunkedArray) -> Any:
    if isinstance(column.type, pa.FixedShapeTensorType):
        return list(numpy_of(column))
    return column.to_pandas().array


def numpy_of(column: pa.ChunkedArray) -> Any:
    """Return a column as an array; missing tensors are None in an array of objects."""
    kind = column.type
    if isinstance(kind, pa.FixedShapeTensorType):
        return _tensor_values(column, kind)
    if pa.types.is_dictionary(kind):
        column = column.cast(kind.value_type)
    return column.to_numpy()


def _tensor_values(column: pa.ChunkedArray, kind: pa.FixedShapeTensorType) -> Any:
    whole = column.combine_chunks()
    if not whole.null_count:
        return whole.to_numpy_ndarray()
    rows = np.empty(len(whole), dtype=object)
    for index, values in enumerate(whole.storage):
        if values.is_valid:
            rows[index] = np.asarray(values.values).reshape(kind.shape)
    return rows


def arrow_of(values: Any) -> pa.Array:
    """Return an array, of which the first dimension is the row, as a column."""
    array = np.asarray(values)
    if array.ndim > 1:
        return pa.FixedShapeTensorArray.from_numpy_ndarray(np.ascontiguousarray(array))
    if array.dtype.kind in "OUS":
        return pa.array(array.tolist())
    return pa.array(array)
