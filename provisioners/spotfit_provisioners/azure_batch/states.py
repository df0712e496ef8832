"""The states of Azure Batch in our words."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from spotfit.model.group import NodeState, NodeStatus
from spotfit.provision.launch import Exit

TASK_STATES: Mapping[str, NodeState] = {
    "active": NodeState.WAITING,
    "preparing": NodeState.WAITING,
    "running": NodeState.RUNNING,
    "completed": NodeState.GONE,
}

STARTS_TASKS: Mapping[str, bool] = {
    "active": True,
    "disabling": True,
    "disabled": True,
    "enabling": True,
    "terminating": False,
    "completed": False,
    "deleting": False,
}
"""Of a job: whether a task of it that waits may still get a node."""

WORKS: Mapping[str, bool] = {
    "idle": True,
    "running": True,
    "leavingpool": True,
    "offline": True,
    "preempted": False,
    "unusable": False,
    "unknown": False,
    "creating": False,
    "starting": False,
    "waitingforstarttask": False,
    "starttaskfailed": False,
    "rebooting": False,
    "reimaging": False,
    "upgradingos": False,
    "deallocating": False,
    "deallocated": False,
}
"""Of a node: whether a task that is said to run there does. Where it does not Batch will requeue
it: https://learn.microsoft.com/azure/batch/batch-spot-vms. `unusable` is no end either: so are
preempted nodes told for a while, and Batch recovers those it cannot speak to
(https://learn.microsoft.com/azure/batch/batch-pool-node-error-checking)."""

_LEFT = {int(Exit.GIVEN_UP), int(Exit.DRAINED), int(Exit.DONE)}
_ENDED_BY_USER = "TaskEnded"


def status(
    job: Mapping[str, Any], task: Mapping[str, Any] | None, nodes: Mapping[str, Mapping[str, Any]]
) -> NodeStatus:
    """One machine: its task, on whichever node. A job has no tasks for a moment."""
    state = _state(task)
    if state == NodeState.WAITING and not STARTS_TASKS.get(job["state"], True):
        return NodeStatus(NodeState.GONE, f"its job is {job['state']}")
    if task is None or state == NodeState.WAITING:
        return NodeStatus(state)
    if state == NodeState.RUNNING:
        return _at_work(nodes.get(task.get("nodeInfo", {}).get("nodeId", "")))
    return _over(task.get("executionInfo", {}))


def waits_for(pool: Mapping[str, Any] | None, nodes: Sequence[Mapping[str, Any]]) -> str:
    """Why nothing comes, as far as the pool and its nodes tell."""
    if pool is None:
        return "the pool is gone"
    if pool.get("state") == "deleting":
        return "the pool is being deleted"
    return next(_troubles(pool, nodes), "")


def _state(task: Mapping[str, Any] | None) -> NodeState:
    return NodeState.WAITING if task is None else TASK_STATES.get(task["state"], NodeState.WAITING)


def _at_work(node: Mapping[str, Any] | None) -> NodeStatus:
    """A node that nobody lists (any more) is believed."""
    if node is None or WORKS.get(node["state"], True):
        return NodeStatus(NodeState.RUNNING)
    return NodeStatus(NodeState.WAITING, f"its node is {node['state']}")


def _over(ended: Mapping[str, Any]) -> NodeStatus:
    """What Batch calls a failure: every exit code but 0, and every task that was ended."""
    if ended.get("result") == "success":
        return NodeStatus(NodeState.GONE)
    code, failure = ended.get("exitCode"), ended.get("failureInfo") or {}
    left = code in _LEFT or failure.get("code") == _ENDED_BY_USER
    why = _first_line(failure.get("message", "")) or "it ended"
    details = ", ".join(str(one.get("value", "")) for one in failure.get("details") or [])
    more = details if code is None else f"exit code {code}"
    return NodeStatus(
        NodeState.GONE if left else NodeState.FAILED, f"{why} ({more})" if more else why
    )


def _troubles(pool: Mapping[str, Any], nodes: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """The likeliest reason first: that of the last time the pool was to grow."""
    for error in pool.get("resizeErrors") or []:
        yield _told(error)
    if error := (pool.get("autoScaleRun") or {}).get("error"):
        yield f"the pool's formula fails: {_told(error)}"
    for node in nodes:
        for error in node.get("errors") or []:
            yield f"a node is {node['state']}: {_told(error)}"
        if node["state"] == "starttaskfailed":
            yield "the start task of the pool fails"


def _told(error: Mapping[str, Any]) -> str:
    return f"{error.get('code', '')}: {_first_line(error.get('message', ''))}"


def _first_line(message: Any) -> str:
    """Without the request's id and time, which follow on lines of their own."""
    text = message.get("value", "") if isinstance(message, Mapping) else str(message or "")
    return text.strip().partition("\n")[0]
