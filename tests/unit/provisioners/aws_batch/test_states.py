"""Mapping of AWS Batch states, complete by the list of AWS."""

from __future__ import annotations

from typing import Any

import pytest

from spotfit.model.group import NodeState
from spotfit.provision.launch import AgentExitCode
from spotfit_provisioners.aws_batch.states import STATES, node_status, pending_reason


def test_every_aws_state_is_mapped() -> None:
    loaders = pytest.importorskip("botocore.loaders")
    model = loaders.Loader().load_service_model("batch", "service-2")
    assert set(STATES) == set(model["shapes"]["JobStatus"]["enum"])


def ended_attempt(reason: str, code: int | None = None) -> dict[str, Any]:
    container = {} if code is None else {"exitCode": code}
    attempt = {"container": container, "statusReason": reason}
    return {"status": "FAILED", "statusReason": reason, "attempts": [attempt]}


@pytest.mark.parametrize(
    ("job", "state", "reason"),
    [
        ({"status": "RUNNABLE"}, NodeState.WAITING, ""),
        ({"status": "RUNNING", "statusReason": "x"}, NodeState.RUNNING, ""),
        ({"status": "SUCCEEDED"}, NodeState.GONE, ""),
        (ended_attempt("Host EC2 (instance i-1) terminated."), NodeState.GONE, "Host EC2"),
        (ended_attempt("Essential container in task exited", 1), NodeState.FAILED, "exit code 1"),
        (
            ended_attempt("Essential container in task exited", AgentExitCode.RELEASED),
            NodeState.GONE,
            "exit code 75",
        ),
        (
            ended_attempt("Essential container in task exited", AgentExitCode.DRAINED),
            NodeState.GONE,
            "exit code 85",
        ),
        (ended_attempt("spotfit has let it go"), NodeState.FAILED, "let it go"),
    ],
)
def test_job_is_mapped_to_a_node_state(job: dict[str, Any], state: NodeState, reason: str) -> None:
    result = node_status(job)
    assert result.state == state
    assert reason in result.reason


def test_exit_code_of_the_agent_is_reported() -> None:
    ended = ended_attempt("Essential container in task exited", AgentExitCode.STORAGE_REFUSED)
    assert node_status(ended).exit_code == AgentExitCode.STORAGE_REFUSED
    assert node_status({**ended, "status": "RUNNING"}).exit_code is None, "an earlier attempt"


def test_kill_for_lack_of_memory_is_recognized() -> None:
    job = ended_attempt("Essential container in task exited", 137)
    assert not node_status(job).out_of_memory, "killed for another reason"
    job["attempts"][0]["container"]["reason"] = (
        "OutOfMemoryError: Container killed due to memory usage"
    )
    result = node_status(job)
    assert (result.state, result.out_of_memory) == (NodeState.FAILED, True)
    assert result.reason.startswith("OutOfMemoryError: Container killed due to memory usage")


@pytest.mark.parametrize(
    ("attempts", "ended", "under_way", "last"),
    [(10, 8, 0, False), (10, 8, 1, False), (10, 9, 0, True), (10, 9, 1, True), (1, 0, 0, False)],
)
def test_last_attempt_is_reported(attempts: int, ended: int, under_way: int, *, last: bool) -> None:
    """AWS does not document whether running attempts are listed; both cases are handled."""
    listed = [{"stoppedAt": 1_000 + n} for n in range(ended)] + [{}] * under_way
    job = {"status": "RUNNING", "retryStrategy": {"attempts": attempts}, "attempts": listed}
    assert node_status(job).is_last_attempt is last


@pytest.mark.parametrize(
    ("reason", "waited_s", "expected"),
    [
        ("", 5_000, False),
        ("MISCONFIGURATION:JOB_RESOURCE_REQUIREMENT - x", 60, False),
        ("MISCONFIGURATION:JOB_RESOURCE_REQUIREMENT - x", 700, True),
        ("CAPACITY:INSUFFICIENT_INSTANCE_CAPACITY - x", 5, True),
    ],
)
def test_wait_reason_counts_after_the_pending_timeout(
    reason: str, waited_s: int, expected: bool
) -> None:
    """Batch reports temporary reasons for minutes while an environment scales up from zero."""
    job = {"status": "RUNNABLE", "statusReason": reason, "createdAt": 1_000_000}
    now_ms = 1_000_000 + waited_s * 1000
    assert bool(pending_reason(job, now_ms=now_ms, pending_timeout_s=600.0)) is expected
    assert pending_reason({**job, "status": "STARTING"}, now_ms=now_ms, pending_timeout_s=0.0) == ""


def test_pending_time_restarts_after_a_lost_host() -> None:
    """The job is hours old, and its environment scales up from zero again."""
    job = {
        "status": "RUNNABLE",
        "statusReason": "MISCONFIGURATION:COMPUTE_ENVIRONMENT_MAX_RESOURCE - x",
        "createdAt": 0,
        "attempts": [{"stoppedAt": 9_000_000}],
    }
    assert pending_reason(job, now_ms=9_060_000, pending_timeout_s=600.0) == ""
    assert pending_reason(job, now_ms=9_700_000, pending_timeout_s=600.0)


def times_of(job: dict[str, Any]) -> tuple[int | None, int | None]:
    status = node_status(job)
    return status.started_at_ms, status.ended_at_ms


def test_times_are_those_of_the_last_attempt() -> None:
    first, second = {"startedAt": 10, "stoppedAt": 20}, {"startedAt": 30, "stoppedAt": 40}
    assert times_of({"status": "RUNNABLE", "startedAt": 0}) == (None, None)
    assert times_of({"status": "RUNNING", "startedAt": 10}) == (10, None)
    assert times_of({"status": "RUNNABLE", "startedAt": 10, "attempts": [first]}) == (10, 20)
    running = {"status": "RUNNING", "startedAt": 30, "attempts": [first]}
    assert times_of(running) == (30, None)
    assert times_of({**running, "startedAt": 10}) == (None, None), "that of the first attempt"
    assert times_of({**running, "attempts": [first, {"startedAt": 30}]}) == (30, None)
    ended = {"status": "FAILED", "startedAt": 10, "stoppedAt": 41, "attempts": [first, second]}
    assert times_of(ended) == (30, 40)
    assert times_of({**ended, "attempts": []}) == (10, 41)
    never_started = {"status": "FAILED", "startedAt": 0, "stoppedAt": 41}
    assert times_of(never_started) == (None, None)


def test_parent_of_an_array_has_no_times() -> None:
    parent = {"status": "FAILED", "startedAt": 10, "stoppedAt": 20, "arrayProperties": {"size": 2}}
    assert times_of(parent) == (None, None)
    child = {**parent, "arrayProperties": {"index": 0}}
    assert times_of(child) == (10, 20)
