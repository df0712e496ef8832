"""Where operations are computed, and what is found again."""

from __future__ import annotations

import json
import os
import pickle
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from spotfit.core.errors import ConfigError, InfrastructureError
from spotfit.data.aggregate import AsList, Count, Sum
from spotfit.data.context import DataContext
from spotfit.data.dataset import Dataset
from spotfit.data.expressions import col
from spotfit.data.formats.python_objects import object_column
from spotfit.data.operations import table_operations
from spotfit.data.operations.external_parts import SortedParts, Workspace
from spotfit.data.sources.tables import TableSource
from spotfit.host.memory import MemoryUsage
from tests.house.tree import ROOT
from tests.unit.data.row_sources import UnitSource, number_source

ROWS = 400


@pytest.fixture
def context(tmp_path: Path) -> Iterator[DataContext]:
    """Settings of this test only."""
    before = DataContext.get_current()
    changed = before.copy()
    changed.spill_directory = str(tmp_path)
    DataContext._set_current(changed)
    yield changed
    DataContext._set_current(before)


@pytest.fixture
def little_memory(context: DataContext, monkeypatch: pytest.MonkeyPatch) -> DataContext:
    """No rows fit, and parts have a few of them."""
    monkeypatch.setattr(table_operations, "_MEMORY_FACTOR", 2**40)
    monkeypatch.setattr(Workspace, "part_bytes", 1024)
    return context


def numbers(*units: int) -> tuple[UnitSource, Dataset]:
    source = number_source(*(units or (150, 250)))
    return source, Dataset.of_source(source)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*.parquet"))


def test_rows_that_fit_stay_in_memory(context: DataContext, tmp_path: Path) -> None:
    _, ds = numbers()
    result = ds.sort("square", descending=True)
    assert isinstance(result.manifest.sources[0], TableSource)
    assert list(tmp_path.iterdir()) == []


def test_the_limit_is_the_free_memory_without_a_setting(
    context: DataContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table_operations, "read_memory_usage", lambda: MemoryUsage(600, 4500))
    monkeypatch.setattr("spotfit.data.operations.key_database.is_available", lambda: False)
    assert numbers(9)[1].sort("id").count() == 9  # 900 bytes, encoded
    with pytest.raises(ConfigError, match=r"sort\(\) holds all rows in memory"):
        numbers(10)[1].sort("id").count()


