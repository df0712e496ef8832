"""The states of SkyPilot's managed jobs and clusters in our words."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from spotfit.model.group import NodeState, NodeStatus

JOBS: Mapping[str, NodeState] = {
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
"""RUNNING includes the setup of the machine: SkyPilot does not tell them apart."""

CLUSTERS: Mapping[str, NodeState] = {
    "PENDING": NodeState.WAITING,
    "INIT": NodeState.WAITING,
    "UP": NodeState.RUNNING,
    "AUTOSTOPPING": NodeState.WAITING,
    "STOPPED": NodeState.GONE,
}
"""INIT is also a cluster in disorder: it comes back, or is removed."""

REQUESTS: Mapping[str, NodeState] = {
    "PENDING": NodeState.WAITING,
    "WAITING": NodeState.WAITING,
    "RUNNING": NodeState.WAITING,
    "SUCCEEDED": NodeState.GONE,
    "FAILED": NodeState.FAILED,
    "CANCELLED": NodeState.GONE,
}
"""Of a launch whose cluster is not there: it comes, or has been and is no more."""

_NO_ROOM = "FAILED_NO_RESOURCE"
_BACKING_OFF = "in backoff"
"""In what is told of a job for which no place had a machine; all are asked again after a pause."""
_TELL = ("RUNNING", "CANCELLING")
_UNTOLD = ("", "-", "None")
_SHOWN = 500


@dataclass(frozen=True, slots=True)
class Job:
    """A managed job, as the queue tells it."""

    id: int
    name: str
    state: str
    why: str = ""

    @property
    def over(self) -> bool:
        return job(self).over

    @property
    def tells(self) -> bool:
        """Whether what it printed is told at once: SkyPilot waits for the machine of any other."""
        return self.over or self.state in _TELL


def job(told: Job) -> NodeStatus:
    """One machine. The reason is SkyPilot's own, where it is more than a run of the mill."""
    state = JOBS.get(told.state, NodeState.WAITING)  # a newer server may know more of them
    if state == NodeState.RUNNING or told.state == "STARTING":
        return NodeStatus(state)
    return NodeStatus(state, _reason(told.state, told.why))


def refusal(told: Job) -> str:
    """Why SkyPilot finds no machine for it; '' while it says nothing of the kind."""
    waits = JOBS.get(told.state) == NodeState.WAITING and _BACKING_OFF in told.why.lower()
    return _reason(told.state, told.why) if waits or told.state == _NO_ROOM else ""


def cluster(state: str) -> NodeStatus:
    """One machine that is a cluster."""
    ours = CLUSTERS.get(state, NodeState.WAITING)
    return NodeStatus(ours, "" if ours == NodeState.RUNNING else state)


def launch(state: str, why: str = "", *, no_room: bool = False) -> NodeStatus:
    """One machine whose cluster is not there, by how the request for it stands.

    `no_room`: it failed because no place had such a machine; the market is asked again, more
    slowly, and for nobody's fault.
    """
    ours = NodeState.REFUSED if no_room else REQUESTS.get(state, NodeState.WAITING)
    if ours == NodeState.WAITING:
        return NodeStatus(ours)
    if state == "SUCCEEDED":
        return NodeStatus(ours, "its cluster is down")
    return NodeStatus(ours, _reason(state, why))


def _reason(state: str, why: str) -> str:
    told = " ".join(why.split())
    return state if told in _UNTOLD else f"{state}: {told[:_SHOWN]}"
