"""What every source of spotfit.data guarantees."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from spotfit.core.errors import ConfigError
from spotfit.data.dataset import Dataset
from spotfit.data.files import FileSet, PathOptions
from spotfit.data.plans.unit_manifest import UnitManifest
from spotfit.data.source import Source
from spotfit.data.sources.file_format import OpenFile


def rows_of(source: Source) -> pa.Table:
    """Return all rows of a source."""
    units = source.list_units()
    blocks = [source.read_unit(units, unit) for unit in range(len(units.unit_rows))]
    return pa.concat_tables(blocks) if blocks else source.schema(units).empty_table()


def values_of(table: pa.Table) -> dict[str, list[Any]]:
    """Return the values of the columns, which do not depend on chunks and types' widths."""
    return {name: table[name].combine_chunks().to_pylist() for name in table.column_names}


def source_of(dataset: Dataset) -> Source:
    """Return the only source of a dataset."""
    (source,) = dataset.manifest.sources
    return source


def read_values(dataset: Dataset) -> dict[str, list[Any]]:
    """Return the values of all rows by column."""
    return values_of(rows_of(source_of(dataset)))


def open_file(path: Path) -> OpenFile:
    """Return a local file as formats read it."""
    files = FileSet.of_paths(path, PathOptions())
    return OpenFile(files, files.list_files()[0])


class SourceSuite:
    """Base class of the tests of a source. A subclass provides `source` and `expected`.

    `source` has several units, and `expected` its rows as another reader reads them.
    """

    def test_listing_twice_gives_one_manifest(self, source: Source) -> None:
        again = pickle.loads(pickle.dumps(source))
        assert UnitManifest.of_source(source).digest == UnitManifest.of_source(again).digest

    def test_all_units_are_the_rows_of_another_reader(
        self, source: Source, expected: pa.Table
    ) -> None:
        assert values_of(rows_of(source)) == values_of(expected)

    def test_each_unit_has_the_listed_rows_and_columns(self, source: Source) -> None:
        units = source.list_units()
        assert len(units.unit_rows) > 1
        for unit, rows in enumerate(units.unit_rows):
            block = source.read_unit(units, unit)
            assert block.num_rows == rows
            assert block.schema.equals(source.schema(units))

    def test_another_process_reads_each_unit_alike(self, source: Source) -> None:
        units = source.list_units()
        copy, copied_units = pickle.loads(pickle.dumps((source, units)))
        for unit in reversed(range(len(units.unit_rows))):
            there = values_of(copy.read_unit(copied_units, unit))
            assert there == values_of(source.read_unit(units, unit))

    def test_columns_are_read_in_the_order_of_the_call(self, source: Source) -> None:
        units = source.list_units()
        last = len(units.unit_rows) - 1
        block = source.read_unit(units, last)
        names = list(reversed(block.column_names))
        assert source.read_unit(units, last, names).equals(block.select(names))
        assert source.read_unit(units, last, names[:1]).equals(block.select(names[:1]))


class FileSourceSuite(SourceSuite):
    """Base class of the tests of a source of files. A subclass also provides `folder`."""

    def test_a_replaced_file_is_reported_by_name(self, source: Source, folder: Path) -> None:
        units = source.list_units()
        last = max(path for path in folder.rglob("*") if path.is_file())
        found = last.stat()
        os.utime(last, ns=(found.st_atime_ns, found.st_mtime_ns + 1))
        with pytest.raises(ConfigError, match=f"{last.name} was changed"):
            source.read_unit(units, len(units.unit_rows) - 1)

    def test_a_deleted_file_is_reported_by_name(self, source: Source, folder: Path) -> None:
        units = source.list_units()
        last = max(path for path in folder.rglob("*") if path.is_file())
        last.unlink()
        with pytest.raises(ConfigError, match=f"{last.name} was changed or deleted"):
            source.read_unit(units, len(units.unit_rows) - 1)


class FetchedSourceSuite(FileSourceSuite):
    """Base class of the tests of a source that fetches a unit before it decodes it."""

    def test_a_fetched_unit_is_decoded_without_its_file(self, source: Any, folder: Path) -> None:
        units = source.list_units()
        last = len(units.unit_rows) - 1
        expected = values_of(source.read_unit(units, last))
        decode = source.fetch_unit(units, last)
        for path in folder.rglob("*"):
            if path.is_file():
                path.unlink()
        assert values_of(decode()) == expected