def test_without_duckdb_the_error_names_the_extra_and_other_ways(
    little_memory: DataContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("spotfit.data.operations.key_database.is_available", lambda: False)
    little_memory.operation_memory_bytes = 2**30
    source, ds = numbers()
    for result in (ds.sort("id"), ds.join(ds, "inner", on=["id"], left_suffix="_l")):
        with pytest.raises(ConfigError, match="holds all rows in memory") as caught:
            result.count()
        assert "pip install 'spotfit[duckdb]'" in caught.value.do
        assert "write_parquet" in caught.value.do
    assert source.reads == []
    assert ds.groupby("group").count().count() == 3  # needs no more memory than its result
    assert ds.unique("group") == [0, 1, 2]


def test_a_limit_below_what_libraries_need_is_refused(context: DataContext) -> None:
    context.operation_memory_bytes = 2**20
    with pytest.raises(ConfigError, match="operation_memory_bytes is 1048576"):
        numbers()[1].sort("id").count()


def test_every_operation_has_the_rows_of_memory(little_memory: DataContext) -> None:
    _, ds = numbers()
    other = ds.with_column("twice", col("id") * 2).select_columns(["group", "twice"])
    results: dict[str, Callable[[], Dataset]] = {
        "sort": lambda: ds.sort(["group", "id"], descending=[False, True]),
        "join": lambda: ds.limit(20).join(other.limit(30), "left_outer", on=["group"]),
        "map_groups": lambda: ds.groupby("group").map_groups(lambda rows: {"n": rows["id"][:2]}),
        "aggregate": lambda: ds.groupby("id").aggregate(Count(), Sum("square")),
        "lists": lambda: ds.groupby("group").aggregate(AsList("id")),
        "shuffle": lambda: ds.random_shuffle(exact=True, seed=3),
        "with_column": lambda: ds.groupby("group").with_column("m", col("id") + 1),
    }
    in_files = {name: make().take_all() for name, make in results.items()}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(table_operations, "_MEMORY_FACTOR", 0)
        in_memory = {name: make().take_all() for name, make in results.items()}
    for name, rows in in_memory.items():
        assert repr(in_files[name]) == repr(rows), name


def test_distinct_values_are_found_by_duckdb(little_memory: DataContext) -> None:
    table = pa.table({"x": ["b", None, "a", "b", "c", None]})
    ds = Dataset.of_source(UnitSource(table, (2, 4)))
    assert ds.unique("x") == ["b", None, "a", "c"]
    assert ds.unique("x", ignore_nulls=True) == ["b", "a", "c"]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("ignore_nulls", [False, True])
def test_distinct_numbers_are_those_of_memory(
    little_memory: DataContext, monkeypatch: pytest.MonkeyPatch, seed: int, ignore_nulls: bool
) -> None:
    rng = random.Random(seed)
    values = [rng.choice([0.0, -0.0, float("nan"), -float("nan"), None, 1.5]) for _ in range(12)]
    ds = Dataset.of_source(UnitSource(pa.table({"x": values}), (1, 4, 7)))
    in_files = ds.unique("x", ignore_nulls=ignore_nulls)
    monkeypatch.setattr(table_operations, "_MEMORY_FACTOR", 0)
    assert repr(ds.unique("x", ignore_nulls=ignore_nulls)) == repr(in_files)
    first_zero = next(value for value in values if value == 0)
    assert repr(first_zero) in map(repr, in_files)


def test_few_groups_are_aggregated_in_memory(
    little_memory: DataContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(table_operations.AggregateOperation, "parts")
    _, ds = numbers()
    assert ds.groupby("group").sum("id").count() == 3


def test_a_result_is_written_once_to_the_folder_of_its_hash(
    little_memory: DataContext, tmp_path: Path
) -> None:
    source, ds = numbers()
    folder = tmp_path / "results"
    first = ds.sort("square", descending=True).materialize(folder)
    (subfolder,) = folder.iterdir()
    assert len(names(folder)) > 3
    assert first.take(1) == [{"id": 399, "square": 399**2, "group": 0}]
    source.reads.clear()
    second = ds.sort("square", descending=True).materialize(folder)
    assert second.take_all() == first.take_all()
    assert source.reads == []
    ds.sort("square").materialize(folder)
    assert len(list(folder.iterdir())) == 2
    assert subfolder.exists()


def test_a_result_that_fits_is_found_again_too(context: DataContext, tmp_path: Path) -> None:
    source, ds = numbers()
    ds.sort("id", descending=True).materialize(tmp_path / "results")
    source.reads.clear()
    found = ds.sort("id", descending=True).materialize(tmp_path / "results")
    assert found.take(1)[0]["id"] == 399
    assert source.reads == []


def test_results_are_written_to_the_folder_of_the_settings(
    little_memory: DataContext, tmp_path: Path
) -> None:
    little_memory.materialize_path = str(tmp_path / "results")
    _, ds = numbers()
    assert ds.sort("square").limit(2).take_all() == ds.take(2)
    assert names(tmp_path / "results")


def test_an_interrupted_operation_computes_the_missing_parts_only(
    little_memory: DataContext, tmp_path: Path
) -> None:
    _, ds = numbers()
    expected = ds.random_shuffle(exact=True).materialize(tmp_path / "whole").take_all()
    folder = tmp_path / "results"
    ds.random_shuffle(exact=True).materialize(folder)
    (subfolder,) = folder.iterdir()
    paths = sorted(subfolder.glob("*.parquet"))
    (subfolder / "_SUCCESS").unlink()
    paths[1].unlink()
    times = {path: path.stat().st_mtime_ns for path in paths if path != paths[1]}
    assert ds.random_shuffle(exact=True).materialize(folder).take_all() == expected
    assert {path: path.stat().st_mtime_ns for path in times} == times


@pytest.mark.parametrize("is_renamed", [False, True])
def test_an_interrupted_operation_computes_parts_of_which_a_piece_is_missing(
    is_renamed: bool, little_memory: DataContext, tmp_path: Path
) -> None:
    texts = ["x" * (1000 if 450 <= n < 550 else 1) for n in range(1000)]
    table = pa.table({"n": range(1000), "text": texts})
    # The sizes of small rows are read: those of the units 0, 2, 4 and 6.
    ds = Dataset.of_source(UnitSource(table, (250, 100, 50, 200, 50, 100, 250)))
    folder = tmp_path / "results"
    expected = ds.random_shuffle(exact=True).materialize(folder).take_all()
    (subfolder,) = folder.iterdir()
    paths = sorted(subfolder.glob("*.parquet"))
    pieces = [path for path in paths if path.name.startswith("000001.")]
    assert len(pieces) > 2
    (subfolder / "_SUCCESS").unlink()
    if is_renamed:  # A number that no piece has.
        count = f"{len(pieces):06d}"
        pieces[1].rename(subfolder / pieces[1].name.replace(".000001-of", f".{count}-of"))
    else:
        pieces[1].unlink()
    times = {path: path.stat().st_mtime_ns for path in paths if path not in pieces}
    assert ds.random_shuffle(exact=True).materialize(folder).take_all() == expected
    assert {path: path.stat().st_mtime_ns for path in times} == times
    assert sorted(subfolder.glob("*.parquet")) == paths


def test_a_result_without_one_of_its_files_is_written_again(
    little_memory: DataContext, tmp_path: Path
) -> None:
    _, ds = numbers()
    expected = ds.sort("square").materialize(tmp_path).take_all()
    next(tmp_path.rglob("000001-*.parquet")).unlink()

    assert ds.sort("square").materialize(tmp_path).take_all() == expected


def test_files_that_another_process_deletes_meanwhile_are_an_error(
    little_memory: DataContext, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = SortedParts.read

    def read_and_delete(self: SortedParts, complete: Collection[int]) -> Iterator[Any]:
        for piece, rows in read(self, complete):
            if piece.part == 3:
                next(tmp_path.rglob("000000-*.parquet")).unlink()
            yield piece, rows

    monkeypatch.setattr(SortedParts, "read", read_and_delete)
    with pytest.raises(InfrastructureError, match="Another process changed the files"):
        numbers()[1].sort("square").materialize(tmp_path)
    assert not list(tmp_path.rglob("_SUCCESS"))


def with_attempt(batch: dict[str, Any]) -> dict[str, Any]:
    return {**batch, "attempt": np.full(len(batch["id"]), int(os.environ["TEST_ATTEMPT"]))}


def test_parts_of_two_attempts_of_a_function_are_not_mixed(
    little_memory: DataContext, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def materialized(attempt: int) -> set[int]:
        monkeypatch.setenv("TEST_ATTEMPT", str(attempt))
        rows = numbers()[1].map_batches(with_attempt).sort("square").materialize(tmp_path)
        return {row["attempt"] for row in rows.take_all()}

    assert materialized(1) == {1}
    next(tmp_path.rglob("000001-*.parquet")).unlink()
    assert materialized(2) == {2}


def test_one_group_of_all_rows_is_computed_in_memory(little_memory: DataContext) -> None:
    groups = numbers()[1].groupby(None).map_groups(lambda rows: {"count": [len(rows["id"])]})
    assert groups.take_all() == [{"count": ROWS}]


def test_temporary_files_are_deleted_with_the_result(
    little_memory: DataContext, tmp_path: Path
) -> None:
    result = numbers()[1].sort("square")
    assert [row["id"] for row in result.iter_rows()] == [*range(ROWS)]
    assert names(tmp_path)
    del result
    assert list(tmp_path.iterdir()) == []


def test_temporary_files_that_cannot_be_deleted_are_logged(
    little_memory: DataContext, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    result = numbers()[1].sort("square")
    assert result.count() == ROWS
    (folder,) = tmp_path.iterdir()
    folder.rename(tmp_path / "moved")
    folder.symlink_to(tmp_path / "moved")
    del result
    assert "data.temporary_files_remain" in caplog.text
    assert names(tmp_path / "moved")


def test_temporary_files_cannot_be_sent_to_machines(little_memory: DataContext) -> None:
    result = numbers()[1].sort("square")
    with pytest.raises(ConfigError, match=r"rows of sort\(\) do not fit into memory") as caught:
        pickle.dumps(result)
    assert "materialize('s3://" in caught.value.do


def test_a_full_disk_is_an_error_that_names_the_setting(
    little_memory: DataContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_arguments: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("spotfit.data.operations.bucket_file.BucketFile._write_all", fail)
    with pytest.raises(InfrastructureError, match="is full") as caught:
        numbers()[1].sort("square").count()
    assert "spill_directory" in caught.value.do


def test_python_objects_are_refused_where_rows_do_not_fit(little_memory: DataContext) -> None:
    table = pa.table({"k": [2, 1], "o": object_column([{1}, {2}])})
    with pytest.raises(ConfigError, match="column 'o' has Python objects"):
        Dataset.of_source(UnitSource(table, (2,))).sort("k").count()


def test_an_unknown_column_is_an_error(little_memory: DataContext) -> None:
    _, ds = numbers()
    for result in (ds.sort("y"), ds.join(ds, "inner", on=["y"]), ds.groupby("y").count()):
        with pytest.raises(ConfigError, match="no column 'y'"):
            result.count()


# --- Exact shuffle --------------------------------------------------------------------------------


def test_an_exact_shuffle_is_a_function_of_rows_and_seed(context: DataContext) -> None:
    _, ds = numbers()
    orders = [
        [row["id"] for row in ds.random_shuffle(exact=True, seed=seed).take_all()]
        for seed in (None, 0, 1)
    ]
    assert orders[0] == orders[1] != orders[2]
    other_units = numbers(1, 99, 300)[1].random_shuffle(exact=True, seed=1)
    assert [row["id"] for row in other_units.take_all()] == orders[2]
    assert all(Counter(order) == Counter(range(ROWS)) for order in orders)


def test_rows_of_an_exact_shuffle_are_uniformly_distributed(context: DataContext) -> None:
    cells = 10
    rows = 50 * cells
    counts = np.zeros((cells, cells))
    seeds = range(40)
    _, ds = numbers(rows)
    for seed in seeds:
        table = ds.random_shuffle(exact=True, seed=seed).to_pandas()
        places = np.arange(rows) * cells // rows
        np.add.at(counts, (table["id"].to_numpy() * cells // rows, places), 1)
    expected = rows * len(seeds) / cells**2
    statistic = ((counts - expected) ** 2 / expected).sum()
    # Of (cells - 1)**2 = 81 degrees of freedom: the 0.1 % and 99.9 % quantiles of chi-squared.
    assert 46.5 < statistic < 126.1


def test_the_order_of_an_exact_shuffle_is_that_of_every_epoch(context: DataContext) -> None:
    ds = numbers()[1].random_shuffle(exact=True)
    first, second = ([row["id"] for row in ds.iter_rows()] for _ in range(2))
    assert first == second
    again = ds.random_shuffle(seed=1)
    assert [row["id"] for row in again.iter_rows()] != first


# --- Memory ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("operation", "size_mib"),
    [
        ("sort", 512),
        pytest.param("shuffle", 512, marks=pytest.mark.slow),
        pytest.param("join", 1024, marks=pytest.mark.slow),
    ],
)
@pytest.mark.timeout(600)
def test_rows_beyond_the_limit_need_less_memory_than_their_size(
    operation: str, size_mib: int, tmp_path: Path
) -> None:
    module = "tests.unit.data.operations.large_rows"
    done = subprocess.run(
        [sys.executable, "-m", module, operation, str(size_mib), "128", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    memory = json.loads(done.stdout.splitlines()[-1])
    # The libraries and what is read ahead need some, whatever the limit of 128 MiB is.
    assert memory["peak"] - memory["before"] < size_mib * 2**20 // 2
