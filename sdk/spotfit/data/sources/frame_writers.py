"""Writers of Parquet files by the user's Dask, Spark, Daft, Ray or Modin, on its own cluster.

Nothing is imported here: the caller has imported the library of the object that it passes.
"""

from __future__ import annotations

import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Protocol

from spotfit.core.errors import ConfigError, ConfigTypeError
from spotfit.store.url import RootUrl

ROW_GROUP_BYTES = 8 * 2**20
"""Decoded size of a row group, as that of `materialize`."""
_UNKNOWN_WIDTH_BYTES = 256
"""Assumed size of text, bytes and lists, where a library takes numbers of rows."""


class FrameWriter(Protocol):
    """Writes an object of another library as Parquet files."""

    @property
    def library(self) -> str:
        """The name of the library, for messages and names of files."""
        ...

    @property
    def options(self) -> Mapping[str, Any]:
        """Arguments of the user for the library's writer."""
        ...

    def write(self, folder: RootUrl) -> Sequence[str] | None:
        """Write all rows to files in a folder that does not exist yet.

        Returns the names of the files in the order of the rows; None if that is the order of the
        names. Raises what the library raises.
        """
        ...


@dataclass(frozen=True, eq=False)
class LibraryWriter(ABC):
    """The writer of a library, for objects of one class."""

    frame: Any
    options: Mapping[str, Any] = field(default_factory=dict)

    library: ClassVar[str]
    frame_type: ClassVar[tuple[str, str]]
    """Package and name of the class of `frame`."""

    def __post_init__(self) -> None:
        """Raise `ConfigTypeError` if `frame` is not of this class, or of one derived from it."""
        package, kind = self.frame_type
        for one in type(self.frame).__mro__:
            if one.__name__ == kind and one.__module__.partition(".")[0] == package:
                return
        found = type(self.frame)
        raise ConfigTypeError(
            f"from_{self.library}() has a {found.__module__}.{found.__qualname__}.",
            do=f"Pass a {kind} of {package}; of a Series, the result of its to_frame().",
        )

    @abstractmethod
    def write(self, folder: RootUrl) -> Sequence[str] | None:
        """See `FrameWriter`."""


class DaskWriter(LibraryWriter):
    """Writes a file for each partition of a Dask DataFrame."""

    library = "dask"
    frame_type = "dask", "DataFrame"

    def write(self, folder: RootUrl) -> None:
        """Call `to_parquet`, without the index."""
        rows = _rows_per_group(self.frame.dtypes)
        options = {"write_index": False, "row_group_size": rows, **self.options}
        self.frame.to_parquet(fsspec_url(folder), name_function=_part_name, **options)


class SparkWriter(LibraryWriter):
    """Writes a file for each partition of a Spark DataFrame."""

    library = "spark"
    frame_type = "pyspark", "DataFrame"

    def write(self, folder: RootUrl) -> None:
        """Call `DataFrame.write.parquet`, with the options of Spark's writer."""
        options = {"parquet.block.size": ROW_GROUP_BYTES, **self.options}
        self.frame.write.options(**options).parquet(spark_url(folder))


class DaftWriter(LibraryWriter):
    """Writes the files of a Daft DataFrame."""

    library = "daft"
    frame_type = "daft", "DataFrame"

    def write(self, folder: RootUrl) -> list[str]:
        """Call `write_parquet`; the names of the files are random."""
        daft = sys.modules["daft"]
        with daft.execution_config_ctx(parquet_target_row_group_size=ROW_GROUP_BYTES):
            written = self.frame.write_parquet(hadoop_url(folder), **self.options)
        return [path.rpartition("/")[2] for path in written.to_pydict()["path"]]


class RayWriter(LibraryWriter):
    """Writes a file for each block of a dataset of Ray Data."""

    library = "ray"
    frame_type = "ray", "Dataset"

    def write(self, folder: RootUrl) -> None:
        """Call `write_parquet`, whose files have the numbers of the blocks in their names."""
        schema = self.frame.schema()
        rows = _rows_per_group(schema.types if schema is not None else ())
        options = {"row_group_size": rows, **self.options}
        self.frame.write_parquet(hadoop_url(folder), **options)


class ModinWriter(LibraryWriter):
    """Writes a file for each row of partitions of a Modin DataFrame."""

    library = "modin"
    frame_type = "modin", "DataFrame"

    def write(self, folder: RootUrl) -> None:
        """Call `to_parquet`, without the index."""
        url = fsspec_url(folder)
        if folder.scheme == "file":
            Path(url).mkdir(parents=True)
        rows = _rows_per_group(self.frame.dtypes)
        self.frame.to_parquet(url, **{"index": False, "row_group_size": rows, **self.options})


# --- Addresses ------------------------------------------------------------------------------------


def check_can_write(library: str, folder: RootUrl) -> None:
    """Raise `ConfigError` if other processes cannot write to this address."""
    if folder.scheme == "memory":
        raise ConfigError(
            f"{library} cannot write rows to {folder}, the memory of this process.",
            do="Pass path= with the URL of a folder in a bucket.",
        )


def spark_url(folder: RootUrl) -> str:
    """Return the address of a folder as Spark and its Hadoop connectors write it."""
    if folder.scheme == "file":  # a path without a scheme is one of the cluster's default storage
        return f"file://{folder.path}"
    return hadoop_url(folder).replace("s3://", "s3a://", 1)


def hadoop_url(folder: RootUrl) -> str:
    """Return the address of a folder as Daft, Ray and Hadoop's connector for Azure write it."""
    if folder.scheme == "az":
        host = f"{folder.account}.dfs.core.windows.net"
        return f"abfss://{folder.bucket}@{host}/{folder.prefix}"
    return fsspec_url(folder)


def fsspec_url(folder: RootUrl) -> str:
    """Return the address of a folder as Dask and Modin write it; a path of a local one."""
    return folder.path if folder.scheme == "file" else f"{folder.scheme}://{folder.path}"


# --- Row groups -----------------------------------------------------------------------------------


def _part_name(partition: int) -> str:
    return f"part-{partition:08d}.parquet"  # the order of the names is that of the partitions


def _rows_per_group(types: Iterable[Any]) -> int:
    """Return how many rows of columns of these types have about `ROW_GROUP_BYTES`."""
    return max(1, ROW_GROUP_BYTES // max(1, sum(_width_bytes(kind) for kind in types)))


def _width_bytes(kind: Any) -> int:
    """Return the size of a value of a type of NumPy, pandas or Arrow, or of a tensor of Ray."""
    if shape := getattr(kind, "shape", None):
        return int(math.prod(shape)) * _width_bytes(getattr(kind, "scalar_type", None))
    if getattr(kind, "kind", "O") in "biufcmM":
        return int(kind.itemsize)
    try:
        return -(-int(kind.bit_width) // 8)
    except (AttributeError, ValueError, TypeError):  # not a type of Arrow, or not of a fixed size
        return _UNKNOWN_WIDTH_BYTES
