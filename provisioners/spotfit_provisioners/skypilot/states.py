"""Mapping of SkyPilot's managed job, cluster and request states to `NodeState`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from spotfit.model.group import NodeState, NodeStatus

JOB_STATES: Mapping[str, NodeState] = {
    "PENDING": NodeState.WAITING,
    "SUBMITTED": NodeState.WAITING,
    "STARTING": NodeState.WAITING,
    "RUNNING": NodeState.RUNNING,
    "WINDING_DOWN": NodeState.RUNNING,
    "RECOVERING": NodeState.WAITING,
    "CANCELLING": NodeState.WAITING,
    "SUCCEEDED": NodeState.GONE,
    "CANCELLED": NodeState.GONE,
    "FAILED": NodeState.FAILED,
    "FAILED_SETUP": NodeState.FAILED,
    "FAILED_PRECHECKS": NodeState.FAILED,
    "FAILED_NO_RESOURCE": NodeState.REFUSED,
    "FAILED_CONTROLLER": NodeState.FAILED,
}
"""RUNNING includes the setup of the machine, which SkyPilot does not report separately."""

CLUSTER_STATES: Mapping[str, NodeState] = {
    "PENDING": NodeState.WAITING,
    "INIT": NodeState.WAITING,
    "UP": NodeState.RUNNING,
    "AUTOSTOPPING": NodeState.WAITING,
    "STOPPED": NodeState.GONE,
}
"""INIT is also the state of an abnormal cluster, which recovers or is removed."""

REQUEST_STATES: Mapping[str, NodeState] = {
    "PENDING": NodeState.WAITING,
    "WAITING": NodeState.WAITING,
    "RUNNING": NodeState.WAITING,
    "SUCCEEDED": NodeState.GONE,
    "FAILED": NodeState.FAILED,
    "CANCELLED": NodeState.GONE,
}
"""States of a launch request whose cluster does not exist: either not yet, or not any more."""

_NO_CAPACITY_STATE = "FAILED_NO_RESOURCE"
# Part of a job's details while SkyPilot pauses because no infrastructure had a machine.
_BACKING_OFF = "in backoff"
_LOG_READY_STATES = ("RUNNING", "CANCELLING")
_EMPTY_REASONS = ("", "-", "None")
_MAX_REASON_LENGTH = 500  # SkyPilot's reasons may contain tables of every tried zone


@dataclass(frozen=True, slots=True)
class SkyPilotJob:
    """A managed job, as reported by the jobs queue."""

    id: int
    name: str
    state: str
    reason: str = ""

    @property
    def is_over(self) -> bool:
        return job_status(self).is_terminated

    @property
    def has_log(self) -> bool:
        """Whether its log can be read; for other states SkyPilot blocks until a machine starts."""
        return self.is_over or self.state in _LOG_READY_STATES


def job_status(record: SkyPilotJob) -> NodeStatus:
    """Return the status of the machine of a managed job."""
    state = JOB_STATES.get(record.state, NodeState.WAITING)  # newer servers may add states
    if state == NodeState.RUNNING or record.state == "STARTING":
        return NodeStatus(state=state)
    return NodeStatus(state=state, reason=_format_reason(record.state, record.reason))


def refusal_reason(record: SkyPilotJob) -> str:
    """Return why SkyPilot finds no machine for the job; '' if that is not the case."""
    is_backing_off = (
        JOB_STATES.get(record.state) == NodeState.WAITING and _BACKING_OFF in record.reason.lower()
    )
    if is_backing_off or record.state == _NO_CAPACITY_STATE:
        return _format_reason(record.state, record.reason)
    return ""


class UsageInterval(NamedTuple):
    """When SkyPilot began to start the machine of a cluster, and when it was terminated."""

    started_at_s: int
    ended_at_s: int | None


def with_usage(status: NodeStatus, usage: UsageInterval | None) -> NodeStatus:
    """Add the times of the cluster that had the machine; None if they are not known."""
    if usage is None:
        return status
    is_over = status.is_terminated and usage.ended_at_s is not None
    return msgspec.structs.replace(
        status,
        started_at_ms=usage.started_at_s * 1000,
        ended_at_ms=(usage.ended_at_s or 0) * 1000 if is_over else None,
    )


def cluster_status(state: str) -> NodeStatus:
    """Return the status of the machine of an existing cluster."""
    # As above, a state that is unknown here is not the end of the machine.
    node_state = CLUSTER_STATES.get(state, NodeState.WAITING)
    return NodeStatus(state=node_state, reason="" if node_state == NodeState.RUNNING else state)


def launch_status(state: str, reason: str = "", *, is_capacity_error: bool = False) -> NodeStatus:
    """Return the status of a machine without cluster, from the state of its launch request.

    With `is_capacity_error` the launch failed for lack of machines, and the node is REFUSED.
    """
    if is_capacity_error:
        return NodeStatus(state=NodeState.REFUSED, reason=_format_reason(state, reason))
    node_state = REQUEST_STATES.get(state, NodeState.WAITING)
    if node_state == NodeState.WAITING:
        return NodeStatus(state=node_state)
    if state == "SUCCEEDED":
        return NodeStatus(state=node_state, reason="its cluster is down")
    return NodeStatus(state=node_state, reason=_format_reason(state, reason))


def _format_reason(state: str, reason: str) -> str:
    text = " ".join(reason.split())
    return state if text in _EMPTY_REASONS else f"{state}: {text[:_MAX_REASON_LENGTH]}"
