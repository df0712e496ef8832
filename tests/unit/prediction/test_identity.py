"""Equal inputs have one identity in every process, others have another one."""

from __future__ import annotations

import copy
import functools
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from spotfit.checkpoint.checkpoint_dir import Checkpoint
from spotfit.prediction.identity import code_fingerprint, identity_of

np = pytest.importorskip("numpy")
pd = pytest.importorskip("pandas")


def write_files(folder: Path) -> None:
    """A function of the user."""


def test_functions_classes_and_checkpoints_have_an_identity(tmp_path: Path) -> None:
    checkpoint = Checkpoint.from_directory(tmp_path)
    assert identity_of(write_files).endswith("test_identity.write_files")
    assert identity_of(functools.partial(write_files, Path())) != identity_of(write_files)
    assert identity_of({"b": checkpoint, "a": Path}) == identity_of({"a": Path, "b": checkpoint})
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
from spotfit.prediction.identity import identity_of

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


def test_a_changed_method_changes_the_fingerprint_of_the_code() -> None:
    class First:
        def __call__(self, batch: Any) -> Any:
            return batch

    class Second:
        def __call__(self, batch: Any) -> Any:
            return {**batch, "more": 1}

    assert code_fingerprint(First) != code_fingerprint(Second)
    assert code_fingerprint(First, None) == code_fingerprint(First)
