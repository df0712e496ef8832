"""Checks of Kubernetes objects by the models of the client library.

The models are generated from the OpenAPI document of Kubernetes. All versions that spotfit allows
have `openapi_types`, the type of each field as a text, and `attribute_map`, its name on the wire.
Versions before 37 write 'dict(str, str)' and 'list[str]' for 'Dict[str, str]' and 'List[str]'.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

from spotfit.host.plugins import require_module

Path = tuple[str | int, ...]
_CONTAINER = re.compile(r"(?P<kind>[Dd]ict|[Ll]ist)[\[(](str, )?(?P<item>.*)[\])]")
_SCALARS: dict[str, tuple[type, ...]] = {
    "str": (str,),
    # Texts on the wire.
    "bytes": (str,),
    "datetime": (str,),
    "bool": (bool,),
    "int": (int,),
    "float": (int, float),
}
_INT64 = range(-(2**63), 2**63)


class UnknownField(NamedTuple):
    """The model has no such field."""

    path: Path


class MissingField(NamedTuple):
    """A required field is absent."""

    path: Path


class WrongType(NamedTuple):
    """The value has another type."""

    path: Path
    expected: str
    value: Any


def violations(
    expected: str, value: Any, path: Path = ()
) -> Iterator[UnknownField | MissingField | WrongType]:
    """Yield how a decoded JSON value differs from a type such as 'V1Job' or 'List[str]'."""
    container = _CONTAINER.fullmatch(expected)
    if container is not None:
        kind = dict if container["kind"].lower() == "dict" else list
        if not isinstance(value, kind):
            yield WrongType(path, expected, value)
            return
        for key, one in value.items() if isinstance(value, dict) else enumerate(value):
            yield from violations(container["item"], one, (*path, key))
    elif expected in _SCALARS:
        is_bool = isinstance(value, bool)
        if not isinstance(value, _SCALARS[expected]) or is_bool != (expected == "bool"):
            yield WrongType(path, expected, value)
        elif isinstance(value, int) and value not in _INT64:
            yield WrongType(path, "int64", value)
    # Any JSON value, for example a port that is a number or a name.
    elif expected != "object":
        yield from _model_violations(expected, value, path)


def _model_violations(
    model: str, value: Any, path: Path
) -> Iterator[UnknownField | MissingField | WrongType]:
    if not isinstance(value, dict):
        yield WrongType(path, model, value)
        return
    types = _field_types(model)
    for name, one in value.items():
        if name in types:
            yield from violations(types[name], one, (*path, name))
        else:
            yield UnknownField((*path, name))
    for name in sorted(_required_fields(model) - value.keys()):
        yield MissingField((*path, name))


@cache
def _field_types(model: str) -> dict[str, str]:
    kind = getattr(require_module("kubernetes.client", extra="kubernetes"), model)
    return {wire: kind.openapi_types[name] for name, wire in kind.attribute_map.items()}


@cache
def _required_fields(model: str) -> frozenset[str]:
    client = require_module("kubernetes.client", extra="kubernetes")
    kind = getattr(client, model)
    # Since version 37 the models are those of pydantic.
    if fields := getattr(kind, "model_fields", None):
        required = {name for name, field in fields.items() if field.is_required()}
    else:
        required = {name for name in kind.attribute_map if not _accepts_none(client, kind, name)}
    return frozenset(kind.attribute_map[name] for name in required)


def _accepts_none(client: Any, kind: Any, name: str) -> bool:
    """Whether a model of a version before 37 has the field as an optional one."""
    unchecked = client.Configuration()
    unchecked.client_side_validation = False
    instance = kind(local_vars_configuration=unchecked)
    unchecked.client_side_validation = True
    try:
        setattr(instance, name, None)
    except ValueError:
        return False
    return True
