"""Mapping of SkyPilot's states, complete by its enumerations."""

from __future__ import annotations

import pytest

from spotfit.model.group import NodeState, NodeStatus
from spotfit_provisioners.skypilot import states
from spotfit_provisioners.skypilot.states import SkyPilotJob


def test_every_state_of_a_managed_job_is_mapped() -> None:
    state = pytest.importorskip(
        "sky.jobs.state", reason="SkyPilot is not installed; `make sky-api`"
    )
    assert {one.value for one in state.ManagedJobStatus} == set(states.JOB_STATES)


def test_terminal_states_match_skypilot() -> None:
    state = pytest.importorskip(
        "sky.jobs.state", reason="SkyPilot is not installed; `make sky-api`"
    )
    over = {one.value for one in state.ManagedJobStatus if one.is_terminal()}
    assert over == {name for name in states.JOB_STATES if SkyPilotJob(1, "j", name).is_over}


def test_output_is_read_only_of_running_and_ended_jobs() -> None:
    waits = {name for name in states.JOB_STATES if not SkyPilotJob(1, "j", name).has_log}
    assert waits == {"PENDING", "SUBMITTED", "STARTING", "WINDING_DOWN", "RECOVERING"}


def test_every_state_of_a_cluster_is_mapped() -> None:
    lib = pytest.importorskip(
        "sky.utils.status_lib", reason="SkyPilot is not installed; `make sky-api`"
    )
    assert {one.value for one in lib.ClusterStatus} == set(states.CLUSTER_STATES)


def test_every_state_of_a_request_is_mapped() -> None:
    lib = pytest.importorskip(
        "sky.server.requests.requests", reason="SkyPilot is not installed; `make sky-api`"
    )
    assert {one.value for one in lib.RequestStatus} == set(states.REQUEST_STATES)


@pytest.mark.parametrize(
    ("job", "status"),
    [
        (SkyPilotJob(1, "j", "RUNNING", "x"), NodeStatus(state=NodeState.RUNNING)),
        (SkyPilotJob(1, "j", "STARTING", "Launching"), NodeStatus(state=NodeState.WAITING)),
        (
            SkyPilotJob(1, "j", "RECOVERING", "-"),
            NodeStatus(state=NodeState.WAITING, reason="RECOVERING"),
        ),
        (
            SkyPilotJob(1, "j", "FAILED", "exit\ncode 70"),
            NodeStatus(state=NodeState.FAILED, reason="FAILED: exit code 70"),
        ),
        (SkyPilotJob(1, "j", "SUCCEEDED"), NodeStatus(state=NodeState.GONE, reason="SUCCEEDED")),
    ],
)
def test_job_state_has_its_reason(job: SkyPilotJob, status: NodeStatus) -> None:
    assert states.job_status(job) == status


def test_launch_failure_has_its_reason() -> None:
    assert states.refusal_reason(SkyPilotJob(1, "j", "FAILED_NO_RESOURCE", "no p4d")) == (
        "FAILED_NO_RESOURCE: no p4d"
    )
    assert states.refusal_reason(SkyPilotJob(1, "j", "PENDING", "Job is in backoff")) == (
        "PENDING: Job is in backoff"
    )
    assert states.refusal_reason(SkyPilotJob(1, "j", "PENDING", "Job submitted to queue")) == ""
    assert states.refusal_reason(SkyPilotJob(1, "j", "FAILED", "a bug")) == ""
    assert states.refusal_reason(SkyPilotJob(1, "j", "CANCELLED", "was in backoff")) == ""


@pytest.mark.parametrize(
    ("state", "status"),
    [
        ("UP", NodeStatus(state=NodeState.RUNNING)),
        ("INIT", NodeStatus(state=NodeState.WAITING, reason="INIT")),
        ("STOPPED", NodeStatus(state=NodeState.GONE, reason="STOPPED")),
    ],
)
def test_cluster_is_mapped_to_a_node_state(state: str, status: NodeStatus) -> None:
    assert states.cluster_status(state) == status


@pytest.mark.parametrize(
    ("state", "why", "status"),
    [
        ("RUNNING", "", NodeStatus(state=NodeState.WAITING)),
        ("SUCCEEDED", "", NodeStatus(state=NodeState.GONE, reason="its cluster is down")),
        ("FAILED", "pip failed", NodeStatus(state=NodeState.FAILED, reason="FAILED: pip failed")),
        ("CANCELLED", "", NodeStatus(state=NodeState.GONE, reason="CANCELLED")),
    ],
)
def test_launch_request_without_a_cluster_is_mapped(
    state: str, why: str, status: NodeStatus
) -> None:
    assert states.launch_status(state, why) == status


def test_launch_without_capacity_is_a_refusal() -> None:
    """Machines that fail to boot end a run eventually; missing capacity does not."""
    result = states.launch_status("FAILED", "no p4d anywhere", is_capacity_error=True)
    assert result == NodeStatus(state=NodeState.REFUSED, reason="FAILED: no p4d anywhere")
    assert (
        states.job_status(SkyPilotJob(1, "j", "FAILED_NO_RESOURCE", "x")).state is NodeState.REFUSED
    )


def test_unknown_states_are_reported_as_waiting() -> None:
    assert states.job_status(SkyPilotJob(1, "j", "DREAMING")) == NodeStatus(
        state=NodeState.WAITING, reason="DREAMING"
    )
    assert states.cluster_status("DREAMING") == NodeStatus(
        state=NodeState.WAITING, reason="DREAMING"
    )
    assert states.launch_status("DREAMING") == NodeStatus(state=NodeState.WAITING)
    assert states.refusal_reason(SkyPilotJob(1, "j", "DREAMING", "in backoff")) == ""
