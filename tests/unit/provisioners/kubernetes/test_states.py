"""Mapping of pods and Jobs, complete by the documentation of the library."""

from __future__ import annotations

import re
from typing import Any

import pytest

from spotfit.model.group import NodeState
from spotfit_provisioners.kubernetes.render import INDEX_LABEL
from spotfit_provisioners.kubernetes.states import (
    PHASES,
    group_status,
    has_missing_pods,
    parse_indexes,
)


def a_job(nodes: int = 1, **status: Any) -> dict[str, Any]:
    return {"spec": {"completions": nodes}, "status": status}


def a_pod(phase: str, index: int = 0, created_at: str = "1", **status: Any) -> dict[str, Any]:
    meta = {"labels": {INDEX_LABEL: str(index)}, "creationTimestamp": created_at}
    return {"metadata": meta, "status": {"phase": phase, **status}}


def test_every_phase_is_mapped() -> None:
    """The library has no enumeration; the documentation of the status lists all phases."""
    client = pytest.importorskip("kubernetes.client")
    # Since version 37 of the library the fields are those of pydantic.
    fields = getattr(client.V1PodStatus, "model_fields", None)
    result = fields["phase"].description if fields else str(client.V1PodStatus.phase.__doc__)
    named = set(re.findall(r"(Pending|Running|Succeeded|Failed|Unknown):", result))
    assert named == set(PHASES)


@pytest.mark.parametrize(
    ("job", "pods", "state"),
    [
        (a_job(), [], NodeState.WAITING),
        (a_job(), [a_pod("Pending")], NodeState.WAITING),
        (a_job(), [a_pod("Running")], NodeState.RUNNING),
        (a_job(), [a_pod("Failed")], NodeState.WAITING),
        (a_job(), [a_pod("Failed"), a_pod("Running", created_at="2")], NodeState.RUNNING),
        (a_job(completedIndexes="0"), [a_pod("Succeeded")], NodeState.GONE),
        (a_job(failedIndexes="0"), [a_pod("Failed")], NodeState.FAILED),
        (a_job(failedIndexes="0"), [], NodeState.FAILED),
        pytest.param(
            a_job(failedIndexes="0"), [a_pod("Running")], NodeState.RUNNING, id="late list of pods"
        ),
    ],
)
def test_newest_pod_of_an_index_counts_until_the_job_ends(
    job: dict[str, Any], pods: list[dict[str, Any]], state: NodeState
) -> None:
    assert [node.state for node in group_status(job, pods).nodes] == [state]


def test_kill_for_lack_of_memory_is_recognized_before_the_job_has_failed() -> None:
    """Until then the leader must not attribute the end of the machine to a preemption."""
    ended = {"terminated": {"exitCode": 137, "reason": "OOMKilled"}}
    pod = a_pod("Failed", containerStatuses=[{"name": "agent", "state": ended}])
    for job in (a_job(), a_job(failedIndexes="0")):
        (node,) = group_status(job, [pod]).nodes
        assert (node.out_of_memory, node.reason) == (True, "OOMKilled (exit code 137)")
    ended["terminated"]["reason"] = "Error"
    (node,) = group_status(a_job(failedIndexes="0"), [pod]).nodes
    assert (node.out_of_memory, node.reason) == (False, "exit code 137")


def test_unknown_phase_is_reported_as_waiting() -> None:
    (node,) = group_status(a_job(), [a_pod("Hibernating")]).nodes
    assert node.state is NodeState.WAITING
    assert node.reason == "its phase Hibernating is unknown"


@pytest.mark.parametrize(
    ("ready", "state"), [("True", NodeState.RUNNING), ("False", NodeState.WAITING)]
)
def test_pod_on_an_unresponsive_node_is_not_running(ready: str, state: NodeState) -> None:
    """Its phase remains Running for more than five minutes."""
    conditions = [{"type": "PodScheduled", "status": "True"}, {"type": "Ready", "status": ready}]
    (node,) = group_status(a_job(), [a_pod("Running", conditions=conditions)]).nodes
    assert node.state is state


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (
            "pods is forbidden: exceeded quota: compute",
            "a ResourceQuota of the namespace is exceeded",
        ),
        ('serviceaccount "agent" not found', "pods cannot be created: serviceaccount"),
        ("", ""),
    ],
)
def test_pod_creation_error_is_reported(message: str, expected: str) -> None:
    refusal = group_status(a_job(2), [a_pod("Running")], message).refusal
    assert refusal.startswith(expected)
    assert bool(refusal) == bool(expected)


