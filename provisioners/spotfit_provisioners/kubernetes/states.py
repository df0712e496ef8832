"""The states of pods and Jobs in our words."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from spotfit.model.group import GroupStatus, NodeState, NodeStatus
from spotfit_provisioners.kubernetes.render import INDEX_LABEL

PHASES: Mapping[str, NodeState] = {
    "Pending": NodeState.WAITING,
    "Running": NodeState.RUNNING,
    "Succeeded": NodeState.GONE,
    "Failed": NodeState.FAILED,
    "Unknown": NodeState.WAITING,
}
"""Unknown: the node has fallen silent; the pod is replaced once it is known to be gone."""

_ON_ITS_WAY = ("", "ContainerCreating", "PodInitializing")
"""Reasons why a container waits that say nothing: its image is on its way."""


def group(job: Mapping[str, Any], pods: Iterable[Mapping[str, Any]]) -> GroupStatus:
    """A Job, index by index: its newest pod, or what the Job remembers of one that is gone."""
    nodes = int(job["spec"]["completions"])
    newest: dict[int, Mapping[str, Any]] = {}
    for pod in sorted(pods, key=lambda pod: str(pod["metadata"].get("creationTimestamp", ""))):
        newest[int(pod["metadata"]["labels"].get(INDEX_LABEL, 0))] = pod
    status = job.get("status") or {}
    done, failed = indexes(status.get("completedIndexes")), indexes(status.get("failedIndexes"))
    statuses = tuple(_node(index, newest.get(index), done, failed) for index in range(nodes))
    return GroupStatus(statuses, _refusal(job, newest.values()))


def indexes(text: str | None) -> set[int]:
    """'1,3-5,7' as Kubernetes writes it."""
    found: set[int] = set()
    for part in filter(None, (text or "").split(",")):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return found


def _node(
    index: int, pod: Mapping[str, Any] | None, done: set[int], failed: set[int]
) -> NodeStatus:
    if index in done:
        return NodeStatus(NodeState.GONE, "its agent has ended")
    if index in failed:
        return NodeStatus(NodeState.FAILED, _why(pod) or "its agent has failed")
    if pod is None:
        return NodeStatus(NodeState.WAITING)
    state = PHASES[(pod.get("status") or {}).get("phase", "Pending")]
    if state in (NodeState.GONE, NodeState.FAILED):
        # The Job has not judged it yet, or it will be replaced: until then it is on its way.
        return NodeStatus(NodeState.WAITING, _why(pod))
    return NodeStatus(state)


def _why(pod: Mapping[str, Any] | None) -> str:
    """What the pod's status says of its end."""
    status = (pod or {}).get("status") or {}
    disrupted = [
        f"{one.get('reason', '')}: {one.get('message', '')}"
        for one in status.get("conditions") or []
        if one.get("type") == "DisruptionTarget"
    ]
    ended = [
        (one.get("state") or {}).get("terminated") or {}
        for one in status.get("containerStatuses") or []
    ]
    codes = [f"exit code {one['exitCode']}" for one in ended if one.get("exitCode") is not None]
    told = [*disrupted, str(status.get("reason") or ""), str(status.get("message") or ""), *codes]
    return "; ".join(filter(None, told))


def _refusal(job: Mapping[str, Any], pods: Iterable[Mapping[str, Any]]) -> str:
    if job["spec"].get("suspend"):
        return "the Job is suspended: its queue has not admitted it"
    return next(filter(None, map(_waits_for, pods)), "")


def _waits_for(pod: Mapping[str, Any]) -> str:
    """Why it has no node, or why its container does not start there: an image that nobody has."""
    status = pod.get("status") or {}
    for one in status.get("conditions") or []:
        if one.get("type") == "PodScheduled" and one.get("status") == "False":
            return str(one.get("message") or one.get("reason") or "no node has room for it")
    for one in status.get("containerStatuses") or []:
        waiting = (one.get("state") or {}).get("waiting") or {}
        if (reason := waiting.get("reason", "")) not in _ON_ITS_WAY:
            return f"{reason}: {waiting.get('message', '')}".rstrip(": ")
    return ""
