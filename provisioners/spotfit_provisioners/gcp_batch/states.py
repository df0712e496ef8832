"""Mapping of Google Cloud Batch task and job states to `NodeState`.

task state                         | job state                       | NodeState
-----------------------------------|---------------------------------|---------------------
any                                | CANCELLED                       | GONE
none, PENDING, ASSIGNED            | may start tasks                 | WAITING
none, PENDING, ASSIGNED            | ended, or being cancelled       | GONE
RUNNING                            | any other                       | RUNNING
SUCCEEDED, UNEXECUTED              | any other                       | GONE
FAILED, lost host or clean exit    | any other                       | GONE
FAILED, any other exit code        | any other                       | FAILED
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from spotfit.model.group import NodeState, NodeStatus
from spotfit.provision.launch import AgentExitCode, describe_exit_code
from spotfit_provisioners.job_fields.timestamps import to_ms

TASK_STATES: Mapping[str, NodeState] = {
    "STATE_UNSPECIFIED": NodeState.WAITING,
    "PENDING": NodeState.WAITING,
    "ASSIGNED": NodeState.WAITING,
    "RUNNING": NodeState.RUNNING,
    "FAILED": NodeState.FAILED,
    "SUCCEEDED": NodeState.GONE,
    "UNEXECUTED": NodeState.GONE,
}

CAN_START_TASKS: Mapping[str, bool] = {
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
"""Whether a waiting task of a job in this state may still get a machine."""

HOST_LOST_EXIT_CODES: Mapping[int, str] = {
    50001: "the Spot VM was preempted",
    50002: "the VM stopped reporting to Batch",
    50003: "the VM rebooted",
    50004: "the VM did not respond",
    50006: "the VM was recreated",
}
"""https://docs.cloud.google.com/batch/docs/troubleshooting#reserved-exit-codes"""

_CLEAN_EXIT_CODES = (AgentExitCode.RELEASED, AgentExitCode.DRAINED, AgentExitCode.DONE)
_EXECUTION_ENDS = ("PENDING", "FAILED", "SUCCEEDED")
# Batch has no field for the reason of waiting: it describes both reasons and states as events.
_STATE_CHANGE_PREFIXES = ("Job state is set", "Task state is updated")


def node_status(job: Mapping[str, Any], task: Mapping[str, Any] | None) -> NodeStatus:
    """Return the status of one task. `task` is None while Batch has not created the task."""
    started_at_ms, ended_at_ms = _execution_times_ms(task) if task is not None else (None, None)
    return replace(_node_state(job, task), started_at_ms=started_at_ms, ended_at_ms=ended_at_ms)


def _node_state(job: Mapping[str, Any], task: Mapping[str, Any] | None) -> NodeStatus:
    job_state = job["status"]["state"]
    # States that Google adds in the future must not look like the end of the machine.
    task_state = "PENDING" if task is None else task["status"]["state"]
    state = TASK_STATES.get(task_state, NodeState.WAITING)
    # First, whatever the last state of the task is: a cancelled job runs no tasks.
    if job_state == "CANCELLED":
        return NodeStatus(
            state=NodeState.GONE, reason=_last_event_description(job) or "the job was cancelled"
        )
    if state == NodeState.WAITING and not CAN_START_TASKS.get(job_state, True):
        reason = _last_event_description(job) or f"its job is {job_state}"
        return NodeStatus(state=NodeState.GONE, reason=reason)
    if task is None:
        return NodeStatus(state=state)
    if state not in (NodeState.GONE, NodeState.FAILED):
        return NodeStatus(
            state=state,
            # Of a waiting task, why its last attempt has ended: Batch retries it.
            reason=_end_reason(task) if state == NodeState.WAITING else "",
            is_last_attempt=_is_last_attempt(job, task),
        )
    # A task that a lost VM or the release of the agent ended is not a failure of the run.
    code = None if state == NodeState.GONE else _exit_code(task)
    if code in HOST_LOST_EXIT_CODES or code in _CLEAN_EXIT_CODES:
        state = NodeState.GONE
    if code is None:
        return NodeStatus(state=state)
    return NodeStatus(state=state, reason=_end_reason(task), exit_code=code)


def _execution_times_ms(task: Mapping[str, Any]) -> tuple[int | None, int | None]:
    """Return when the last execution of the task was started, and when it ended.

    https://docs.cloud.google.com/batch/docs/reference/rest/v1/StatusEvent. Compute Engine bills
    the VM, from its start before the task until Batch has deleted it; these times are not part of
    the API.
    """
    started_at_ms = ended_at_ms = None
    for event in _sort_events(task["status"].get("status_events", [])):
        state, at_ms = event.get("task_state"), to_ms(event.get("event_time"))
        if state == "RUNNING":
            started_at_ms, ended_at_ms = at_ms, None
        elif state in _EXECUTION_ENDS and ended_at_ms is None:
            ended_at_ms = at_ms
    return started_at_ms, ended_at_ms if started_at_ms is not None else None


def pending_reason(job: Mapping[str, Any]) -> str:
    """Return the job's last event as the reason for waiting; '' if it is only a state change."""
    event = _last_event_description(job)
    return "" if event.startswith(_STATE_CHANGE_PREFIXES) else event


def _exit_code(task: Mapping[str, Any]) -> int | None:
    """Return the exit code of the last execution of a failed task.

    Valid only for failed tasks: after a successful retry the old codes remain in the events.
    """
    # Events that do not concern an execution have exit code 0, which a failed one never has.
    codes = [
        (event.get("task_execution") or {}).get("exit_code", 0)
        for event in _sort_events(task["status"].get("status_events", []))
    ]
    return next((int(code) for code in reversed(codes) if code), None)


def _end_reason(task: Mapping[str, Any]) -> str:
    """Return why the last execution that has failed has ended; '' if none has."""
    failed = [
        event
        for event in _sort_events(task["status"].get("status_events", []))
        if (event.get("task_execution") or {}).get("exit_code")
    ]
    if not failed:
        return ""
    code = int(failed[-1]["task_execution"]["exit_code"])
    description = str(failed[-1].get("description", "")) or "the agent exited"
    exit_reason = HOST_LOST_EXIT_CODES.get(code)
    suffix = f"exit code {code}: {exit_reason}" if exit_reason else describe_exit_code(code)
    return f"{description} ({suffix})"


def _is_last_attempt(job: Mapping[str, Any], task: Mapping[str, Any]) -> bool:
    """Return whether the retries are used up. Every failed attempt is in the task's events."""
    specs = [group["task_spec"] for group in job.get("task_groups", [])]
    retries = sum(int(spec.get("max_retry_count", 0)) for spec in specs)
    failed = sum(
        bool((event.get("task_execution") or {}).get("exit_code"))
        for event in task["status"].get("status_events", [])
    )
    return 0 < retries <= failed


def _last_event_description(job_or_task: Mapping[str, Any]) -> str:
    events = _sort_events(job_or_task["status"].get("status_events", []))
    return str(events[-1].get("description", "")) if events else ""


def _sort_events(events: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    # Batch returns events unordered, with a varying number of decimals in their times.
    return sorted(events, key=lambda event: str(event.get("event_time") or "").rstrip("Z"))
