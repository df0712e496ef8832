"""Kubernetes objects are checked as by the API server, with what the simulator cannot run."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

from spotfit_localsim.clouds.kubernetes_requests import (
    InvalidObjectError,
    check_object,
    check_review,
    parse_quantity,
)

pytest.importorskip("kubernetes.client")

DISRUPTED = {"type": "DisruptionTarget", "status": "True"}
JOB = {
    "metadata": {"name": "j"},
    "spec": {
        "completionMode": "Indexed",
        "completions": 2,
        "parallelism": 2,
        "podFailurePolicy": {"rules": [{"action": "Ignore", "onPodConditions": [DISRUPTED]}]},
        "template": {
            "spec": {
                "restartPolicy": "Never",
                "containers": [
                    {
                        "name": "agent",
                        "image": "i",
                        "command": ["true"],
                        "env": [{"name": "A", "value": "b"}],
                        "resources": {"limits": {"memory": "2Gi"}, "requests": {"memory": "1Gi"}},
                    }
                ],
            }
        },
    },
}


def spec(job: Any) -> Any:
    return job["spec"]


def pod(job: Any) -> Any:
    return job["spec"]["template"]["spec"]


def container(job: Any) -> Any:
    return pod(job)["containers"][0]


def check(kind: str, body: dict[str, Any], *, is_strict: bool = False) -> str:
    """Return the message of the error, or ''."""
    try:
        check_object(kind, {"jobs": "Job", "secrets": "Secret"}[kind], body, is_strict=is_strict)
    except InvalidObjectError as error:
        return str(error)
    return ""


def test_valid_job_passes() -> None:
    assert check("jobs", copy.deepcopy(JOB)) == ""


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda job: job["metadata"].update(name="J"), "RFC 1123"),
        (lambda job: job["metadata"].update(labels={"a": "b" * 64}), "metadata.labels: Invalid"),
        (lambda job: job["metadata"].update(labels={"a/b/c": "d"}), "metadata.labels: Invalid"),
        (lambda job: spec(job).pop("template"), "spec.template: Required value"),
        (lambda job: spec(job).update(completions=10_001), "at most 10000"),
        (lambda job: spec(job).update(parallelism=-1), "spec.parallelism: Invalid value: -1"),
        (
            lambda job: spec(job).update(completionMode="NonIndexed", backoffLimitPerIndex=1),
            "index",
        ),
        (
            lambda job: spec(job).update(podReplacementPolicy="TerminatingOrFailed"),
            "only be Failed",
        ),
        (lambda job: spec(job)["podFailurePolicy"]["rules"][0].update(action="Retry"), "Retry"),
        (lambda job: spec(job)["podFailurePolicy"]["rules"][0].pop("onPodConditions"), "one of"),
        (lambda job: pod(job).update(restartPolicy="Always"), "restartPolicy: Required"),
        (lambda job: pod(job)["containers"].append(container(job)), "containers: Duplicate"),
        (lambda job: container(job).update(name="Agent"), 'name: Invalid value: "Agent"'),
        (lambda job: container(job).pop("image"), "image: Required"),
        (lambda job: container(job).pop("command"), "this simulator runs no images"),
        (lambda job: container(job)["env"][0].update(name="1A"), "env[0].name: Invalid"),
        (lambda job: container(job)["env"][0].update(valueFrom={}), "a value is set, too"),
        (
            lambda job: container(job)["env"].append(
                {"name": "B", "valueFrom": {"fieldRef": {"fieldPath": "status.phase"}}}
            ),
            "env[1].valueFrom: Unsupported value",
        ),
        (lambda job: container(job).update(envFrom=[{"configMapRef": {"name": "m"}}]), "secretRef"),
        (lambda job: container(job)["resources"].update(limits={"memory": "2GB"}), '"2GB"'),
        (lambda job: container(job)["resources"]["limits"].update(memory="1Mi"), "memory limit"),
        (
            lambda job: container(job)["resources"].update(limits={"nvidia.com/gpu": "0.5"}),
            "must be an integer",
        ),
        (
            lambda job: container(job)["resources"].update(requests={"nvidia.com/gpu": "1"}),
            "must equal the request of nvidia.com/gpu",
        ),
    ],
)
def test_job_that_the_api_server_refuses(change: Callable[[Any], object], reason: str) -> None:
    job = copy.deepcopy(JOB)
    change(job)
    assert reason in check("jobs", job)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda job: spec(job).update(completions="2"),
            "json: cannot unmarshal '2' into Go struct field spec.completions of type int",
        ),
        (lambda job: job.update(kind="Pod"), "Pod does not match the expected kind Job"),
    ],
)
def test_object_that_cannot_be_decoded_is_a_bad_request(
    change: Callable[[Any], object], message: str
) -> None:
    job = copy.deepcopy(JOB)
    change(job)
    with pytest.raises(InvalidObjectError) as raised:
        check_object("jobs", "Job", job, is_strict=False)
    assert (raised.value.code, raised.value.reason) == (400, "BadRequest")
    assert message in str(raised.value)


def test_unknown_fields_are_removed_unless_validation_is_strict() -> None:
    job = copy.deepcopy(JOB)
    container(job)["imagePullpolicy"] = "Always"
    path = "spec.template.spec.containers[0].imagePullpolicy"
    assert f'strict decoding error: unknown field "{path}"' in check(
        "jobs", copy.deepcopy(job), is_strict=True
    )
    assert check("jobs", job) == ""
    assert job == JOB


def test_quantities_may_be_numbers_and_nulls_are_absent() -> None:
    job = copy.deepcopy(JOB)
    container(job)["resources"]["limits"]["memory"] = 2**31
    spec(job)["suspend"] = None
    assert check("jobs", job) == ""
    assert container(job)["resources"]["limits"]["memory"] == "2147483648"
    assert "suspend" not in spec(job)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"data": {"a": "Yg=="}, "stringData": {"c": "d"}}, ""),
        ({"data": {"a": "b"}}, "data[a]: Invalid"),
        ({"stringData": {"a b": "c"}}, "stringData[a b]: Invalid"),
    ],
)
def test_data_of_secrets_must_be_base64(fields: dict[str, Any], reason: str) -> None:
    found = check("secrets", {"metadata": {"name": "s"}, **fields})
    assert reason in found
    assert bool(found) == bool(reason)


def test_review_without_spec_is_invalid() -> None:
    with pytest.raises(InvalidObjectError, match="spec: Required value"):
        check_review("SelfSubjectAccessReview", {})


@pytest.mark.parametrize("text", ["1", "1.5", "100m", "2Ki", "3Gi", "1e3", "1E", "5k", ".5", "+1"])
def test_quantities_are_parsed_as_by_the_official_client(text: str) -> None:
    parse = pytest.importorskip("kubernetes.utils.quantity").parse_quantity
    assert parse_quantity(text) == float(parse(text))
