"""Batches as arrays of JAX, divided between all devices of all processes; jax is lazy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from spotfit.core.errors import ConfigError
from spotfit.data.formats.column_arrays import NumpyArray, stack_objects
from spotfit.host.plugins import require_module

Paddings: TypeAlias = "float | Mapping[str, float] | None"

_AXIS = "batch"


@dataclass(frozen=True, slots=True)
class JaxBatchOptions:
    """How batches become arrays of JAX."""

    batch_size: int | None
    """Rows of a batch of this process; smaller batches are padded to it."""
    dtypes: Any = None
    """The type of all arrays, or types by column."""
    paddings: Paddings = None
    """The value of padded rows, or values by column; None: batches are not padded."""
    synchronize: bool = False
    """Whether to compare the sizes of batches between all processes."""


def check_jax_batch_size(batch_size: int | None) -> None:
    """Raise `ConfigError` unless this process can divide its batch equally between its devices."""
    devices = require_module("jax", extra="jax").local_device_count()
    if batch_size is None or batch_size % devices:
        raise ConfigError(
            f"batch_size={batch_size} is not a multiple of the {devices} JAX devices of this "
            "process.",
            do=f"Use a multiple of {devices}.",
        )


def jax_converter(options: JaxBatchOptions) -> Callable[[Any], Any]:
    """Return the function that converts a batch of this process to arrays of all processes.

    A batch is an array or a dictionary of arrays. The functions raise `ConfigError` if the rows
    cannot be divided equally between the devices, or differ between processes. They communicate
    if `synchronize` is set: every process calls them in the same order.
    """
    jax = require_module("jax", extra="jax")
    mesh_utils = require_module("jax.experimental.mesh_utils", extra="jax")
    mesh = jax.sharding.Mesh(mesh_utils.create_device_mesh((jax.device_count(),)), (_AXIS,))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(_AXIS))

    def to_array(values: Any, name: str | None) -> Any:
        array = _padded(stack_objects(np.asarray(values)), name, options)
        shape = (len(array) * jax.process_count(), *array.shape[1:])
        result = jax.make_array_from_process_local_data(sharding, array, shape)
        dtype = _of_column(options.dtypes, name)
        return result if dtype is None else result.astype(dtype)

    def convert(batch: Any) -> Any:
        _check_rows(_row_count(batch), options)
        if isinstance(batch, Mapping):
            return {name: to_array(values, name) for name, values in batch.items()}
        return to_array(batch, None)

    return convert


def _row_count(batch: Any) -> int:
    return len(next(iter(batch.values()), ())) if isinstance(batch, Mapping) else len(batch)


def _of_column(setting: Any, name: str | None) -> Any:
    if not isinstance(setting, Mapping):
        return setting
    return setting.get(name) if name is not None else next(iter(setting.values()), None)


def _padded(array: NumpyArray, name: str | None, options: JaxBatchOptions) -> NumpyArray:
    missing = (options.batch_size or 0) - len(array)
    if options.paddings is None or missing <= 0:
        return array
    padding = _of_column(options.paddings, name)
    if padding is None:
        raise ConfigError(
            f"{missing} rows are missing in a batch, and paddings has no value for the column "
            f"{name!r}.",
            do="Add it to paddings, or pass drop_last=True.",
        )
    rows = np.full((missing, *array.shape[1:]), padding, dtype=array.dtype)
    return np.concatenate([array, rows])


def _check_rows(rows: int, options: JaxBatchOptions) -> None:
    jax = require_module("jax", extra="jax")
    if options.paddings is not None:
        return
    devices = jax.local_device_count()
    do = "Pass drop_last=True, or paddings= for the rows that are missing in the last batch."
    if rows % devices:
        raise ConfigError(
            f"A batch of {rows} rows cannot be divided between the {devices} JAX devices of this "
            "process.",
            do=do,
        )
    if not options.synchronize or jax.process_count() == 1:
        return
    multihost = require_module("jax.experimental.multihost_utils", extra="jax")
    counts = np.unique(multihost.process_allgather(np.array([rows])))
    if len(counts) > 1:
        raise ConfigError(f"The processes have batches of {counts.tolist()} rows.", do=do)
