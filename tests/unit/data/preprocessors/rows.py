"""Datasets of tests, and what comes out of them."""

from __future__ import annotations

import itertools
from typing import Any

import pyarrow as pa

from spotfit.data.dataset import Dataset
from spotfit.data.preprocessors.preprocessor_base import Preprocessor
from spotfit.data.sources.tables import TableSource


def dataset(table: pa.Table | dict[str, Any], *lengths: int) -> Dataset:
    """Return the rows as a dataset of units of these lengths, and of the rest."""
    whole = pa.table(table) if isinstance(table, dict) else table
    bounds = [0]
    for length in lengths:
        bounds.append(bounds[-1] + length)
    pieces = [whole.slice(a, b - a) for a, b in itertools.pairwise(bounds)]
    pieces.append(whole.slice(bounds[-1]))
    first, *others = (Dataset.of_source(TableSource(piece)) for piece in pieces)
    return first.union(*others)


def rows_of(ds: Dataset) -> pa.Table:
    """Return all rows."""
    blocks = list(ds.blocks())
    return pa.concat_tables(blocks) if blocks else ds.schema().base_schema.empty_table()


def output(preprocessor: Preprocessor, table: pa.Table | dict[str, Any], name: str) -> list[Any]:
    """Return a column of the transformed table as values of Python."""
    values: list[Any] = rows_of(preprocessor.transform(dataset(table)))[name].to_pylist()
    return values
