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
    from spotfit.data.context import TaskPoolStrategy as TaskPoolStrategy
    from spotfit.data.dataset import Dataset as Dataset
    from spotfit.data.dataset import MaterializedDataset as MaterializedDataset
    from spotfit.data.dataset_pipeline import DatasetPipeline as DatasetPipeline
    from spotfit.data.file_readers import read_parquet as read_parquet
    from spotfit.data.grouped_data import GroupedData as GroupedData
    from spotfit.data.partitioning import Partitioning as Partitioning
    from spotfit.data.partitioning import PathPartitionFilter as PathPartitionFilter
    from spotfit.data.reader_options import FileShuffleConfig as FileShuffleConfig
    from spotfit.data.readers import from_items as from_items
    from spotfit.data.readers import range as range  # noqa: A004 - the name of Ray
    from spotfit.data.schema import Schema as Schema
    from spotfit.data.source import Source as Source
    from spotfit.data.summary import DatasetSummary as DatasetSummary
    from spotfit.data.writers import SaveMode as SaveMode

_MODULES = {
    "ActorPoolStrategy": "spotfit.data.context",
    "DataContext": "spotfit.data.context",
    "Dataset": "spotfit.data.dataset",
    "DatasetContext": "spotfit.data.context",
    "DatasetPipeline": "spotfit.data.dataset_pipeline",
    "DatasetSummary": "spotfit.data.summary",
    "ExecutionOptions": "spotfit.data.context",
    "ExecutionResources": "spotfit.data.context",
    "FileShuffleConfig": "spotfit.data.reader_options",
    "GroupedData": "spotfit.data.grouped_data",
    "MaterializedDataset": "spotfit.data.dataset",
    "Partitioning": "spotfit.data.partitioning",
    "PathPartitionFilter": "spotfit.data.partitioning",
    "SaveMode": "spotfit.data.writers",
    "Schema": "spotfit.data.schema",
    "Source": "spotfit.data.source",
    "TaskPoolStrategy": "spotfit.data.context",
    "from_items": "spotfit.data.readers",
    "range": "spotfit.data.readers",
    "read_parquet": "spotfit.data.file_readers",
}

__all__ = [
    "ActorPoolStrategy",
    "DataContext",
    "Dataset",
    "DatasetContext",
    "DatasetPipeline",
    "DatasetSummary",
    "ExecutionOptions",
    "ExecutionResources",
    "FileShuffleConfig",
    "GroupedData",
    "MaterializedDataset",
    "Partitioning",
    "PathPartitionFilter",
    "SaveMode",
    "Schema",
    "Source",
    "TaskPoolStrategy",
    "from_items",
    "range",
    "read_parquet",
]

__getattr__, __dir__ = lazy_names(__name__, _MODULES)
