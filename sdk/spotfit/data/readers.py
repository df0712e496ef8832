"""`read_*` and `from_*`: datasets from files, from tables and from the user's own objects."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa

from spotfit.data.dataset import Dataset
from spotfit.data.sources.tables import RangeSource, TableSource


def range(n: int) -> Dataset:  # noqa: A001 - the name of Ray
    """Return a dataset of the integers from 0 to `n` - 1 in the column `id`."""
    return Dataset.of_source(RangeSource(n))


def from_items(items: Sequence[Any]) -> Dataset:
    """Return a dataset with one row for each item.

    Dictionaries give one column for each key; other items are in the column `item`.
    """
    rows = [item if isinstance(item, Mapping) else {"item": item} for item in items]
    return Dataset.of_source(TableSource(pa.Table.from_pylist(rows)))
