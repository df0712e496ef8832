"""Fingerprints of code: equal for the same code in every process, wherever its lines stand."""

from __future__ import annotations

import functools
import hashlib
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

_CONSTANTS = (bool, int, float, str, bytes, tuple, frozenset, type(None))


def code_of(fn: Callable[..., Any]) -> str:
    """The function by name and code, with what is bound to it: arguments, defaults, a closure."""
    if isinstance(fn, functools.partial):
        return f"partial {code_of(fn.func)} {plain(fn.args)} {plain(fn.keywords)}"
    named = f"{getattr(fn, '__module__', '')}.{getattr(fn, '__qualname__', type(fn).__qualname__)}"
    code = getattr(fn, "__code__", None)
    if code is None:
        return named
    bound = (getattr(fn, "__defaults__", None), getattr(fn, "__kwdefaults__", None), _cells(fn))
    return f"{named}:{_digest(code)}:{plain(bound)}"


def part_of(thing: types.FunctionType | types.ModuleType | type) -> str:
    """A function, class or module as it is carried along: its code, and the constants it uses."""
    if isinstance(thing, types.FunctionType):
        used = {name: thing.__globals__.get(name) for name in _names(thing.__code__)}
        return f"{code_of(thing)}:{plain(_constants(used))}"
    named = getattr(thing, "__qualname__", thing.__name__)
    return f"{named}:{plain(_constants(vars(thing)))}"


def digest_of(parts: Iterable[str]) -> str:
    """All of them in a few letters, in whatever order they come."""
    return hashlib.sha256("\n".join(sorted(parts)).encode()).hexdigest()[:16]


def plain(value: Any) -> str:
    """A text that is equal for equal plain data; objects count by their type alone."""
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{plain(value[key])}" for key in sorted(value, key=str)) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ",".join(plain(one) for one in value) + "]"
    if isinstance(value, (set, frozenset)):
        return "{" + ",".join(sorted(plain(one) for one in value)) + "}"
    if isinstance(value, types.CodeType):
        return _digest(value)
    if value is None or isinstance(value, (bool, int, float, str, bytes)):
        return repr(value)
    return type(value).__qualname__


def _cells(fn: Callable[..., Any]) -> list[Any]:
    return [_content(cell) for cell in getattr(fn, "__closure__", None) or ()]


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # a name that was never bound
        return None


def _digest(code: types.CodeType) -> str:
    told = code.co_code + plain((code.co_names, code.co_varnames, code.co_consts)).encode()
    return hashlib.sha256(told).hexdigest()


def _names(code: types.CodeType) -> Iterator[str]:
    """What the code and the functions inside it may look up in their module."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)


def _constants(values: Mapping[str, Any]) -> dict[str, Any]:
    """Values that stay what they are; others change while a script runs."""
    return {
        name: value
        for name, value in values.items()
        if isinstance(value, _CONSTANTS) and not name.startswith("__")
    }
