"""`range` and `from_*`: datasets of numbers, of tables in memory and of the user's own objects.

Arguments of Ray's scheduling, such as `parallelism` and `override_num_blocks`, have no effect.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Unpack

import numpy as np
import pyarrow as pa

from spotfit.core.errors import ConfigError, ConfigTypeError
from spotfit.data.dataset import Dataset
from spotfit.data.formats.batch_formats import concat_blocks, to_block
from spotfit.data.formats.column_arrays import column_from_values
from spotfit.data.reader_options import SchedulingOptions, ignore_scheduling
from spotfit.data.source import Source
from spotfit.data.sources.tables import RangeSource, TableSource
from spotfit.data.sources.torch_datasets import TorchSource


def range(n: int, **options: Unpack[SchedulingOptions]) -> Dataset:  # noqa: A001 - the name of Ray
    """Return the dataset of the integers from 0 to `n` - 1 in the column `id`."""
    ignore_scheduling("range", options)
    return Dataset.of_source(RangeSource(_row_count(n)))


def range_tensor(
    n: int, *, shape: tuple[int, ...] = (1,), **options: Unpack[SchedulingOptions]
) -> Dataset:
    """Return the dataset of `n` tensors in the column `data`: row i is filled with i."""
    ignore_scheduling("range_tensor", options)
    if not all(isinstance(size, int) and size > 0 for size in shape):
        raise ConfigError(f"range_tensor(shape={shape!r}) is not a shape.", do="Pass sizes > 0.")
    return Dataset.of_source(RangeSource(_row_count(n), tuple(shape)))


def from_items(items: Sequence[Any], **options: Unpack[SchedulingOptions]) -> Dataset:
    """Return the dataset with one row for each item.

    Dictionaries give one column for each key; other items are in the column `item`, tuples and
    items of unknown types as Python objects. Raises `ConfigError` if only some items are
    dictionaries, or if Arrow has no type for their values.
    """
    ignore_scheduling("from_items", options)
    rows = list(items)
    dictionaries = [row for row in rows if isinstance(row, Mapping)]
    if not dictionaries:
        return Dataset.of_source(_item_source(rows))
    if len(dictionaries) < len(rows):
        raise ConfigError(
            "from_items() has dictionaries and other items.", do="Pass items of one kind."
        )
    names = dict.fromkeys(name for row in dictionaries for name in row)
    columns = {
        str(name): column_from_values([row.get(name) for row in dictionaries], name=str(name))
        for name in names
    }
    return Dataset.of_source(TableSource(pa.table(columns)))


def from_pandas(dfs: Any, **options: Unpack[SchedulingOptions]) -> Dataset:
    """Return the dataset of the rows of a DataFrame or of several, without their indices."""
    ignore_scheduling("from_pandas", options)
    return _from_tables("from_pandas", dfs if isinstance(dfs, list | tuple) else [dfs])


def from_arrow(tables: Any, **options: Unpack[SchedulingOptions]) -> Dataset:
    """Return the dataset of the rows of an Arrow table or of several.

    Bytes are the stream of a table in Arrow's IPC format.
    """
    ignore_scheduling("from_arrow", options)
    given = list(tables) if isinstance(tables, list | tuple) else [tables]
    return _from_tables(
        "from_arrow",
        [pa.ipc.open_stream(one).read_all() if isinstance(one, bytes) else one for one in given],
    )


def from_numpy(ndarrays: Any) -> Dataset:
    """Return the dataset of the rows of an array, or of several, in the column `data`."""
    arrays = list(ndarrays) if isinstance(ndarrays, list | tuple) else [ndarrays]
    for array in arrays:
        if not isinstance(array, np.ndarray):
            raise ConfigTypeError(
                f"from_numpy() has a {type(array).__name__}.", do="Pass an array or a list of them."
            )
    return _from_tables("from_numpy", [{"data": array} for array in arrays])


def from_huggingface(dataset: Any, **options: Unpack[SchedulingOptions]) -> Dataset:
    """Return the dataset of a `datasets.Dataset`, whose rows are copied to memory.

    Raises `ConfigError` for a streaming dataset, which has no positions of rows.
    """
    ignore_scheduling("from_huggingface", options)
    kinds = {kind.__name__ for kind in type(dataset).__mro__}
    if "IterableDataset" in kinds:
        raise ConfigError(
            "A streaming dataset of Hugging Face cannot be resumed at a row.",
            do="Read its Parquet files: read_parquet('hf://datasets/<name>/…'); or load it without "
            "streaming=True.",
        )
    if kinds & {"DatasetDict", "IterableDatasetDict"}:
        raise ConfigError(
            f"from_huggingface() has a dictionary of datasets: {', '.join(dataset)}.",
            do="Pass one of them, such as datasets['train'].",
        )
    if not hasattr(dataset, "with_format"):
        raise ConfigTypeError(
            f"from_huggingface() has a {type(dataset).__name__}.", do="Pass a datasets.Dataset."
        )
    return _from_tables("from_huggingface", [dataset.with_format("arrow")[:]])


def from_torch(dataset: Any, local_read: bool = False) -> Dataset:  # noqa: FBT001, FBT002 - Ray's
    """Return the dataset of the items of a PyTorch dataset, in the column `item`.

    The dataset has `__len__` and `__getitem__`; it is pickled, and its items are loaded where rows
    are needed. Items other than arrays, numbers, text and bytes are Python objects, which `map` or
    `map_batches` converts. Raises `ConfigError` for an iterable dataset. `local_read` is ignored.
    """
    if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise ConfigError(
            f"from_torch() has a {type(dataset).__name__} without __len__ and __getitem__, which "
            "cannot be resumed at a row.",
            do="Write its items to files once, for example as Parquet, or give it both methods.",
        )
    return Dataset.of_source(TorchSource(dataset))


def _from_tables(function: str, batches: Sequence[Any]) -> Dataset:
    if not batches:
        raise ConfigError(f"{function}() has no rows.", do="Pass at least one table or array.")
    return Dataset.of_source(TableSource(concat_blocks([to_block(batch) for batch in batches])))


def _item_source(items: list[Any]) -> Source:
    if any(isinstance(item, tuple) for item in items):  # Arrow would make lists of them
        return TorchSource(items)
    try:
        return TableSource(pa.table({"item": column_from_values(items, name="item")}))
    except ConfigTypeError:
        return TorchSource(items)


def _row_count(n: int) -> int:
    if n < 0:
        raise ConfigError(f"The number of rows is {n}.", do="Pass 0 or more.")
    return n
