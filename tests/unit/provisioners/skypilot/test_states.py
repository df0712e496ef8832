"""SkyPilot's states in our words: every state there is, by its own enumerations."""

from __future__ import annotations

import pytest

from spotfit.model.group import NodeState, NodeStatus
from spotfit_provisioners.skypilot import states
from spotfit_provisioners.skypilot.states import Job


def test_every_state_of_a_managed_job_is_translated() -> None:
    state = pytest.importorskip(
        "sky.jobs.state", reason="SkyPilot is not installed; `make sky-api`"
    )
    assert {one.value for one in state.ManagedJobStatus} == set(states.JOBS)


def test_what_skypilot_calls_the_end_is_ours() -> None:
    state = pytest.importorskip(
        "sky.jobs.state", reason="SkyPilot is not installed; `make sky-api`"
    )
    over = {one.value for one in state.ManagedJobStatus if one.is_terminal()}
    assert over == {name for name in states.JOBS if Job(1, "j", name).over}


def test_only_of_jobs_on_a_machine_and_of_those_that_are_over_what_they_printed_is_asked() -> None:
    waits = {name for name in states.JOBS if not Job(1, "j", name).tells}
    assert waits == {"PENDING", "SUBMITTED", "STARTING", "WINDING_DOWN", "RECOVERING"}


def test_every_state_of_a_cluster_is_translated() -> None:
    lib = pytest.importorskip(
        "sky.utils.status_lib", reason="SkyPilot is not installed; `make sky-api`"
    )
    assert {one.value for one in lib.ClusterStatus} == set(states.CLUSTERS)


def test_every_state_of_a_request_is_translated() -> None:
    lib = pytest.importorskip(
        "sky.server.requests.requests", reason="SkyPilot is not installed; `make sky-api`"
    )
    assert {one.value for one in lib.RequestStatus} == set(states.REQUESTS)


@pytest.mark.parametrize(
    ("job", "status"),
    [
        (Job(1, "j", "RUNNING", "x"), NodeStatus(NodeState.RUNNING)),
        (Job(1, "j", "STARTING", "Launching"), NodeStatus(NodeState.WAITING)),
        (Job(1, "j", "RECOVERING", "-"), NodeStatus(NodeState.WAITING, "RECOVERING")),
        (
            Job(1, "j", "FAILED", "exit\ncode 70"),
            NodeStatus(NodeState.FAILED, "FAILED: exit code 70"),
        ),
        (Job(1, "j", "SUCCEEDED"), NodeStatus(NodeState.GONE, "SUCCEEDED")),
    ],
)
def test_a_job_is_told_with_its_reason(job: Job, status: NodeStatus) -> None:
    assert states.job(job) == status


def test_why_no_machine_came_is_told() -> None:
    assert states.refusal(Job(1, "j", "FAILED_NO_RESOURCE", "no p4d")) == (
        "FAILED_NO_RESOURCE: no p4d"
    )
    assert states.refusal(Job(1, "j", "PENDING", "Job is in backoff")) == (
        "PENDING: Job is in backoff"
    )
    assert states.refusal(Job(1, "j", "PENDING", "Job submitted to queue")) == ""
    assert states.refusal(Job(1, "j", "FAILED", "a bug")) == ""
    assert states.refusal(Job(1, "j", "CANCELLED", "was in backoff")) == ""


@pytest.mark.parametrize(
    ("state", "status"),
    [
        ("UP", NodeStatus(NodeState.RUNNING)),
        ("INIT", NodeStatus(NodeState.WAITING, "INIT")),
        ("STOPPED", NodeStatus(NodeState.GONE, "STOPPED")),
    ],
)
def test_a_cluster_is_told(state: str, status: NodeStatus) -> None:
    assert states.cluster(state) == status


@pytest.mark.parametrize(
    ("state", "why", "status"),
    [
        ("RUNNING", "", NodeStatus(NodeState.WAITING)),
        ("SUCCEEDED", "", NodeStatus(NodeState.GONE, "its cluster is down")),
        ("FAILED", "pip failed", NodeStatus(NodeState.FAILED, "FAILED: pip failed")),
        ("CANCELLED", "", NodeStatus(NodeState.GONE, "CANCELLED")),
    ],
)
def test_a_launch_without_its_cluster_is_told(state: str, why: str, status: NodeStatus) -> None:
    assert states.launch(state, why) == status


def test_a_launch_for_which_there_was_no_room_is_the_market_s_refusal() -> None:
    """Machines that fail at birth end a run after a while; a market without room never does."""
    told = states.launch("FAILED", "no p4d anywhere", no_room=True)
    assert told == NodeStatus(NodeState.REFUSED, "FAILED: no p4d anywhere")
    assert states.job(Job(1, "j", "FAILED_NO_RESOURCE", "x")).state is NodeState.REFUSED


def test_states_that_a_newer_server_may_know_are_told_and_harmless() -> None:
    assert states.job(Job(1, "j", "DREAMING")) == NodeStatus(NodeState.WAITING, "DREAMING")
    assert states.cluster("DREAMING") == NodeStatus(NodeState.WAITING, "DREAMING")
    assert states.launch("DREAMING") == NodeStatus(NodeState.WAITING)
    assert states.refusal(Job(1, "j", "DREAMING", "in backoff")) == ""
