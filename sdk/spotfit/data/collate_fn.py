"""Base classes of collate functions, with the names of `ray.data.collate_fn`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Generic, TypeVar

import pyarrow as pa

from spotfit.core.errors import ConfigTypeError
from spotfit.data.formats.batch_formats import BatchFormat
from spotfit.data.formats.column_arrays import NumpyArray

BatchT = TypeVar("BatchT")


class CollateFn(ABC, Generic[BatchT]):
    """Converts a batch to what a training function uses; derive from one of the subclasses.

    Called in a thread beside the training loop. Any return value is passed on; tensors and
    collections of tensors are moved to the device by `iter_torch_batches`.
    """

    @abstractmethod
    def __call__(self, batch: BatchT) -> Any:
        """Return the collated batch."""


class ArrowBatchCollateFn(CollateFn[pa.Table]):
    """A collate function of Arrow tables."""


class NumpyBatchCollateFn(CollateFn[dict[str, NumpyArray]]):
    """A collate function of dictionaries of NumPy arrays."""


class PandasBatchCollateFn(CollateFn[Any]):
    """A collate function of pandas DataFrames."""


def collated_format(collate_fn: object) -> BatchFormat:
    """Return the format of the batches that a collate function takes.

    "numpy" for None and for a plain function. Raises `ConfigTypeError` if it cannot be called.
    """
    if isinstance(collate_fn, ArrowBatchCollateFn):
        return "pyarrow"
    if isinstance(collate_fn, PandasBatchCollateFn):
        return "pandas"
    if collate_fn is None or callable(collate_fn):
        return "numpy"
    raise ConfigTypeError(
        f"collate_fn is a {type(collate_fn).__name__}, which cannot be called.",
        do="Pass a function of a dictionary of NumPy arrays, or an instance of a class of "
        "spotfit.data.collate_fn.",
    )
