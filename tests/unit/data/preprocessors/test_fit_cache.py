"""A second fit to the same rows reads nothing."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import spotfit.data
from spotfit.data.context import DataContext
from spotfit.data.dataset import Dataset
from spotfit.data.preprocessor import Preprocessor
from spotfit.data.preprocessors import (
    Chain,
    CountVectorizer,
    LabelEncoder,
    MinMaxScaler,
    OneHotEncoder,
    RobustScaler,
    SimpleImputer,
    StandardScaler,
    fit_cache,
)
from spotfit.data.sources.file_source import FormatSource

Reads = list[int]


@pytest.fixture(autouse=True)
def new_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """No fits of other tests, and settings of this test only."""
    monkeypatch.setattr(fit_cache, "_recent", fit_cache._RecentFits())
    monkeypatch.setattr(DataContext, "_current", DataContext())


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Reads:
    """The units of files that are read."""
    found: Reads = []
    read_unit = FormatSource.read_unit

    def recorded(self: Any, units: Any, unit: int, columns: Any = None) -> pa.Table:
        found.append(unit)
        return read_unit(self, units, unit, columns)

    monkeypatch.setattr(FormatSource, "read_unit", recorded)
    return found


@pytest.fixture
def rows(tmp_path: Path) -> Dataset:
    folder = tmp_path / "rows"
    folder.mkdir()
    for part in range(4):
        numbers = range(10 * part, 10 * part + 10)
        table = pa.table(
            {
                "x": [float(n) if n % 7 else None for n in numbers],
                "y": [n % 5 for n in numbers],
                "t": [f"a b{n % 3}" for n in numbers],
            }
        )
        pq.write_table(table, folder / f"{part}.parquet", row_group_size=5)
    return spotfit.data.read_parquet(str(folder))


def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process begins."""
    monkeypatch.setattr(fit_cache, "_recent", fit_cache._RecentFits())


def test_changed_statistics_do_not_change_other_fits(rows: Dataset) -> None:
    first = OneHotEncoder(["y"])
    first.fit(rows)
    expected = deepcopy(first.stats_)
    first.stats_["unique_values(y)"].clear()
    for _ in range(2):
        again = OneHotEncoder(["y"])
        again.fit(rows)
        assert again.stats_ == expected
        again.stats_["unique_values(y)"].clear()


PREPROCESSORS = [
    StandardScaler(["x"]),
    MinMaxScaler(["x", "y"]),
    RobustScaler(["x"]),
    OneHotEncoder(["y"]),
    LabelEncoder("t"),
    SimpleImputer(["t"], strategy="most_frequent"),
]


@pytest.mark.parametrize("preprocessor", PREPROCESSORS, ids=lambda one: type(one).__name__)
def test_a_second_fit_reads_nothing(preprocessor: Any, rows: Dataset, reads: Reads) -> None:
    first = preprocessor.from_parameters(preprocessor.parameters()).fit(rows)
    assert len(reads) == 8
    reads.clear()
    second = preprocessor.from_parameters(preprocessor.parameters()).fit(rows)
    assert reads == []
    assert second.stats_ == first.stats_
    assert second.fit_status() is Preprocessor.FitStatus.FITTED


def test_the_same_rows_are_found_by_their_content(
    rows: Dataset, reads: Reads, tmp_path: Path
) -> None:
    StandardScaler(["x"]).fit(rows.random_shuffle(seed=2))
    reads.clear()
    StandardScaler(["x"]).fit(spotfit.data.read_parquet(str(tmp_path / "rows")))
    assert reads == []


@pytest.mark.parametrize(
    "other",
    [
        lambda rows: StandardScaler(["y"]).fit(rows),
        lambda rows: MinMaxScaler(["x"]).fit(rows),
        lambda rows: StandardScaler(["x"]).fit(rows.limit(20)),
        lambda rows: StandardScaler(["x"]).fit(rows.map_batches(lambda batch: batch)),
    ],
    ids=["columns", "class", "rows", "transform"],
)
def test_another_fit_reads_the_rows(other: Any, rows: Dataset, reads: Reads) -> None:
    StandardScaler(["x"]).fit(rows)
    reads.clear()
    other(rows)
    assert reads


def test_a_changed_file_is_read_again(rows: Dataset, tmp_path: Path) -> None:
    first = MinMaxScaler(["y"]).fit(rows)
    pq.write_table(pa.table({"x": [1.0], "y": [50], "t": ["a"]}), tmp_path / "rows/3.parquet")
    second = MinMaxScaler(["y"]).fit(spotfit.data.read_parquet(str(tmp_path / "rows")))
    assert (first.stats_["max(y)"], second.stats_["max(y)"]) == (4, 50)


def test_a_chain_reads_only_for_parts_that_are_new(rows: Dataset, reads: Reads) -> None:
    Chain(SimpleImputer(["x"]), StandardScaler(["x"])).fit(rows)
    reads.clear()
    chain = Chain(SimpleImputer(["x"]), StandardScaler(["x"]), MinMaxScaler(["y"])).fit(rows)
    assert len(reads) == 8  # one pass, for the last part
    expected = Chain(SimpleImputer(["x"]), StandardScaler(["x"]))
    expected.fit(rows)
    assert chain.preprocessors[1].stats_ == expected.preprocessors[1].stats_


def test_fits_are_stored_beside_materialized_rows(
    rows: Dataset, reads: Reads, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "stored"
    first = OneHotEncoder(["y"]).fit(rows.materialize(folder))
    assert len(list((folder / "_fits").iterdir())) == 1
    forget(monkeypatch)
    found = rows.materialize(folder)
    reads.clear()
    second = OneHotEncoder(["y"]).fit(found)
    assert reads == []
    assert second.stats_ == first.stats_
    assert spotfit.data.read_parquet(str(folder)).count() == 40  # without the fits


def test_fits_are_stored_in_the_folder_of_the_settings(
    rows: Dataset, reads: Reads, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    DataContext.get_current().materialize_path = str(tmp_path / "settings")
    first = RobustScaler(["x"]).fit(rows)
    forget(monkeypatch)
    reads.clear()
    second = RobustScaler(["x"]).fit(rows)
    assert reads == []
    assert second.stats_ == first.stats_


def test_a_damaged_fit_is_computed_again(
    rows: Dataset, reads: Reads, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    DataContext.get_current().materialize_path = str(tmp_path / "settings")
    first = StandardScaler(["x"]).fit(rows)
    (path,) = (tmp_path / "settings/_fits").iterdir()
    path.write_text("{")
    forget(monkeypatch)
    reads.clear()
    assert StandardScaler(["x"]).fit(rows).stats_ == first.stats_
    assert len(reads) == 8


def test_a_preprocessor_with_a_function_is_fitted_each_time(rows: Dataset, reads: Reads) -> None:
    def vectorizer() -> CountVectorizer:
        return CountVectorizer(["t"], tokenization_fn=lambda text: text.split())

    vectorizer().fit(rows)
    reads.clear()
    vectorizer().fit(rows)
    assert len(reads) == 8


def test_rows_in_memory_have_no_hash_for_a_fit() -> None:
    ds = spotfit.data.from_items([{"x": 1.0}, {"x": 2.0}])
    StandardScaler(["x"]).fit(ds)
    assert "identity" not in vars(ds.manifest.sources[0])
