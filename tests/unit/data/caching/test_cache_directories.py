"""Where the files of cached rows are."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pytest

from spotfit.data.caching import cache_directories
from spotfit.data.caching.cache_directories import set_scratch_directory
from spotfit.data.caching.row_cache import CacheLimits, RowCache

TABLE = pa.table({"id": range(1000)})


@pytest.fixture
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The scratch directory of a run."""
    monkeypatch.setattr(cache_directories._RunDirectory, "path", None)
    set_scratch_directory(str(tmp_path / "scratch"))
    return tmp_path / "scratch"


def files_of(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file() and path.name != "lock"]


def test_files_are_in_the_scratch_directory_of_the_run(scratch: Path) -> None:
    RowCache(CacheLimits(disk_bytes=2**20), "g").put("a", TABLE)
    assert files_of(scratch) == [scratch / "data_cache" / "g" / "g" / "a"]
    assert RowCache(CacheLimits(disk_bytes=2**20), "g").get("a") == TABLE


def test_each_dataset_of_a_run_has_its_own_limit(scratch: Path) -> None:
    limits = CacheLimits(disk_bytes=TABLE.nbytes + 2000)
    for group in "gh":
        RowCache(limits, group).put("a", TABLE)
        RowCache(limits, group).put("b", TABLE)
    assert [path.name for path in files_of(scratch)] == ["a", "a"]


def test_the_limit_of_a_named_directory_is_that_of_all_its_files(tmp_path: Path) -> None:
    limits = CacheLimits(disk_bytes=TABLE.nbytes + 2000, directory=str(tmp_path / "named"))
    caches = [RowCache(limits, group) for group in "gh"]
    for cache in caches:
        cache.put("a", TABLE)
    assert [cache.contains("a") for cache in caches] == [True, False]
    assert len(files_of(tmp_path / "named")) == 1


PROGRAM = """
import os, sys, pyarrow as pa
from spotfit.data.caching.row_cache import CacheLimits, RowCache
cache = RowCache(CacheLimits(disk_bytes=2**20), "g")
cache.put("a", pa.table({"id": [1]}))
if os.fork() == 0:
    sys.exit()
os.wait()
assert cache.get("a") is not None
assert len(os.listdir(os.environ["TMPDIR"])) == 1
"""


def test_temporary_files_of_a_process_are_removed_when_it_exits(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", PROGRAM], env={"TMPDIR": str(tmp_path)}, check=True)
    assert list(tmp_path.iterdir()) == []
