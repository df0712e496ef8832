"""A frame of partitions that are written as Dask writes its own, by pandas."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd


class DataFrame:
    """Has the arguments of Dask's `to_parquet` that the writer needs, and no others."""

    def __init__(self, *partitions: pd.DataFrame) -> None:
        self.partitions = partitions
        self.dtypes = partitions[0].dtypes

    def to_parquet(
        self,
        path: str,
        *,
        name_function: Callable[[int], str],
        write_index: bool,
        row_group_size: int,
        compression: Any = "snappy",
    ) -> None:
        """Write a file for each partition to a folder that does not exist."""
        folder = Path(path)
        folder.mkdir(parents=True)
        for number, partition in enumerate(self.partitions):
            partition.to_parquet(
                folder / name_function(number),
                index=write_index,
                row_group_size=row_group_size,
                compression=compression,
            )


# What the readers check. `tests/frameworks/test_engines.py` writes frames of the library.
DataFrame.__module__ = "dask.dataframe"
