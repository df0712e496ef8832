"""Search for the part of an object that cannot be pickled, or that makes a pickle large.

This module does not pickle: the caller passes a `PickleCheck`. The search descends into the first
part that fails the check, until no part of the current object fails.
"""

from __future__ import annotations

import copyreg
import dis
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from types import CodeType, FunctionType, MappingProxyType, MethodType, ModuleType
from typing import Any, NamedTuple

LabeledPart = tuple[str, Any]
"""A label such as "closure variable 'model'", and the part itself."""

PickleCheck = Callable[[Any], Exception | None]
"""Returns the error of pickling an object, or None."""

# Each level pickles its object once, so the search is quadratic in the depth.
_MAX_DEPTH = 40
_ATOMS = (bool, int, float, complex, str, bytes, bytearray, type(None))
_SKIPPED_ATTRIBUTES = {"__dict__", "__weakref__", "_abc_impl", "__builtins__"}


class UnpicklablePart(NamedTuple):
    """The innermost part that cannot be pickled."""

    path: tuple[str, ...]
    value: Any
    error: Exception

    def __str__(self) -> str:
        return " -> ".join((*self.path, f"{_describe_type(self.value)} cannot be pickled"))


def find_unpicklable_part(
    value: Any, name: str, check_pickle: PickleCheck
) -> UnpicklablePart | None:
    """Return the innermost part of `value` that cannot be pickled, or None if there is none."""
    if error := check_pickle(value):
        suspect = UnpicklablePart((name,), value, error)
        return _UnpicklableSearch(check_pickle).find_innermost(suspect)
    return None


def largest_parts(
    value: Any, size: Callable[[Any], int], *, count: int = 3
) -> list[tuple[str, int]]:
    """Return labels and sizes of the `count` largest direct parts, largest first."""
    sizes = [(label, size(part)) for label, part in iterate_parts(value)]
    return sorted(sizes, key=lambda item: -item[1])[:count]


def iterate_parts(value: Any) -> Iterator[LabeledPart]:
    """List the objects that a by-value pickle of `value` references directly."""
    match value:
        case FunctionType():
            yield from _function_parts(value)
        case MethodType():
            yield "its object", value.__self__
            yield "its function", value.__func__
        case partial():
            yield "its function", value.func
            for n, argument in enumerate(value.args):
                yield f"bound argument {n}", argument
            for name, argument in value.keywords.items():
                yield f"bound argument {name!r}", argument
        case dict() | MappingProxyType():
            yield from _mapping_parts(value)
        case list() | tuple() | set() | frozenset():
            yield from _item_parts(value)
        case ModuleType() | type():
            yield from _attribute_parts(vars(value))
        case staticmethod() | classmethod():
            yield "its function", value.__func__
        case property():
            accessors = {"fget": value.fget, "fset": value.fset, "fdel": value.fdel}
            yield from _attribute_parts(accessors)
        case _:
            yield from _instance_parts(value)


class _UnpicklableSearch:
    """Depth-first search. A visited object is not entered again, so cycles terminate."""

    def __init__(self, check_pickle: PickleCheck) -> None:
        self._check_pickle = check_pickle
        # Holds references to the objects: the id of a deleted object could be reused.
        self._visited: dict[int, Any] = {}

    def find_innermost(self, suspect: UnpicklablePart) -> UnpicklablePart | None:
        """Return the innermost failing part, or None if all failing parts are visited already."""
        self._visited[id(suspect.value)] = suspect.value
        in_a_cycle = False
        parts = iterate_parts(suspect.value) if len(suspect.path) < _MAX_DEPTH else ()
        for label, part in parts:
            error = None if isinstance(part, _ATOMS) else self._check_pickle(part)
            if error is None:
                continue
            if id(part) in self._visited:
                in_a_cycle = True
            elif found := self.find_innermost(UnpicklablePart((*suspect.path, label), part, error)):
                return found
        # In a cycle the failing part is another one, which an outer call finds or has found.
        return None if in_a_cycle else suspect


def _function_parts(function: FunctionType) -> Iterator[LabeledPart]:
    code, defaults = function.__code__, function.__defaults__ or ()
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        with suppress(ValueError):  # the variable is not bound yet
            yield f"closure variable {name!r}", cell.cell_contents
    for name in _global_names(code):
        if name in function.__globals__:
            yield f"global {name!r}", function.__globals__[name]
    # Defaults belong to the last positional parameters.
    positional = code.co_varnames[: code.co_argcount][code.co_argcount - len(defaults) :]
    by_name = dict(zip(positional, defaults, strict=True)) | (function.__kwdefaults__ or {})
    for name, default in by_name.items():
        yield f"default of {name!r}", default
    yield from _attribute_parts(vars(function))


def _global_names(code: CodeType) -> Iterable[str]:
    # From the instructions: co_names also has the names of attributes. A dict keeps the order.
    names = {
        step.argval: None
        for step in dis.get_instructions(code)
        if step.opname in {"LOAD_GLOBAL", "STORE_GLOBAL", "DELETE_GLOBAL"}
    }
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names |= dict.fromkeys(_global_names(constant))
    return names


def _mapping_parts(mapping: dict[Any, Any] | MappingProxyType[Any, Any]) -> Iterator[LabeledPart]:
    for key, value in mapping.items():
        yield f"key {_shorten(key)}", key
        yield f"[{_shorten(key)}]", value


def _item_parts(items: Iterable[Any]) -> Iterator[LabeledPart]:
    for n, item in enumerate(items):
        yield f"[{n}]", item


def _attribute_parts(
    attributes: dict[str, Any] | MappingProxyType[str, Any],
) -> Iterator[LabeledPart]:
    for name, value in attributes.items():
        if name not in _SKIPPED_ATTRIBUTES:
            yield f".{name}", value


def _instance_parts(value: Any) -> Iterator[LabeledPart]:
    reduce = copyreg.dispatch_table.get(type(value))
    try:
        reduced: Any = reduce(value) if reduce else value.__reduce_ex__(5)
    except Exception:  # noqa: BLE001 - a user's __reduce__; its error was recorded by the check
        return
    if not isinstance(reduced, tuple):  # a name: the object is pickled by reference
        return
    # A function, its arguments, and optionally state, list items, dict items and a state setter.
    _, arguments, state, items, pairs = (*reduced, None, None, None)[:5]
    for argument in arguments:
        label = f"its class {argument.__qualname__}" if isinstance(argument, type) else "its value"
        yield label, argument
    # A tuple is the state of an object with slots: its dict, and the values of the slots.
    for part in state if isinstance(state, tuple) else (state,):
        if part is not None:
            yield from _attribute_parts(part) if isinstance(part, dict) else [("its state", part)]
    yield from _item_parts(items or ())
    yield from _mapping_parts(dict(pairs or ()))


def _shorten(key: Any) -> str:
    text = repr(key) if isinstance(key, _ATOMS) else f"<{_describe_type(key)}>"
    return text if len(text) <= 40 else f"{text[:37]}…"


def _describe_type(value: Any) -> str:
    if isinstance(value, (FunctionType, type, ModuleType)):
        return f"{type(value).__name__} {value.__name__!r}"
    module, name = type(value).__module__, type(value).__qualname__
    return name if module == "builtins" else f"{module}.{name}"
