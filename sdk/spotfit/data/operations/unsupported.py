"""Methods of Ray's `Dataset` that do not exist here, each with a way to the same result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from spotfit.core.errors import ConfigError

_NO_OBJECT_STORE = (
    "There is no object store. Iterate over blocks with iter_batches(batch_size=None, "
    "batch_format='pyarrow'), or write them with write_parquet()."
)
_WRITE_AND_LOAD = "Write Parquet with write_parquet(url), and load it there with the tools of {}."

REFUSED_METHODS = {
    "to_arrow_refs": _NO_OBJECT_STORE,
    "to_numpy_refs": _NO_OBJECT_STORE,
    "to_pandas_refs": _NO_OBJECT_STORE,
    "get_internal_block_refs": _NO_OBJECT_STORE,
    "iter_internal_ref_bundles": _NO_OBJECT_STORE,
    "serialize_lineage": "Pickle the dataset with cloudpickle.dumps(); a dataset is a description.",
    "deserialize_lineage": "Load the dataset with pickle.loads() where it was pickled.",
    "map_batches_internal": "Use map_batches().",
    "to_random_access_dataset": "Write Parquet with write_parquet(url), and look keys up with "
    "DuckDB or Lance.",
    "to_mars": "Use to_dask(path=...), which writes Parquet for Dask.",
    "write_datasink": "Write Parquet with write_parquet(url), or iterate over iter_batches().",
    "write_sql": _WRITE_AND_LOAD.format("the database"),
    "write_mongo": _WRITE_AND_LOAD.format("MongoDB"),
    "write_bigquery": _WRITE_AND_LOAD.format("BigQuery (bq load)"),
    "write_snowflake": _WRITE_AND_LOAD.format("Snowflake (COPY INTO)"),
    "write_clickhouse": _WRITE_AND_LOAD.format("ClickHouse (INSERT ... FROM s3())"),
    "write_kafka": "Iterate over iter_rows() with a producer of the Kafka client.",
    "write_turbopuffer": "Iterate over iter_batches() with the turbopuffer client.",
    "write_delta": "Write Parquet with write_parquet(url), and register it with "
    "deltalake.convert_to_deltalake(url).",
    "write_iceberg": "Write Parquet with write_parquet(url), and register it with "
    "pyiceberg's Table.add_files().",
    "write_lance": "Pass iter_batches(batch_size=None, batch_format='pyarrow') to "
    "lance.write_dataset().",
    "write_tfrecords": "Write Parquet with write_parquet(url); for TensorFlow, to_tf() and "
    "iter_tf_batches() read a dataset directly.",
    "write_webdataset": "Write Parquet with write_parquet(url), which keeps samples addressable.",
}
"""What to do instead, by method."""


def refused_method(name: str) -> Callable[..., NoReturn]:
    """Return a method that raises `ConfigError` with what to do instead."""

    def refuse(_self: Any, *_args: Any, **_kwargs: Any) -> NoReturn:
        raise ConfigError(
            f"Dataset.{name}() is not supported by spotfit.", do=REFUSED_METHODS[name]
        )

    refuse.__name__ = name
    refuse.__doc__ = f"Raise `ConfigError`. Instead: {REFUSED_METHODS[name]}"
    return refuse
