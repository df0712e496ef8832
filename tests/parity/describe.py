"""The API of a module as plain data: names, parameters, kinds, defaults, members.

Describes Ray Train, in its own environment, and spotfit. Imports only the standard library.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

KINDS = {
    inspect.Parameter.POSITIONAL_ONLY: "positional only",
    inspect.Parameter.POSITIONAL_OR_KEYWORD: "positional",
    inspect.Parameter.VAR_POSITIONAL: "*",
    inspect.Parameter.KEYWORD_ONLY: "keyword only",
    inspect.Parameter.VAR_KEYWORD: "**",
}
VARIADIC_KINDS = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
IGNORED_MODULES = ("abc", "builtins", "enum", "typing")
IGNORED_PACKAGES = (
    *("keras", "lightgbm", "lightning", "pytorch_lightning", "tensorflow", "tf_keras"),
    *("transformers", "xgboost"),
)
"""What classes inherit from frameworks belongs to their version, and is no API of Ray."""

Description = dict[str, Any]


def describe(obj: Any, example: Callable[[Any], Any] | None = None) -> Description:
    """Describe one public object. `example` creates an instance whose attributes are included."""
    if isinstance(obj, type) and issubclass(obj, enum.Enum):
        return {"kind": "enum", "values": {member.name: member.value for member in obj}}
    if isinstance(obj, type):
        attributes = _non_init_fields(obj) | (set(vars(example(obj))) if example else set())
        return _class(obj) | {"attributes": sorted(filter(is_public, attributes))}
    if callable(obj):
        return {"kind": "function", "parameters": parameters(obj)}
    return {"kind": "constant", "value": repr(obj)}


def parameters(obj: Any) -> list[list[Any]]:
    """Return name, kind and default (None or its text) of each parameter."""
    return [
        [_name(parameter), KINDS[parameter.kind], _default(parameter.default)]
        for parameter in inspect.signature(obj).parameters.values()
        if parameter.name not in ("self", "cls") and is_public(_name(parameter))
    ]


def is_public(name: str) -> bool:
    return not name.startswith("_")


def _name(parameter: inspect.Parameter) -> str:
    """The name of `*args` is irrelevant."""
    return KINDS[parameter.kind] if parameter.kind in VARIADIC_KINDS else parameter.name


def _class(obj: type) -> Description:
    protocol = bool(getattr(obj, "_is_protocol", False))
    facts: Description = {"kind": "protocol" if protocol else "class"}
    facts["parents"] = sorted({kind.__name__ for kind in _own_classes(obj)} - {obj.__name__})
    if dataclasses.is_dataclass(obj):
        frozen: Any = obj
        facts["dataclass"] = "frozen" if frozen.__dataclass_params__.frozen else "open"
    if not protocol and "__init__" in _defined_names(obj):
        facts["parameters"] = parameters(obj)
    members = {name: _member(obj, name) for name in _member_names(obj)}
    return facts | {
        "members": {
            name: description for name, description in sorted(members.items()) if description
        }
    }


def _defined_names(obj: type) -> set[str]:
    """Return the members defined by the class and its parents, except Python's."""
    return {name for kind in _own_classes(obj) for name in vars(kind)}


def _own_classes(obj: type) -> list[type]:
    return [
        kind
        for kind in obj.__mro__
        if kind.__module__ not in IGNORED_MODULES
        and kind.__module__.partition(".")[0] not in IGNORED_PACKAGES
    ]


def _member_names(obj: type) -> list[str]:
    names = {name for name in _defined_names(obj) if is_public(name)} - _fields(obj)
    return sorted(names | ({"__call__"} & _defined_names(obj)))


def _fields(obj: type) -> set[str]:
    """Fields of a dataclass are parameters already."""
    if not dataclasses.is_dataclass(obj):
        return set()
    return {field.name for field in dataclasses.fields(obj)}


def _non_init_fields(obj: type) -> set[str]:
    """Fields of a dataclass that are not parameters of its constructor."""
    if not dataclasses.is_dataclass(obj):
        return set()
    return {field.name for field in dataclasses.fields(obj) if not field.init}


def _member(obj: type, name: str) -> Description:
    found = inspect.getattr_static(obj, name)
    if isinstance(found, property | functools.cached_property):
        return {"kind": "property"}
    if isinstance(found, classmethod):
        return {"kind": "class method", "parameters": parameters(found.__func__)}
    if isinstance(found, staticmethod):
        return {"kind": "static method", "parameters": parameters(found.__func__)}
    if inspect.isfunction(found):
        return {"kind": "method", "parameters": parameters(found)}
    return {"kind": "constant", "value": repr(found)}


def _default(value: Any) -> str | None:
    if value is inspect.Parameter.empty:
        return None
    if isinstance(value, enum.Enum):
        return str(value)
    return repr(value)


def describe_all(
    objects: Mapping[str, Any], examples: Mapping[str, Callable[[Any], Any]]
) -> dict[str, Description]:
    """Describe all objects, by name."""
    return {name: describe(obj, examples.get(name)) for name, obj in sorted(objects.items())}
