"""Mapping of Azure Batch states, complete by the enumerations of the library."""

from __future__ import annotations

from typing import Any

import pytest

from spotfit.model.group import NodeState
from spotfit.provision.launch import AgentExitCode
from spotfit_provisioners.azure_batch.states import (
    CAN_START_TASKS,
    IS_NODE_WORKING,
    TASK_STATES,
    node_status,
    pending_reason,
)

ACTIVE = {"state": "active"}
LOST = ("preempted", "unusable", "unknown", "creating", "starting", "rebooting", "starttaskfailed")


def test_every_azure_state_is_mapped() -> None:
    models = pytest.importorskip("azure.batch.models")
    assert set(TASK_STATES) == {state.value for state in models.BatchTaskState}
    assert set(CAN_START_TASKS) == {state.value for state in models.BatchJobState}
    assert set(IS_NODE_WORKING) == {state.value for state in models.BatchNodeState}


def a_task(state: str, **ended: Any) -> dict[str, Any]:
    return {"id": "0", "state": state, "executionInfo": ended, "nodeInfo": {"nodeId": "n"}}


def failed(code: str, exit_code: int | None = None, **more: Any) -> dict[str, Any]:
    result = {"code": code, "message": "why\nRequestId:1", **more}
    return a_task("completed", result="failure", exitCode=exit_code, failureInfo=result)


@pytest.mark.parametrize(
    ("task", "state", "reason"),
    [
        (None, NodeState.WAITING, ""),
        (a_task("active"), NodeState.WAITING, ""),
        (a_task("preparing"), NodeState.WAITING, ""),
        (a_task("running"), NodeState.RUNNING, ""),
        (a_task("something new"), NodeState.WAITING, ""),
        (a_task("completed", result="success", exitCode=0), NodeState.GONE, ""),
        (failed("FailureExitCode", AgentExitCode.RELEASED), NodeState.GONE, "why (exit code 75)"),
        (failed("FailureExitCode", AgentExitCode.DRAINED), NodeState.GONE, "why (exit code 85)"),
        (failed("FailureExitCode", AgentExitCode.CRASHED), NodeState.FAILED, "why (exit code 70)"),
        (failed("TaskEnded"), NodeState.GONE, "why"),
        (
            failed("ContainerInvalidImage", details=[{"name": "Message", "value": "no such tag"}]),
            NodeState.FAILED,
            "why (no such tag)",
        ),
    ],
)
def test_task_is_mapped_to_a_node_state(
    task: dict[str, Any] | None, state: NodeState, reason: str
) -> None:
    result = node_status(ACTIVE, task, {})
    assert (result.state, result.reason) == (state, reason)


def test_exit_code_of_the_agent_is_reported() -> None:
    task = failed("FailureExitCode", AgentExitCode.STORAGE_REFUSED)
    assert node_status(ACTIVE, task, {}).exit_code == AgentExitCode.STORAGE_REFUSED


@pytest.mark.parametrize("of_node", LOST)
def test_lost_node_is_pending_in_every_node_state(of_node: str) -> None:
    """Azure reports a preempted node as `unusable` first; its task is requeued."""
    result = node_status(ACTIVE, a_task("running"), {"n": {"state": of_node}})
    assert (result.state, result.reason) == (NodeState.WAITING, f"its node is {of_node}")


@pytest.mark.parametrize("of_node", ["running", "idle", "leavingpool", "offline", "new to us"])
def test_task_continues_on_an_offline_node(of_node: str) -> None:
    result = node_status(ACTIVE, a_task("running"), {"n": {"state": of_node}})
    assert result.state == NodeState.RUNNING


@pytest.mark.parametrize("task", [None, a_task("active"), a_task("preparing")])
@pytest.mark.parametrize(
    "of_job", [state for state, starts in CAN_START_TASKS.items() if not starts]
)
def test_ended_job_starts_no_tasks(of_job: str, task: dict[str, Any] | None) -> None:
    """Azure leaves such tasks `active` indefinitely."""
    assert node_status({"state": of_job}, task, {}).state == NodeState.GONE


def test_task_of_a_terminating_job_runs_until_it_ends() -> None:
    assert node_status({"state": "terminating"}, a_task("running"), {}).state == NodeState.RUNNING


def an_error(code: str) -> dict[str, str]:
    return {"code": code, "message": f"{code} it is\nTime:now"}


@pytest.mark.parametrize(
    ("pool", "nodes", "expected"),
    [
        (None, [], "the pool does not exist"),
        ({"state": "deleting"}, [], "the pool is being deleted"),
        ({"state": "active"}, [{"state": "creating"}], ""),
        ({"resizeErrors": [an_error("AllocationFailed")]}, [], "AllocationFailed: Alloc"),
        (
            {"autoScaleRun": {"error": an_error("Oops")}},
            [],
            "the autoscale formula of the pool fails: Oops",
        ),
        ({}, [{"state": "unusable", "errors": [an_error("DiskFull")]}], "a node is unusable: Disk"),
        ({}, [{"state": "unusable"}], ""),
        ({}, [{"state": "starttaskfailed"}], "the start task of the pool fails"),
    ],
)
def test_pending_reason_of_a_pool(
    pool: dict[str, Any] | None, nodes: list[Any], expected: str
) -> None:
    found = pending_reason(pool, nodes)
    assert found.startswith(expected)
    assert bool(found) is bool(expected)
    assert "Time" not in found


def test_a_requeued_task_states_that_its_node_is_lost() -> None:
    requeued = {**a_task("active"), "previousState": "running"}
    result = node_status(ACTIVE, requeued, {})
    expected = (NodeState.WAITING, "its node was preempted or is unusable")
    assert (result.state, result.reason) == expected
    assert node_status(ACTIVE, a_task("active"), {}).reason == ""


def test_times_are_those_of_the_task() -> None:
    nodes = {"n": {"state": "running"}}

    def times_of(task: dict[str, Any]) -> tuple[int | None, int | None]:
        status = node_status(ACTIVE, task, nodes)
        return status.started_at_ms, status.ended_at_ms

    started, ended = "1970-01-01T00:00:01.5Z", "1970-01-01T00:00:03.0399999Z"
    assert times_of(a_task("running", startTime=started)) == (1500, None)
    done = a_task("completed", startTime=started, endTime=ended, result="success", exitCode=0)
    assert times_of(done) == (1500, 3039)
    assert times_of(a_task("completed", endTime=ended, result="failure")) == (None, None)
    assert times_of(a_task("active")) == (None, None)
    nodes["n"]["state"] = "preempted"
    assert times_of(a_task("running", startTime=started)) == (None, None), "it waits for a node"
