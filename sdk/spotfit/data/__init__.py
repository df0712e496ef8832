"""Datasets for training: `import spotfit.data`, with the names of `ray.data`.

Importing this package must not import NumPy or PyArrow; each name loads its module on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from spotfit.core.lazy_names import lazy_names

if TYPE_CHECKING:
    from spotfit.data.context import ActorPoolStrategy as ActorPoolStrategy
    from spotfit.data.context import DataContext as DataContext
    from spotfit.data.context import DatasetContext as DatasetContext
    from spotfit.data.context import ExecutionOptions as ExecutionOptions
    from spotfit.data.context import ExecutionResources as ExecutionResources
    from spotfit.data.context import NodeIdStr as NodeIdStr
    from spotfit.data.context import RandomSeedConfig as RandomSeedConfig
    from spotfit.data.context import TaskPoolStrategy as TaskPoolStrategy
    from spotfit.data.dataset import Dataset as Dataset
    from spotfit.data.dataset import MaterializedDataset as MaterializedDataset
    from spotfit.data.engine_readers import from_daft as from_daft
    from spotfit.data.engine_readers import from_dask as from_dask
    from spotfit.data.engine_readers import from_modin as from_modin
    from spotfit.data.engine_readers import from_ray as from_ray
    from spotfit.data.engine_readers import from_spark as from_spark
    from spotfit.data.feeders import Feeders as Feeders
    from spotfit.data.file_readers import read_binary_files as read_binary_files
    from spotfit.data.file_readers import read_csv as read_csv
    from spotfit.data.file_readers import read_images as read_images
    from spotfit.data.file_readers import read_json as read_json
    from spotfit.data.file_readers import read_numpy as read_numpy
    from spotfit.data.file_readers import read_orc as read_orc
    from spotfit.data.file_readers import read_parquet as read_parquet
    from spotfit.data.file_readers import read_text as read_text
    from spotfit.data.file_readers import read_tfrecords as read_tfrecords
    from spotfit.data.file_readers import read_webdataset as read_webdataset
    from spotfit.data.iteration.data_iterator import DataIterator as DataIterator
    from spotfit.data.operations.dataset_pipeline import DatasetPipeline as DatasetPipeline
    from spotfit.data.operations.grouped_data import GroupedData as GroupedData
    from spotfit.data.operations.mixed_source import MixStoppingCondition as MixStoppingCondition
    from spotfit.data.operations.summary import DatasetSummary as DatasetSummary
    from spotfit.data.operations.writers import SaveMode as SaveMode
    from spotfit.data.preprocessor import Preprocessor as Preprocessor
    from spotfit.data.reader_options import FileShuffleConfig as FileShuffleConfig
    from spotfit.data.readers import from_arrow as from_arrow
    from spotfit.data.readers import from_huggingface as from_huggingface
    from spotfit.data.readers import from_items as from_items
    from spotfit.data.readers import from_numpy as from_numpy
    from spotfit.data.readers import from_pandas as from_pandas
    from spotfit.data.readers import from_torch as from_torch
    from spotfit.data.readers import range as range  # noqa: A004 - the name of Ray
    from spotfit.data.readers import range_tensor as range_tensor
    from spotfit.data.schema import Schema as Schema
    from spotfit.data.source import Source as Source
    from spotfit.data.sources.partitioning import Partitioning as Partitioning
    from spotfit.data.sources.partitioning import PathPartitionFilter as PathPartitionFilter
    from spotfit.data.table_readers import read_delta as read_delta
    from spotfit.data.table_readers import read_iceberg as read_iceberg
    from spotfit.data.table_readers import read_lance as read_lance

_MODULES = {
    "ActorPoolStrategy": "spotfit.data.context",
    "DataContext": "spotfit.data.context",
    "DataIterator": "spotfit.data.iteration.data_iterator",
    "Dataset": "spotfit.data.dataset",
    "DatasetContext": "spotfit.data.context",
    "DatasetPipeline": "spotfit.data.operations.dataset_pipeline",
    "DatasetSummary": "spotfit.data.operations.summary",
    "ExecutionOptions": "spotfit.data.context",
    "ExecutionResources": "spotfit.data.context",
    "Feeders": "spotfit.data.feeders",
    "FileShuffleConfig": "spotfit.data.reader_options",
    "GroupedData": "spotfit.data.operations.grouped_data",
    "MaterializedDataset": "spotfit.data.dataset",
    "MixStoppingCondition": "spotfit.data.operations.mixed_source",
    "NodeIdStr": "spotfit.data.context",
    "Partitioning": "spotfit.data.sources.partitioning",
    "PathPartitionFilter": "spotfit.data.sources.partitioning",
    "Preprocessor": "spotfit.data.preprocessor",
    "RandomSeedConfig": "spotfit.data.context",
    "SaveMode": "spotfit.data.operations.writers",
    "Schema": "spotfit.data.schema",
    "Source": "spotfit.data.source",
    "TaskPoolStrategy": "spotfit.data.context",
    "from_arrow": "spotfit.data.readers",
    "from_daft": "spotfit.data.engine_readers",
    "from_dask": "spotfit.data.engine_readers",
    "from_huggingface": "spotfit.data.readers",
    "from_items": "spotfit.data.readers",
    "from_modin": "spotfit.data.engine_readers",
    "from_numpy": "spotfit.data.readers",
    "from_pandas": "spotfit.data.readers",
    "from_ray": "spotfit.data.engine_readers",
    "from_spark": "spotfit.data.engine_readers",
    "from_torch": "spotfit.data.readers",
    "range": "spotfit.data.readers",
    "range_tensor": "spotfit.data.readers",
    "read_binary_files": "spotfit.data.file_readers",
    "read_csv": "spotfit.data.file_readers",
    "read_delta": "spotfit.data.table_readers",
    "read_iceberg": "spotfit.data.table_readers",
    "read_lance": "spotfit.data.table_readers",
    "read_images": "spotfit.data.file_readers",
    "read_json": "spotfit.data.file_readers",
    "read_numpy": "spotfit.data.file_readers",
    "read_orc": "spotfit.data.file_readers",
    "read_parquet": "spotfit.data.file_readers",
    "read_text": "spotfit.data.file_readers",
    "read_tfrecords": "spotfit.data.file_readers",
    "read_webdataset": "spotfit.data.file_readers",
    # Those that raise an error with the alternative.
    **dict.fromkeys(
        (
            "from_arrow_refs",
            "from_blocks",
            "from_mars",
            "from_numpy_refs",
            "from_pandas_refs",
            "from_tf",
            "read_audio",
            "read_avro",
            "read_bigquery",
            "read_clickhouse",
            "read_databricks_tables",
            "read_datasource",
            "read_delta_sharing_tables",
            "read_hudi",
            "read_kafka",
            "read_lerobot",
            "read_mcap",
            "read_mongo",
            "read_snowflake",
            "read_sql",
            "read_unity_catalog",
            "read_videos",
            "read_zarr",
        ),
        "spotfit.data.refused_readers",
    ),
}

__all__ = [
    "ActorPoolStrategy",
    "DataContext",
    "DataIterator",
    "Dataset",
    "DatasetContext",
    "DatasetPipeline",
    "DatasetSummary",
    "ExecutionOptions",
    "ExecutionResources",
    "Feeders",
    "FileShuffleConfig",
    "GroupedData",
    "MaterializedDataset",
    "MixStoppingCondition",
    "NodeIdStr",
    "Partitioning",
    "PathPartitionFilter",
    "Preprocessor",
    "RandomSeedConfig",
    "SaveMode",
    "Schema",
    "Source",
    "TaskPoolStrategy",
    "from_arrow",
    "from_daft",
    "from_dask",
    "from_huggingface",
    "from_items",
    "from_modin",
    "from_numpy",
    "from_pandas",
    "from_ray",
    "from_spark",
    "from_torch",
    "range",
    "range_tensor",
    "read_binary_files",
    "read_csv",
    "read_delta",
    "read_iceberg",
    "read_images",
    "read_json",
    "read_lance",
    "read_numpy",
    "read_orc",
    "read_parquet",
    "read_text",
    "read_tfrecords",
    "read_webdataset",
]

__getattr__, __dir__ = lazy_names(__name__, _MODULES)
