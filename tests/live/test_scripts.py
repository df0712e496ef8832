"""`spotfit run` executes scripts for torchrun, which continue after the loss of workers."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence

import pytest

from spotfit.model.events import FailureCause
from tests.house.tree import ROOT
from tests.live.cloud import LiveTestCloud, eventually

STEP_S = "0.05"
KILLED_SCRIPT = "killed_script.py"
KILL_RANK_1_IN_STEP_25 = f"""
import os, runpy, signal, sys, time
from pathlib import Path

mark, script = Path(sys.argv[1]), sys.argv[2]
del sys.argv[:2]
sleep, steps = time.sleep, []

def count_steps(seconds):
    steps.extend([1] * (seconds == {STEP_S}))
    if len(steps) == 25 and os.environ["RANK"] == "1" and not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    sleep(seconds)

time.sleep = count_steps
runpy.run_path(script, run_name="__main__")
"""


def start_script(
    cloud: LiveTestCloud, name: str, script: Sequence[str], *, workers: int = 4
) -> subprocess.Popen[str]:
    """Start a script of the examples on two machines."""
    folder = cloud.folder / "scripts"
    shutil.copytree(ROOT / "examples", folder, dirs_exist_ok=True)
    (folder / KILLED_SCRIPT).write_text(KILL_RANK_1_IN_STEP_25)
    command = [
        *(sys.executable, "-m", "spotfit.cli", "run", "--workers", str(workers), "--name", name),
        *("--provisioner", f"local?nodes=2&root={cloud.root.path}", "--max-failures", "1"),
        *("--storage-path", cloud.storage, "--working-dir", str(folder), *script),
    ]
    return subprocess.Popen(
        command, env=dict(os.environ), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def output_of(run: subprocess.Popen[str]) -> str:
    """Wait for the end of the script; return what it has printed."""
    output, errors = run.communicate(timeout=140)
    assert run.returncode == 0, errors
    return output


def weights_in(output: str) -> str:
    found = re.search(r"weights (\w+)", output)
    assert found, output
    return found[1]


@pytest.mark.timeout(300)  # each of the workers imports scikit-learn three times
def test_a_script_ends_with_the_same_weights_after_the_loss_of_a_machine(
    cloud: LiveTestCloud,
) -> None:
    script = ("torchrun_digits.py", "--epochs", "2", "--step-s", STEP_S)
    undisturbed = weights_in(output_of(start_script(cloud, "undisturbed", script)))
    run = start_script(cloud, "killed", script)
    eventually(lambda: cloud.view("killed").latest_checkpoint)
    cloud.reclaimer.kill(cloud.node_of_rank(2, "killed"))
    assert weights_in(output_of(run)) == undisturbed
    assert [one.cause for one in cloud.rounds_closed("killed")] == [FailureCause.PREEMPTION]


NANOGPT = ("nanogpt_style.py", f"--step_s={STEP_S}", "--max_iters=50")


@pytest.mark.timeout(300)
def test_a_script_of_module_level_code_needs_four_added_lines(cloud: LiveTestCloud) -> None:
    """As the guide says: a resume skips the batch that is read ahead, and changes nothing else."""
    lines = (ROOT / "examples" / NANOGPT[0]).read_text().splitlines(keepends=True)
    plain = [line for line in lines if "# (+)" not in line]
    assert len(lines) - len(plain) == 4
    (cloud.folder / "scripts").mkdir()
    (cloud.folder / "scripts" / "plain.py").write_text("".join(plain))
    unchanged = output_of(start_script(cloud, "unchanged", ("plain.py", *NANOGPT[1:])))
    undisturbed = output_of(start_script(cloud, "undisturbed", NANOGPT))
    assert weights_in(undisturbed) == weights_in(unchanged)

    mark = str(cloud.folder / "killed")
    killed = output_of(start_script(cloud, "killed", (KILLED_SCRIPT, mark, *NANOGPT)))
    assert [one.cause for one in cloud.rounds_closed("killed")] == [FailureCause.WORKER]
    assert "starts at iteration 20" in killed
    skipped = output_of(start_script(cloud, "skipped", (*NANOGPT, "--skipped_before=20")))
    assert weights_in(killed) == weights_in(skipped) != weights_in(undisturbed)


MEGATRON = ("megatron_style.py", "--step-s", STEP_S, "--train-iters")
TORCHTITAN = ("torchtitan_style.py", "--step-s", STEP_S, "--steps")


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "script",
    [
        pytest.param(MEGATRON, id="megatron"),
        # In the everyday tests this script is run by the next one.
        pytest.param(TORCHTITAN, id="torchtitan", marks=pytest.mark.slow),
    ],
)
def test_a_script_with_its_own_groups_survives_a_killed_worker_and_a_killed_machine(
    cloud: LiveTestCloud, script: tuple[str, ...]
) -> None:
    undisturbed = weights_in(output_of(start_script(cloud, "undisturbed", (*script, "70"))))
    mark = str(cloud.folder / "killed")
    run = start_script(cloud, "killed", (KILLED_SCRIPT, mark, *script, "70"))
    eventually(lambda: cloud.rounds_closed("killed"), within_s=120)
    committed = cloud.view("killed").latest_checkpoint
    eventually(lambda: cloud.view("killed").latest_checkpoint != committed, within_s=120)
    cloud.reclaimer.kill(cloud.node_of_rank(2, "killed"))
    assert weights_in(output_of(run)) == undisturbed
    closed = [one.cause for one in cloud.rounds_closed("killed")]
    assert closed == [FailureCause.WORKER, FailureCause.PREEMPTION]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("script", "layout"),
    [
        pytest.param(
            MEGATRON,
            ("--pipeline-model-parallel-size", "1"),
            id="megatron",
            marks=pytest.mark.slow,
        ),
        pytest.param(TORCHTITAN, ("--tp", "1"), id="torchtitan"),
    ],
)
def test_a_checkpoint_of_own_groups_is_loaded_with_another_layout(
    cloud: LiveTestCloud, script: tuple[str, ...], layout: tuple[str, ...]
) -> None:
    first = output_of(start_script(cloud, "run", (*script, "20")))
    assert "starts at step 0" in first
    second = output_of(start_script(cloud, "run", (*script, "30", *layout), workers=2))
    assert "starts at step 20" in second
    assert "30" in str(cloud.view("run").latest_checkpoint)
