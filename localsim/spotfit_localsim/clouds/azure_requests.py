"""Validation of Azure Batch requests: the models of the client library.

The service rejects properties that it does not know, wrong types and missing properties:
https://learn.microsoft.com/rest/api/batchservice/batch-status-and-error-codes and
https://github.com/Azure/doAzureParallel/issues/211.
"""

from __future__ import annotations

import re
import shlex
import types
import typing
from collections.abc import Iterator, Mapping, MutableMapping
from enum import Enum
from functools import cache
from typing import Any

from spotfit.host.plugins import require_module

# "Any combination of alphanumeric characters including hyphens and underscores, and cannot contain
# more than 64 characters": the documentation of BatchJobCreateOptions.id.
_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")
_MAX_DISPLAY_NAME = 1024


class ModelViolation(typing.NamedTuple):
    """A violation: the error code of the service, and its reason."""

    code: str
    reason: str


def find_model_violation(model: str, body: Any) -> ModelViolation | None:
    """Return the first violation of a model such as 'BatchJobCreateOptions'; None if valid."""
    kind = getattr(require_module("azure.batch.models", extra="azure"), model)
    return next(_violations(kind, body, ""), None)


def find_limit_violation(body: Mapping[str, Any]) -> ModelViolation | None:
    """Return the documented limit that a valid pool, job or task exceeds; None if there is none."""
    if not _ID.fullmatch(body["id"]):
        return ModelViolation("InvalidPropertyValue", f"{body['id']!r} cannot be an id.")
    if len(body.get("displayName", "")) > _MAX_DISPLAY_NAME:
        return ModelViolation("InvalidPropertyValue", "The displayName is too long.")
    if "commandLine" in body:
        try:
            has_command = bool(shlex.split(body["commandLine"]))
        # The service gives any text to the node; this simulator has to run it.
        except ValueError as error:
            return ModelViolation("InvalidPropertyValue", f"commandLine: {error}")
        if not has_command:
            return ModelViolation("InvalidPropertyValue", "The commandLine is empty.")
    return None


def _violations(kind: Any, value: Any, path: str) -> Iterator[ModelViolation]:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any:
        return
    if origin in (typing.Union, types.UnionType):
        has_enumeration = any(isinstance(one, type) and issubclass(one, Enum) for one in arguments)
        # The library accepts any text for an enumeration, the service does not.
        kinds = [one for one in arguments if not (has_enumeration and one is str)]
        found = [list(_violations(one, value, path)) for one in kinds]
        # The reasons of a model are more useful than those of None or of an enumeration.
        if all(found):
            yield from max(found, key=len)
    # The models of the library are mappings.
    elif isinstance(kind, type) and issubclass(kind, MutableMapping):
        yield from _model_violations(kind, value, path)
    elif origin is list:
        if not isinstance(value, list):
            yield _wrong_type(path, "array")
            return
        for number, one in enumerate(value):
            yield from _violations(arguments[0], one, f"{path}[{number}]")
    elif origin is dict:
        if not isinstance(value, dict):
            yield _wrong_type(path, "object")
            return
        for key, one in value.items():
            yield from _violations(arguments[1], one, f"{path}.{key}")
    elif not _is_instance(kind, value):
        yield _wrong_type(path, getattr(kind, "__name__", str(kind)))


def _model_violations(kind: Any, value: Any, path: str) -> Iterator[ModelViolation]:
    if not isinstance(value, dict):
        yield _wrong_type(path, "object")
        return
    fields = _fields(kind)
    for name, one in value.items():
        if name not in fields:
            reason = f"The property '{name}' does not exist on type '{kind.__name__}'."
            yield ModelViolation("InvalidRequestBody", reason)
        else:
            yield from _violations(fields[name], one, f"{path}.{name}")
    for name, annotation in fields.items():
        if name not in value and type(None) not in typing.get_args(annotation):
            yield ModelViolation("MissingRequiredProperty", f"{path}.{name}".lstrip("."))


@cache
def _fields(kind: Any) -> dict[str, Any]:
    """Return the annotation of each property by its name on the wire."""
    # The first instance fills in the names.
    kind({})
    models = require_module("azure.batch.models", extra="azure")
    # The module of the models imports this name for type checkers only.
    hints = typing.get_type_hints(kind, localns={"_models": models})
    # The library offers no public way to read the names.
    fields = kind._attr_to_rest_field.items()  # noqa: SLF001
    return {field._rest_name: hints[name] for name, field in fields}  # noqa: SLF001


def _is_instance(kind: Any, value: Any) -> bool:
    if kind is type(None):
        return value is None
    if kind is bool:
        return isinstance(value, bool)
    if kind in (int, float):
        # Integers of the service have 32 or 64 bits; the library does not say which.
        is_number = isinstance(value, int | kind) and not isinstance(value, bool)
        return is_number and abs(value) < 2**63
    if isinstance(kind, type) and issubclass(kind, Enum):
        # Resource Manager writes the same values with a capital letter.
        return isinstance(value, str) and value.lower() in {one.value.lower() for one in kind}
    # Dates, durations and bytes are texts on the wire.
    return isinstance(value, str)


def _wrong_type(path: str, expected: str) -> ModelViolation:
    reason = f"Cannot convert the value of '{path.lstrip('.')}' to the expected type '{expected}'."
    return ModelViolation("InvalidRequestBody", reason)
