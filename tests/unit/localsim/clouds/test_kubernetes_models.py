"""The models of the client library refuse what the OpenAPI schemas of Kubernetes refuse."""

from __future__ import annotations

import copy
import importlib.resources
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from spotfit_localsim.clouds.kubernetes_models import (
    MissingField,
    UnknownField,
    WrongType,
    violations,
)

kubernetes = pytest.importorskip("kubernetes")

CONTAINER = {
    "name": "agent",
    "image": "i",
    "command": ["true"],
    "env": [{"name": "A", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}],
    "ports": [{"containerPort": 80}],
    "resources": {"limits": {"memory": "2Gi"}},
    "livenessProbe": {"httpGet": {"port": "http"}},
    "securityContext": {"allowPrivilegeEscalation": False},
}
RULE = {
    "action": "FailIndex",
    "onExitCodes": {"containerName": "agent", "operator": "In", "values": [85]},
}
JOB = {
    "apiVersion": "batch/v1",
    "kind": "Job",
    "metadata": {"name": "j", "labels": {"a": "b"}, "annotations": {"c": "d"}},
    "spec": {
        "completionMode": "Indexed",
        "completions": 2,
        "suspend": False,
        "podFailurePolicy": {"rules": [RULE]},
        "template": {
            "metadata": {"labels": {"a": "b"}},
            "spec": {
                "restartPolicy": "Never",
                "containers": [CONTAINER],
                "nodeSelector": {"a": "b"},
                "tolerations": [{"key": "a", "operator": "Exists"}],
                "volumes": [{"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "1Gi"}}],
            },
        },
    },
}


@pytest.mark.parametrize(
    ("expected", "value", "found"),
    [
        ("V1Job", JOB, []),
        ("V1Job", {"spce": {}}, [UnknownField(("spce",))]),
        ("V1Job", {"spec": {}}, [MissingField(("spec", "template"))]),
        ("V1Job", {"spec": []}, [WrongType(("spec",), "V1JobSpec", [])]),
        ("V1EnvVar", {"name": 1}, [WrongType(("name",), "str", 1)]),
        ("bool", 1, [WrongType((), "bool", 1)]),
        ("int", True, [WrongType((), "int", True)]),
        ("int", 2**63, [WrongType((), "int64", 2**63)]),
        ("float", 1, []),
        ("object", {"any": [1]}, []),
        ("datetime", 1, [WrongType((), "datetime", 1)]),
        # As versions before 37, and as later ones, write them.
        ("dict(str, list[str])", {"a": ["b", 1]}, [WrongType(("a", 1), "str", 1)]),
        ("Dict[str, List[str]]", {"a": ["b", 1]}, [WrongType(("a", 1), "str", 1)]),
        ("list[V1EnvVar]", [{}], [MissingField((0, "name"))]),
    ],
)
def test_differences_to_a_type_are_found(expected: str, value: Any, found: list[Any]) -> None:
    assert list(violations(expected, value)) == found


def schema_of_jobs() -> Any:
    """Return a validator of the release that the client library is made for."""
    pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed")
    jsonschema = pytest.importorskip("jsonschema")
    referencing = pytest.importorskip("referencing")
    release = kubernetes.__version__.partition(".")[0]
    folder = importlib.resources.files("kubernetes_validate").joinpath(
        "kubernetes-json-schema", f"v1.{release}.0-local-strict"
    )
    schema, definitions = [
        msgspec.json.decode(folder.joinpath(name).read_bytes())
        for name in ("job-batch-v1.json", "_definitions.json")
    ]
    known = referencing.Registry()
    for one in (schema, definitions):
        known = referencing.Resource.from_contents(one) @ known
    return jsonschema.Draft202012Validator(schema, registry=known)


def mutations(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield copies of a JSON value with one member replaced, removed or added."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, one in items:
        for other in ("x", 7, 1.5, True, [], {}, [1], {"x": "y"}):
            yield f"{key}={other!r}", {**value, key: other} if isinstance(value, dict) else [other]
        if isinstance(value, dict):
            yield f"{key} is absent", {name: two for name, two in value.items() if name != key}
        if isinstance(one, dict | list):
            for path, changed in mutations(one):
                copied = copy.copy(value)
                copied[key] = changed
                yield f"{key}.{path}", copied
    if isinstance(value, dict):
        yield "unknownField", {**value, "unknownField": 1}


def is_known_difference(path: str) -> bool:
    """Whether the models and the schemas differ for this change.

    The schemas allow numbers as quantities and require the values of `apiVersion` and `kind`. A
    port may be a number or a text, which the models do not check at all.
    """
    return (
        ".resources.limits." in path
        or ".sizeLimit=" in path
        or "livenessProbe.httpGet.port=" in path
        or path.startswith(("apiVersion", "kind"))
    )


def test_models_and_openapi_schemas_refuse_the_same_jobs() -> None:
    schema = schema_of_jobs()
    assert schema.is_valid(JOB)
    compared = {
        path: (schema.is_valid(job), not list(violations("V1Job", job)))
        for path, job in mutations(JOB)
        if not is_known_difference(path)
    }
    assert {valid for valid, _ in compared.values()} == {True, False}
    assert [path for path, (valid, accepted) in compared.items() if valid != accepted] == []
