"""Mapping of AWS Batch job states to `NodeState`.

Batch status                            | NodeState
----------------------------------------|----------------------------------------------
SUBMITTED, PENDING, RUNNABLE, STARTING  | WAITING
RUNNING                                 | RUNNING
SUCCEEDED                               | GONE
FAILED                                  | GONE if the host was lost or the agent left cleanly,
                                        | else FAILED
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from spotfit.model.group import NodeState, NodeStatus
from spotfit.provision.launch import AgentExitCode, describe_exit_code

STATES: Mapping[str, NodeState] = {
    "SUBMITTED": NodeState.WAITING,
    "PENDING": NodeState.WAITING,
    "RUNNABLE": NodeState.WAITING,
    "STARTING": NodeState.WAITING,
    "RUNNING": NodeState.RUNNING,
    "SUCCEEDED": NodeState.GONE,
    "FAILED": NodeState.FAILED,
}
# The retry rule "Host EC2*" in render.py matches the same prefix:
# https://docs.aws.amazon.com/batch/latest/userguide/job_retries.html
_HOST_LOST_PREFIX = "Host EC2"
# "OutOfMemoryError: Container killed due to memory usage":
# https://docs.aws.amazon.com/AmazonECS/latest/developerguide/stopped-task-error-codes.html
_OUT_OF_MEMORY = "OutOfMemoryError"
_CLEAN_EXIT_CODES = (AgentExitCode.RELEASED, AgentExitCode.DRAINED, AgentExitCode.DONE)


def node_status(job: Mapping[str, Any]) -> NodeStatus:
    """Return the status of a job or array child. A preempted host is not a failure of its job."""
    # A status that AWS adds in the future must not look like the end of the machine.
    state = STATES.get(job["status"], NodeState.WAITING)
    attempts = job.get("attempts") or []
    # The status reason of the job may describe its end in general; that of the last attempt names
    # the lost host. Earlier attempts were retried.
    is_host_lost = any(
        str(entry.get("statusReason", "")).startswith(_HOST_LOST_PREFIX)
        for entry in (job, *attempts[-1:])
    )
    if state == NodeState.FAILED and (is_host_lost or _exit_code(job) in _CLEAN_EXIT_CODES):
        state = NodeState.GONE
    # Of a waiting job, why its last attempt has ended: Batch retries it.
    has_ended = state in (NodeState.GONE, NodeState.FAILED)
    is_retried = state is NodeState.WAITING and bool(attempts)
    reason = _end_reason(job) if has_ended or is_retried else ""
    allowed = int((job.get("retryStrategy") or {}).get("attempts", 1))
    # The list of attempts may contain the running one, which has no end time yet.
    ended = sum(bool(attempt.get("stoppedAt")) for attempt in attempts)
    started_at_ms, ended_at_ms = _attempt_times_ms(job)
    # A job that allows a single attempt is never reported as on its last one: it has no retries.
    return NodeStatus(
        state=state,
        reason=reason,
        is_last_attempt=1 < allowed <= ended + 1,
        exit_code=_exit_code(job) if state in (NodeState.GONE, NodeState.FAILED) else None,
        out_of_memory=state is NodeState.FAILED and _OUT_OF_MEMORY in reason,
        started_at_ms=started_at_ms,
        ended_at_ms=ended_at_ms,
    )


def _attempt_times_ms(job: Mapping[str, Any]) -> tuple[int | None, int | None]:
    """Return when the container of the last attempt was started, and when it ended.

    https://docs.aws.amazon.com/batch/latest/APIReference/API_AttemptDetail.html. EC2 bills the
    instance, from its start before the container to its end after it; these times are not part of
    the API, and the instance may run jobs of others meanwhile. 0 stands for none.
    """
    if "size" in (job.get("arrayProperties") or {}):  # the parent of an array has no machine
        return None, None
    attempts = job.get("attempts") or []
    last = attempts[-1] if attempts else {}
    if job["status"] == "RUNNING" and (not last or last.get("stoppedAt")):
        # The list contains only attempts that have ended: the job has the time of the present one.
        at_ms = int(job.get("startedAt") or 0)
        return (at_ms if at_ms > int(last.get("stoppedAt") or 0) else None), None
    if not attempts and job["status"] in ("SUCCEEDED", "FAILED"):
        last = job
    started_at_ms = int(last.get("startedAt") or 0) or None
    return started_at_ms, (int(last.get("stoppedAt") or 0) or None) if started_at_ms else None


def pending_reason(job: Mapping[str, Any], *, now_ms: int, pending_timeout_s: float) -> str:
    """Return why a RUNNABLE job has no machine, or '' if the wait is not unusual.

    While a compute environment scales up from zero, Batch reports misconfigurations and missing
    capacity for a few minutes. Misconfigurations are returned only after `pending_timeout_s`.
    Missing capacity is returned at once; the caller decides how long to wait.
    """
    # Documented reasons: https://docs.aws.amazon.com/batch/latest/userguide/job-queue-blocked.html
    reason = str(job.get("statusReason", ""))
    if job["status"] != "RUNNABLE" or not reason:
        return ""
    if reason.startswith("CAPACITY:") or waiting_time_s(job, now_ms=now_ms) >= pending_timeout_s:
        return reason
    return ""


def longest_runnable_s(jobs: Sequence[Mapping[str, Any]], *, now_ms: int) -> float:
    """Return the longest `waiting_time_s` of the jobs that wait for a machine; 0 without any."""
    runnable = (job for job in jobs if job["status"] == "RUNNABLE")
    return max((waiting_time_s(job, now_ms=now_ms) for job in runnable), default=0.0)


def waiting_time_s(job: Mapping[str, Any], *, now_ms: int) -> float:
    """Return the time since the job was created, or since its last attempt ended."""
    # A retried job waits again from the end of its last attempt. Batch's times are in milliseconds.
    last = (job.get("attempts") or [{}])[-1]
    since_ms = int(last.get("stoppedAt") or job.get("createdAt") or now_ms)
    return (now_ms - since_ms) / 1000


def log_streams(job: Mapping[str, Any]) -> list[str]:
    """Return the log streams of all attempts, the current one last."""
    containers = [entry.get("container", {}) for entry in (*(job.get("attempts") or []), job)]
    names = (container.get("logStreamName") for container in containers)
    return list(dict.fromkeys(filter(None, names)))


def _end_reason(job: Mapping[str, Any]) -> str:
    last = (job.get("attempts") or [{}])[-1]
    reasons = [
        str(last.get("container", {}).get("reason") or ""),
        str(last.get("statusReason") or ""),
        str(job.get("statusReason") or ""),
    ]
    # The job repeats the reason of its last attempt, so equal texts are printed once.
    text = "; ".join(dict.fromkeys(filter(None, reasons)))
    code = _exit_code(job)
    return text if code is None else f"{text or 'the agent exited'} ({describe_exit_code(code)})"


def _exit_code(job: Mapping[str, Any]) -> int | None:
    last = (job.get("attempts") or [{}])[-1]
    code = last.get("container", {}).get("exitCode")
    return None if code is None else int(code)
