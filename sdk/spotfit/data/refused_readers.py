"""Readers of Ray Data that do not exist here, each with a way to the same rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from spotfit.core.errors import ConfigError

_NO_OBJECT_STORE = "There is no object store. Pass the tables or arrays themselves to {}()."
_EXPORT = (
    "Export the rows as Parquet to the bucket with the tools of {}, and use read_parquet(): the "
    "machines then need no access to it, and rows keep their positions."
)
_WRITE = "Write Parquet to the bucket with {}, and use read_parquet()."
_BYTES = "Use read_binary_files(), and decode the column `bytes` with {} in map() or map_batches()."

REFUSED_READERS = {
    "from_arrow_refs": _NO_OBJECT_STORE.format("from_arrow"),
    "from_blocks": _NO_OBJECT_STORE.format("from_arrow"),
    "from_numpy_refs": _NO_OBJECT_STORE.format("from_numpy"),
    "from_pandas_refs": _NO_OBJECT_STORE.format("from_pandas"),
    "from_mars": _WRITE.format("df.to_parquet(url)"),
    "from_tf": "Use read_tfrecords() for its files, or write the elements as Parquet once.",
    "read_audio": _BYTES.format("torchaudio or soundfile"),
    "read_avro": _WRITE.format("fastavro or Spark"),
    "read_bigquery": _EXPORT.format("BigQuery (EXPORT DATA)"),
    "read_clickhouse": _EXPORT.format("ClickHouse (INSERT INTO FUNCTION s3())"),
    "read_databricks_tables": _EXPORT.format("Databricks, or use read_delta()"),
    "read_datasource": "Implement spotfit.data.Source, and use Dataset.of_source().",
    "read_delta_sharing_tables": _EXPORT.format("delta-sharing"),
    "read_hudi": _EXPORT.format("Spark"),
    "read_kafka": "A topic has no positions of rows that stay. Write a range of it as Parquet, and "
    "use read_parquet().",
    "read_lerobot": "Use read_parquet() for its tables and read_binary_files() for its videos.",
    "read_mcap": _BYTES.format("mcap"),
    "read_mongo": _EXPORT.format("MongoDB"),
    "read_snowflake": _EXPORT.format("Snowflake (COPY INTO)"),
    "read_sql": "Read the rows with pandas.read_sql() and use from_pandas(), or write them as "
    "Parquet to the bucket and use read_parquet().",
    "read_unity_catalog": "Use read_delta() or read_parquet() with the address of the table.",
    "read_videos": _BYTES.format("torchcodec"),
    "read_zarr": "Write the arrays as .npy files or Parquet, and use read_numpy() or "
    "read_parquet().",
}
"""What to do instead, by name."""


def __getattr__(name: str) -> Callable[..., NoReturn]:
    if name not in REFUSED_READERS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def refuse(*_args: Any, **_kwargs: Any) -> NoReturn:
        raise ConfigError(f"{name}() is not supported by spotfit.", do=REFUSED_READERS[name])

    refuse.__name__ = name
    refuse.__doc__ = f"Raise `ConfigError`. Instead: {REFUSED_READERS[name]}"
    return refuse
