"""`read_delta`, `read_iceberg` and `read_lance`: datasets of versioned tables.

The version is chosen when the dataset is listed, and is the same for the whole run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Unpack

from spotfit.data.dataset import Dataset
from spotfit.data.reader_options import (
    FileShuffleConfig,
    SchedulingOptions,
    ignore_scheduling,
    refuse,
    shuffled_dataset,
)
from spotfit.data.sources.lance_tables import LanceSource
from spotfit.data.sources.table_files import DeltaTable, IcebergTable, TableFilesSource

_FILTER_REMEDY = "Call filter(expr=…) on the dataset."


def read_delta(
    path: str,
    version: int | str | None = None,
    *,
    storage_options: Mapping[str, str] | None = None,
    columns: Sequence[str] | None = None,
    shuffle: FileShuffleConfig | None = None,
    include_paths: bool = False,
    catalog: Any = None,
    filesystem: Any = None,
    **options: Unpack[SchedulingOptions],
) -> Dataset:
    """Return the dataset of a Delta table, at its latest version or another.

    `storage_options` are those of the package `deltalake` for the log; the files are read with the
    credentials of the machine. Needs the extra `delta`. Raises `ConfigError` for
    tables with deletion vectors or mapped columns.
    """
    ignore_scheduling("read_delta", options)
    remedies = {
        "catalog": "Pass the path of the table.",
        "filesystem": "Pass the URL of the table, and storage_options.",
    }
    refuse("read_delta", {"catalog": catalog, "filesystem": filesystem}, remedies)
    table = DeltaTable(str(path), version, dict(storage_options or {}))
    source = TableFilesSource(table, _to_tuple(columns), include_paths)
    return shuffled_dataset(source, shuffle)


def read_iceberg(
    *,
    table_identifier: str,
    row_filter: Any = None,
    selected_fields: Sequence[str] = ("*",),
    snapshot_id: int | None = None,
    scan_kwargs: Mapping[str, Any] | None = None,
    catalog_kwargs: Mapping[str, Any] | None = None,
    catalog: Any = None,
    **options: Unpack[SchedulingOptions],
) -> Dataset:
    """Return the dataset of an Iceberg table, at its latest snapshot or another.

    `catalog_kwargs` are `name` and properties for `pyiceberg.catalog.load_catalog`. Needs the extra
    `iceberg`. Raises `ConfigError` for tables with deleted rows in files or renamed columns.
    """
    ignore_scheduling("read_iceberg", options)
    refused = {"row_filter": row_filter, "scan_kwargs": scan_kwargs, "catalog": catalog}
    remedies = {
        "row_filter": _FILTER_REMEDY,
        "scan_kwargs": "Pass snapshot_id or selected_fields.",
        "catalog": "Pass catalog_kwargs.",
    }
    refuse("read_iceberg", refused, remedies)
    table = IcebergTable(table_identifier, snapshot_id, dict(catalog_kwargs or {}))
    columns = None if "*" in selected_fields else tuple(selected_fields)
    return Dataset.of_source(TableFilesSource(table, columns))


def read_lance(
    uri: str,
    *,
    version: int | str | None = None,
    columns: Sequence[str] | None = None,
    filter: str | None = None,  # noqa: A002 - the name of Ray
    storage_options: Mapping[str, str] | None = None,
    scanner_options: Mapping[str, Any] | None = None,
    **options: Unpack[SchedulingOptions],
) -> Dataset:
    """Return the dataset of a Lance table, at its latest version or another.

    The package `lance` reads it, with `storage_options` or the credentials of the machine. Needs
    the extra `lance`. Raises `ConfigError`.
    """
    ignore_scheduling("read_lance", options)
    refused = {"filter": filter, "scanner_options": scanner_options}
    refuse("read_lance", refused, {"filter": _FILTER_REMEDY, "scanner_options": "Pass columns."})
    source = LanceSource(str(uri), version, _to_tuple(columns), dict(storage_options or {}))
    return Dataset.of_source(source)


def _to_tuple(columns: Sequence[str] | None) -> tuple[str, ...] | None:
    return None if columns is None else tuple(columns)
