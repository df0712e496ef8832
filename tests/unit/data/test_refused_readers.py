"""Readers of Ray Data that do not exist here."""

from __future__ import annotations

import pytest

import spotfit.data
from spotfit.core.errors import ConfigError
from spotfit.data import refused_readers
from spotfit.data.refused_readers import REFUSED_READERS

READERS_OF_RAY_2_60 = [
    "from_arrow",
    "from_arrow_refs",
    "from_blocks",
    "from_daft",
    "from_dask",
    "from_huggingface",
    "from_items",
    "from_mars",
    "from_modin",
    "from_numpy",
    "from_numpy_refs",
    "from_pandas",
    "from_pandas_refs",
    "from_spark",
    "from_tf",
    "from_torch",
    "range",
    "range_tensor",
    "read_audio",
    "read_avro",
    "read_bigquery",
    "read_binary_files",
    "read_clickhouse",
    "read_csv",
    "read_databricks_tables",
    "read_datasource",
    "read_delta",
    "read_delta_sharing_tables",
    "read_hudi",
    "read_iceberg",
    "read_images",
    "read_json",
    "read_kafka",
    "read_lance",
    "read_lerobot",
    "read_mcap",
    "read_mongo",
    "read_numpy",
    "read_orc",
    "read_parquet",
    "read_snowflake",
    "read_sql",
    "read_text",
    "read_tfrecords",
    "read_unity_catalog",
    "read_videos",
    "read_webdataset",
    "read_zarr",
]


def test_every_reader_of_ray_exists_or_is_refused() -> None:
    missing = [name for name in READERS_OF_RAY_2_60 if not hasattr(spotfit.data, name)]
    assert not missing


@pytest.mark.parametrize("name", sorted(REFUSED_READERS))
def test_a_refused_reader_names_the_alternative(name: str) -> None:
    reader = getattr(spotfit.data, name)
    assert reader.__name__ == name
    with pytest.raises(ConfigError) as error:
        reader("anything", of="it")
    assert error.value.do == REFUSED_READERS[name]


def test_other_names_do_not_exist() -> None:
    with pytest.raises(AttributeError):
        _ = refused_readers.read_everything
