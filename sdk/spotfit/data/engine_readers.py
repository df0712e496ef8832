"""`from_dask`, `from_spark`, `from_daft`, `from_ray` and `from_modin`: rows of the user's cluster.

The library writes the rows once as Parquet files, with its own writer, its own machines and their
credentials, when the dataset is listed; `fit()` does that before machines are rented. All have the
arguments of `WriteArguments`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Unpack

from spotfit.core.errors import ConfigError
from spotfit.data.dataset import Dataset
from spotfit.data.plans.row_plan import RowPlan, Rows
from spotfit.data.plans.unit_manifest import UnitManifest
from spotfit.data.reader_options import SchedulingOptions, ignore_scheduling
from spotfit.data.sources import frame_writers
from spotfit.data.sources.engine_frames import WrittenFrame
from spotfit.store.url import RootUrl, validate_key


class WriteArguments(SchedulingOptions, total=False):
    """Where and how the rows are written, and Ray's arguments of scheduling, without effect."""

    path: str | Path | None
    """Folder that this process and the library's processes can access; None: that of the run."""
    key: str | None
    """Name of the rows: with a name that was written before with equal `write_options`, the library
    writes nothing. None: the hash of the files, which finds equal rows again."""
    write_options: Mapping[str, Any] | None
    """Further arguments of the library's writer, such as `storage_options`."""


def from_dask(df: Any, **arguments: Unpack[WriteArguments]) -> Dataset:
    """Return the dataset of the rows of a `dask.dataframe.DataFrame`, without its index.

    Raises `ConfigError` for invalid arguments, and when it is listed if Dask cannot write.
    """
    return _dataset(frame_writers.DaskWriter, df, arguments)


def from_spark(df: Any, **arguments: Unpack[WriteArguments]) -> Dataset:
    """Return the dataset of the rows of a `pyspark.sql.DataFrame`.

    Raises `ConfigError` for invalid arguments, and when it is listed if Spark cannot write.
    """
    return _dataset(frame_writers.SparkWriter, df, arguments)


def from_daft(df: Any, **arguments: Unpack[WriteArguments]) -> Dataset:
    """Return the dataset of the rows of a `daft.DataFrame`.

    Raises `ConfigError` for invalid arguments, and when it is listed if Daft cannot write.
    """
    return _dataset(frame_writers.DaftWriter, df, arguments)


def from_ray(ds: Any, **arguments: Unpack[WriteArguments]) -> Dataset:
    """Return the dataset of the rows of a `ray.data.Dataset`, with its tensors.

    Raises `ConfigError` for invalid arguments, and when it is listed if Ray cannot write.
    """
    return _dataset(frame_writers.RayWriter, ds, arguments)


def from_modin(df: Any, **arguments: Unpack[WriteArguments]) -> Dataset:
    """Return the dataset of the rows of a `modin.pandas.DataFrame`, without its index.

    Raises `ConfigError` for invalid arguments, and when it is listed if Modin cannot write.
    """
    return _dataset(frame_writers.ModinWriter, df, arguments)


def _dataset(
    library: type[frame_writers.LibraryWriter], frame: Any, arguments: WriteArguments
) -> Dataset:
    writer = library(frame, dict(arguments.get("write_options") or {}))
    function = f"from_{writer.library}"
    ignore_scheduling(function, arguments, known=WriteArguments.__annotations__)
    path, key = arguments.get("path"), arguments.get("key")
    if path is not None:
        root = RootUrl.parse(path, setting=f"{function}(path=…)")
        frame_writers.check_can_write(writer.library, root)
        path = str(root)
    if key is not None and (not key or "/" in validate_key(key)):
        raise ConfigError(
            f"{function}(key={key!r}) is not a name of rows.", do="Pass a name without '/'."
        )
    written = WrittenFrame(writer, path, key)
    return Dataset(RowPlan(Rows(lambda: UnitManifest.of_source(written.to_source()))))
