"""Examples of training frameworks run and print the documented output."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.house.tree import ROOT

EXPECTED_OUTPUT = {
    "xgboost": "30 rounds, training error below 2 %: True",
    "lightgbm": "30 rounds, test AUC above 0.95: True",
}


@pytest.mark.parametrize("library", EXPECTED_OUTPUT)
def test_example_prints_the_expected_output(library: str, tmp_path: Path) -> None:
    pytest.importorskip(library)
    command = [sys.executable, str(ROOT / "examples" / f"{library}_breast_cancer.py")]
    environment = os.environ | {"SPOTFIT_HOME": str(tmp_path / "keys"), "TMPDIR": str(tmp_path)}
    completed = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=100, check=False
    )
    assert completed.returncode == 0, completed.stderr
    assert EXPECTED_OUTPUT[library] in completed.stdout
