"""Azure Batch requests are checked by the client library's models and by documented limits."""

from __future__ import annotations

from typing import Any

import pytest

from spotfit_localsim.clouds.azure_requests import find_limit_violation, find_model_violation

pytest.importorskip("azure.batch.models")

JOB = {"id": "j", "poolInfo": {"poolId": "p"}}
TASK = {"id": "0", "commandLine": "true"}


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"priority": 1, "onAllTasksComplete": "noaction", "metadata": [{"name": "a", "value": ""}]},
        {"displayName": None},
        {"onAllTasksComplete": "NoAction"},
        {"constraints": {"maxWallClockTime": "PT1H"}},
    ],
)
def test_valid_job_has_no_violation(change: dict[str, Any]) -> None:
    assert find_model_violation("BatchJobCreateOptions", JOB | change) is None


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"pool": "p"}, "The property 'pool' does not exist"),
        ({"poolInfo": {"poolid": "p"}}, "The property 'poolid' does not exist"),
        ({"poolInfo": "p"}, "Cannot convert the value of 'poolInfo' to the expected type 'object'"),
        ({"priority": "1"}, "Cannot convert the value of 'priority'"),
        ({"priority": True}, "Cannot convert the value of 'priority'"),
        ({"metadata": {}}, "expected type 'array'"),
        ({"metadata": [{"name": 1, "value": ""}]}, "'metadata[0].name'"),
        ({"onAllTasksComplete": "stop"}, "'onAllTasksComplete'"),
        ({"id": None}, "Cannot convert the value of 'id'"),
    ],
)
def test_job_must_match_the_model(change: dict[str, Any], reason: str) -> None:
    found = find_model_violation("BatchJobCreateOptions", JOB | change)
    assert found is not None
    assert found.code == "InvalidRequestBody"
    assert reason in found.reason


def test_required_property_is_missing() -> None:
    found = find_model_violation("BatchTaskCreateOptions", {"id": "0"})
    assert found == ("MissingRequiredProperty", "commandLine")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"id": "a" * 65}, "cannot be an id"),
        ({"id": "a b"}, "cannot be an id"),
        ({"displayName": "a" * 1025}, "displayName is too long"),
        ({"commandLine": " "}, "commandLine is empty"),
        ({"commandLine": "echo '"}, "commandLine: No closing quotation"),
    ],
)
def test_documented_limits(change: dict[str, Any], reason: str) -> None:
    assert find_limit_violation(TASK) is None
    found = find_limit_violation(TASK | change)
    assert found is not None
    assert found.code == "InvalidPropertyValue"
    assert reason in found.reason
