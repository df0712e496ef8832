"""Rows in memory, and rows that are computed from their number."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from spotfit.data.source import Source
from spotfit.data.sources import tables
from spotfit.data.sources.tables import RangeSource, TableSource
from tests.unit.data.sources.source_suite import SourceSuite


@pytest.fixture(autouse=True)
def _small_units(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "_UNIT_BYTES", 100)


class TestTable(SourceSuite):
    @pytest.fixture
    def expected(self) -> pa.Table:
        kinds = pa.array(["x", "y"] * 20).dictionary_encode()
        table = pa.table({"id": np.arange(40), "names": [["a"] * (n % 3) for n in range(40)]})
        return pa.concat_tables([table, table]).append_column("kind", pa.chunked_array([kinds] * 2))

    @pytest.fixture
    def source(self, expected: pa.Table) -> Source:
        return TableSource(expected)


class TestRange(SourceSuite):
    @pytest.fixture
    def source(self) -> Source:
        return RangeSource(100)

    @pytest.fixture
    def expected(self) -> pa.Table:
        return pa.table({"id": list(range(100))})


class TestRangeOfTensors(SourceSuite):
    @pytest.fixture
    def source(self) -> Source:
        return RangeSource(30, (2, 3))

    @pytest.fixture
    def expected(self) -> pa.Table:
        tensors = np.stack([np.full((2, 3), n) for n in range(30)])
        return pa.table({"data": pa.FixedShapeTensorArray.from_numpy_ndarray(tensors)})


def test_the_digest_of_a_table_depends_on_its_values_not_on_its_chunks() -> None:
    table = pa.table({"a": [1, 2, 3]})
    chunked = pa.concat_tables([table.slice(0, 1), table.slice(1)])
    other = pa.table({"a": [1, 2, 4]})
    assert TableSource(chunked).identity == TableSource(table).identity
    assert TableSource(other).identity != TableSource(table).identity
