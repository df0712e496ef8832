"""Validation of AWS requests: service models of botocore, and limits that only their text states.

Sources: the documentation strings of botocore's model of Batch, which are those of
https://docs.aws.amazon.com/batch/latest/APIReference/.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

from spotfit.host.plugins import require_module

_NAME = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9_-]{0,127}")
_DEFINITION_NAME = re.compile(r"[a-zA-Z0-9_-]{1,128}")
_IMAGE = re.compile(r"[a-zA-Z0-9_:./#@-]{1,255}")
_SHARE = re.compile(r"[a-zA-Z0-9]{1,255}\*?")
# "letters, numbers, periods, colons, and white spaces", optionally an asterisk at the end
_REASON_PATTERN = re.compile(r"[a-zA-Z0-9.:\s]{0,511}[a-zA-Z0-9.:\s*]")
_EXIT_CODE_PATTERN = re.compile(r"[0-9]{0,511}[0-9*]")
_MAX_ATTEMPTS, _MAX_EXIT_RULES = 10, 5
_ARRAY_SIZES = range(2, 10_001)
_MIN_TIMEOUT_S = 60
# Documented as "The values aren't case sensitive", unlike other enumerations.
_CASE_INSENSITIVE_SHAPES = ("RetryAction",)

_INTEGERS = {"integer": range(-(2**31), 2**31), "long": range(-(2**63), 2**63)}


def find_model_violation(service: str, operation: str, body: Any) -> str:
    """Return what the service's model forbids in the request; '' if it is valid."""
    shape = _service_model(service).operation_model(operation).input_shape
    # Only descriptions of all objects have no parameters at all.
    if shape is None:
        return ""
    validate = require_module("botocore.validate", extra="aws")
    report = validate.ParamValidator().validate(body, shape)
    if report.has_errors():
        return str(report.generate_report())
    # The validator of botocore leaves these to the service.
    return next(_constraint_violations(shape, body, operation), "")


def find_definition_violation(body: Mapping[str, Any]) -> str:
    """Return the documented limit that a job definition exceeds; '' if there is none."""
    name = body["jobDefinitionName"]
    if not _DEFINITION_NAME.fullmatch(name):
        return f"Provided name {name} is not supported pattern[a-zA-Z_0-9-]{{1,128}}"
    container = body.get("containerProperties")
    if body["type"] != "container" or container is None:
        return "This simulator runs jobs with containerProperties only."
    if not _IMAGE.fullmatch(container.get("image", "")):
        return "Container image is required, and must match its pattern."
    if not container.get("command"):
        return "This simulator runs no images: set the command."
    needs = {one["type"]: one["value"] for one in container.get("resourceRequirements", [])}
    # The members are the deprecated form of both requirements.
    for kind, member in (("VCPU", "vcpus"), ("MEMORY", "memory")):
        text = str(needs.get(kind, container.get(member, "")))
        if not re.fullmatch(r"\d{1,9}(\.\d{1,9})?", text) or float(text) <= 0:
            return f"Container requires a positive resource requirement {kind}."
    if not re.fullmatch(r"\d{1,9}", needs.get("GPU", "0")):
        return "The resource requirement GPU must be a number."
    return _find_strategy_violation(body)


def find_job_violation(body: Mapping[str, Any], *, is_fair_share: bool) -> str:
    """Return the documented limit that a job exceeds; '' if there is none."""
    if not _NAME.fullmatch(body["jobName"]):
        return "Job name should match valid pattern"
    size = body.get("arrayProperties", {}).get("size")
    if size is not None and size not in _ARRAY_SIZES:
        return "Array size must be between 2 and 10000."
    share = body.get("shareIdentifier", "")
    if share and not is_fair_share:
        return "Share identifier cannot be specified: the job queue has no scheduling policy."
    if is_fair_share and not _SHARE.fullmatch(share):
        return "Share identifier is required: the job queue has a scheduling policy."
    pairs = body.get("containerOverrides", {}).get("environment", [])
    # The prefix is reserved, which clients learn only from this error.
    if reserved := [one for one in pairs if one.get("name", "").startswith("AWS_BATCH")]:
        return f"Reserved names: {', '.join(one['name'] for one in reserved)}."
    return _find_strategy_violation(body)


def _find_strategy_violation(body: Mapping[str, Any]) -> str:
    timeout_s = body.get("timeout", {}).get("attemptDurationSeconds", _MIN_TIMEOUT_S)
    if timeout_s < _MIN_TIMEOUT_S:
        return f"The timeout must be at least {_MIN_TIMEOUT_S} seconds."
    strategy = body.get("retryStrategy", {})
    rules = strategy.get("evaluateOnExit", [])
    if not 1 <= strategy.get("attempts", 1) <= _MAX_ATTEMPTS:
        return f"Retry attempts must be between 1 and {_MAX_ATTEMPTS}."
    if rules and "attempts" not in strategy:
        return "evaluateOnExit requires attempts."
    if len(rules) > _MAX_EXIT_RULES:
        return f"evaluateOnExit can have at most {_MAX_EXIT_RULES} conditions."
    patterns = {
        "onStatusReason": _REASON_PATTERN,
        "onReason": _REASON_PATTERN,
        "onExitCode": _EXIT_CODE_PATTERN,
    }
    for rule in rules:
        for name, pattern in patterns.items():
            if name in rule and not pattern.fullmatch(rule[name]):
                return f"{name} {rule[name]!r} should match valid pattern"
    return ""


@cache
def _service_model(service: str) -> Any:
    loaders = require_module("botocore.loaders", extra="aws")
    model = require_module("botocore.model", extra="aws")
    return model.ServiceModel(loaders.Loader().load_service_model(service, "service-2"))


def _constraint_violations(shape: Any, value: Any, path: str) -> Iterator[str]:
    """Yield violated enumerations, sizes and patterns of a value with valid types."""
    if shape.type_name == "structure":
        for name, member in value.items():
            yield from _constraint_violations(shape.members[name], member, f"{path}.{name}")
    elif shape.type_name == "list":
        for one in value:
            yield from _constraint_violations(shape.member, one, f"{path}[]")
    elif shape.type_name == "map":
        for key, one in value.items():
            yield from _constraint_violations(shape.key, key, f"{path} key")
            yield from _constraint_violations(shape.value, one, f"{path}.{key}")
    elif shape.type_name in _INTEGERS and value not in _INTEGERS[shape.type_name]:
        yield f"{path}: {value} is not of the type {shape.type_name}"
    limits = shape.metadata
    if "enum" in limits:
        ignores_case = shape.name in _CASE_INSENSITIVE_SHAPES
        if (value.upper() if ignores_case else value) not in limits["enum"]:
            yield f"{path}: {value!r} is not one of {', '.join(limits['enum'])}"
    size = len(value) if isinstance(value, str | list | dict) else value
    if not limits.get("min", size) <= size <= limits.get("max", size):
        yield f"{path}: the size {size} is not valid"
    if "pattern" in limits and not re.fullmatch(limits["pattern"], value):
        yield f"{path}: {value!r} does not match {limits['pattern']}"
