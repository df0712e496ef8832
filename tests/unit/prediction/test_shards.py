"""Shards of files, rows in memory and items, and their fingerprints."""

from __future__ import annotations

import copy
import functools
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from spotfit.checkpoint.checkpoint_dir import Checkpoint
from spotfit.core.errors import ConfigError
from spotfit.prediction.shards import Work, code_fingerprint, identity_of, plan_work
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


def test_functions_classes_and_checkpoints_have_an_identity(tmp_path: Path) -> None:
    checkpoint = Checkpoint.from_directory(tmp_path)
    assert identity_of(write_files).endswith("test_shards.write_files")
    assert identity_of(functools.partial(write_files, Path())) != identity_of(write_files)
    assert identity_of({"b": checkpoint, "a": Work}) == identity_of({"a": Work, "b": checkpoint})
    assert str(tmp_path) in identity_of([checkpoint])


class Threshold:
    """An item of a read function that is not plain data."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def apply(self, item: Any) -> Any:
        return item


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ([Path("a")], [Path("c")]),
        (list(np.arange(3)), list(np.arange(5, 8))),
        (np.float32(1), np.float32(2)),
        (np.arange(3), np.arange(5, 8)),
        (np.arange(3), np.arange(3).reshape(3, 1)),
        (np.zeros(2, np.int32), np.zeros(2, np.float32)),
        (np.array(["a", None]), np.array(["b", None])),
        ({Path("a")}, {Path("c")}),
        (Threshold(1), Threshold(2)),
        (Threshold(1).apply, Threshold(2).apply),
        (Threshold(np.arange(3)), Threshold(np.arange(5, 8))),
        (pd.DataFrame({"a": [1]}), pd.DataFrame({"b": [1]})),
    ],
)
def test_other_values_have_another_identity(first: Any, second: Any) -> None:
    assert identity_of(first) != identity_of(second)
    assert identity_of(first) == identity_of(copy.deepcopy(first))


def test_tensors_are_identified_by_their_elements() -> None:
    torch = pytest.importorskip("torch")
    weights = torch.arange(6, dtype=torch.bfloat16).reshape(2, 3).requires_grad_()
    assert identity_of([weights]) == identity_of([weights.detach().clone()])
    assert identity_of(weights) != identity_of(weights.T)
    assert identity_of(Threshold(weights)) == identity_of(Threshold(weights.detach().clone()))
    assert identity_of(Threshold(weights)) != identity_of(Threshold(weights + 1))


def test_scalars_and_paths_are_identified_as_plain_data() -> None:
    assert identity_of(list(np.arange(3))) == identity_of([0, 1, 2])
    assert identity_of(Path("a")) == identity_of("a")


def test_an_object_of_a_script_has_one_identity_in_every_process() -> None:
    script = """
from spotfit.prediction.shards import identity_of

class Item:
    def __init__(self, *names):
        self.names, self.kind, self.file = set(names), Item, __import__("pathlib").Path("a")

print(identity_of([Item("a", "b", "c")]))
"""
    outputs = {
        subprocess.run(
            [sys.executable, "-c", script],
            env={**os.environ, "PYTHONHASHSEED": seed},
            check=True,
            capture_output=True,
        ).stdout
        for seed in "123"
    }
    assert len(outputs) == 1


def test_an_input_that_cannot_be_identified_is_refused(output: Store) -> None:
    with pytest.raises(ConfigError, match=r"a lock cannot be pickled .*lock"):
        plan([threading.Lock()], output, read=print)


def test_a_changed_method_changes_the_fingerprint_of_the_code() -> None:
    class First:
        def __call__(self, batch: Any) -> Any:
            return batch

    class Second:
        def __call__(self, batch: Any) -> Any:
            return {**batch, "more": 1}

    assert code_fingerprint(First) != code_fingerprint(Second)
    assert code_fingerprint(First, None) == code_fingerprint(First)
