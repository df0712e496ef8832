"""Datasets for training: `import spotfit.data`, with the names of `ray.data`.

Importing this package must not import NumPy or PyArrow; each name loads its module on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from spotfit.core.lazy_names import lazy_names

if TYPE_CHECKING:
    from spotfit.data.dataset import Dataset as Dataset
    from spotfit.data.file_readers import read_parquet as read_parquet
    from spotfit.data.partitioning import Partitioning as Partitioning
    from spotfit.data.partitioning import PathPartitionFilter as PathPartitionFilter
    from spotfit.data.reader_options import FileShuffleConfig as FileShuffleConfig
    from spotfit.data.readers import from_items as from_items
    from spotfit.data.readers import range as range  # noqa: A004 - the name of Ray
    from spotfit.data.source import Source as Source

_MODULES = {
    "Dataset": "spotfit.data.dataset",
    "FileShuffleConfig": "spotfit.data.reader_options",
    "Partitioning": "spotfit.data.partitioning",
    "PathPartitionFilter": "spotfit.data.partitioning",
    "Source": "spotfit.data.source",
    "from_items": "spotfit.data.readers",
    "range": "spotfit.data.readers",
    "read_parquet": "spotfit.data.file_readers",
}

__all__ = [
    "Dataset",
    "FileShuffleConfig",
    "Partitioning",
    "PathPartitionFilter",
    "Source",
    "from_items",
    "range",
    "read_parquet",
]

__getattr__, __dir__ = lazy_names(__name__, _MODULES)
