"""Every golden request of the provisioners passes the vendor's own model, and a wrong one does not.

The models are those of the installed client libraries, which the vendors generate from the
definitions of their APIs; for Kubernetes also the OpenAPI schemas of its releases.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
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
from spotfit_provisioners.kubernetes import render

_GOLDEN = Path(__file__).parents[1] / "unit" / "provisioners"
# The oldest supported release (docs/guides/kubernetes.md), and the newest at hand.
_KUBERNETES_RELEASES = ("1.29", "1.37")


def golden_files(backend: str, prefix: str = "plan") -> list[Any]:
    found = sorted((_GOLDEN / backend / "golden").glob(f"{prefix}_*.json"))
    assert found, f"{backend} has no golden files"
    return [pytest.param(path, id=path.stem) for path in found]


def read(path: Path) -> Any:
    return msgspec.json.decode(path.read_bytes())


# --- each returns what the vendor would refuse, or '' ---------------------------------------------


def aws_definition_violation(definition: Any) -> str:
    pytest.importorskip("botocore")
    found = aws_requests.find_model_violation("batch", "RegisterJobDefinition", definition)
    return found or aws_requests.find_definition_violation(definition)


def aws_job_violation(job: Any) -> str:
    pytest.importorskip("botocore")
    found = aws_requests.find_model_violation("batch", "SubmitJob", job)
    is_fair_share = "shareIdentifier" in job
    return found or aws_requests.find_job_violation(job, is_fair_share=is_fair_share)


def google_violation(job: Any) -> str:
    pytest.importorskip("google.cloud.batch_v1")
    location = job["allocationPolicy"]["location"]["allowedLocations"][0]
    kind, _, place = location.partition("/")
    try:
        gcp_requests.check_job(
            "t-0123456789ab",
            "11111111-1111-4111-8111-111111111111",
            gcp_requests.to_canonical_job(job),
            region=place.rpartition("-")[0] if kind == "zones" else place,
            size_bytes=len(msgspec.json.encode(job)),
        )
    except gcp_requests.InvalidJobError as error:
        return str(error)
    return ""


def azure_job_violation(job: Any) -> str:
    return _azure_violation("BatchJobCreateOptions", job)


def azure_task_violation(task: Any) -> str:
    return _azure_violation("BatchTaskCreateOptions", {"id": "0", **task})


def _azure_violation(model: str, body: Any) -> str:
    pytest.importorskip("azure.batch.models")
    found = azure_requests.find_model_violation(model, body)
    found = found or azure_requests.find_limit_violation(body)
    return f"{found.code}: {found.reason}" if found else ""


def kubernetes_violation(manifest: Any) -> str:
    pytest.importorskip("kubernetes.client")
    kind = manifest["kind"]
    try:
        body = copy.deepcopy(manifest)
        kubernetes_requests.check_object(f"{kind.lower()}s", kind, body, is_strict=True)
    except kubernetes_requests.InvalidObjectError as error:
        return str(error)
    return ""


# --- golden requests ------------------------------------------------------------------------------


@pytest.mark.parametrize("path", golden_files("aws_batch"))
def test_job_definitions_pass_the_model_and_limits_of_aws(path: Path) -> None:
    assert aws_definition_violation(read(path)["body"]["definition"]) == ""


@pytest.mark.parametrize("path", golden_files("aws_batch", "job"))
def test_jobs_pass_the_model_and_limits_of_aws(path: Path) -> None:
    assert aws_job_violation(read(path)) == ""


@pytest.mark.parametrize("path", [*golden_files("gcp_batch"), *golden_files("gcp_batch", "job")])
def test_jobs_pass_the_protobuf_and_limits_of_google(path: Path) -> None:
    document = read(path)
    assert google_violation(document.get("body", document)) == ""


@pytest.mark.parametrize("path", golden_files("azure_batch"))
def test_jobs_and_tasks_pass_the_models_of_azure(path: Path) -> None:
    body = read(path)["body"]
    assert azure_job_violation(body["job"]) == ""
    assert azure_task_violation(body["task"]) == ""


@pytest.mark.parametrize("path", golden_files("azure_batch", "task"))
def test_tasks_with_their_environment_pass_the_model_of_azure(path: Path) -> None:
    assert azure_task_violation(read(path)) == ""


def manifests(path: Path) -> Iterator[dict[str, Any]]:
    plan = msgspec.json.decode(path.read_bytes(), type=GroupPlan)
    yield dict(plan.body)
    yield render.secret_manifest(plan, {"A": "b"})
    yield render.service_manifest(plan)
    yield render.pod_manifest(plan)


@pytest.mark.parametrize("path", golden_files("kubernetes"))
def test_objects_pass_the_models_and_names_of_kubernetes(path: Path) -> None:
    assert {kubernetes_violation(one) for one in manifests(path)} == {""}


@pytest.mark.parametrize("release", _KUBERNETES_RELEASES)
@pytest.mark.parametrize("path", golden_files("kubernetes"))
def test_objects_pass_the_openapi_schemas_of_kubernetes(path: Path, release: str) -> None:
    schemas = pytest.importorskip("kubernetes_validate")
    for one in manifests(path):
        assert schemas.validate(one, release, strict=True) == release


def test_a_field_that_the_openapi_schema_does_not_have_is_refused() -> None:
    schemas = pytest.importorskip("kubernetes_validate")
    job = read(_GOLDEN / "kubernetes/golden/plan_plain.json")["body"]
    job["spec"]["template"]["spec"]["containers"][0]["imagePullpolicy"] = "Always"
    for release in _KUBERNETES_RELEASES:
        with pytest.raises(schemas.ValidationError, match="imagePullpolicy"):
            schemas.validate(job, release, strict=True)


# --- wrong requests -------------------------------------------------------------------------------

_DEFINITION = ("aws_batch/golden/plan_plain.json", "body", "definition")
_AWS_JOB = ("aws_batch/golden/job_array.json",)
_GOOGLE_JOB = ("gcp_batch/golden/plan_plain.json", "body")
_AZURE_JOB = ("azure_batch/golden/plan_plain.json", "body", "job")
_AZURE_TASK = ("azure_batch/golden/plan_plain.json", "body", "task")
_KUBERNETES_JOB = ("kubernetes/golden/plan_plain.json", "body")
_LABELS = "spec.template.metadata.labels"
# (finds violations, the golden request, the path of the changed member, its value, the reason)
WRONG: list[tuple[Callable[[Any], str], tuple[str, ...], str, Any, str]] = [
    (aws_definition_violation, _DEFINITION, "containerProperties.comand", [], "comand"),
    (aws_definition_violation, _DEFINITION, "containerProperties.command", "true", "list"),
    (aws_definition_violation, _DEFINITION, "tags", {"a": "b" * 257}, "size 257"),
    (aws_definition_violation, _DEFINITION, "jobDefinitionName", "a" * 129, "pattern"),
    (aws_job_violation, _AWS_JOB, "arrayProperties.length", 2, "length"),
    (aws_job_violation, _AWS_JOB, "arrayProperties.size", "2", "int"),
    (aws_job_violation, _AWS_JOB, "jobName", "a" * 129, "pattern"),
    (google_violation, _GOOGLE_JOB, "taskGroups.0.taskSpec.maxRetries", 1, "maxRetries"),
    (google_violation, _GOOGLE_JOB, "taskGroups.0.taskCount", "two", "taskCount"),
    (google_violation, _GOOGLE_JOB, "labels", {"a": "b" * 64}, "label a="),
    (google_violation, _GOOGLE_JOB, "taskGroups.0.taskSpec.maxRetryCount", 11, "max_retry"),
    (azure_job_violation, _AZURE_JOB, "poolInfo.pool", "spot", "'pool'"),
    (azure_job_violation, _AZURE_JOB, "poolInfo", [], "object"),
    (azure_job_violation, _AZURE_JOB, "id", "a" * 65, "cannot be an id"),
    (azure_task_violation, _AZURE_TASK, "containerSettings.imagename", "i", "imagename"),
    (azure_task_violation, _AZURE_TASK, "commandLine", ["true"], "commandLine"),
    (kubernetes_violation, _KUBERNETES_JOB, "spec.template.spec.hostname_", "a", "hostname_"),
    (kubernetes_violation, _KUBERNETES_JOB, "spec.completions", "2", "completions"),
    (kubernetes_violation, _KUBERNETES_JOB, _LABELS, {"a": "b" * 64}, "labels: Invalid"),
    (kubernetes_violation, _KUBERNETES_JOB, "metadata.name", "a" * 254, "RFC 1123"),
]


@pytest.mark.parametrize(
    ("find", "golden", "path", "value", "reason"),
    [pytest.param(*one, id=f"{one[0].__name__}-{one[2]}-{one[4]}") for one in WRONG],
)
def test_wrong_request_is_refused(
    find: Callable[[Any], str], golden: tuple[str, ...], path: str, value: Any, reason: str
) -> None:
    file, *members = golden
    request = follow(read(_GOLDEN / file), members)
    *parents, name = path.split(".")
    parent = follow(request, parents)
    assert find(request) == ""
    parent[name] = value
    assert reason in find(request)


def follow(value: Any, path: Iterable[str]) -> Any:
    for part in path:
        value = value[int(part) if part.isdecimal() else part]
    return value
