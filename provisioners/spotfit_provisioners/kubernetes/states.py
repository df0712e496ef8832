"""Mapping of pods and Jobs to `NodeState`, per completion index of the Job.

index of the Job    | newest pod                               | NodeState
--------------------|------------------------------------------|----------
completed           | any                                      | GONE
failed              | any                                      | FAILED
open                | none, Pending, Unknown                   | WAITING
open                | Running                                  | RUNNING
open                | Running, its node is unreachable         | WAITING
open                | Succeeded or Failed, not yet judged      | WAITING
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from msgspec.structs import replace

from spotfit.model.group import GroupStatus, NodeState, NodeStatus
from spotfit.provision.launch import describe_exit_code
from spotfit_provisioners.job_fields import timestamps
from spotfit_provisioners.kubernetes.render import INDEX_LABEL

PHASES: Mapping[str, NodeState] = {
    "Pending": NodeState.WAITING,
    "Running": NodeState.RUNNING,
    "Succeeded": NodeState.GONE,
    "Failed": NodeState.FAILED,
    "Unknown": NodeState.WAITING,
}
"""Unknown: the node is unreachable; the pod is replaced when it is known to have ended."""

QUOTA_MESSAGE = "exceeded quota"
"""Part of the admission error of a pod that exceeds a ResourceQuota of the namespace."""

# https://kubernetes.io/docs/tasks/configure-pod-container/assign-memory-resource/
_OUT_OF_MEMORY = "OOMKilled"
# Waiting reasons of a container that starts normally, for example while its image is pulled.
_STARTING_REASONS = ("", "ContainerCreating", "PodInitializing")


def group_status(
    job: Mapping[str, Any], pods: Iterable[Mapping[str, Any]], creation_error: str = ""
) -> GroupStatus:
    """Return the status of every index, from its newest pod or the record of the Job.

    `creation_error` is the last event of the Job's controller about pods it could not create.
    """
    nodes = int(job["spec"]["completions"])
    # A replaced pod stays in the list until it is deleted, so an index may have several. Times in
    # RFC 3339 with equal precision sort as texts.
    newest: dict[int, Mapping[str, Any]] = {}
    previous: dict[int, Mapping[str, Any]] = {}
    for pod in sorted(pods, key=lambda pod: str(pod["metadata"].get("creationTimestamp", ""))):
        index = int(pod["metadata"]["labels"].get(INDEX_LABEL, 0))
        if index in newest:
            previous[index] = newest[index]
        newest[index] = pod
    status = job.get("status") or {}
    completed = parse_indexes(status.get("completedIndexes"))
    failed = parse_indexes(status.get("failedIndexes"))
    statuses = tuple(
        _with_times(
            _node_status(index, newest.get(index), completed=completed, failed=failed),
            newest.get(index),
        )
        for index in range(nodes)
    )
    statuses = tuple(
        replace(status, reason=_end_reason(previous[index]))
        if status.state is NodeState.WAITING and not status.reason and index in previous
        else status
        for index, status in enumerate(statuses)
    )
    # Events outlive their cause: an old creation error is irrelevant once all pods exist.
    is_missing_pods = any(
        status.state is NodeState.WAITING and index not in newest
        for index, status in enumerate(statuses)
    )
    if job["spec"].get("suspend"):
        refusal = "the Job is suspended: its queue has not admitted it"
    elif is_missing_pods and QUOTA_MESSAGE in creation_error:
        refusal = f"a ResourceQuota of the namespace is exceeded: {creation_error}"
    elif is_missing_pods and creation_error:
        refusal = f"pods cannot be created: {creation_error}"
    else:
        refusal = next(filter(None, map(_pod_pending_reason, newest.values())), "")
    return GroupStatus(nodes=statuses, refusal=refusal)


def has_missing_pods(job: Mapping[str, Any], pods: Iterable[Mapping[str, Any]]) -> bool:
    """Return whether the Job may run but has no pod for some index."""
    known = {pod["metadata"]["labels"].get(INDEX_LABEL) for pod in pods}
    return not job["spec"].get("suspend") and len(known) < int(job["spec"]["completions"])


def pods_of_index(pods: Iterable[Mapping[str, Any]], index: int) -> list[Mapping[str, Any]]:
    """Return the pods of the index, oldest first."""
    matching = (p for p in pods if int(p["metadata"]["labels"].get(INDEX_LABEL, 0)) == index)
    return sorted(matching, key=lambda pod: str(pod["metadata"].get("creationTimestamp", "")))


def parse_indexes(text: str | None) -> set[int]:
    """Parse a list of indexes and ranges such as '1,3-5,7'."""
    found: set[int] = set()
    for part in filter(None, (text or "").split(",")):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return found


def _node_status(
    index: int, pod: Mapping[str, Any] | None, *, completed: set[int], failed: set[int]
) -> NodeStatus:
    if index in completed:
        return NodeStatus(state=NodeState.GONE, reason="its agent has exited")
    phase = ((pod or {}).get("status") or {}).get("phase", "Pending")
    # A list of pods may be older than the Job: then the reason and the exit code are missing yet.
    if index in failed and (pod is None or PHASES.get(phase) is not NodeState.RUNNING):
        return NodeStatus(
            state=NodeState.FAILED,
            reason=_end_reason(pod) or "its agent has failed",
            out_of_memory=_is_out_of_memory(pod),
            exit_code=next(iter(_exit_codes(pod)), None),
        )
    if pod is None:
        return NodeStatus(state=NodeState.WAITING)
    state = PHASES.get(phase, NodeState.WAITING)
    if phase not in PHASES:
        return NodeStatus(state=state, reason=f"its phase {phase} is unknown")
    conditions = (pod.get("status") or {}).get("conditions") or []
    # Within a minute after a node becomes unreachable, the node controller marks its pods as not
    # ready, while their phase stays Running for five more minutes. The pods have no readiness
    # probe, so there is no other cause.
    # https://kubernetes.io/docs/concepts/architecture/nodes/#node-controller
    is_unreachable = any(
        condition.get("type") == "Ready" and condition.get("status") == "False"
        for condition in conditions
    )
    if state is NodeState.RUNNING and is_unreachable:
        return NodeStatus(state=NodeState.WAITING, reason="its node is unreachable")
    if state in (NodeState.GONE, NodeState.FAILED):
        # The Job controller has not processed the end yet, and may still replace the pod.
        return NodeStatus(
            state=NodeState.WAITING,
            reason=_end_reason(pod),
            out_of_memory=_is_out_of_memory(pod),
        )
    return NodeStatus(state=state)


def _with_times(status: NodeStatus, pod: Mapping[str, Any] | None) -> NodeStatus:
    """Add when the pod started and ended, by the clocks of its node and of the control plane.

    `startTime`: the kubelet has accepted the pod, "before the Kubelet pulled the container
    image(s)"; `finishedAt`: the container has terminated. Nodes themselves may exist longer.
    https://kubernetes.io/docs/reference/kubernetes-api/workload-resources/pod-v1/#PodStatus
    """
    pod_status = (pod or {}).get("status") or {}
    started_at_ms = timestamps.to_ms(pod_status.get("startTime"))
    ends = [end.get("finishedAt") for end in _container_ends(pod)]
    # The containers of a lost node have no end; then the pod was marked as disrupted.
    ends += [
        condition.get("lastTransitionTime")
        for condition in pod_status.get("conditions") or []
        if condition.get("type") == "DisruptionTarget" and not any(ends)
    ]
    times = [time for time in map(timestamps.to_ms, ends) if time is not None]
    # A disrupted pod still runs for its grace period.
    has_ended = pod_status.get("phase") in ("Succeeded", "Failed")
    ended_at_ms = None
    if times and has_ended and started_at_ms is not None:
        # The clocks of node and control plane may differ.
        ended_at_ms = max(started_at_ms, *times)
    return replace(status, started_at_ms=started_at_ms, ended_at_ms=ended_at_ms)


def _is_out_of_memory(pod: Mapping[str, Any] | None) -> bool:
    """Whether the kernel has killed the container at its memory limit."""
    return any(end.get("reason") == _OUT_OF_MEMORY for end in _container_ends(pod))


def _container_ends(pod: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    """Return the field `state.terminated` of every container; {} of one that runs."""
    statuses = ((pod or {}).get("status") or {}).get("containerStatuses") or []
    return [(container.get("state") or {}).get("terminated") or {} for container in statuses]


def _end_reason(pod: Mapping[str, Any] | None) -> str:
    status = (pod or {}).get("status") or {}
    # Set before a pod is evicted, preempted, or deleted with its node:
    # https://kubernetes.io/docs/concepts/workloads/pods/disruptions/#pod-disruption-conditions
    disruptions = [
        f"{condition.get('reason', '')}: {condition.get('message', '')}"
        for condition in status.get("conditions") or []
        if condition.get("type") == "DisruptionTarget"
    ]
    ends = _container_ends(pod)
    codes = [_end_text(end) for end in ends if end.get("exitCode") is not None]
    own = [str(status.get("reason") or ""), str(status.get("message") or "")]
    return "; ".join(filter(None, [*disruptions, *own, *codes]))


def _exit_codes(pod: Mapping[str, Any] | None) -> list[int]:
    """Return the exit codes of the containers that have terminated; the agent's is the only one."""
    ends = _container_ends(pod)
    return [int(end["exitCode"]) for end in ends if end.get("exitCode") is not None]


def _end_text(terminated: Mapping[str, Any]) -> str:
    """For example "OOMKilled (exit code 137)", from a ContainerStateTerminated."""
    code = describe_exit_code(int(terminated["exitCode"]))
    reason = str(terminated.get("reason") or "")
    # The other reasons, such as Error and Completed, say no more than the code.
    return f"{reason} ({code})" if reason == _OUT_OF_MEMORY else code


def _pod_pending_reason(pod: Mapping[str, Any]) -> str:
    """Return why the pod is not scheduled, or why its container does not start."""
    # Scheduling first: an unscheduled pod has no container statuses.
    status = pod.get("status") or {}
    for condition in status.get("conditions") or []:
        if condition.get("type") == "PodScheduled" and condition.get("status") == "False":
            message = condition.get("message") or condition.get("reason")
            return str(message or "no node has enough free resources")
    for container in status.get("containerStatuses") or []:
        waiting = (container.get("state") or {}).get("waiting") or {}
        if (reason := waiting.get("reason", "")) not in _STARTING_REASONS:
            return f"{reason}: {waiting.get('message', '')}".rstrip(": ")
    return ""
