"""Columns of features and labels as tensors, for `DataIterator.to_torch`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import pyarrow as pa

from spotfit.core.errors import ConfigError, ConfigTypeError
from spotfit.data.formats.batch_formats import to_batch
from spotfit.data.formats.torch_tensors import require_torch, to_tensor
from spotfit.data.schema import check_columns
from spotfit.host.plugins import require_module

if TYPE_CHECKING:
    import torch

FeatureColumns: TypeAlias = Sequence[str] | Sequence[Sequence[str]] | Mapping[str, Sequence[str]]


def feature_converter(
    columns: FeatureColumns | None, dtypes: Any, *, label: str | None, unsqueeze: bool
) -> Callable[[pa.Table], Any]:
    """Return the function from a block to its features.

    One tensor of the columns in a list, or of all but the label for None; a list of tensors for
    lists in a list, and a dictionary of tensors for a dictionary of lists. `dtypes` is a type, or
    one for each group in the structure of `columns`. Raises `ConfigTypeError` for another structure
    of `dtypes`, and `ConfigError` for other keys, another length or an empty group.
    """
    if isinstance(columns, Mapping):
        _check_groups(dtypes, Mapping, columns.values(), has_keys=set(columns))
        by_key = dtypes if isinstance(dtypes, Mapping) else dict.fromkeys(columns, dtypes)
        return lambda block: {
            key: join_columns(block, names, by_key[key], unsqueeze=unsqueeze)
            for key, names in columns.items()
        }
    if columns and not isinstance(columns[0], str):
        _check_groups(dtypes, Sequence, columns, has_keys=len(columns))
        types = dtypes if isinstance(dtypes, Sequence) else [dtypes] * len(columns)
        return lambda block: [
            join_columns(block, names, dtype, unsqueeze=unsqueeze)
            for names, dtype in zip(columns, types, strict=True)
        ]
    _check_groups(dtypes, (), (), has_keys=None)

    def convert(block: pa.Table) -> torch.Tensor:
        names: Any = columns or [name for name in block.column_names if name != label]
        return join_columns(block, names, dtypes, unsqueeze=unsqueeze)

    return convert


def _check_groups(dtypes: Any, structure: Any, groups: Iterable[Any], *, has_keys: Any) -> None:
    if any(not group for group in groups):
        raise ConfigError(
            "feature_columns contains an empty list of columns.", do="Remove the empty list."
        )
    if dtypes is None or isinstance(dtypes, require_torch().dtype):
        return
    if not isinstance(dtypes, structure):
        raise ConfigTypeError(
            f"feature_column_dtypes is a {type(dtypes).__name__}, which does not have the "
            "structure of feature_columns.",
            do="Pass one torch.dtype, or one for each group of columns.",
        )
    if has_keys != (set(dtypes) if isinstance(dtypes, Mapping) else len(dtypes)):
        raise ConfigError(
            f"feature_column_dtypes={dtypes} does not have one type for each group of "
            "feature_columns.",
            do="Pass one type for each.",
        )


def join_columns(
    block: pa.Table, columns: Sequence[str], dtype: torch.dtype | None, *, unsqueeze: bool
) -> torch.Tensor:
    """Return columns side by side in one tensor; each as (rows, 1) first if `unsqueeze`.

    Raises `ConfigError` for an unknown column, and `TensorConversionError`.
    """
    check_columns("to_torch()", columns, block.column_names)
    batch = to_batch(block.select(list(columns)), "numpy")
    tensors = [to_tensor(batch[name], dtype, name) for name in columns]
    if unsqueeze:
        tensors = [tensor.unsqueeze(1) for tensor in tensors]
    joined: torch.Tensor = require_torch().cat(tensors, dim=1) if len(tensors) > 1 else tensors[0]
    return joined


def iterable_dataset(batches: Iterable[Any]) -> torch.utils.data.IterableDataset[Any]:
    """Return a dataset of PyTorch; each iteration of it is one of `batches`."""
    data: Any = require_module("torch.utils.data", extra="torch")

    class BatchDataset(data.IterableDataset):  # type: ignore[misc]
        def __iter__(self) -> Iterator[Any]:
            return iter(batches)

    dataset: torch.utils.data.IterableDataset[Any] = BatchDataset()
    return dataset
