"""Mapping of Google Cloud Batch states, complete by the enumerations of the library."""

from __future__ import annotations

from typing import Any

import pytest

from spotfit.model.group import NodeState
from spotfit.provision.launch import AgentExitCode
from spotfit_provisioners.gcp_batch.states import (
    CAN_START_TASKS,
    TASK_STATES,
    node_status,
    pending_reason,
)

PREEMPTED = "Task state is updated from RUNNING to FAILED on zones/z/instances/1 due to Spot VM"


def test_every_google_state_is_mapped() -> None:
    batch = pytest.importorskip("google.cloud.batch_v1")
    assert set(TASK_STATES) == {state.name for state in batch.TaskStatus.State}
    assert set(CAN_START_TASKS) == {state.name for state in batch.JobStatus.State}


def a_job(state: str, *descriptions: str) -> dict[str, Any]:
    events = [{"description": one, "event_time": f"t{n}Z"} for n, one in enumerate(descriptions)]
    return {"status": {"state": state, "status_events": events}}


def a_task(state: str, *events: dict[str, Any]) -> dict[str, Any]:
    return {"name": "t/0", "status": {"state": state, "status_events": list(events)}}


def an_event(at: str, code: int, description: str = "Task state is updated") -> dict[str, Any]:
    return {"event_time": at, "description": description, "task_execution": {"exit_code": code}}


@pytest.mark.parametrize(
    ("of_job", "task", "state", "reason"),
    [
        ("QUEUED", None, NodeState.WAITING, ""),
        ("SCHEDULED", a_task("PENDING"), NodeState.WAITING, ""),
        ("RUNNING", a_task("ASSIGNED"), NodeState.WAITING, ""),
        (
            "RUNNING",
            a_task("PENDING", an_event("t1", 50001)),
            NodeState.WAITING,
            "exit code 50001: the Spot VM was preempted",
        ),
        ("RUNNING", a_task("RUNNING"), NodeState.RUNNING, ""),
        ("RUNNING", a_task("SOMETHING_NEW"), NodeState.WAITING, ""),
        ("SUCCEEDED", a_task("SUCCEEDED"), NodeState.GONE, ""),
        ("FAILED", a_task("FAILED", an_event("t1", 50001)), NodeState.GONE, "was preempted"),
        ("FAILED", a_task("FAILED", an_event("t1", 50002)), NodeState.GONE, "stopped reporting"),
        ("FAILED", a_task("FAILED", an_event("t1", 50005)), NodeState.FAILED, "exit code 50005"),
        ("FAILED", a_task("FAILED", an_event("t1", 1)), NodeState.FAILED, "exit code 1"),
        ("FAILED", a_task("FAILED"), NodeState.FAILED, ""),
        ("RUNNING", a_task("FAILED", an_event("t1", AgentExitCode.RELEASED)), NodeState.GONE, "75"),
        ("RUNNING", a_task("FAILED", an_event("t1", AgentExitCode.DRAINED)), NodeState.GONE, "85"),
    ],
)
def test_task_is_mapped_to_a_node_state(
    of_job: str, task: dict[str, Any] | None, state: NodeState, reason: str
) -> None:
    result = node_status(a_job(of_job), task)
    assert result.state == state
    assert reason in result.reason


def test_exit_code_of_the_agent_is_reported() -> None:
    task = a_task("FAILED", an_event("t1", AgentExitCode.STORAGE_REFUSED))
    assert node_status(a_job("FAILED"), task).exit_code == AgentExitCode.STORAGE_REFUSED


def test_succeeded_task_ignores_earlier_exit_codes() -> None:
    """The event of a success has no execution, and events of failures remain."""
    task = a_task("SUCCEEDED", an_event("t1", 50001, PREEMPTED), an_event("t2", 0))
    result = node_status(a_job("SUCCEEDED"), task)
    assert (result.state, result.reason) == (NodeState.GONE, "")


