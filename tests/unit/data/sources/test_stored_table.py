"""Tables that are pickled as references to objects in the run's storage."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from spotfit.core.errors import IntegrityError
from spotfit.data.plans.unit_manifest import UnitManifest
from spotfit.data.sources.stored_table import StoredTableSource, tables_stored_in
from spotfit.data.sources.tables import TableSource
from spotfit.store.factory import open_store

LARGE = pa.table({"value": np.arange(500_000)})


def shipped(table: pa.Table, folder: Path) -> StoredTableSource | TableSource:
    with tables_stored_in(open_store(str(folder))):
        body = pickle.dumps(TableSource(table))
    source = pickle.loads(body)
    assert isinstance(source, StoredTableSource | TableSource)
    return source


def test_a_large_table_is_pickled_as_a_reference(tmp_path: Path) -> None:
    source = shipped(LARGE, tmp_path)
    assert isinstance(source, StoredTableSource)
    assert len(pickle.dumps(source)) < 1000


def test_a_reference_has_the_rows_of_the_table(tmp_path: Path) -> None:
    manifest = UnitManifest.of_source(shipped(LARGE, tmp_path))
    parts = [manifest.read_part(n, 0, int(rows)) for n, rows in enumerate(manifest.unit_rows)]
    assert pa.concat_tables(parts).equals(LARGE)


def test_a_reference_has_the_digest_of_the_table(tmp_path: Path) -> None:
    stored = UnitManifest.of_source(shipped(LARGE, tmp_path))
    assert stored.digest == UnitManifest.of_source(TableSource(LARGE)).digest


def test_a_small_table_is_pickled_with_its_rows(tmp_path: Path) -> None:
    assert isinstance(shipped(LARGE.slice(0, 10), tmp_path), TableSource)
    assert not list(tmp_path.iterdir())


def test_a_table_is_pickled_with_its_rows_outside_of_a_run() -> None:
    assert pickle.loads(pickle.dumps(TableSource(LARGE))).table.equals(LARGE)


def test_a_modified_object_is_refused(tmp_path: Path) -> None:
    source = shipped(LARGE, tmp_path)
    [path] = tmp_path.rglob("*.arrow")
    path.write_bytes(b"\0" + path.read_bytes()[1:])
    with pytest.raises(IntegrityError, match="were modified"):
        source.read_unit(source.list_units(), 0)
