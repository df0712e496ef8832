"""Batches of a preprocessor: DataFrames, dictionaries of NumPy arrays, Arrow tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import pyarrow as pa

from spotfit.core.errors import ConfigTypeError
from spotfit.core.input_checks import is_dataframe
from spotfit.data.formats.batch_formats import to_block
from spotfit.data.formats.column_arrays import column_to_numpy

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
    if is_dataframe(batch):
        return BatchFormat.PANDAS
    raise ConfigTypeError(
        f"A batch must be a DataFrame, a dictionary of NumPy arrays or an Arrow table, not a "
        f"{type(batch).__name__}.",
        do="Convert it, for example with pyarrow.table(batch).",
    )


def block_of(batch: Any, columns: Sequence[str] | None = None) -> pa.Table:
    """Return the columns of a batch that it has of `columns`, or all, as an Arrow table."""
    kind = format_of(batch)
    if kind is BatchFormat.ARROW or columns is None:
        return to_block(batch)
    names = [name for name in batch if name in columns]
    return to_block(
        batch[names] if kind is BatchFormat.PANDAS else {name: batch[name] for name in names}
    )


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
            return kept | {name: column_to_numpy(result.column(name)) for name in outputs}
        case BatchFormat.PANDAS:
            frame = batch.drop(columns=[name for name in dropped if name in batch])
            return frame.assign(**{name: _pandas_values(result.column(name)) for name in outputs})


def _pandas_values(column: pa.ChunkedArray) -> Any:
    if isinstance(column.type, pa.FixedShapeTensorType):
        return list(column_to_numpy(column))
    # Without the index of the new column, which is not that of the batch.
    return column.to_pandas().array
