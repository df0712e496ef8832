"""Mapping of Slurm job states to `NodeState`, and parsing of squeue's output."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from spotfit.model.group import GroupStatus, NodeState, NodeStatus
from spotfit.provision.launch import describe_exit_code

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
"""COMPLETING is WAITING, because the task may be requeued afterwards."""

_UNALLOCATED = (
    "PENDING",
    "REQUEUED",
    "REQUEUE_FED",
    "REQUEUE_HOLD",
    "RESV_DEL_HOLD",
    "SPECIAL_EXIT",
)
"""States of a task without nodes; its times are expected ones."""

# Waiting reasons that do not indicate missing capacity; `submit` holds jobs for a moment, and a
# requeued task begins after a delay.
_NEUTRAL_REASONS = ("", "None", "BeginTime", "Cleaning", "JobHeldUser")


@dataclass(frozen=True, slots=True)
class SlurmTask:
    """One task of an array job, as reported by squeue."""

    job_id: int
    """The id of the array job."""
    index: int
    state: str
    reason: str = ""
    exit_code: int = 0
    started_at_ms: int | None = None
    """In milliseconds since 1970; of a pending task the expected time."""
    ended_at_ms: int | None = None
    """Of a task that has not ended the expected time."""


def parse_tasks(line: str) -> Iterable[SlurmTask]:
    """Parse a line of squeue. It stands for several tasks while an array has not been split."""
    job, indexes_, state, reason, status, start, end = line.strip().split("|")[:7]
    # A wait status: the code is in the high byte.
    code = int(status) >> 8 if status.isdecimal() else 0
    return [
        SlurmTask(
            job_id=int(job),
            index=index,
            state=state,
            reason=reason,
            exit_code=code,
            started_at_ms=_to_ms(start),
            ended_at_ms=_to_ms(end),
        )
        for index in parse_indexes(indexes_)
    ]


def _to_ms(time: str) -> int | None:
    """Parse seconds since 1970; None for 'N/A' and 'NONE'."""
    return int(time) * 1000 if time.isdecimal() else None


def parse_indexes(text: str) -> list[int]:
    """Parse array indexes such as '0', '0-3,5' and '[0-3%2]'; empty if the job is not an array."""
    found: list[int] = []
    for part in text.strip("[]").partition("%")[0].split(","):
        first, _, last = part.partition("-")
        if first.isdecimal():
            found.extend(range(int(first), int(last or first) + 1))
    return found


def group_status(nodes: int, tasks: Iterable[SlurmTask]) -> GroupStatus:
    """Return the status of every task of an array; tasks that Slurm has purged are GONE."""
    by_index = {task.index: task for task in tasks}
    statuses = tuple(_node_status(by_index.get(index)) for index in range(nodes))
    waits = (task.reason for task in by_index.values() if task.state == "PENDING")
    refusal = next((reason for reason in waits if reason not in _NEUTRAL_REASONS), "")
    return GroupStatus(nodes=statuses, refusal=refusal)


def _node_status(task: SlurmTask | None) -> NodeStatus:
    if task is None:
        return NodeStatus(
            state=NodeState.GONE, reason="Slurm does not know the task", is_known=False
        )
    # A state of a newer Slurm must not look like the end of the machine.
    state = STATES.get(task.state, NodeState.WAITING)
    # Slurm accounts for the nodes from the start to the end of the job:
    # https://slurm.schedmd.com/squeue.html#OPT_StartTime, "actual or expected"
    started_at_ms = None if task.state in _UNALLOCATED else task.started_at_ms
    if state in (NodeState.RUNNING, NodeState.WAITING):
        return NodeStatus(
            state=state,
            reason="" if task.state in ("RUNNING", "PENDING") else task.state,
            started_at_ms=started_at_ms,
        )
    code = describe_exit_code(task.exit_code) if task.exit_code else ""
    reason = "" if task.reason in ("None", "NonZeroExitCode") else task.reason
    return NodeStatus(
        state=state,
        reason=", ".join(filter(None, (task.state, reason, code))),
        exit_code=task.exit_code or None,
        started_at_ms=started_at_ms,
        ended_at_ms=task.ended_at_ms,
        out_of_memory=task.state == "OUT_OF_MEMORY",
    )
