"""Limits of `Dataset.cache`, and rows in memory and in files."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from spotfit.core.errors import ConfigError, ConfigErrors
from spotfit.data.caching import cache_directories
from spotfit.data.caching.row_cache import (
    CacheLimits,
    RowCache,
    cache_limits,
)
from spotfit.data.formats.python_objects import object_column

TABLE = pa.table({"id": range(1000)})


@pytest.fixture
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The scratch directory of a run."""
    monkeypatch.setattr(cache_directories._RunDirectory, "path", tmp_path / "scratch")
    return tmp_path / "scratch"


def files_of(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file() and path.name != "lock"]


# ── limits ────────────────────────────────────────────────────────────────────────────────────────


def test_sizes_are_integers(tmp_path: Path) -> None:
    assert cache_limits(2e9, 0.5 * 2**30, tmp_path) == (2_000_000_000, 2**29, str(tmp_path))


@pytest.mark.parametrize("value", [-1, float("nan"), float("inf"), True, "20gb", None])
@pytest.mark.parametrize("name", ["memory_bytes", "disk_bytes"])
def test_an_invalid_size_is_refused(name: str, value: Any) -> None:
    values = {"memory_bytes": 1, "disk_bytes": 1, name: value}
    with pytest.raises(ConfigError, match=rf"cache\({name}=.*number of bytes"):
        cache_limits(**values, directory=None)


def test_a_cache_needs_a_limit() -> None:
    with pytest.raises(ConfigError, match="keeps no rows without a limit"):
        cache_limits(0, 0, None)


@pytest.mark.parametrize("directory", ["cache", "~/cache", "s3://bucket/cache", "", 5])
def test_a_directory_is_an_absolute_path(directory: Any) -> None:
    with pytest.raises(ConfigError, match="absolute path"):
        cache_limits(0, 1, directory)


def test_a_directory_needs_a_limit_for_its_files() -> None:
    with pytest.raises(ConfigError, match="writes no files without disk_bytes"):
        cache_limits(1, 0, "/cache")


def test_all_invalid_values_are_reported_together() -> None:
    with pytest.raises(ConfigErrors) as raised:
        cache_limits(-1, -2, "cache")
    assert len(raised.value.errors) == 3


# ── memory ────────────────────────────────────────────────────────────────────────────────────────


def test_tables_are_kept_in_memory_up_to_the_limit(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "spotfit")
    cache = RowCache(CacheLimits(memory_bytes=2 * TABLE.nbytes + 1), "g")
    for name in "abc":
        cache.put(name, TABLE)
        cache.put(name, TABLE)
    assert [name for name in "abc" if cache.contains(name)] == ["a", "b"]
    assert cache.get("a") is TABLE
    assert cache.get("c") is None
    assert caplog.messages == ["data.cache_full"]


def test_a_part_of_a_table_is_kept_without_the_other_rows() -> None:
    cache = RowCache(CacheLimits(memory_bytes=2000), "g")
    part = TABLE.slice(7, 100)
    cache.put("a", part)
    cache.put("b", TABLE.slice(0, 900))
    kept = cache.get("a")
    assert kept is not None
    assert kept == part
    assert kept.get_total_buffer_size() <= 2000
    assert not cache.contains("b")


def test_all_buffers_of_a_table_count() -> None:
    cache = RowCache(CacheLimits(memory_bytes=TABLE.nbytes - 1), "g")
    cache.put("a", TABLE.slice(0, 900))
    assert not cache.contains("a")


def test_rows_of_files_are_kept_in_memory(scratch: Path) -> None:
    RowCache(CacheLimits(disk_bytes=2**20), "g").put("a", TABLE)
    cache = RowCache(CacheLimits(memory_bytes=2**20, disk_bytes=2**20), "g")
    first = cache.get("a")
    assert first == TABLE
    assert cache.get("a") is first


def test_python_objects_are_kept_in_memory_only(scratch: Path) -> None:
    """A file must never be unpickled."""
    table = pa.table({"o": object_column([{1}, {2}])})
    cache = RowCache(CacheLimits(memory_bytes=2**20, disk_bytes=2**20), "g")
    cache.put("a", table)
    assert cache.get("a") is table
    assert files_of(scratch) == []


def test_without_a_usable_directory_rows_are_not_kept(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    cache = RowCache(CacheLimits(disk_bytes=2**20, directory=str(tmp_path / "file")), "g")
    cache.put("a", TABLE)
    assert cache.get("a") is None
    assert caplog.messages == ["data.cache_not_written"]


def test_on_windows_rows_are_kept_in_memory(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delitem(sys.modules, cache_directories.__name__)
    monkeypatch.setitem(sys.modules, "spotfit.data.caching.cache_files", None)
    cache = RowCache(CacheLimits(memory_bytes=2**20, disk_bytes=2**20), "g")
    cache.put("a", TABLE)
    assert cache.get("a") is TABLE
    assert caplog.messages == ["data.cache_not_written"]
