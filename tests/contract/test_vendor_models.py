"""Every golden request passes the vendor's own model: no unknown members, types, required members.

The models are those of the installed client libraries, which the vendors generate from the
definitions of their APIs.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import msgspec
import pytest

from spotfit.model.group import GroupPlan
from spotfit_localsim.clouds import (
    aws_requests,
    azure_requests,
    gcp_requests,
    kubernetes_requests,
)
from spotfit_localsim.clouds.kubernetes_requests import InvalidObjectError
from spotfit_provisioners.kubernetes.render import secret_manifest, service_manifest

_HERE = Path(__file__).parent


def golden_files(backend: str, prefix: str = "plan") -> list[Any]:
    found = sorted((_HERE / backend / "golden").glob(f"{prefix}_*.json"))
    assert found, f"{backend} has no golden files"
    return [pytest.param(path, id=path.stem) for path in found]


def read(path: Path) -> dict[str, Any]:
    return dict(msgspec.json.decode(path.read_bytes()))


@pytest.mark.parametrize("path", golden_files("aws_batch"))
def test_job_definitions_pass_the_model_and_limits_of_aws(path: Path) -> None:
    pytest.importorskip("botocore")
    definition = read(path)["body"]["definition"]
    operation = "RegisterJobDefinition"
    assert aws_requests.find_model_violation("batch", operation, definition) == ""
    assert aws_requests.find_definition_violation(definition) == ""


@pytest.mark.parametrize("path", golden_files("aws_batch", "job"))
def test_jobs_pass_the_model_and_limits_of_aws(path: Path) -> None:
    pytest.importorskip("botocore")
    job = read(path)
    is_fair_share = "shareIdentifier" in job
    assert aws_requests.find_model_violation("batch", "SubmitJob", job) == ""
    assert aws_requests.find_job_violation(job, is_fair_share=is_fair_share) == ""


@pytest.mark.parametrize("path", [*golden_files("gcp_batch"), *golden_files("gcp_batch", "job")])
def test_jobs_pass_the_protobuf_and_limits_of_google(path: Path) -> None:
    pytest.importorskip("google.cloud.batch_v1")
    document = read(path)
    job = document.get("body", document)
    locations = job["allocationPolicy"]["location"]["allowedLocations"]
    region = next(iter(locations)).partition("/")[2]
    canonical = gcp_requests.to_canonical_job(job)
    if locations[0].startswith("zones/"):
        region = region.rpartition("-")[0]
    request_id = "11111111-1111-4111-8111-111111111111"
    gcp_requests.check_job(
        "t-0123456789ab", request_id, canonical, region=region, size_bytes=len(path.read_bytes())
    )


@pytest.mark.parametrize("path", golden_files("azure_batch"))
def test_jobs_and_tasks_pass_the_models_of_azure(path: Path) -> None:
    pytest.importorskip("azure.batch.models")
    body = read(path)["body"]
    task = {**body["task"], "id": "0"}
    assert azure_requests.find_model_violation("BatchJobCreateOptions", body["job"]) is None
    assert azure_requests.find_model_violation("BatchTaskCreateOptions", task) is None
    assert azure_requests.find_model_violation("BatchTaskGroup", {"value": [task]}) is None


@pytest.mark.parametrize("path", golden_files("azure_batch", "task"))
def test_tasks_with_their_environment_pass_the_model_of_azure(path: Path) -> None:
    pytest.importorskip("azure.batch.models")
    assert azure_requests.find_model_violation("BatchTaskCreateOptions", read(path)) is None


@pytest.mark.parametrize("path", golden_files("kubernetes"))
def test_objects_pass_the_models_and_names_of_kubernetes(path: Path) -> None:
    pytest.importorskip("kubernetes.client")
    plan = msgspec.json.decode(path.read_bytes(), type=GroupPlan)
    objects = [
        ("jobs", "Job", plan.body),
        ("secrets", "Secret", secret_manifest(plan, {"A": "b"})),
        ("services", "Service", service_manifest(plan)),
    ]
    for kind, name, body in objects:
        kubernetes_requests.check_object(kind, name, copy.deepcopy(dict(body)), is_strict=True)


def test_a_member_that_a_vendor_does_not_know_is_found() -> None:
    """The tests above fail for a misspelt member in any depth."""
    pytest.importorskip("azure.batch.models")
    pytest.importorskip("kubernetes.client")
    pytest.importorskip("google.cloud.batch_v1")
    pytest.importorskip("botocore")
    azure = read(_HERE / "azure_batch/golden/plan_plain.json")["body"]["task"]
    azure["containerSettings"]["imagename"] = "i"
    found = azure_requests.find_model_violation("BatchTaskCreateOptions", {**azure, "id": "0"})
    assert found is not None
    assert "imagename" in found.reason
    job = read(_HERE / "kubernetes/golden/plan_plain.json")["body"]
    job["spec"]["template"]["spec"]["containers"][0]["imagePullpolicy"] = "Always"
    with pytest.raises(InvalidObjectError, match="imagePullpolicy"):
        kubernetes_requests.check_object("jobs", "Job", job, is_strict=True)
    google = read(_HERE / "gcp_batch/golden/plan_plain.json")["body"]
    google["taskGroups"][0]["taskSpec"]["maxRetries"] = 1
    with pytest.raises(gcp_requests.InvalidJobError, match="maxRetries"):
        gcp_requests.to_canonical_job(google)
    aws = read(_HERE / "aws_batch/golden/plan_plain.json")["body"]["definition"]
    aws["containerProperties"]["comand"] = []
    assert "comand" in aws_requests.find_model_violation("batch", "RegisterJobDefinition", aws)
