"""Mapping of Azure Batch task, job and node states to `NodeState`.

task state         | condition                                | NodeState
-------------------|------------------------------------------|----------
none, active, …    | the job may start tasks                  | WAITING
none, active, …    | the job has ended or is being deleted    | GONE
running            | its node works or is not listed          | RUNNING
running            | its node is preempted, unusable, …       | WAITING (Batch requeues it)
completed          | success, clean exit, or terminated       | GONE
completed          | any other exit code                      | FAILED
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from spotfit.model.group import NodeState, NodeStatus
from spotfit.provision.launch import AgentExitCode, describe_exit_code
from spotfit_provisioners.job_fields.timestamps import to_ms

TASK_STATES: Mapping[str, NodeState] = {
    "active": NodeState.WAITING,
    "preparing": NodeState.WAITING,
    "running": NodeState.RUNNING,
    "completed": NodeState.GONE,
}

CAN_START_TASKS: Mapping[str, bool] = {
    "active": True,
    "disabling": True,
    "disabled": True,
    "enabling": True,
    "terminating": False,
    "completed": False,
    "deleting": False,
}
"""Whether a waiting task of a job in this state may still get a node."""

IS_NODE_WORKING: Mapping[str, bool] = {
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
"""Whether a task that is reported as running on a node in this state does run. If not, Batch
requeues the task: https://learn.microsoft.com/azure/batch/batch-spot-vms. `unusable` is not final:
preempted nodes are reported so for a while, and Batch recovers unreachable nodes
(https://learn.microsoft.com/azure/batch/batch-pool-node-error-checking)."""

_CLEAN_EXIT_CODES = (AgentExitCode.RELEASED, AgentExitCode.DRAINED, AgentExitCode.DONE)
# https://learn.microsoft.com/rest/api/batchservice/batch-status-and-error-codes
_TERMINATED_CODE = "TaskEnded"
_REQUEUED_REASON = "its node was preempted or is unusable"


def node_status(
    job: Mapping[str, Any], task: Mapping[str, Any] | None, nodes: Mapping[str, Mapping[str, Any]]
) -> NodeStatus:
    """Return the status of the machine of a task; `task` is None before it is created."""
    status = _node_state(job, task, nodes)
    # Of a waiting task, Batch does not report when its previous node was lost.
    if task is None or status.state is NodeState.WAITING:
        return status
    # The times of the last execution: the documentation of BatchTaskExecutionInfo in azure-batch.
    # Azure bills the node, from its allocation before the task until the pool releases it, which
    # may be minutes after the task; another task may use it meanwhile.
    execution = task.get("executionInfo") or {}
    started_at_ms = to_ms(execution.get("startTime"))
    ended_at_ms = to_ms(execution.get("endTime")) if started_at_ms is not None else None
    return replace(status, started_at_ms=started_at_ms, ended_at_ms=ended_at_ms)


def _node_state(
    job: Mapping[str, Any], task: Mapping[str, Any] | None, nodes: Mapping[str, Mapping[str, Any]]
) -> NodeStatus:
    # States that Azure adds in the future must not look like the end of the machine.
    state = NodeState.WAITING if task is None else TASK_STATES.get(task["state"], NodeState.WAITING)
    if state == NodeState.WAITING and not CAN_START_TASKS.get(job["state"], True):
        return NodeStatus(state=NodeState.GONE, reason=f"its job is {job['state']}")
    if task is None:
        return NodeStatus(state=state)
    if state == NodeState.WAITING:
        # Batch reports no reason, but requeues a task only if its node is lost:
        # https://learn.microsoft.com/azure/batch/batch-spot-vms
        is_requeued = task.get("previousState") == "running"
        return NodeStatus(state=state, reason=_REQUEUED_REASON if is_requeued else "")
    if state == NodeState.RUNNING:
        node = nodes.get(task.get("nodeInfo", {}).get("nodeId", ""))
        # A node that is not listed (any more) does not contradict the state of the task.
        if node is None or IS_NODE_WORKING.get(node["state"], True):
            return NodeStatus(state=NodeState.RUNNING)
        return NodeStatus(state=NodeState.WAITING, reason=f"its node is {node['state']}")
    return _end_status(task.get("executionInfo", {}))


def pending_reason(pool: Mapping[str, Any] | None, nodes: Sequence[Mapping[str, Any]]) -> str:
    """Return the reason for waiting that the pool or its nodes report; '' if there is none."""
    if pool is None:
        return "the pool does not exist"
    if pool.get("state") == "deleting":
        return "the pool is being deleted"
    # The most likely reason first: that of the pool's last resize.
    errors = [_format_error(error) for error in pool.get("resizeErrors") or []]
    if error := (pool.get("autoScaleRun") or {}).get("error"):
        errors.append(f"the autoscale formula of the pool fails: {_format_error(error)}")
    for node in nodes:
        errors += [
            f"a node is {node['state']}: {_format_error(error)}"
            for error in node.get("errors") or []
        ]
        # A failed start task is reported as a state, not among the errors.
        if node["state"] == "starttaskfailed":
            errors.append("the start task of the pool fails")
    return next(iter(errors), "")


def _end_status(ended: Mapping[str, Any]) -> NodeStatus:
    # Batch reports every exit code but 0, and every terminated task, as a failure.
    if ended.get("result") == "success":
        return NodeStatus(state=NodeState.GONE)
    code, failure = ended.get("exitCode"), ended.get("failureInfo") or {}
    is_clean = code in _CLEAN_EXIT_CODES or failure.get("code") == _TERMINATED_CODE
    reason = _first_line(failure.get("message", "")) or "the agent exited"
    # The details say why a container could not be started; without an exit code they are all
    # there is.
    details = ", ".join(str(entry.get("value", "")) for entry in failure.get("details") or [])
    suffix = details if code is None else describe_exit_code(code)
    return NodeStatus(
        state=NodeState.GONE if is_clean else NodeState.FAILED,
        reason=f"{reason} ({suffix})" if suffix else reason,
        exit_code=code,
    )


def _format_error(error: Mapping[str, Any]) -> str:
    return f"{error.get('code', '')}: {_first_line(error.get('message', ''))}"


def _first_line(message: Any) -> str:
    """Return the first line; the following ones are the request's id and time."""
    # Errors of nodes and tasks have a text, those of pools a structure with a language.
    text = message.get("value", "") if isinstance(message, Mapping) else str(message or "")
    return text.strip().partition("\n")[0]
