"""Shards of files, rows in memory and items, and their fingerprints."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from spotfit.core.errors import ConfigError
from spotfit.prediction.shards import Work, plan_work
from spotfit.store.api import Store
from spotfit.store.factory import open_store

np = pytest.importorskip("numpy")
pd = pytest.importorskip("pandas")


@pytest.fixture
def output(tmp_path: Path) -> Store:
    return open_store(tmp_path / "output")


def plan(inputs: Any, output: Store, *, read: Any = None, rows: int = 10) -> Work:
    return plan_work(inputs, read=read, rows_per_shard=rows, output=output)


def write_files(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        np.savez(folder / name, x=np.ones(2))


def test_a_folder_has_a_shard_per_known_file(tmp_path: Path, output: Store) -> None:
    write_files(tmp_path / "in", "b.npz", "a.npz", "sub/c.npz", "_SUCCESS.npz")
    (tmp_path / "in/readme.md").touch()
    shards = plan(tmp_path / "in", output).shards
    assert [shard.name for shard in shards] == ["part-00000", "part-00001", "part-00002"]
    assert [str(shard.source) for shard in shards] == [
        str(tmp_path / "in" / name) for name in ("a.npz", "b.npz", "sub/c.npz")
    ]
    assert shards[0].source.read("numpy")["x"].tolist() == [1.0, 1.0]


def test_files_and_folders_can_be_combined(tmp_path: Path, output: Store) -> None:
    write_files(tmp_path, "in/a.npz", "b.npz")
    shards = plan([str(tmp_path / "b.npz"), tmp_path / "in"], output).shards
    assert [Path(str(shard.source)).name for shard in shards] == ["b.npz", "a.npz"]


def test_missing_files_are_listed(tmp_path: Path, output: Store) -> None:
    write_files(tmp_path, "a.npz")
    with pytest.raises(ConfigError, match=r"1 input file of 2 .*missing\.npz"):
        plan([tmp_path / "a.npz", tmp_path / "missing.npz"], output)


@pytest.mark.parametrize("inputs", [[], ()])
def test_inputs_without_a_shard_are_refused(inputs: Any, output: Store) -> None:
    with pytest.raises(ConfigError, match="no shards"):
        plan(inputs, output)
    with pytest.raises(ConfigError, match="no shards"):
        plan(inputs, output, read=print)


def test_a_folder_without_known_files_is_refused(tmp_path: Path, output: Store) -> None:
    with pytest.raises(ConfigError, match="no shards"):
        plan(tmp_path, output)


@pytest.mark.parametrize("inputs", [3, None, [3]])
def test_inputs_that_are_no_urls_are_refused(inputs: Any, output: Store) -> None:
    with pytest.raises(ConfigError, match="inputs="):
        plan(inputs, output)


@pytest.mark.parametrize("kind", ["frame", "columns", "array"])
def test_rows_in_memory_are_uploaded_in_parts(kind: str, output: Store) -> None:
    values = np.arange(25.0)
    rows = {"frame": pd.DataFrame({"x": values}), "columns": {"x": values}, "array": values}[kind]
    work = plan(rows, output)
    work.upload(output)
    column = "data" if kind == "array" else "x"
    read = [shard.source.read("numpy")[column].tolist() for shard in work.shards]
    assert read == [values[:10].tolist(), values[10:20].tolist(), values[20:].tolist()]
    work.delete_uploads(output)
    assert list(output.list()) == []


def test_uploads_that_exist_are_not_repeated(output: Store, tmp_path: Path) -> None:
    work = plan(np.arange(25.0), output)
    work.upload(output)
    written = {path: path.stat().st_ino for path in tmp_path.rglob("*.npz")}
    plan(np.arange(25.0), output).upload(output)
    assert {path: path.stat().st_ino for path in written} == written


def test_an_item_is_read_by_the_function(output: Store) -> None:
    [_, shard] = plan(range(2), output, read=lambda n: np.full(3, n)).shards
    assert shard.source.read("numpy")["data"].tolist() == [1, 1, 1]
    assert batch_is_frame(shard.source.read("pandas"))


def batch_is_frame(batch: Any) -> bool:
    return isinstance(batch, pd.DataFrame)


def test_equal_inputs_have_equal_fingerprints(tmp_path: Path, output: Store) -> None:
    write_files(tmp_path, "a.npz", "b.npz")
    for inputs, other in (
        (np.arange(25.0), np.arange(26.0)),
        ([tmp_path / "a.npz"], [tmp_path / "b.npz"]),
    ):
        assert plan(inputs, output).fingerprint == plan(inputs, output).fingerprint
        assert plan(inputs, output).fingerprint != plan(other, output).fingerprint
    first, second, third = (plan(range(n), output, read=print).fingerprint for n in (3, 3, 4))
    assert first == second != third


def test_more_shards_have_longer_names_that_sort(output: Store) -> None:
    names = [shard.name for shard in plan(range(100_001), output, read=print).shards]
    assert names == sorted(names)


def test_an_input_that_cannot_be_identified_is_refused(output: Store) -> None:
    with pytest.raises(ConfigError, match=r"a lock cannot be pickled .*lock"):
        plan([threading.Lock()], output, read=print)
