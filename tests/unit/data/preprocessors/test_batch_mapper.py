"""A function on batches."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from spotfit.core.errors import ConfigError
from spotfit.data.plans.transforms import RowCountChangedError
from spotfit.data.preprocessors import BatchMapper
from tests.unit.data.preprocessors.rows import dataset, rows_of


def double(batch: Any) -> Any:
    batch["x"] = batch["x"] * 2
    return batch


@pytest.mark.parametrize("batch_format", ["pandas", "numpy"])
def test_the_function_gets_batches_of_the_format(batch_format: str) -> None:
    ds = BatchMapper(double, batch_format).transform(dataset({"x": [1, 2, 3]}, 2))
    assert rows_of(ds)["x"].to_pylist() == [2, 4, 6]


def test_the_function_gets_tables() -> None:
    mapper = BatchMapper(lambda table: table.rename_columns(["y"]), "arrow")
    assert rows_of(mapper.transform(dataset({"x": [1]}))) == pa.table({"y": [1]})


def test_batches_have_the_given_size_at_most() -> None:
    sizes = []

    def note_size(table: Any) -> Any:
        sizes.append(table.num_rows)
        return table

    ds = BatchMapper(note_size, "arrow", batch_size=2).transform(dataset({"x": [1, 2, 3, 4, 5]}, 3))
    assert rows_of(ds)["x"].to_pylist() == [1, 2, 3, 4, 5]
    assert sizes == [2, 1, 2]


def test_a_function_that_changes_the_number_of_rows_is_rejected() -> None:
    mapper = BatchMapper(lambda table: table.slice(1), "arrow")
    with pytest.raises(RowCountChangedError, match=r"BatchMapper\.transform returned 1 rows for 2"):
        rows_of(mapper.transform(dataset({"x": [1, 2]})))


def test_an_unknown_format_is_rejected() -> None:
    with pytest.raises(ConfigError, match="'polars' is not supported"):
        BatchMapper(double, "polars")
