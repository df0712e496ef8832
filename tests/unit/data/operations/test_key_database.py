"""DuckDB over keys."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from spotfit.core.errors import ConfigError, InfrastructureError
from spotfit.data.operations.key_database import KeyDatabase, key_batches

SCHEMA = pa.schema([("row", pa.int64()), ("k0", pa.int64())])


@pytest.fixture
def database(tmp_path: Path) -> Iterator[KeyDatabase]:
    opened = KeyDatabase(tmp_path, 64 * 2**20)
    yield opened
    opened.close()


def load_numbers(database: KeyDatabase, count: int) -> None:
    numbers = np.random.default_rng(0).permutation(count)
    blocks = ([pa.chunked_array([part])] for part in np.array_split(numbers, 10))
    database.load("keys", SCHEMA, key_batches(["k0"], blocks))


def test_blocks_are_numbered_row_by_row(database: KeyDatabase) -> None:
    load_numbers(database, 1000)
    (batch,) = database.stream("SELECT min(row), max(row), count(DISTINCT row) FROM keys")
    assert [column.to_pylist() for column in batch.columns] == [[0], [999], [1000]]


def test_results_are_streamed_in_order(database: KeyDatabase) -> None:
    load_numbers(database, 200_000)
    batches = [*database.stream("SELECT k0 FROM keys ORDER BY k0")]
    assert len(batches) > 1
    assert np.concatenate([batch.column(0).to_numpy() for batch in batches]).tolist() == list(
        range(200_000)
    )


def test_a_result_can_become_a_table_while_it_is_read(database: KeyDatabase) -> None:
    load_numbers(database, 200_000)
    database.load(
        "sorted", pa.schema([("row", pa.int64())]), database.stream("SELECT row FROM keys")
    )
    (batch,) = database.stream("SELECT count(*) FROM sorted")
    assert batch.column(0)[0].as_py() == 200_000


def test_rows_beyond_the_limit_are_in_files(tmp_path: Path) -> None:
    database = KeyDatabase(tmp_path, 32 * 2**20)
    load_numbers(database, 5_000_000)  # 80 MB
    (used,) = database.stream("SELECT sum(size) AS size FROM duckdb_temporary_files()")
    assert used.column(0)[0].as_py() > 2**20
    database.close()


def test_an_error_of_the_rows_is_raised_unchanged(database: KeyDatabase) -> None:
    def batches() -> Iterator[pa.RecordBatch]:
        yield from key_batches(["k0"], [[pa.chunked_array([[1]])]])
        raise ConfigError("a file was changed")

    with pytest.raises(ConfigError, match="a file was changed"):
        database.load("keys", SCHEMA, batches())


def test_an_error_of_the_engine_is_an_infrastructure_error(database: KeyDatabase) -> None:
    with pytest.raises(InfrastructureError, match="DuckDB failed") as caught:
        [*database.stream("SELECT * FROM missing")]
    assert "operation_memory_bytes" in caught.value.do
