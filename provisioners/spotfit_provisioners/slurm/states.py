"""The states of Slurm's jobs in our words."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from spotfit.model.group import GroupStatus, NodeState, NodeStatus

STATES: Mapping[str, NodeState] = {
    "PENDING": NodeState.WAITING,
    "CONFIGURING": NodeState.WAITING,
    "RUNNING": NodeState.RUNNING,
    "RESIZING": NodeState.RUNNING,
    "SIGNALING": NodeState.RUNNING,
    "COMPLETING": NodeState.WAITING,
    "STAGE_OUT": NodeState.WAITING,
    "SUSPENDED": NodeState.WAITING,
    "STOPPED": NodeState.WAITING,
    "REQUEUED": NodeState.WAITING,
    "REQUEUE_FED": NodeState.WAITING,
    "REQUEUE_HOLD": NodeState.WAITING,
    "RESV_DEL_HOLD": NodeState.WAITING,
    "SPECIAL_EXIT": NodeState.WAITING,
    "COMPLETED": NodeState.GONE,
    "CANCELLED": NodeState.GONE,
    "PREEMPTED": NodeState.GONE,
    "TIMEOUT": NodeState.GONE,
    "NODE_FAIL": NodeState.GONE,
    "BOOT_FAIL": NodeState.GONE,
    "REVOKED": NodeState.GONE,
    "FAILED": NodeState.FAILED,
    "DEADLINE": NodeState.FAILED,
    "OUT_OF_MEMORY": NodeState.FAILED,
}
"""COMPLETING: its end has begun, and whether it is the last one shows only afterwards."""

_PASSING = ("", "None", "BeginTime", "Cleaning", "JobHeldUser")
"""Reasons to wait that say nothing about room: the last one is ours, for a moment."""


@dataclass(frozen=True, slots=True)
class Task:
    """One task of an array job, as squeue tells it."""

    job: int
    """The whole array's number."""
    index: int
    state: str
    reason: str = ""
    exit_code: int = 0


def read(line: str) -> Iterable[Task]:
    """The tasks of a line of squeue: several where the array was never taken apart."""
    job, indexes_, state, reason, status = line.strip().split("|")[:5]
    code = int(status) >> 8 if status.isdecimal() else 0
    return [Task(int(job), index, state, reason, code) for index in indexes(indexes_)]


def indexes(text: str) -> list[int]:
    """'0', '0-3,5' and '[0-3%2]' as Slurm writes them; none for a job that is no array."""
    found: list[int] = []
    for part in text.strip("[]").partition("%")[0].split(","):
        first, _, last = part.partition("-")
        if first.isdecimal():
            found.extend(range(int(first), int(last or first) + 1))
    return found


def group(nodes: int, tasks: Iterable[Task]) -> GroupStatus:
    """An array, task by task; a task that Slurm has forgotten is gone."""
    by_index = {task.index: task for task in tasks}
    statuses = tuple(_node(by_index.get(index)) for index in range(nodes))
    waits = (task.reason for task in by_index.values() if task.state == "PENDING")
    refusal = next((reason for reason in waits if reason not in _PASSING), "")
    return GroupStatus(statuses, refusal)


def _node(task: Task | None) -> NodeStatus:
    if task is None:
        return NodeStatus(NodeState.GONE, "Slurm has forgotten it")
    state = STATES.get(task.state, NodeState.WAITING)
    if state in (NodeState.RUNNING, NodeState.WAITING):
        return NodeStatus(state, "" if task.state in ("RUNNING", "PENDING") else task.state)
    code = f"exit code {task.exit_code}" if task.exit_code else ""
    reason = "" if task.reason in ("None", "NonZeroExitCode") else task.reason
    return NodeStatus(state, ", ".join(filter(None, (task.state, reason, code))))
