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

Description = dict[str, Any]


def describe(thing: Any, example: Callable[[Any], Any] | None = None) -> Description:
    """Describe one public object. `example` creates an instance whose attributes are included."""
    if isinstance(thing, type) and issubclass(thing, enum.Enum):
        return {"kind": "enum", "values": {member.name: member.value for member in thing}}
    if isinstance(thing, type):
        attributes = _non_init_fields(thing) | (set(vars(example(thing))) if example else set())
        return _class(thing) | {"attributes": sorted(filter(is_public, attributes))}
    if callable(thing):
        return {"kind": "function", "parameters": parameters(thing)}
    return {"kind": "constant", "value": repr(thing)}


def parameters(thing: Any) -> list[list[Any]]:
    """Return name, kind and default (None or its text) of each parameter."""
    return [
        [_name(given), KINDS[given.kind], _default(given.default)]
        for given in inspect.signature(thing).parameters.values()
        if given.name not in ("self", "cls") and is_public(_name(given))
    ]


def is_public(name: str) -> bool:
    return not name.startswith("_")


def _name(given: inspect.Parameter) -> str:
    """The name of `*args` is irrelevant."""
    return KINDS[given.kind] if given.kind in VARIADIC_KINDS else given.name


def _class(thing: type) -> Description:
    protocol = bool(getattr(thing, "_is_protocol", False))
    facts: Description = {"kind": "protocol" if protocol else "class"}
    facts["parents"] = sorted({kind.__name__ for kind in _own_classes(thing)} - {thing.__name__})
    if dataclasses.is_dataclass(thing):
        frozen: Any = thing
        facts["dataclass"] = "frozen" if frozen.__dataclass_params__.frozen else "open"
    if not protocol and "__init__" in _defined_names(thing):
        facts["parameters"] = parameters(thing)
    members = {name: _member(thing, name) for name in _member_names(thing)}
    return facts | {"members": {name: fact for name, fact in sorted(members.items()) if fact}}


def _defined_names(thing: type) -> set[str]:
    """Return the members defined by the class and its parents, except Python's."""
    return {name for kind in _own_classes(thing) for name in vars(kind)}


def _own_classes(thing: type) -> list[type]:
    return [kind for kind in thing.__mro__ if kind.__module__ not in IGNORED_MODULES]


def _member_names(thing: type) -> list[str]:
    names = {name for name in _defined_names(thing) if is_public(name)} - _fields(thing)
    return sorted(names | ({"__call__"} & _defined_names(thing)))


def _fields(thing: type) -> set[str]:
    """Fields of a dataclass are parameters already."""
    if not dataclasses.is_dataclass(thing):
        return set()
    return {field.name for field in dataclasses.fields(thing)}


def _non_init_fields(thing: type) -> set[str]:
    """Fields of a dataclass that are not parameters of its constructor."""
    if not dataclasses.is_dataclass(thing):
        return set()
    return {field.name for field in dataclasses.fields(thing) if not field.init}


def _member(thing: type, name: str) -> Description:
    found = inspect.getattr_static(thing, name)
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
    things: Mapping[str, Any], examples: Mapping[str, Callable[[Any], Any]]
) -> dict[str, Description]:
    """Describe all objects, by name."""
    return {name: describe(thing, examples.get(name)) for name, thing in sorted(things.items())}