def test_last_execution_counts_in_any_order() -> None:
    events = [an_event("12:00:05.5Z", 1), an_event("12:00:09Z", 85), an_event("12:00:05Z", 50001)]
    result = node_status(a_job("FAILED"), a_task("FAILED", *events))
    assert "exit code 85" in result.reason


@pytest.mark.parametrize("task", [None, a_task("PENDING"), a_task("ASSIGNED")])
@pytest.mark.parametrize(
    "of_job", [state for state, starts in CAN_START_TASKS.items() if not starts]
)
def test_ended_job_starts_no_tasks(of_job: str, task: dict[str, Any] | None) -> None:
    result = node_status(a_job(of_job, "no agent reported"), task)
    assert (result.state, result.reason) == (NodeState.GONE, "no agent reported")


def test_task_continues_after_another_task_failed_the_job() -> None:
    assert node_status(a_job("FAILED"), a_task("RUNNING")).state == NodeState.RUNNING
    assert node_status(a_job("CANCELLED"), a_task("RUNNING")).state == NodeState.GONE


@pytest.mark.parametrize(
    ("expected_text", "expected"),
    [
        ((), ""),
        (("Job state is set from QUEUED to SCHEDULED for job x.",), ""),
        (("Job state is set …", "code - CODE_GCE_QUOTA_EXCEEDED"), "CODE_GCE_QUOTA_EXCEEDED"),
        (("code - CODE_GCE_QUOTA_EXCEEDED", "Job state is set from SCHEDULED to RUNNING"), ""),
    ],
)
def test_wait_reason_holds_until_the_state_changes(
    expected_text: tuple[str, ...], expected: str
) -> None:
    assert expected in pending_reason(a_job("SCHEDULED", *expected_text))
    assert bool(pending_reason(a_job("SCHEDULED", *expected_text))) is bool(expected)


@pytest.mark.parametrize(
    ("retries", "failures", "last"), [(10, 9, False), (10, 10, True), (1, 1, True), (0, 0, False)]
)
def test_last_try_is_reported(retries: int, failures: int, *, last: bool) -> None:
    """Events without an execution have index 0 and do not count."""
    events = [an_event(f"t{n:02}", 50001) for n in range(failures)]
    running = a_task("RUNNING", *events, an_event("t99", 0))
    job = a_job("RUNNING") | {"task_groups": [{"task_spec": {"max_retry_count": retries}}]}
    assert node_status(job, running).is_last_attempt is last


def test_times_are_those_of_the_last_execution() -> None:
    def event(state: str, at: str) -> dict[str, Any]:
        return {"task_state": state, "event_time": f"2026-11-26T10:00:{at}Z"}

    def times_of(state: str, *events: dict[str, Any]) -> tuple[int | None, int | None]:
        status = node_status(a_job("RUNNING"), a_task(state, *events))
        return status.started_at_ms, status.ended_at_ms

    base_ms = 1_795_687_200_000  # 2026-11-26T10:00:00Z
    assigned, running = event("ASSIGNED", "01"), event("RUNNING", "02.5")
    assert times_of("ASSIGNED", assigned) == (None, None)
    assert times_of("RUNNING", running, assigned) == (base_ms + 2500, None)
    # Nanoseconds, and no order.
    failed, again = event("FAILED", "03.123456789"), event("RUNNING", "08")
    pending = event("PENDING", "04")
    assert times_of("PENDING", pending, failed, running) == (base_ms + 2500, base_ms + 3123)
    assert times_of("RUNNING", again, pending, failed, running) == (base_ms + 8000, None)
    done = event("SUCCEEDED", "09")
    assert times_of("SUCCEEDED", done, again, failed, running) == (base_ms + 8000, base_ms + 9000)
    assert times_of("FAILED", failed) == (None, None), "it was never started"
    assert node_status(a_job("RUNNING"), None).started_at_ms is None
