"""The worker image without Docker: the steps of the Dockerfile, executed on this machine."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.house.tree import ROOT
from worker_image.check import EXIT_CANNOT_MOUNT

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(2400),
    pytest.mark.real_time("installs packages and boots an agent"),
]


def test_cpu_image_passes_its_checks() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "worker_image.check", "cpu"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode == EXIT_CANNOT_MOUNT:
        pytest.skip(done.stdout.strip())
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    assert "cpu: the image keeps its promises." in done.stdout
