"""Validation of Kubernetes objects: the models of the client library, names and required fields.

Rules of the API server that no request can violate by mistake in spotfit are left out. What this
simulator cannot run is invalid, too, with a reason that says so.

Sources: https://kubernetes.io/docs/concepts/overview/working-with-objects/names/, and the messages
of the API server (k8s.io/apimachinery/pkg/util/validation).
"""

from __future__ import annotations

import base64
import re
from collections.abc import Iterator, Mapping
from typing import Any

from spotfit_localsim.clouds.http_server import drop_nulls
from spotfit_localsim.clouds.kubernetes_models import (
    MissingField,
    Path,
    UnknownField,
    WrongType,
    violations,
)

_SUBDOMAIN = re.compile(
    r"(?=.{1,253}$)[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*"
)
_VARIABLE = re.compile(r"[-._a-zA-Z][-._a-zA-Z0-9]*")
_SECRET_KEY = re.compile(r"[-._a-zA-Z0-9]{1,253}")
_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
_LABEL_VALUE = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?")
# At most 18 digits: the API server stores quantities as 64-bit integers.
_QUANTITY = re.compile(
    r"\+?(\d{1,18}\.?\d{0,9}|\.\d{1,9})([KMGTPE]i|[numkMGTPE]|[eE][+-]?\d{1,2})?"
)
_MAX_COMPLETIONS = 10_000
POD_FIELDS = (
    "metadata.name",
    "metadata.namespace",
    "metadata.uid",
    "spec.nodeName",
    "status.hostIP",
    "status.podIP",
)
"""Fields of a pod that its environment can refer to."""
_SUFFIXES = {"n": -3, "u": -2, "m": -1, "": 0, "k": 1, "M": 2, "G": 3, "T": 4, "P": 5, "E": 6}


class InvalidObjectError(Exception):
    """The API server would reject the object: 400 BadRequest, or 422 Invalid."""

    def __init__(self, message: str, *, code: int = 422) -> None:
        super().__init__(message)
        self.code = code
        self.reason = "BadRequest" if code == 400 else "Invalid"


def check_object(kind: str, name_of_kind: str, body: dict[str, Any], *, is_strict: bool) -> None:
    """Raise `InvalidObjectError`; remove unknown fields unless `is_strict`.

    https://kubernetes.io/docs/reference/using-api/api-concepts/#field-validation
    """
    if body.get("kind", name_of_kind) != name_of_kind:
        raise InvalidObjectError(
            f"{body['kind']} does not match the expected kind {name_of_kind}", code=400
        )
    missing = _check_model(name_of_kind, body, is_strict=is_strict)
    problems = [f"{path}: Required value" for path in missing] or list(_violations(kind, body))
    if problems:
        name = body.get("metadata", {}).get("name", "")
        raise InvalidObjectError(f'{name_of_kind} "{name}" is invalid: {"; ".join(problems)}')


def check_review(name_of_kind: str, body: dict[str, Any]) -> None:
    """Raise `InvalidObjectError` for an access review that the API server would reject."""
    if missing := _check_model(name_of_kind, body, is_strict=False):
        raise InvalidObjectError(f"{name_of_kind} is invalid: {missing[0]}: Required value")


def _check_model(name_of_kind: str, body: dict[str, Any], *, is_strict: bool) -> list[str]:
    """Remove nulls and unknown fields, and return the paths of missing fields."""
    where = f'{name_of_kind} in version "v1" cannot be handled as a {name_of_kind}'
    drop_nulls(body)
    unknown, missing = [], []
    for one in list(violations(f"V1{name_of_kind}", body)):
        field = _field_text(one.path)
        if isinstance(one, MissingField):
            missing.append(field)
        elif isinstance(one, UnknownField):
            unknown.append(f'unknown field "{field}"')
            del _parent(body, one.path)[one.path[-1]]
        elif not _is_numeric_quantity(one):
            raise InvalidObjectError(
                f"{where}: json: cannot unmarshal {one.value!r} into Go struct field {field} of "
                f"type {one.expected}",
                code=400,
            )
        else:
            # The API server stores every quantity as a text.
            _parent(body, one.path)[one.path[-1]] = str(one.value)
    if unknown and is_strict:
        raise InvalidObjectError(f"{where}: strict decoding error: {', '.join(unknown)}", code=400)
    return missing


def _field_text(path: Path) -> str:
    """Return a path such as 'spec.containers[0].image'."""
    parts = [f"[{part}]" if isinstance(part, int) else f".{part}" for part in path]
    return "".join(parts).removeprefix(".")


def _is_numeric_quantity(violation: WrongType) -> bool:
    """The API server also reads quantities that are numbers, which the models forbid."""
    is_quantity = violation.path[-2:-1] in (("limits",), ("requests",))
    return is_quantity and type(violation.value) in (int, float)


def _parent(body: Any, path: Path) -> Any:
    for part in path[:-1]:
        body = body[part]
    return body


