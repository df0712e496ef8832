"""Requests to AWS are checked by botocore's models and by documented limits."""

from __future__ import annotations

from typing import Any

import pytest

from spotfit_localsim.clouds.aws_requests import (
    find_definition_violation,
    find_job_violation,
    find_model_violation,
)

pytest.importorskip("botocore")

CONTAINER = {
    "image": "i",
    "command": ["true"],
    "resourceRequirements": [
        {"type": "VCPU", "value": "1"},
        {"type": "MEMORY", "value": "2048"},
    ],
}
DEFINITION = {"jobDefinitionName": "d", "type": "container", "containerProperties": CONTAINER}
JOB = {"jobName": "j", "jobQueue": "q", "jobDefinition": "d"}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, ""),
        ({"name": "x"}, 'Unknown parameter in input: "name"'),
        ({"jobName": 1}, "Invalid type for parameter jobName"),
        ({"tags": {"a": "x" * 257}}, "the size 257 is not valid"),
        ({"arrayProperties": {"size": "2"}}, "Invalid type for parameter arrayProperties.size"),
    ],
)
def test_job_must_match_the_model(change: dict[str, Any], reason: str) -> None:
    found = find_model_violation("batch", "SubmitJob", JOB | change)
    assert reason in found
    assert bool(found) == bool(reason)


def test_required_member_is_missing() -> None:
    found = find_model_violation("batch", "SubmitJob", {"jobName": "j", "jobQueue": "q"})
    assert 'Missing required parameter in input: "jobDefinition"' in found


def test_value_must_be_one_of_its_enumeration() -> None:
    found = find_model_violation("batch", "RegisterJobDefinition", DEFINITION | {"type": "pod"})
    assert "'pod' is not one of container, multinode" in found


def test_retry_actions_ignore_case() -> None:
    """The model says so, and lists lower case only."""
    for action in ("exit", "EXIT"):
        rules = [{"action": action, "onExitCode": "1"}]
        job = JOB | {"retryStrategy": {"attempts": 1, "evaluateOnExit": rules}}
        assert find_model_violation("batch", "SubmitJob", job) == ""


def test_operation_without_parameters_accepts_a_request() -> None:
    assert find_model_violation("batch", "DescribeComputeEnvironments", {}) == ""


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, ""),
        ({"image": "a b"}, "image is required"),
        ({"command": []}, "set the command"),
        ({"resourceRequirements": [{"type": "VCPU", "value": "1"}]}, "requirement MEMORY"),
        ({"resourceRequirements": [], "vcpus": 1, "memory": 4}, ""),
    ],
)
def test_documented_limits_of_definitions(change: dict[str, Any], reason: str) -> None:
    found = find_definition_violation({**DEFINITION, "containerProperties": CONTAINER | change})
    assert reason in found
    assert bool(found) == bool(reason)


@pytest.mark.parametrize(
    ("change", "is_fair_share", "reason"),
    [
        ({}, False, ""),
        ({}, True, "Share identifier is required"),
        ({"shareIdentifier": "team*"}, True, ""),
        ({"shareIdentifier": "team-a"}, True, "Share identifier is required"),
        ({"timeout": {"attemptDurationSeconds": 60}}, False, ""),
        ({"retryStrategy": {"evaluateOnExit": [{"action": "EXIT"}]}}, False, "requires attempts"),
        (
            {"containerOverrides": {"environment": [{"name": "AWS_BATCH_X", "value": ""}]}},
            False,
            "Reserved names: AWS_BATCH_X",
        ),
    ],
)
def test_documented_limits_of_jobs(
    change: dict[str, Any], is_fair_share: bool, reason: str
) -> None:
    found = find_job_violation(JOB | change, is_fair_share=is_fair_share)
    assert reason in found
    assert bool(found) == bool(reason)
