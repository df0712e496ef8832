"""Every example runs and prints the documented output."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.house.tree import ROOT

SAYS = {
    "01_hello_two_nodes.py": "sum of all ranks: 6.0",
    "02_resume_after_reclaim.py": "counted to 100; preempted: [ReclaimRecord(",
    "04_any_cloud.py": "local: 60 steps, total 1770",
    "04_any_cloud.py sim://aws_batch": "sim://aws_batch: 60 steps, total 1770",
    "03_shard_and_reshard.py": "three workers: {'from': 30, 'to': 60",
}


@pytest.mark.parametrize("command_line", SAYS)
def test_example_prints_the_expected_output(command_line: str, tmp_path: Path) -> None:
    name, *arguments = command_line.split()
    command = [sys.executable, str(ROOT / "examples" / name), *arguments]
    environment = os.environ | {"SPOTFIT_HOME": str(tmp_path / "keys"), "TMPDIR": str(tmp_path)}
    ran = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=100, check=False
    )
    assert ran.returncode == 0, ran.stderr
    assert SAYS[command_line] in ran.stdout


def test_example_project_passes_its_tests_on_a_spot_cloud(tmp_path: Path) -> None:
    project = shutil.copytree(ROOT / "examples" / "testing_on_spot", tmp_path / "project")
    command = [sys.executable, "-m", "pytest", "-q", f"--basetemp={tmp_path / 'tests'}"]
    environment = os.environ | {"SPOTFIT_HOME": str(tmp_path / "keys"), "TMPDIR": str(tmp_path)}
    ran = subprocess.run(
        command, cwd=project, env=environment, capture_output=True, text=True, timeout=110
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "3 passed" in ran.stdout


@pytest.mark.slow
def test_demo_passes_its_checks(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "examples" / "digits_demo.py")]
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    ran = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=110, check=False
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "✗" not in ran.stdout
    # The user's folder for downloads of checkpoints stays, like a cache; it must be empty.
    assert [path for path in tmp_path.rglob("*") if path.parent != tmp_path] == []
    assert {path.name for path in tmp_path.iterdir()} <= {f"spotfit-checkpoints-{os.getuid()}"}
