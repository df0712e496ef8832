"""`spotfit run` executes a script for torchrun, which continues after the loss of a machine."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from spotfit.model.events import FailureCause
from tests.house.tree import ROOT
from tests.live.cloud import LiveTestCloud, eventually


def start_example(cloud: LiveTestCloud, name: str) -> subprocess.Popen[str]:
    """Start examples/torchrun_digits.py on two machines."""
    command = [
        *(sys.executable, "-m", "spotfit.cli", "run", "--workers", "4", "--name", name),
        *("--provisioner", f"local?nodes=2&root={cloud.root.path}"),
        *("--storage-path", cloud.storage, "--working-dir", str(ROOT / "examples")),
        *("torchrun_digits.py", "--epochs", "2", "--step-s", "0.05"),
    ]
    return subprocess.Popen(
        command, env=dict(os.environ), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def weights_at_the_end(run: subprocess.Popen[str]) -> str:
    """Wait for the end of the script; return the digest of its weights."""
    output, errors = run.communicate(timeout=140)
    assert run.returncode == 0, errors
    found = re.search(r"weights (\w+)", output)
    assert found, output
    return found[1]


@pytest.mark.timeout(300)  # each of the workers imports scikit-learn three times
def test_a_script_ends_with_the_same_weights_after_the_loss_of_a_machine(
    cloud: LiveTestCloud,
) -> None:
    undisturbed = weights_at_the_end(start_example(cloud, "undisturbed"))
    run = start_example(cloud, "killed")
    eventually(lambda: cloud.view("killed").latest_checkpoint)
    cloud.reclaimer.kill(cloud.node_of_rank(2, "killed"))
    assert weights_at_the_end(run) == undisturbed
    assert [one.cause for one in cloud.rounds_closed("killed")] == [FailureCause.PREEMPTION]
