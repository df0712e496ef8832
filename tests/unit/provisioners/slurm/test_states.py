"""Mapping of Slurm's states, complete by the list of squeue."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from spotfit.model.group import NodeState, NodeStatus
from spotfit.provision.launch import describe_exit_code
from spotfit_provisioners.slurm.states import (
    STATES,
    SlurmTask,
    group_status,
    parse_indexes,
    parse_tasks,
)


@pytest.mark.skipif(
    shutil.which("squeue") is None, reason="Slurm is not installed; `.ci/servers` as root"
)
def test_every_state_is_mapped(tmp_path: Path) -> None:
    """squeue lists all states when it is called with an unknown one."""
    conf = tmp_path / "slurm.conf"
    conf.write_text("ClusterName=none\nSlurmctldHost=localhost\nNodeName=n\n")
    done = subprocess.run(
        [shutil.which("squeue") or "", "--states=none-such"],
        env={"SLURM_CONF": str(conf), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
    )
    result = re.search(r"Valid job states include: ([A-Z_,]+)", done.stderr)
    assert result is not None, done.stderr
    assert set(result[1].split(",")) <= set(STATES)


@pytest.mark.parametrize(
    ("text", "found"),
    [("3", [3]), ("0-2,5", [0, 1, 2, 5]), ("[1-2%1]", [1, 2]), ("N/A", [])],
)
def test_array_indices_are_parsed(text: str, found: list[int]) -> None:
    assert parse_indexes(text) == found


def test_squeue_line_is_parsed() -> None:
    assert list(parse_tasks("41|1|FAILED|NonZeroExitCode|19200|1795693260|1795693264|")) == [
        SlurmTask(41, 1, "FAILED", "NonZeroExitCode", 75, 1795693260000, 1795693264000)
    ]
    assert len(list(parse_tasks("41|0-3|CANCELLED|None|0|N/A|NONE|"))) == 4


@pytest.mark.parametrize(
    ("state", "times"),
    [
        # Expected times, or those of the attempt before.
        ("PENDING", (None, None)),
        ("REQUEUED", (None, None)),
        # The end is the time limit.
        ("RUNNING", (5000, None)),
        ("COMPLETING", (5000, None)),
        ("COMPLETED", (5000, 9000)),
        ("PREEMPTED", (5000, 9000)),
        ("FAILED", (5000, 9000)),
    ],
)
def test_only_actual_times_of_a_task_are_reported(
    state: str, times: tuple[int | None, int | None]
) -> None:
    (node,) = group_status(1, parse_tasks(f"41|0|{state}|None|0|5|9|")).nodes
    assert (node.started_at_ms, node.ended_at_ms) == times


@pytest.mark.parametrize(
    ("task", "expected"),
    [
        (SlurmTask(1, 0, "RUNNING", "None"), NodeStatus(state=NodeState.RUNNING)),
        (SlurmTask(1, 0, "PENDING", "Priority"), NodeStatus(state=NodeState.WAITING)),
        (
            SlurmTask(1, 0, "COMPLETING", "None"),
            NodeStatus(state=NodeState.WAITING, reason="COMPLETING"),
        ),
        (
            SlurmTask(1, 0, "NODE_FAIL", "None"),
            NodeStatus(state=NodeState.GONE, reason="NODE_FAIL"),
        ),
        (
            SlurmTask(1, 0, "FAILED", "NonZeroExitCode", 70),
            NodeStatus(state=NodeState.FAILED, reason="FAILED, exit code 70", exit_code=70),
        ),
        (
            SlurmTask(1, 0, "FAILED", "NonZeroExitCode", 66),
            NodeStatus(
                state=NodeState.FAILED, reason=f"FAILED, {describe_exit_code(66)}", exit_code=66
            ),
        ),
        (
            SlurmTask(1, 0, "A_NEW_ONE", "None"),
            NodeStatus(state=NodeState.WAITING, reason="A_NEW_ONE"),
        ),
        (
            SlurmTask(1, 7, "RUNNING", "None"),
            NodeStatus(state=NodeState.GONE, reason="Slurm does not know the task", is_known=False),
        ),
    ],
)
def test_task_state_has_its_reason(task: SlurmTask, expected: NodeStatus) -> None:
    assert group_status(1, [task]).nodes == (expected,)


@pytest.mark.parametrize(
    ("reason", "refusal"),
    [("Resources", "Resources"), ("BeginTime", ""), ("JobHeldUser", ""), ("None", "")],
)
def test_pending_reason_is_reported(reason: str, refusal: str) -> None:
    assert group_status(1, [SlurmTask(1, 0, "PENDING", reason)]).refusal == refusal


def test_kill_for_lack_of_memory_is_recognized() -> None:
    status = group_status(1, [SlurmTask(1, 0, "OUT_OF_MEMORY", "None", exit_code=0)])
    assert [node.out_of_memory for node in status.nodes] == [True]
