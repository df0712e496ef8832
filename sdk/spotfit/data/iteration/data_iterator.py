"""`DataIterator`: the rows of a dataset, or of a rank's shard of it, as batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from spotfit.core.errors import ConfigError
from spotfit.data.collate_fn import CollateFn, collated_format
from spotfit.data.formats import jax_arrays, tensorflow_tensors, torch_features, torch_tensors
from spotfit.data.formats.batch_formats import (
    BatchFormat,
    check_batch_format,
    concat_blocks,
    to_batch,
)
from spotfit.data.iteration.batch_passes import (
    DEFAULT_BATCH_SIZE,
    BatchOptions,
    BatchPasses,
    BatchProgress,
)
from spotfit.data.iteration.pass_reader import read_pass
from spotfit.data.iteration.shard import ShardPosition
from spotfit.data.plans.row_functions import block_rows
from spotfit.data.schema import Schema
from spotfit.data.sources.tables import TableSource

if TYPE_CHECKING:
    import torch

_ROWS_AT_A_TIME = 256
"""Rows that `iter_rows` reads, and converts to Python objects, together."""


class DataIterator:
    """The rows of a dataset, or of this rank's shard of it.

    What the `iter_*` methods return can be iterated repeatedly; each iteration is a pass over all
    rows. The methods, parameters and defaults are those of `ray.data.DataIterator`, and in addition
    `global_batch_size`: the number of rows of all ranks together, instead of `batch_size` rows of
    each. With it, the batches are the same for any number of ranks.

    `prefetch_batches` batches are converted, collated and copied ahead in a thread. Arrays of
    batches are writable. `local_shuffle_buffer_size` is at least `batch_size`.
    """

    def __init__(
        self,
        position: ShardPosition,
        *,
        default_device: Callable[[], torch.device] | None = None,
    ) -> None:
        """`default_device` is called for `device="auto"`; without it, that is the CPU."""
        self.position = position
        """The position in the shard, which each pass advances."""
        # A `Dataset`, which imports this module.
        self._dataset: Any = position.dataset
        self._default_device = default_device
        self._progress = BatchProgress()

    def __repr__(self) -> str:
        return f"DataIterator({self._dataset!r})"

    @property
    def batch_count(self) -> int:
        """Number of batches that the training loop has taken."""
        return self._progress.batches

    @property
    def waiting_s(self) -> float:
        """For how long the training loop has waited for them."""
        return self._progress.waiting_s

    # --- batches ----------------------------------------------------------------------------------

    def iter_batches(
        self,
        *,
        prefetch_batches: int = 1,
        batch_size: int | None = DEFAULT_BATCH_SIZE,
        batch_format: BatchFormat = "default",
        drop_last: bool = False,
        local_shuffle_buffer_size: int | None = None,
        local_shuffle_seed: int | None = None,
        global_batch_size: int | None = None,
    ) -> Iterable[Any]:
        """Return an iterable of batches in a format: see `to_batch`.

        `batch_size=None` gives batches of any size, as the rows are read. Raises `ConfigError`.
        """
        check_batch_format(batch_format)
        options = BatchOptions(
            batch_size=batch_size,
            global_batch_size=global_batch_size,
            prefetch_batches=prefetch_batches,
            drop_last=drop_last,
            local_shuffle_buffer_size=local_shuffle_buffer_size,
            local_shuffle_seed=local_shuffle_seed,
        )
        return self._passes(options, lambda block: to_batch(block, batch_format))

    def iter_torch_batches(
        self,
        *,
        prefetch_batches: int = 1,
        batch_size: int | None = DEFAULT_BATCH_SIZE,
        dtypes: torch_tensors.TorchDtypes = None,
        device: Any = "auto",
        collate_fn: Callable[[Any], Any] | CollateFn[Any] | None = None,
        drop_last: bool = False,
        local_shuffle_buffer_size: int | None = None,
        local_shuffle_seed: int | None = None,
        pin_memory: bool = False,
        global_batch_size: int | None = None,
    ) -> Iterable[Any]:
        """Return an iterable of batches as tensors on a device, in a dictionary by column.

        `device="auto"` is this worker's device in a training function, else the CPU. `dtypes` is
        the type of all tensors or a dictionary by column. `collate_fn` takes the batch as NumPy
        arrays, or as its class of `spotfit.data.collate_fn` says; tensors and collections of
        tensors that it returns are moved to the device, and pinned first with `pin_memory`.

        Raises `ConfigError`, also for `dtypes` together with `collate_fn`. The iteration raises
        `TensorConversionError` for text, times and lists of different lengths.
        """
        if collate_fn is not None and dtypes is not None:
            raise ConfigError(
                "dtypes and collate_fn are both set, but dtypes applies to the tensors that are "
                "created without a collate_fn.",
                do="Convert the tensors in collate_fn.",
            )
        options = BatchOptions(
            batch_size=batch_size,
            global_batch_size=global_batch_size,
            prefetch_batches=prefetch_batches,
            drop_last=drop_last,
            local_shuffle_buffer_size=local_shuffle_buffer_size,
            local_shuffle_seed=local_shuffle_seed,
        )
        batch_format = collated_format(collate_fn)
        collate = collate_fn or (lambda batch: torch_tensors.to_tensors(batch, dtypes))
        copy = torch_tensors.DeviceCopy(self._device(device))

        def convert(block: pa.Table) -> Any:
            batch = collate(to_batch(block, batch_format))
            return copy.start(torch_tensors.pin_tensors(batch) if pin_memory else batch)

        return self._passes(options, convert, copy.hand_over)

    def iter_tf_batches(
        self,
        *,
        prefetch_batches: int = 1,
        batch_size: int | None = DEFAULT_BATCH_SIZE,
        dtypes: Any = None,
        drop_last: bool = False,
        local_shuffle_buffer_size: int | None = None,
        local_shuffle_seed: int | None = None,
        global_batch_size: int | None = None,
    ) -> Iterable[dict[str, Any]]:
        """Return an iterable of batches as TensorFlow's tensors, in a dictionary by column.

        `dtypes` is the type of all tensors or a dictionary by column. Raises `ConfigError`.
        """
        options = BatchOptions(
            batch_size=batch_size,
            global_batch_size=global_batch_size,
            prefetch_batches=prefetch_batches,
            drop_last=drop_last,
            local_shuffle_buffer_size=local_shuffle_buffer_size,
            local_shuffle_seed=local_shuffle_seed,
        )
        # In the caller's thread, which may have entered a device or a strategy.
        return self._passes(
            options,
            to_batch,
            lambda batch: tensorflow_tensors.to_tf_tensors(batch, dtypes),
        )

    def iter_jax_batches(
        self,
        *,
        prefetch_batches: int = 1,
        batch_size: int | None = DEFAULT_BATCH_SIZE,
        dtypes: Any = None,
        collate_fn: Callable[[Any], Any] | CollateFn[Any] | None = None,
        drop_last: bool = False,
        local_shuffle_buffer_size: int | None = None,
        local_shuffle_seed: int | None = None,
        synchronize_batches: bool = False,
        paddings: jax_arrays.Paddings = None,
        global_batch_size: int | None = None,
    ) -> Iterable[Any]:
        """Return an iterable of batches as arrays of JAX, divided between all devices.

        `batch_size` is the number of rows of this process, a multiple of its devices. `collate_fn`
        returns an array or a dictionary of arrays. With `paddings`, a value or a dictionary by
        column, rows with this value are added to a smaller last batch. `synchronize_batches`
        compares the sizes of batches between all processes, which must be equal. Raises
        `ConfigError`.
        """
        options = BatchOptions(
            batch_size=batch_size,
            global_batch_size=global_batch_size,
            prefetch_batches=prefetch_batches,
            drop_last=drop_last,
            local_shuffle_buffer_size=local_shuffle_buffer_size,
            local_shuffle_seed=local_shuffle_seed,
        )
        batch_format = collated_format(collate_fn)
        if global_batch_size is None:
            jax_arrays.check_jax_batch_size(batch_size)
        convert_to_jax = jax_arrays.jax_converter(
            jax_arrays.JaxBatchOptions(batch_size, dtypes, paddings, synchronize_batches)
        )
        collate = collate_fn or (lambda batch: batch)
        # In the caller's thread: all processes communicate in the same order.
        return self._passes(
            options, lambda block: collate(to_batch(block, batch_format)), convert_to_jax
        )

    def iter_rows(self) -> Iterable[dict[str, Any]]:
        """Return an iterable of rows: dictionaries of Python objects, with arrays for tensors.

        The order is that of `iter_batches(batch_size=1)`.
        """
        options = BatchOptions(
            batch_size=_ROWS_AT_A_TIME,
            prefetch_batches=1,
            drop_last=False,
            local_shuffle_buffer_size=None,
            local_shuffle_seed=None,
            by_row=True,
        )
        blocks = self._passes(options, lambda block: block, block_rows)
        return _Iterable(lambda: chain.from_iterable(iter(blocks)))

    # --- datasets of frameworks -------------------------------------------------------------------

    def to_torch(
        self,
        *,
        label_column: str | None = None,
        feature_columns: torch_features.FeatureColumns | None = None,
        label_column_dtype: torch.dtype | None = None,
        feature_column_dtypes: Any = None,
        batch_size: int = 1,
        prefetch_batches: int = 1,
        drop_last: bool = False,
        local_shuffle_buffer_size: int | None = None,
        local_shuffle_seed: int | None = None,
        unsqueeze_label_tensor: bool = True,
        unsqueeze_feature_tensors: bool = True,
    ) -> torch.utils.data.IterableDataset[Any]:
        """Return a PyTorch dataset of pairs: a tensor of all features, and one of the labels.

        `feature_columns` in several lists, or in a dictionary of lists, give a list or dictionary
        of tensors. Raises `ConfigError` and `ConfigTypeError`.
        """
        features = torch_features.feature_converter(
            feature_columns,
            feature_column_dtypes,
            label=label_column,
            unsqueeze=unsqueeze_feature_tensors,
        )
        batches = self.iter_batches(
            batch_size=batch_size,
            batch_format="pyarrow",
            prefetch_batches=prefetch_batches,
            drop_last=drop_last,
            local_shuffle_buffer_size=local_shuffle_buffer_size,
            local_shuffle_seed=local_shuffle_seed,
        )

        def convert(block: pa.Table) -> tuple[Any, Any]:
            label = None
            if label_column is not None:
                label = torch_features.join_columns(
                    block, [label_column], label_column_dtype, unsqueeze=unsqueeze_label_tensor
                )
            return features(block), label

        return torch_features.iterable_dataset(_Iterable(lambda: map(convert, batches)))

    def to_tf(
        self,
        feature_columns: tensorflow_tensors.Columns,
        label_columns: tensorflow_tensors.Columns,
        *,
        additional_columns: tensorflow_tensors.Columns | None = None,
        prefetch_batches: int = 1,
        batch_size: int = 1,
        drop_last: bool = False,
        local_shuffle_buffer_size: int | None = None,
        local_shuffle_seed: int | None = None,
        feature_type_spec: Any = None,
        label_type_spec: Any = None,
        additional_type_spec: Any = None,
    ) -> Any:
        """Return a `tf.data.Dataset` of features, labels and, if set, additional columns.

        A name of a column gives a tensor, a list of names a dictionary of tensors. A type spec is a
        `tf.TypeSpec` or a dictionary by column; None derives it from the schema. Raises
        `ConfigError` for an unknown column.
        """
        batches = self.iter_batches(
            batch_size=batch_size,
            prefetch_batches=prefetch_batches,
            drop_last=drop_last,
            local_shuffle_buffer_size=local_shuffle_buffer_size,
            local_shuffle_seed=local_shuffle_seed,
        )
        columns = [(feature_columns, feature_type_spec), (label_columns, label_type_spec)]
        if additional_columns is not None:
            columns.append((additional_columns, additional_type_spec))
        return tensorflow_tensors.tf_dataset(
            lambda: iter(batches), columns, lambda: self.schema().base_schema
        )

    # --- other ------------------------------------------------------------------------------------

    def materialize(self) -> Any:
        """Read all rows of the shard into memory, and return a dataset of them.

        Does not change the position: the rows are always those of the first epoch, also after a
        restart.
        """
        _, steps = read_pass(ShardPosition(self._dataset, self.position.group), None)
        blocks = [block for block, _ in steps]
        block = concat_blocks(blocks) if blocks else self.schema().base_schema.empty_table()
        return self._dataset.of_source(TableSource(block))

    def schema(self) -> Schema:
        """Return the schema of the rows; reads as little as possible."""
        schema: Schema = self._dataset.schema()
        return schema

    def stats(self) -> str:
        """Return one line on the passes so far: batches, rows, and the time spent waiting."""
        return self._progress.text()

    def get_context(self) -> Any:
        """Return the `DataContext` of the dataset."""
        return self._dataset.context

    # --- passes -----------------------------------------------------------------------------------

    def _device(self, device: Any) -> torch.device:
        if isinstance(device, str) and device == "auto":
            device = "cpu" if self._default_device is None else self._default_device()
        return torch_tensors.concrete_device(device)

    def _passes(
        self,
        options: BatchOptions,
        convert: Callable[[pa.Table], Any],
        finish: Callable[[Any], Any] | None = None,
    ) -> BatchPasses:
        return BatchPasses(self.position, self._progress, options, convert, finish)


class _Iterable:
    """An iterable; each iteration calls a function for a new iterator."""

    def __init__(self, begin: Callable[[], Iterator[Any]]) -> None:
        self._begin = begin

    def __iter__(self) -> Iterator[Any]:
        return self._begin()
