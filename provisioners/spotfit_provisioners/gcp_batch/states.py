"""The states of Google Cloud Batch in our words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from spotfit.model.group import NodeState, NodeStatus
from spotfit.provision.launch import Exit

TASK_STATES: Mapping[str, NodeState] = {
    "STATE_UNSPECIFIED": NodeState.WAITING,
    "PENDING": NodeState.WAITING,
    "ASSIGNED": NodeState.WAITING,
    "RUNNING": NodeState.RUNNING,
    "FAILED": NodeState.FAILED,
    "SUCCEEDED": NodeState.GONE,
    "UNEXECUTED": NodeState.GONE,
}

STARTS_TASKS: Mapping[str, bool] = {
    "STATE_UNSPECIFIED": True,
    "QUEUED": True,
    "SCHEDULED": True,
    "RUNNING": True,
    "SUCCEEDED": False,
    "FAILED": False,
    "DELETION_IN_PROGRESS": False,
    "CANCELLATION_IN_PROGRESS": False,
    "CANCELLED": False,
}
"""Of a job: whether a task of it that waits may still get a machine."""

HOST_LOST: Mapping[int, str] = {
    50001: "the Spot VM was preempted",
    50002: "Batch heard no more of the VM",
    50003: "the VM rebooted",
    50004: "the VM did not respond",
    50006: "the VM was made anew",
}
"""https://docs.cloud.google.com/batch/docs/troubleshooting#reserved-exit-codes. Where a host is
under strain, 50002 is as frequent as 50001."""

_LEFT = {int(Exit.GIVEN_UP), int(Exit.DRAINED), int(Exit.DONE)}
_CHANGES = ("Job state is set", "Task state is updated")


def status(job: Mapping[str, Any], task: Mapping[str, Any] | None) -> NodeStatus:
    """One task of a job; it has none for a moment after it was made, nor if that failed."""
    of_job = job["status"]["state"]
    state = _state(task)
    if of_job == "CANCELLED":
        return NodeStatus(NodeState.GONE, _last_said(job) or "the job was cancelled")
    if state == NodeState.WAITING and not STARTS_TASKS.get(of_job, True):
        return NodeStatus(NodeState.GONE, _last_said(job) or f"its job is {of_job}")
    if task is None or state not in (NodeState.GONE, NodeState.FAILED):
        return NodeStatus(state, last=task is not None and _is_last(job, task))
    code = None if state == NodeState.GONE else _exit_code(task)
    if code in HOST_LOST or code in _LEFT:
        state = NodeState.GONE
    return NodeStatus(state, _why(task, code))


def waits_for(job: Mapping[str, Any]) -> str:
    """Why nothing comes: what was said last of the job, if that is no change of its state."""
    said = _last_said(job)
    return "" if said.startswith(_CHANGES) else said


def _state(task: Mapping[str, Any] | None) -> NodeState:
    if task is None:
        return NodeState.WAITING
    return TASK_STATES.get(task["status"]["state"], NodeState.WAITING)


def _why(task: Mapping[str, Any], code: int | None) -> str:
    if code is None:
        return ""
    told = _last_said(task) or "it ended"
    return f"{told} ({HOST_LOST.get(code, f'exit code {code}')})"


def _exit_code(task: Mapping[str, Any]) -> int | None:
    """Of its last execution; only for a task that has failed, for old ones stay among the events.

    An event that is about no execution says 0 as well, which no execution that failed does.
    """
    codes = [
        (event.get("task_execution") or {}).get("exit_code", 0)
        for event in _in_order(task["status"].get("status_events", []))
    ]
    return next((int(code) for code in reversed(codes) if code), None)


def _is_last(job: Mapping[str, Any], task: Mapping[str, Any]) -> bool:
    """Whether the task was tried again as often as it may be: each try that failed is among its
    events, and whatever the cause they share one budget."""
    specs = [group["task_spec"] for group in job.get("task_groups", [])]
    retries = sum(int(spec.get("max_retry_count", 0)) for spec in specs)
    failed = sum(
        bool((event.get("task_execution") or {}).get("exit_code"))
        for event in task["status"].get("status_events", [])
    )
    return 0 < retries <= failed


def _last_said(told: Mapping[str, Any]) -> str:
    events = _in_order(told["status"].get("status_events", []))
    return str(events[-1].get("description", "")) if events else ""


def _in_order(events: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """As they happened: Batch gives them in no order, with as many decimals as it likes."""
    return sorted(events, key=lambda event: str(event.get("event_time") or "").rstrip("Z"))
