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

QUOTA = "exceeded quota"
"""What the admission of a pod says where a ResourceQuota of the namespace has no room for it."""

_ON_ITS_WAY = ("", "ContainerCreating", "PodInitializing")
"""Reasons why a container waits that say nothing: its image is on its way."""


def group(
    job: Mapping[str, Any], pods: Iterable[Mapping[str, Any]], complaint: str = ""
) -> GroupStatus:
    """A Job, index by index: its newest pod, or what the Job remembers of one that is gone.

    `complaint`: what its controller said last of pods that it could not make.
    """
    nodes = int(job["spec"]["completions"])
    newest: dict[int, Mapping[str, Any]] = {}
    for pod in sorted(pods, key=lambda pod: str(pod["metadata"].get("creationTimestamp", ""))):
        newest[int(pod["metadata"]["labels"].get(INDEX_LABEL, 0))] = pod
    status = job.get("status") or {}
    done, failed = indexes(status.get("completedIndexes")), indexes(status.get("failedIndexes"))
    statuses = tuple(_node(index, newest.get(index), done, failed) for index in range(nodes))
    unmade = any(
        status.state is NodeState.WAITING and index not in newest
        for index, status in enumerate(statuses)
    )
    return GroupStatus(statuses, _refusal(job, newest.values(), complaint if unmade else ""))


def lacks_pods(job: Mapping[str, Any], pods: Iterable[Mapping[str, Any]]) -> bool:
    """Whether the controller may have something to say of pods that it could not make."""
    known = {pod["metadata"]["labels"].get(INDEX_LABEL) for pod in pods}
    return not job["spec"].get("suspend") and len(known) < int(job["spec"]["completions"])


def of_index(pods: Iterable[Mapping[str, Any]], index: int) -> list[Mapping[str, Any]]:
    """Those of that machine, the oldest first."""
    mine = (p for p in pods if int(p["metadata"]["labels"].get(INDEX_LABEL, 0)) == index)
    return sorted(mine, key=lambda pod: str(pod["metadata"].get("creationTimestamp", "")))


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
    told = (pod.get("status") or {}).get("phase", "Pending")
    state = PHASES.get(told, NodeState.WAITING)
    if told not in PHASES:
        return NodeStatus(state, f"its phase is {told}, which nobody here knows")
    if state is NodeState.RUNNING and _is_silent(pod):
        return NodeStatus(NodeState.WAITING, "its node has fallen silent")
    if state in (NodeState.GONE, NodeState.FAILED):
        # The Job has not judged it yet, or it will be replaced: until then it is on its way.
        return NodeStatus(NodeState.WAITING, _why(pod))
    return NodeStatus(state)


def _is_silent(pod: Mapping[str, Any]) -> bool:
    """Whether its node is not heard any more: then the node's controller calls its pods unready,
    within a minute, and their phase stays Running for five more, and until the node is deleted.

    Nothing else makes a pod of ours unready while it runs: it has no probe.
    https://kubernetes.io/docs/concepts/architecture/nodes/#node-controller
    """
    conditions = (pod.get("status") or {}).get("conditions") or []
    return any(one.get("type") == "Ready" and one.get("status") == "False" for one in conditions)


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


def _refusal(job: Mapping[str, Any], pods: Iterable[Mapping[str, Any]], complaint: str) -> str:
    if job["spec"].get("suspend"):
        return "the Job is suspended: its queue has not admitted it"
    if QUOTA in complaint:
        return f"a quota of the namespace stands against it: {complaint}"
    if complaint:
        return f"no pod can be made: {complaint}"
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
