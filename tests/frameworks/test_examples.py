"""Examples with training frameworks run and print the documented output."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.house.tree import ROOT

EXPECTED_OUTPUT = {
    "accelerate_digits.py": ["lost machines: 1, resumed: True", "accuracy above 90 %: True"],
    "deepspeed_digits.py": ["lost machines: 1, resumed: True", "accuracy above 90 %: True"],
    "jax_digits.py": ["200 steps, accuracy above 90 %: True", "saved: True"],
    "lightgbm_breast_cancer.py": ["30 rounds, test AUC above 0.95: True"],
    "lightning_autoencoder.py": ["loss of the validation below 0.05: True"],
    "lightning_digits.py": ["lost machines: 1, resumed: True", "accuracy above 0.9: True"],
    "sklearn_digits.py": [
        "lost machines: 1, resumed: True",
        "240 trees, accuracy above 90 %: True",
    ],
    "tensorflow_digits.py": ["12 epochs, accuracy above 90 %: True"],
    "transformers_digits.py": ["accuracy above 30 %: True", "loaded 12650 parameters"],
    "xgboost_breast_cancer.py": ["30 rounds, training error below 2 %: True"],
}


@pytest.mark.parametrize("name", EXPECTED_OUTPUT)
def test_an_example_prints_the_expected_output(name: str, tmp_path: Path) -> None:
    pytest.importorskip(name.partition("_")[0])
    environment = os.environ | {"SPOTFIT_HOME": str(tmp_path / "keys"), "TMPDIR": str(tmp_path)}
    completed = subprocess.run(
        [sys.executable, str(ROOT / "examples" / name)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert completed.returncode == 0, completed.stdout + completed.stderr
    for line in EXPECTED_OUTPUT[name]:
        assert line in completed.stdout, completed.stdout + completed.stderr
