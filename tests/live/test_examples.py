"""Every example runs and prints the documented output."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.house.tree import ROOT

EXPECTED_OUTPUT = {
    "01_hello_two_nodes.py": "sum of all ranks: 6.0",
    "02_resume_after_reclaim.py": "counted to 100; preempted: [ReclaimRecord(",
    "04_any_cloud.py": "local: 60 steps, total 1770",
    "04_any_cloud.py sim://aws_batch": "sim://aws_batch: 60 steps, total 1770",
    "horovod_digits.py": "6 epochs, accuracy above 90 %: True",
    "predict_digits.py": "36 shards, 1797 rows, 100% correct\nthe exported program agrees: True",
    "dataset_digits.py": "2 kills; equal weights: True",
    "dataset_feeders.py": "equal weights: True",
    "03_shard_and_reshard.py": "three workers: {'from': 30, 'to': 60",
}


@pytest.mark.parametrize("command_line", EXPECTED_OUTPUT)
def test_example_prints_the_expected_output(command_line: str, tmp_path: Path) -> None:
    name, *arguments = command_line.split()
    command = [sys.executable, str(ROOT / "examples" / name), *arguments]
    environment = os.environ | {"SPOTFIT_HOME": str(tmp_path / "keys"), "TMPDIR": str(tmp_path)}
    completed = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=100, check=False
    )
    assert completed.returncode == 0, completed.stderr
    assert EXPECTED_OUTPUT[command_line] in completed.stdout


@pytest.mark.timeout(300)
def test_example_project_passes_its_tests_on_a_spot_cloud(tmp_path: Path) -> None:
    project = shutil.copytree(ROOT / "examples" / "testing_on_spot", tmp_path / "project")
    command = [sys.executable, "-m", "pytest", "-q", f"--basetemp={tmp_path / 'tests'}"]
    environment = os.environ | {"SPOTFIT_HOME": str(tmp_path / "keys"), "TMPDIR": str(tmp_path)}
    completed = subprocess.run(
        command, cwd=project, env=environment, capture_output=True, text=True, timeout=280
    )
    assert completed.returncode == 0, completed.stdout + completed.stderr
    assert "3 passed" in completed.stdout


@pytest.mark.slow
def test_demo_passes_its_checks(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "examples" / "digits_demo.py")]
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    completed = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=110, check=False
    )
    assert completed.returncode == 0, completed.stdout + completed.stderr
    assert "✗" not in completed.stdout
    # The user's folder for downloads of checkpoints stays, like a cache; it must be empty.
    assert [path for path in tmp_path.rglob("*") if path.parent != tmp_path] == []
    assert {path.name for path in tmp_path.iterdir()} <= {f"spotfit-checkpoints-{os.getuid()}"}