def _violations(kind: str, body: dict[str, Any]) -> Iterator[str]:
    meta = body.get("metadata", {})
    name = meta.get("name", "")
    if not name:
        yield "metadata.name: Required value: name or generateName is required"
    elif not (_LABEL if kind == "services" else _SUBDOMAIN).fullmatch(name):
        yield (
            f'metadata.name: Invalid value: "{name}": a lowercase RFC 1123 subdomain must consist '
            "of lower case alphanumeric characters, '-' or '.', and must start and end with an "
            "alphanumeric character"
        )
    yield from _label_violations(meta, "metadata")
    if kind == "jobs":
        yield from _job_violations(body.get("spec", {}), name)
    elif kind == "pods":
        yield from _pod_violations(body.get("spec", {}), "spec")
    elif kind == "secrets":
        yield from _secret_violations(body)


def _job_violations(spec: dict[str, Any], name: str) -> Iterator[str]:
    template = spec.get("template", {})
    yield from _label_violations(template.get("metadata", {}), "spec.template.metadata")
    pod = template.get("spec", {})
    yield from _pod_violations(pod, "spec.template.spec")
    if pod.get("restartPolicy") not in ("Never", "OnFailure"):
        yield 'spec.template.spec.restartPolicy: Required value: valid values: "OnFailure", "Never"'
    for field in ("completions", "parallelism", "backoffLimit", "backoffLimitPerIndex"):
        if spec.get(field, 0) < 0:
            yield f"spec.{field}: Invalid value: {spec[field]}: must be greater than or equal to 0"
    completions = spec.get("completions", 1)
    if completions > _MAX_COMPLETIONS:
        yield f"spec.completions: Invalid value: this simulator runs at most {_MAX_COMPLETIONS}"
    if spec.get("completionMode") == "Indexed":
        if "completions" not in spec:
            yield "spec.completions: Required value: when completion mode is Indexed"
        # The host name of a pod is the name of its Job with the index.
        elif len(f"{name}-{max(0, completions - 1)}") > 63:
            yield "metadata.name: Invalid value: will not be able to create pod with hostname"
    elif "backoffLimitPerIndex" in spec:
        yield "spec.backoffLimitPerIndex: Invalid value: requires indexed completion mode"
    policy = spec.get("podFailurePolicy", {})
    # Combinations that are easy to get wrong.
    if policy and pod.get("restartPolicy") != "Never":
        yield "spec.podFailurePolicy: Invalid value: needs restartPolicy: Never"
    if policy and spec.get("podReplacementPolicy", "Failed") != "Failed":
        yield "spec.podReplacementPolicy: Unsupported value: can only be Failed"
    yield from _failure_rule_violations(policy.get("rules", []))


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
    containers = pod.get("containers", [])
    if not containers:
        yield f"{path}.containers: Required value"
    names = [one.get("name", "") for one in containers]
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
        yield from _environment_violations(container, where)
        yield from _resource_violations(container.get("resources", {}), f"{where}.resources")


def _environment_violations(container: dict[str, Any], path: str) -> Iterator[str]:
    for number, variable in enumerate(container.get("env", [])):
        where = f"{path}.env[{number}]"
        if not _VARIABLE.fullmatch(variable["name"]):
            yield f'{where}.name: Invalid value: "{variable["name"]}"'
        source = variable.get("valueFrom")
        field = (source or {}).get("fieldRef", {}).get("fieldPath")
        if source is not None and variable.get("value"):
            yield f"{where}.valueFrom: Invalid value: a value is set, too"
        if source is not None and (len(source) != 1 or field not in POD_FIELDS):
            yield f"{where}.valueFrom: Unsupported value: this simulator knows {POD_FIELDS}"
    for number, source in enumerate(container.get("envFrom", [])):
        if not source.get("secretRef", {}).get("name") or len(source) != 1:
            yield f"{path}.envFrom[{number}]: Invalid value: this simulator knows secretRef only"


def _resource_violations(resources: dict[str, Any], path: str) -> Iterator[str]:
    amounts: dict[str, dict[str, float]] = {"limits": {}, "requests": {}}
    for part, parsed in amounts.items():
        for name, text in resources.get(part, {}).items():
            if not _QUANTITY.fullmatch(text):
                yield f'{path}.{part}[{name}]: Invalid value: "{text}"'
            # Extended resources, such as GPUs, have a domain.
            elif "/" in name and not parse_quantity(text).is_integer():
                yield f'{path}.{part}[{name}]: Invalid value: "{text}": must be an integer'
            else:
                parsed[name] = parse_quantity(text)
    for name, amount in amounts["requests"].items():
        limit = amounts["limits"].get(name)
        if "/" in name and limit != amount:
            yield f"{path}.limits: Required value: must equal the request of {name}"
        elif limit is not None and amount > limit:
            yield f"{path}.requests: Invalid value: must be less than or equal to {name} limit"


def _secret_violations(secret: dict[str, Any]) -> Iterator[str]:
    for part in ("data", "stringData"):
        for key in secret.get(part, {}):
            if not _SECRET_KEY.fullmatch(key):
                yield f'{part}[{key}]: Invalid value: "{key}"'
    for key, text in secret.get("data", {}).items():
        try:
            base64.b64decode(text, validate=True).decode()
        except ValueError:
            yield f"data[{key}]: Invalid value: this simulator reads base64 of UTF-8 only"


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
