"""Google Cloud Batch jobs are checked by the protobuf and by documented limits."""

from __future__ import annotations

from typing import Any

import pytest

from spotfit_localsim.clouds.gcp_requests import InvalidJobError, check_job, to_canonical_job

pytest.importorskip("google.cloud.batch_v1")

RUNNABLE = {"container": {"imageUri": "i", "commands": ["true"]}}
JOB = {"taskGroups": [{"taskCount": "2", "taskSpec": {"runnables": [RUNNABLE]}}]}
UUID = "11111111-1111-4111-8111-111111111111"


def check(job: Any, *, job_id: str = "j", size_bytes: int = 100) -> None:
    check_job(job_id, UUID, to_canonical_job(job), region="us-east1", size_bytes=size_bytes)


def task_group(**spec: Any) -> dict[str, Any]:
    return {"taskGroups": [{"taskSpec": {"runnables": [RUNNABLE], **spec}}]}


def test_valid_job_passes_in_both_spellings() -> None:
    check(JOB)
    assert to_canonical_job({"task_groups": [{"task_count": 2}]})["taskGroups"][0] == {
        "taskCount": "2"
    }


@pytest.mark.parametrize(
    "job",
    [{"taskgroups": []}, {"priority": "high"}, {"taskGroups": {}}, {"labels": {"a": 1}}],
)
def test_job_must_match_the_protobuf(job: Any) -> None:
    with pytest.raises(InvalidJobError, match="Invalid JSON payload received"):
        to_canonical_job(job)


@pytest.mark.parametrize(
    ("job", "reason"),
    [
        ({}, "exactly one task group"),
        (task_group(maxRetryCount=11), "max_retry_count"),
        (task_group(lifecyclePolicies=[{"action": "FAIL_TASK"}]), "exit codes"),
        (task_group(runnables=[{"script": {"text": "true"}}]), "containers only"),
        (task_group(runnables=[{}]), "requires a container"),
        (task_group(runnables=[{"container": {}}]), "image_uri"),
        ({**JOB, "labels": {"a": "b" * 64}}, "label a="),
        (
            {**JOB, "allocationPolicy": {"location": {"allowedLocations": ["regions/us-east4"]}}},
            "are not in us-east1",
        ),
    ],
)
def test_documented_limits(job: Any, reason: str) -> None:
    with pytest.raises(InvalidJobError, match=reason):
        check(job)


def test_names_and_sizes_are_limited() -> None:
    with pytest.raises(InvalidJobError, match="job_id"):
        check(JOB, job_id="J")
    with pytest.raises(InvalidJobError, match="larger than 1 MB"):
        check(JOB, size_bytes=2**20 + 1)