def test_outdated_pod_creation_error_is_ignored() -> None:
    there = [a_pod("Running"), a_pod("Pending", index=1)]
    assert group_status(a_job(2), there, "exceeded quota").refusal == ""
    assert has_missing_pods(a_job(2), there[:1])
    assert not has_missing_pods(a_job(2), there)
    assert not has_missing_pods({"spec": {"completions": 1, "suspend": True}}, [])


def test_failure_reason_of_a_machine_is_reported() -> None:
    ended = [{"state": {"terminated": {"exitCode": 70}}}]
    pod = a_pod("Failed", reason="Evicted", message="out of disk", containerStatuses=ended)
    (node,) = group_status(a_job(failedIndexes="0"), [pod]).nodes
    assert node.reason == "Evicted; out of disk; exit code 70"
    assert node.exit_code == 70


def test_pending_reason_is_reported() -> None:
    waits = [{"type": "PodScheduled", "status": "False", "message": "0/3 nodes are available"}]
    assert (
        group_status(a_job(), [a_pod("Pending", conditions=waits)]).refusal
        == "0/3 nodes are available"
    )
    suspended = {"spec": {"completions": 1, "suspend": True}}
    assert "suspended" in group_status(suspended, []).refusal


@pytest.mark.parametrize(
    ("waiting", "expected"),
    [
        ({"reason": "ImagePullBackOff", "message": "no such tag"}, "ImagePullBackOff: no such tag"),
        ({"reason": "InvalidImageName"}, "InvalidImageName"),
        ({"reason": "ContainerCreating"}, ""),
    ],
)
def test_image_pull_error_is_reported(waiting: dict[str, str], expected: str) -> None:
    pod = a_pod("Pending", containerStatuses=[{"state": {"waiting": waiting}}])
    assert group_status(a_job(), [pod]).refusal == expected


@pytest.mark.parametrize(
    ("text", "found"), [(None, set()), ("", set()), ("1,3-5,7", {1, 3, 4, 5, 7})]
)
def test_completed_indices_are_parsed(text: str | None, found: set[int]) -> None:
    assert parse_indexes(text) == found


def test_a_new_pod_states_why_the_previous_one_has_ended() -> None:
    condition = {"type": "DisruptionTarget", "reason": "DeletionByTaintManager", "message": "gone"}
    disrupted = a_pod("Failed", created_at="1", conditions=[condition])
    (node,) = group_status(a_job(), [disrupted, a_pod("Pending", created_at="2")]).nodes
    assert (node.state, node.reason) == (NodeState.WAITING, "DeletionByTaintManager: gone")


START, END = "2026-11-26T12:00:00Z", "2026-11-26T12:01:00Z"
START_MS = 1795694400000
DISRUPTED = {"type": "DisruptionTarget", "status": "True", "lastTransitionTime": END}


def a_container(**state: Any) -> list[dict[str, Any]]:
    return [{"name": "agent", "state": state}]


@pytest.mark.parametrize(
    ("pod", "times"),
    [
        (a_pod("Pending"), (None, None)),
        # Its images are being pulled.
        (a_pod("Pending", startTime=START), (START_MS, None)),
        (a_pod("Running", startTime=START), (START_MS, None)),
        # It still has its grace period.
        (a_pod("Running", startTime=START, conditions=[DISRUPTED]), (START_MS, None)),
        (
            a_pod(
                "Failed",
                startTime=START,
                containerStatuses=a_container(terminated={"exitCode": 1, "finishedAt": END}),
                conditions=[{**DISRUPTED, "lastTransitionTime": "2026-11-26T13:00:00Z"}],
            ),
            (START_MS, START_MS + 60_000),
        ),
        # The containers of a lost node are not reported.
        (
            a_pod(
                "Failed", startTime=START, containerStatuses=a_container(), conditions=[DISRUPTED]
            ),
            (START_MS, START_MS + 60_000),
        ),
        (a_pod("Failed", startTime=START), (START_MS, None)),
        # The clock of the node is ahead.
        (
            a_pod("Failed", startTime="2026-11-26T12:02:00Z", conditions=[DISRUPTED]),
            (START_MS + 120_000, START_MS + 120_000),
        ),
    ],
)
def test_times_are_those_of_the_newest_pod(
    pod: dict[str, Any], times: tuple[int | None, int | None]
) -> None:
    old = a_pod("Failed", created_at="0", startTime=END)
    (node,) = group_status(a_job(), [old, pod]).nodes
    assert (node.started_at_ms, node.ended_at_ms) == times
