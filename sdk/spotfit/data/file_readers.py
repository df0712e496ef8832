"""`read_*`: datasets of files, with the names and arguments of `ray.data`.

Nothing is read until rows, their number or their columns are asked for. Every reader also has the
arguments of `FileOptions`. Paths are files, folders or a list of them: local, `s3://`, `gs://`,
`az://`, or in a `filesystem`; `s3://anonymous@bucket/…` is a public bucket.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Unpack

import pyarrow as pa

from spotfit.data.dataset import Dataset
from spotfit.data.reader_options import FileOptions, Paths, read_files, refuse
from spotfit.data.sources.parquet import ParquetFormat

_PARQUET_REMEDIES = {
    "filter": "Call filter(expr=…) on the dataset.",
    "include_row_hash": "Add a column with map_batches().",
    "skip_paths": "Select the files with partition_filter.",
    "catalog": "Pass the paths of the files.",
}


class ParquetOptions(FileOptions, total=False):
    """Further arguments of Ray, which are refused."""

    filter: Any
    include_row_hash: bool
    skip_paths: Any
    catalog: Any


def read_parquet(
    paths: Paths,
    *,
    columns: Sequence[str] | None = None,
    tensor_column_schema: Mapping[str, tuple[Any, tuple[int, ...]]] | None = None,
    schema: pa.Schema | None = None,
    **options: Unpack[ParquetOptions],
) -> Dataset:
    """Return the dataset of Parquet files; a unit is a row group.

    Only `columns` are read; None: all. `tensor_column_schema` has element type and shape of binary
    columns whose bytes are tensors. `schema` replaces the types of the files, and adds columns that
    some of them lack. `partitioning` is "hive" if it is not given. Tensors that Ray Data has
    written are read as such. Raises `ConfigError`, also for missing files and columns when the
    dataset is listed.
    """
    others = refuse("read_parquet", options, _PARQUET_REMEDIES)
    return read_files(
        "read_parquet",
        paths,
        ParquetFormat(dict(tensor_column_schema or {})),
        {"partitioning": "hive", **others},
        extensions=("parquet", "parq", "pq"),
        columns=columns,
        schema=schema,
    )
