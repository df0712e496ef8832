"""Type checkers find mistakes in a user's script, and accept a correct one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.house.tree import ROOT

# Each line is correct for a type checker.
CORRECT = """
from datetime import timedelta
from pathlib import Path

import spotfit
import torch
from spotfit.torch import Checkpointer, TorchTrainer
from spotfit_provisioners.local.options import LocalOptions


def train() -> None:
    model = torch.nn.Linear(1, 1)
    Checkpointer(model=model)
    Checkpointer(model=model, every="10m")
    Checkpointer(model=model, every=timedelta(minutes=7))
    Checkpointer(model=model, every=["epoch", "1h"])


run = spotfit.RunConfig(storage_path=Path("runs"))
TorchTrainer(train, run_config=run, provisioner=LocalOptions(nodes=2))
TorchTrainer(train, run_config=run, provisioner="local?nodes=2").fit()
"""

# Each line has one mistake.
MISTAKES = """
import spotfit
import torch
from spotfit.torch import Checkpointer, TorchTrainer


def train(model: torch.nn.Module) -> None:
    Checkpointer(model=model, every="epochs")
    Checkpointer(model=model, every=["10m", 2.5])


spotfit.ScalingConfig(num_worker=2)
spotfit.RunConfig(storage_path=7)
spotfit.FailureConfig(max_failures="3")
TorchTrainer(train, provisioner={"nodes": 2})
TorchTrainer(train, provisioner=7)
TorchTrainer(train).fit().metric
"""


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[int]]:
    """The lines with errors, by script, that `mypy --strict` finds."""
    folder = tmp_path_factory.mktemp("scripts")
    (folder / "correct.py").write_text(CORRECT)
    (folder / "mistakes.py").write_text(MISTAKES)
    pytest.importorskip("mypy")
    packages = os.pathsep.join(str(ROOT / name) for name in ("sdk", "provisioners", "localsim"))
    command = [sys.executable, "-m", "mypy", "--strict", "--config-file=", "--no-error-summary"]
    checked = subprocess.run(
        [*command, f"--cache-dir={ROOT / '.mypy_cache/user_types'}", "correct.py", "mistakes.py"],
        cwd=folder,
        env=os.environ | {"MYPYPATH": packages},
        capture_output=True,
        text=True,
        check=False,
    )
    assert not checked.stderr
    found: dict[str, list[int]] = {"correct.py": [], "mistakes.py": []}
    for line in checked.stdout.splitlines():
        file, number, severity, *_ = line.split(":")
        if severity.strip() == "error":
            found[Path(file).name].append(int(number))
    return found


def test_a_correct_script_has_no_type_errors(reports: dict[str, list[int]]) -> None:
    assert reports["correct.py"] == []


def test_each_mistake_of_a_script_is_a_type_error(reports: dict[str, list[int]]) -> None:
    planted = [
        number
        for number, line in enumerate(MISTAKES.splitlines(), 1)
        if line.strip().startswith(("Checkpointer(", "spotfit.", "TorchTrainer("))
    ]
    assert sorted(set(reports["mistakes.py"])) == planted
