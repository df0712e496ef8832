"""Slurm's states in our words: every state there is, by squeue's own list."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from spotfit.model.group import NodeState, NodeStatus
from spotfit_provisioners.slurm.states import STATES, Task, group, indexes, read


@pytest.mark.skipif(shutil.which("squeue") is None, reason="Slurm is not installed")
def test_every_state_is_translated(tmp_path: Path) -> None:
    """squeue names them all when it is asked for one that there is not."""
    conf = tmp_path / "slurm.conf"
    conf.write_text("ClusterName=none\nSlurmctldHost=localhost\nNodeName=n\n")
    done = subprocess.run(
        [shutil.which("squeue") or "", "--states=none-such"],
        env={"SLURM_CONF": str(conf), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
    )
    told = re.search(r"Valid job states include: ([A-Z_,]+)", done.stderr)
    assert told is not None, done.stderr
    assert set(told[1].split(",")) <= set(STATES)


@pytest.mark.parametrize(
    ("text", "found"),
    [("3", [3]), ("0-2,5", [0, 1, 2, 5]), ("[1-2%1]", [1, 2]), ("N/A", [])],
)
def test_indexes_are_read_as_slurm_writes_them(text: str, found: list[int]) -> None:
    assert indexes(text) == found


def test_a_line_of_squeue_is_read() -> None:
    assert list(read("41|1|FAILED|NonZeroExitCode|19200|")) == [
        Task(41, 1, "FAILED", "NonZeroExitCode", 75)
    ]
    assert len(list(read("41|0-3|CANCELLED|None|0|"))) == 4


@pytest.mark.parametrize(
    ("task", "told"),
    [
        (Task(1, 0, "RUNNING", "None"), NodeStatus(NodeState.RUNNING)),
        (Task(1, 0, "PENDING", "Priority"), NodeStatus(NodeState.WAITING)),
        (Task(1, 0, "COMPLETING", "None"), NodeStatus(NodeState.WAITING, "COMPLETING")),
        (Task(1, 0, "NODE_FAIL", "None"), NodeStatus(NodeState.GONE, "NODE_FAIL")),
        (
            Task(1, 0, "FAILED", "NonZeroExitCode", 70),
            NodeStatus(NodeState.FAILED, "FAILED, exit code 70"),
        ),
        (Task(1, 0, "A_NEW_ONE", "None"), NodeStatus(NodeState.WAITING, "A_NEW_ONE")),
        (Task(1, 7, "RUNNING", "None"), NodeStatus(NodeState.GONE, "Slurm has forgotten it")),
    ],
)
def test_a_task_is_told_with_its_reason(task: Task, told: NodeStatus) -> None:
    assert group(1, [task]).nodes == (told,)


@pytest.mark.parametrize(
    ("reason", "refusal"),
    [("Resources", "Resources"), ("BeginTime", ""), ("JobHeldUser", ""), ("None", "")],
)
def test_why_nothing_comes_is_told(reason: str, refusal: str) -> None:
    assert group(1, [Task(1, 0, "PENDING", reason)]).refusal == refusal
