"""`read_*`: datasets of files, with the names and arguments of `ray.data`.

Arguments of Ray's scheduling, such as `parallelism`, `concurrency` and `num_cpus`, are accepted and
not needed. Nothing is read until rows, their number or their columns are asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import pyarrow as pa

from spotfit.data.dataset import Dataset
from spotfit.data.partitioning import Partitioning
from spotfit.data.reader_options import (
    FileArguments,
    FileShuffleConfig,
    Paths,
    read_files,
    take_options,
)
from spotfit.data.sources.parquet import ParquetFormat

PathFilter = Callable[[list[str]], Sequence[str]]
Shuffle = Literal["files"] | FileShuffleConfig | None

_FILTER_REMEDY = "Call filter(expr=…) on the dataset: the rows that stay are then counted once."


def read_parquet(  # noqa: PLR0913 - the arguments of Ray
    paths: Paths,
    *,
    filesystem: Any = None,
    columns: Sequence[str] | None = None,
    tensor_column_schema: Mapping[str, tuple[Any, tuple[int, ...]]] | None = None,
    partition_filter: PathFilter | None = None,
    partitioning: Partitioning | str | None = "hive",
    include_paths: bool = False,
    ignore_missing_paths: bool = False,
    shuffle: Shuffle = None,
    file_extensions: Sequence[str] | None = None,
    schema: pa.Schema | None = None,
    **options: Any,
) -> Dataset:
    """Return the dataset of Parquet files; a unit is a row group.

    `columns` are read, None for all. `tensor_column_schema` gives element type and shape of binary
    columns whose bytes are tensors. Columns of hive folders such as `year=2024` are strings, unless
    `partitioning` has types. `schema` replaces the types of the files, and adds columns that they
    lack. Tensors that Ray Data has written are read as such. Raises `ConfigError`.
    """
    take_options(
        "read_parquet",
        options,
        refused={
            "filter": _FILTER_REMEDY,
            "include_row_hash": "Add a column with map_batches().",
            "skip_paths": "Select the files with partition_filter.",
            "catalog": "Pass the paths of the table's files.",
        },
    )
    arguments = FileArguments(
        paths,
        filesystem=filesystem,
        partition_filter=partition_filter,
        partitioning=partitioning,
        include_paths=include_paths,
        ignore_missing_paths=ignore_missing_paths,
        shuffle=shuffle,
        file_extensions=file_extensions,
    )
    return read_files(
        arguments,
        ParquetFormat(dict(tensor_column_schema or {})),
        columns=columns,
        stated_schema=schema,
        format_extensions=("parquet", "parq", "pq"),
    )
