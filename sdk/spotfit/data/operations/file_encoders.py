"""The content of the files that `write_*` writes, by format."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa

from spotfit.core.errors import ConfigError
from spotfit.data.formats.column_arrays import column_to_numpy
from spotfit.data.plans.row_functions import block_rows
from spotfit.data.schema import check_columns
from spotfit.host.plugins import require_module

Encoder: TypeAlias = Callable[[pa.Table], bytes]
"""Returns the content of a file with these rows."""

ROW_GROUP_BYTES = 8 * 2**20
"""Decoded size of a row group: small enough to mix, large enough for one request each."""


def parquet_encoder(row_group_bytes: int = ROW_GROUP_BYTES, **arrow_parquet_args: Any) -> Encoder:
    """Return the encoder of Parquet files; the arguments are those of `pyarrow`'s writer."""
    import pyarrow.parquet as pq

    def encode(rows: pa.Table) -> bytes:
        arguments = dict(arrow_parquet_args)
        arguments.setdefault("row_group_size", rows_per_group(rows, row_group_bytes))
        sink = pa.BufferOutputStream()
        pq.write_table(rows, sink, **arguments)
        body: bytes = sink.getvalue().to_pybytes()
        return body

    return encode


def rows_per_group(rows: pa.Table, group_bytes: int) -> int:
    """Return how many of the rows have about `group_bytes`; at least one."""
    count = int(rows.num_rows)
    return max(1, min(count, count * group_bytes // max(int(rows.nbytes), 1)))


def csv_encoder(**arrow_csv_args: Any) -> Encoder:
    """Return the encoder of CSV files; the arguments are those of `pyarrow.csv.write_csv`."""
    import pyarrow.csv

    def encode(rows: pa.Table) -> bytes:
        sink = pa.BufferOutputStream()
        try:
            pyarrow.csv.write_csv(rows, sink, **arrow_csv_args)
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError, pa.ArrowTypeError) as error:
            raise ConfigError(
                f"A column cannot be written as CSV: {error}.",
                do="Drop the column or convert it to numbers or text, or use write_parquet().",
            ) from error
        body: bytes = sink.getvalue().to_pybytes()
        return body

    return encode


def json_encoder(**pandas_json_args: Any) -> Encoder:
    """Return the encoder of files with a line of JSON for each row, Ray's only layout."""
    if (orient := pandas_json_args.pop("orient", "records")) != "records":
        raise ConfigError(
            f"write_json(orient={orient!r}) is not supported.",
            do="Leave it out: each line of a file is the object of a row.",
        )
    _refuse_arguments("write_json", set(pandas_json_args) - {"lines", "index"})

    def encode(rows: pa.Table) -> bytes:
        lines = (json.dumps(row, default=_to_json, ensure_ascii=False) for row in block_rows(rows))
        return "".join(f"{line}\n" for line in lines).encode()

    return encode


def _refuse_arguments(method: str, unknown: set[str]) -> None:
    if unknown:
        raise ConfigError(
            f"{method}() has no argument {', '.join(sorted(unknown))}.", do="Leave it out."
        )


def _to_json(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.tolist()
    if hasattr(value, "isoformat"):
        return value.isoformat()
    raise ConfigError(
        f"A value of type {type(value).__name__} cannot be written as JSON.",
        do="Drop the column or convert it to numbers or text, or use write_parquet().",
    )


def orc_encoder(**arrow_orc_args: Any) -> Encoder:
    """Return the encoder of ORC files; the arguments are those of `pyarrow.orc.write_table`."""
    import pyarrow.orc

    def encode(rows: pa.Table) -> bytes:
        sink = pa.BufferOutputStream()
        pyarrow.orc.write_table(rows, sink, **arrow_orc_args)
        body: bytes = sink.getvalue().to_pybytes()
        return body

    return encode


def numpy_encoder(column: str, **arguments: Any) -> Encoder:
    """Return the encoder of `.npy` files with the values of one column."""
    _refuse_arguments("write_numpy", set(arguments))

    def encode(rows: pa.Table) -> bytes:
        check_columns("write_numpy()", [column], rows.column_names)
        values = column_to_numpy(rows.column(column))
        if values.dtype == object:
            raise ConfigError(
                f"write_numpy(column={column!r}): values of type {rows.schema.field(column).type} "
                "have no common shape or type of NumPy.",
                do="Convert them to arrays of one shape, or use write_parquet().",
            )
        sink = io.BytesIO()
        np.save(sink, values, allow_pickle=False)
        return sink.getvalue()

    return encode


def image_encoder(column: str, file_format: str) -> Callable[[dict[str, Any]], bytes]:
    """Return the encoder of image files with the arrays of one column, by Pillow."""
    image_module = require_module("PIL.Image", extra="images")

    def encode(row: dict[str, Any]) -> bytes:
        check_columns("write_images()", [column], list(row))
        sink = io.BytesIO()
        image_module.fromarray(np.asarray(row[column])).save(sink, format=_pillow_name(file_format))
        return sink.getvalue()

    return encode


def _pillow_name(file_format: str) -> str:
    return {"jpg": "jpeg"}.get(file_format, file_format)
