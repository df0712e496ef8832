"""NumPy's .npy files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from spotfit.core.errors import ConfigError
from spotfit.data.file_readers import read_numpy
from spotfit.data.source import Source
from spotfit.data.sources import numpy_files
from tests.unit.data.sources.source_suite import FetchedSourceSuite, rows_of, source_of


def read_array(folder: Path) -> Any:
    column = rows_of(source_of(read_numpy(folder)))["data"].combine_chunks()
    if isinstance(column.type, pa.FixedShapeTensorType):
        return column.to_numpy_ndarray()
    return np.array(column.to_pylist())


class TestNumpy(FetchedSourceSuite):
    @pytest.fixture
    def folder(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        monkeypatch.setattr(numpy_files, "UNIT_BYTES", 100)
        np.save(tmp_path / "a.npy", np.arange(60, dtype=np.int16).reshape(10, 2, 3))
        np.save(tmp_path / "b.npy", np.arange(180, dtype=np.int16).reshape(30, 2, 3))
        return tmp_path

    @pytest.fixture
    def source(self, folder: Path) -> Source:
        return source_of(read_numpy(folder))

    @pytest.fixture
    def expected(self, folder: Path) -> pa.Table:
        arrays = np.concatenate([np.load(folder / "a.npy"), np.load(folder / "b.npy")])
        return pa.table({"data": pa.FixedShapeTensorArray.from_numpy_ndarray(arrays)})


@pytest.mark.parametrize("dtype", ["float16", "float32", ">f8", "<i4", "uint64", "bool", "<U3"])
def test_values_of_all_types_are_read(tmp_path: Path, dtype: str) -> None:
    values = np.arange(7).astype(dtype)
    np.save(tmp_path / "a.npy", values)
    assert read_array(tmp_path).tolist() == values.tolist()


def test_the_last_rows_of_a_unit_are_not_those_of_the_next(tmp_path: Path) -> None:
    values = np.arange(3 * 10**6, dtype=np.float64).reshape(-1, 3)
    np.save(tmp_path / "a.npy", values)
    assert len(read_numpy(tmp_path).manifest.unit_rows) == 3
    assert np.array_equal(read_array(tmp_path), values)


def test_arrays_in_the_order_of_fortran_are_one_unit(tmp_path: Path) -> None:
    values = np.asfortranarray(np.arange(24.0).reshape(4, 3, 2))
    np.save(tmp_path / "a.npy", values)
    assert np.array_equal(read_array(tmp_path), values)


def test_an_array_without_rows_has_none(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.empty((0, 2)))
    np.save(tmp_path / "b.npy", np.ones((1, 2)))
    assert read_array(tmp_path).tolist() == [[1.0, 1.0]]


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        (np.array([{}, []], dtype=object), "contains Python objects"),
        (np.array(3.0), "is a single value"),
        (np.array([1 + 2j]), "'data' cannot be stored"),
    ],
)
def test_other_arrays_are_refused(tmp_path: Path, values: Any, reason: str) -> None:
    np.save(tmp_path / "a.npy", values, allow_pickle=True)
    with pytest.raises(ConfigError, match=reason):
        _ = read_numpy(tmp_path).manifest


def test_a_file_of_another_format_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "a.npy").write_bytes(b"no magic")
    with pytest.raises(ConfigError, match=r"a\.npy is not a \.npy file"):
        _ = read_numpy(tmp_path).manifest


def test_pickles_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="allow_pickle"):
        read_numpy(tmp_path, allow_pickle=True)
