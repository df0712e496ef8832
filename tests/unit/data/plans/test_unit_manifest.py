"""Manifests: units, slices and unions of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spotfit.core.errors import ConfigError
from spotfit.data.plans.unit_manifest import UnitManifest
from spotfit.data.source import DataFile, Decode, SourceUnits
from spotfit.data.sources.tables import RangeSource, TableSource
from tests.unit.data.counting_source import CountingSource


def counting(*unit_rows: int) -> UnitManifest:
    """Units of these numbers of rows, whose column `id` counts them."""
    return UnitManifest.of_source(CountingSource(unit_rows))


def ids(manifest: UnitManifest) -> list[int]:
    parts = [manifest.read_part(unit, 0, int(rows)) for unit, rows in enumerate(manifest.unit_rows)]
    return [row for part in parts for row in part["id"].to_pylist()]


@given(
    unit_rows=st.lists(st.integers(0, 4), min_size=1, max_size=6),
    first=st.integers(0, 20),
    count=st.none() | st.integers(0, 20),
)
def test_a_slice_has_the_rows_of_a_list(
    unit_rows: list[int], first: int, count: int | None
) -> None:
    manifest = counting(*unit_rows)
    end = None if count is None else first + count
    assert ids(manifest.slice(first, count)) == list(range(sum(unit_rows)))[first:end]


def test_a_slice_of_a_slice_counts_from_its_first_row() -> None:
    assert ids(counting(3, 3, 3).slice(2, 5).slice(2, 2)) == [4, 5]


def test_a_part_of_a_sliced_unit_counts_from_its_first_row() -> None:
    part = counting(5).slice(2).read_part(0, 1, 2)
    assert part["id"].to_pylist() == [3, 4]


@pytest.mark.parametrize(("url", "is_fetched"), [("s3://bucket", True), ("/folder", False)])
def test_units_of_a_bucket_are_fetched(url: str, is_fetched: bool) -> None:
    class FetchedSource(CountingSource):
        def list_units(self) -> SourceUnits:
            return replace(super().list_units(), files=(DataFile(url, "file", 1, "1"),))

        def is_fetched(self, units: SourceUnits, unit: int) -> bool:
            return units.is_remote(unit)

        def fetch_unit(self, *arguments: Any) -> Decode:
            return lambda: self.read_unit(*arguments)

    manifest = UnitManifest.of_source(FetchedSource([5])).slice(2)
    assert manifest.is_fetched(0) == is_fetched
    assert manifest.fetch_part(0, 1, 2)()["id"].to_pylist() == [3, 4]


def test_a_source_without_fetches_is_read() -> None:
    assert not counting(5).is_fetched(0)
    assert counting(5).fetch_part(0, 1, 2)()["id"].to_pylist() == [1, 2]


def test_a_union_has_the_rows_of_all_manifests() -> None:
    assert ids(UnitManifest.concat([counting(2), counting(1, 2).slice(1)])) == [0, 1, 1, 2]


def test_units_can_be_reordered() -> None:
    assert ids(counting(1, 2, 1).select_units([2, 0])) == [3, 0]


def test_the_size_of_a_slice_is_proportional_to_its_rows() -> None:
    whole = UnitManifest.of_source(RangeSource(100))
    assert whole.unit_bytes.tolist() == [800]
    assert whole.slice(0, 25).unit_bytes.tolist() == [200]


def test_the_digest_depends_on_the_rows_only() -> None:
    assert counting(2, 3).digest == counting(2, 3).digest
    digests = {
        counting(2, 3).digest,
        counting(3, 2).digest,
        counting(2, 3).slice(1).digest,
        counting(2, 3).select_units([1, 0]).digest,
    }
    assert len(digests) == 4


def test_the_schema_unifies_those_of_the_sources() -> None:
    tables = [pa.table({"x": pa.array([1], pa.int32())}), pa.table({"x": [0.5], "y": ["a"]})]
    manifest = UnitManifest.concat([UnitManifest.of_source(TableSource(table)) for table in tables])
    assert manifest.schema.names == ["x", "y"]
    assert manifest.schema.field("x").type == pa.float64()


def test_columns_of_different_kinds_cannot_be_unified() -> None:
    tables = [pa.table({"x": [1]}), pa.table({"x": ["a"]})]
    manifest = UnitManifest.concat([UnitManifest.of_source(TableSource(table)) for table in tables])
    with pytest.raises(ConfigError, match="different columns"):
        _ = manifest.schema


def test_arrays_cannot_be_changed() -> None:
    with pytest.raises(ValueError, match="read-only"):
        counting(2).unit_rows[0] = np.int64(3)
