"""Validation of Kubernetes objects: the models of the client library, names and required fields.

Sources: https://kubernetes.io/docs/concepts/overview/working-with-objects/names/, and the messages
of the API server (k8s.io/apimachinery/pkg/util/validation).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from spotfit.host.plugins import require_module
from spotfit_localsim.clouds.http_server import drop_nulls

_MODELS: Mapping[str, str] = {
    "jobs": "V1Job",
    "pods": "V1Pod",
    "secrets": "V1Secret",
    "services": "V1Service",
}
_SUBDOMAIN = re.compile(
    r"(?=.{1,253}$)[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*"
)
_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
_LABEL_VALUE = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?")
# At most 18 digits: the API server stores quantities as 64-bit integers.
_QUANTITY = re.compile(
    r"\+?(\d{1,18}\.?\d{0,9}|\.\d{1,9})([KMGTPE]i|[numkMGTPE]|[eE][+-]?\d{1,2})?"
)
_SUFFIXES = {"n": -3, "u": -2, "m": -1, "": 0, "k": 1, "M": 2, "G": 3, "T": 4, "P": 5, "E": 6}


class InvalidObjectError(Exception):
    """The API server would reject the object: 400 BadRequest, or 422 Invalid."""

    def __init__(self, message: str, *, code: int = 422) -> None:
        super().__init__(message)
        self.code = code
        self.reason = "BadRequest" if code == 400 else "Invalid"


def check_object(kind: str, name_of_kind: str, body: Any, *, is_strict: bool) -> None:
    """Raise `InvalidObjectError`; remove unknown fields unless `is_strict`.

    https://kubernetes.io/docs/reference/using-api/api-concepts/#field-validation
    """
    where = f'{name_of_kind} in version "v1" cannot be handled as a {name_of_kind}'
    if not isinstance(body, dict):
        raise InvalidObjectError(f"{where}: json: cannot unmarshal into Go value", code=400)
    if body.get("kind", name_of_kind) != name_of_kind:
        raise InvalidObjectError(
            f"{body['kind']} does not match the expected kind {name_of_kind}", code=400
        )
    drop_nulls(body)
    missing = _check_model(_MODELS[kind], body, where, is_strict=is_strict)
    problems = [f"{path}: Required value" for path in missing] or list(_violations(kind, body))
    if problems:
        name = (body.get("metadata") or {}).get("name", "")
        raise InvalidObjectError(f'{name_of_kind} "{name}" is invalid: {"; ".join(problems)}')


def check_review(name_of_kind: str, body: dict[str, Any]) -> None:
    """Raise `InvalidObjectError` for an access review that the API server would reject."""
    where = f'{name_of_kind} in version "v1" cannot be handled as a {name_of_kind}'
    drop_nulls(body)
    if missing := _check_model(f"V1{name_of_kind}", body, where, is_strict=False):
        raise InvalidObjectError(f"{name_of_kind} is invalid: {missing[0]}: Required value")


def _check_model(model: str, body: dict[str, Any], where: str, *, is_strict: bool) -> list[str]:
    """Return the paths of missing fields."""
    client = require_module("kubernetes.client", extra="kubernetes")
    pydantic = require_module("pydantic", extra="kubernetes")
    try:
        getattr(client, model).model_validate(body)
    except pydantic.ValidationError as error:
        found = error.errors(include_url=False)
    else:
        return []
    unknown, missing = [], []
    for one in found:
        path = ".".join(str(part) for part in one["loc"])
        if one["type"] == "extra_forbidden":
            unknown.append(f'unknown field "{path}"')
            _remove(body, one["loc"])
        elif one["type"] == "missing":
            missing.append(path)
        elif not _is_numeric_quantity(one):
            message = f"{where}: json: cannot unmarshal field {path}: {one['msg']}"
            raise InvalidObjectError(message, code=400)
        else:
            # The API server stores every quantity as a text.
            _replace(body, one["loc"], str(one["input"]))
    if unknown and is_strict:
        raise InvalidObjectError(f"{where}: strict decoding error: {', '.join(unknown)}", code=400)
    return missing


def _is_numeric_quantity(error: Mapping[str, Any]) -> bool:
    """The API server also reads quantities that are numbers, which the model forbids."""
    is_quantity = error["loc"][-2:-1] in (("limits",), ("requests",))
    return is_quantity and type(error["input"]) in (int, float)


def _replace(body: Any, location: tuple[Any, ...], value: str) -> None:
    for part in location[:-1]:
        body = body[part]
    body[location[-1]] = value


def _remove(body: Any, location: tuple[Any, ...]) -> None:
    for part in location[:-1]:
        body = body[part]
    del body[location[-1]]


def _violations(kind: str, body: dict[str, Any]) -> Iterator[str]:
    meta = body.get("metadata") or {}
    name = meta.get("name") or ""
    if not name:
        yield "metadata.name: Required value: name or generateName is required"
    elif not (_LABEL if kind == "services" else _SUBDOMAIN).fullmatch(name):
        yield (
            f'metadata.name: Invalid value: "{name}": a lowercase RFC 1123 subdomain must consist '
            "of lower case alphanumeric characters, '-' or '.', and must start and end with an "
            "alphanumeric character"
        )
    yield from _label_violations(meta, "metadata")
    spec = body.get("spec") or {}
    if kind == "jobs":
        yield from _job_violations(spec, name)
    elif kind == "pods":
        yield from _pod_violations(spec, "spec")


def _job_violations(spec: dict[str, Any], name: str) -> Iterator[str]:
    template = spec.get("template") or {}
    yield from _label_violations(template.get("metadata") or {}, "spec.template.metadata")
    pod = template.get("spec") or {}
    yield from _pod_violations(pod, "spec.template.spec")
    if pod.get("restartPolicy") not in ("Never", "OnFailure"):
        yield 'spec.template.spec.restartPolicy: Required value: valid values: "OnFailure", "Never"'
    for field in ("completions", "parallelism", "backoffLimit", "backoffLimitPerIndex"):
        if (spec.get(field) or 0) < 0:
            yield f"spec.{field}: Invalid value: {spec[field]}: must be greater than or equal to 0"
    if spec.get("completionMode") == "Indexed":
        completions = spec.get("completions")
        if completions is None:
            yield "spec.completions: Required value: when completion mode is Indexed"
        # The host name of a pod is the name of its Job with the index.
        elif len(f"{name}-{max(0, completions - 1)}") > 63:
            yield "metadata.name: Invalid value: will not be able to create pod with hostname"
    elif spec.get("backoffLimitPerIndex") is not None:
        yield "spec.backoffLimitPerIndex: Invalid value: requires indexed completion mode"
    policy = spec.get("podFailurePolicy")
    # Combinations that are easy to get wrong.
    if policy and pod.get("restartPolicy") != "Never":
        yield "spec.podFailurePolicy: Invalid value: needs restartPolicy: Never"
    if policy and spec.get("podReplacementPolicy") not in (None, "Failed"):
        yield "spec.podReplacementPolicy: Unsupported value: can only be Failed"
    yield from _failure_rule_violations((policy or {}).get("rules") or [])


def _failure_rule_violations(rules: list[dict[str, Any]]) -> Iterator[str]:
    if len(rules) > 20:
        yield "spec.podFailurePolicy.rules: Too many: must have at most 20 items"
    for number, rule in enumerate(rules):
        path = f"spec.podFailurePolicy.rules[{number}]"
        if rule["action"] not in ("Count", "FailIndex", "FailJob", "Ignore"):
            yield f'{path}.action: Unsupported value: "{rule["action"]}"'
        codes, conditions = rule.get("onExitCodes"), rule.get("onPodConditions")
        if bool(codes) == bool(conditions):
            yield f"{path}: Invalid value: one of OnExitCodes and OnPodConditions is required"
        elif codes and (
            codes["operator"] not in ("In", "NotIn")
            or not codes["values"]
            or (codes["operator"] == "In" and 0 in codes["values"])
        ):
            yield f"{path}.onExitCodes: Invalid value"


def _pod_violations(pod: dict[str, Any], path: str) -> Iterator[str]:
    containers = pod.get("containers") or []
    if not containers:
        yield f"{path}.containers: Required value"
    names = [one.get("name") or "" for one in containers]
    if len(set(names)) < len(names):
        yield f"{path}.containers: Duplicate value"
    for number, container in enumerate(containers):
        where = f"{path}.containers[{number}]"
        if not _LABEL.fullmatch(names[number]):
            yield f'{where}.name: Invalid value: "{names[number]}"'
        if not container.get("image"):
            yield f"{where}.image: Required value"
        # An image may have a default command; a simulated machine has none.
        if not container.get("command"):
            yield f"{where}.command: Required value: this simulator runs no images"
        resources = container.get("resources") or {}
        for part in ("limits", "requests"):
            for name, text in (resources.get(part) or {}).items():
                path_of_value = f"{where}.resources.{part}[{name}]"
                if not _QUANTITY.fullmatch(str(text)):
                    yield f'{path_of_value}: Invalid value: "{text}"'
                # Extended resources, such as GPUs, have a domain.
                elif "/" in name and not parse_quantity(str(text)).is_integer():
                    yield f'{path_of_value}: Invalid value: "{text}": must be an integer'


def parse_quantity(text: str) -> float:
    """Return the value of a valid quantity such as '2Gi', '1.5' or '100m'.

    https://kubernetes.io/docs/reference/kubernetes-api/common-definitions/quantity/
    """
    match = _QUANTITY.fullmatch(text)
    assert match is not None, text
    number, unit = float(match[1]), match[2] or ""
    if unit.endswith("i"):
        exponent: int = _SUFFIXES[unit[0].lower() if unit[0] == "K" else unit[0]]
        return number * 1024.0**exponent
    # 'E' alone is exa, with digits an exponent.
    if unit not in _SUFFIXES:
        return float(match[1] + unit)
    return number * 1000.0 ** _SUFFIXES[unit]


def _label_violations(meta: Mapping[str, Any], path: str) -> Iterator[str]:
    for name, value in (meta.get("labels") or {}).items():
        prefix, _, rest = name.rpartition("/")
        valid_prefix = not prefix or _SUBDOMAIN.fullmatch(prefix)
        if not rest or not valid_prefix or not _LABEL_VALUE.fullmatch(rest):
            yield f'{path}.labels: Invalid value: "{name}"'
        if not _LABEL_VALUE.fullmatch(value):
            yield f'{path}.labels: Invalid value: "{value}"'
