"""The states of AWS Batch in our words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from spotfit.model.group import NodeState, NodeStatus
from spotfit.provision.launch import Exit

STATES: Mapping[str, NodeState] = {
    "SUBMITTED": NodeState.WAITING,
    "PENDING": NodeState.WAITING,
    "RUNNABLE": NodeState.WAITING,
    "STARTING": NodeState.WAITING,
    "RUNNING": NodeState.RUNNING,
    "SUCCEEDED": NodeState.GONE,
    "FAILED": NodeState.FAILED,
}
_HOST_LOST = "Host EC2"
_LEFT = {int(Exit.GIVEN_UP), int(Exit.DRAINED), int(Exit.DONE)}


def status(job: Mapping[str, Any]) -> NodeStatus:
    """One job, or one child of an array. A host that was reclaimed is no failure of its job."""
    state = STATES.get(job["status"], NodeState.WAITING)  # one that AWS may invent is not an end
    why = _why(job)
    if state == NodeState.FAILED and (_is_reclaimed(job) or _exit_code(job) in _LEFT):
        state = NodeState.GONE
    told = why if state in (NodeState.GONE, NodeState.FAILED) else ""
    return NodeStatus(state, told, last=_is_last(job))


def waits_for(job: Mapping[str, Any], *, now_ms: int, dwell_s: float) -> str:
    """Why a job that was ready long ago has no machine; '' while that is nothing unusual.

    Batch tells of misconfigurations and lacking capacity for a few minutes even while an
    environment that is well grows from nothing; of the former only what lasts is a reason. Lack of
    capacity is told at once; it is up to the caller to wait before anything is given up for it.
    """
    reason = str(job.get("statusReason", ""))
    if job["status"] != "RUNNABLE" or not reason:
        return ""
    told_at_once = reason.startswith("CAPACITY:")
    return reason if told_at_once or waited_s(job, now_ms=now_ms) >= dwell_s else ""


def waited_s(job: Mapping[str, Any], *, now_ms: int) -> float:
    """Since it was made, or since the last attempt at it ended."""
    last = (job.get("attempts") or [{}])[-1]
    since_ms = int(last.get("stoppedAt") or job.get("createdAt") or now_ms)
    return (now_ms - since_ms) / 1000


def _is_last(job: Mapping[str, Any]) -> bool:
    """Whether the attempt that runs, or comes next, is the last of several; one that has not ended
    may be among those told of."""
    attempts = int((job.get("retryStrategy") or {}).get("attempts", 1))
    ended = sum(bool(one.get("stoppedAt")) for one in job.get("attempts", []))
    return 1 < attempts <= ended + 1


def streams(job: Mapping[str, Any]) -> list[str]:
    """Where each attempt's output is, the one that is under way last."""
    told = [one.get("container", {}) for one in (*(job.get("attempts") or []), job)]
    names = (one.get("logStreamName") for one in told)
    return list(dict.fromkeys(filter(None, names)))


def _is_reclaimed(job: Mapping[str, Any]) -> bool:
    return any(
        str(told.get("statusReason", "")).startswith(_HOST_LOST)
        for told in (job, *job.get("attempts", [])[-1:])
    )


def _why(job: Mapping[str, Any]) -> str:
    last = (job.get("attempts") or [{}])[-1]
    reasons = [
        str(last.get("container", {}).get("reason") or ""),
        str(last.get("statusReason") or ""),
        str(job.get("statusReason") or ""),
    ]
    told = "; ".join(dict.fromkeys(filter(None, reasons)))
    code = _exit_code(job)
    return told if code is None else f"{told or 'it ended'} (exit code {code})"


def _exit_code(job: Mapping[str, Any]) -> int | None:
    last = (job.get("attempts") or [{}])[-1]
    code = last.get("container", {}).get("exitCode")
    return None if code is None else int(code)
