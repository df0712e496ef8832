"""Fingerprints of functions, classes and modules, to detect changes of the user's code.

Equal code has equal fingerprints in every process, independent of line numbers and hash seeds.
"""

from __future__ import annotations

import functools
import hashlib
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

_CONSTANTS = (bool, int, float, str, bytes, tuple, frozenset, type(None))


def fingerprint_function(fn: Callable[..., Any]) -> str:
    """Return the fingerprint of a function: name, bytecode, bound arguments, defaults, closure.

    Equal code gives an equal text in every process. `fit()` compares it to detect that a run of the
    same name has another function. A callable without bytecode, such as a builtin or an object with
    `__call__`, is identified by its name only.
    """
    if isinstance(fn, functools.partial):
        bound_args = f"{stable_repr(fn.args)} {stable_repr(fn.keywords)}"
        # A partial has no code of its own.
        return f"partial {fingerprint_function(fn.func)} {bound_args}"
    name = f"{getattr(fn, '__module__', '')}.{getattr(fn, '__qualname__', type(fn).__qualname__)}"
    code = getattr(fn, "__code__", None)
    if code is None:  # a builtin or a callable object: only its name identifies it
        return name
    closure = []
    for cell in getattr(fn, "__closure__", None) or ():
        try:
            closure.append(cell.cell_contents)
        except ValueError:  # the variable is not bound
            closure.append(None)
    bound = (getattr(fn, "__defaults__", None), getattr(fn, "__kwdefaults__", None), closure)
    return f"{name}:{_hash_code(code)}:{stable_repr(bound)}"


def fingerprint_definition(definition: types.FunctionType | types.ModuleType | type) -> str:
    """Return the fingerprint of a function, class or module that is pickled by value.

    Includes the values of the constants that it uses. Equal code gives an equal text in every
    process.
    """
    if isinstance(definition, types.FunctionType):
        referenced = {
            name: definition.__globals__.get(name)
            for name in _referenced_names(definition.__code__)
        }
        return f"{fingerprint_function(definition)}:{stable_repr(_select_constants(referenced))}"
    name = getattr(definition, "__qualname__", definition.__name__)
    return f"{name}:{stable_repr(_select_constants(vars(definition)))}"


def combine_fingerprints(parts: Iterable[str]) -> str:
    """Return one digest (16 hex digits) of several fingerprints, independent of their order."""
    return hashlib.sha256("\n".join(sorted(parts)).encode()).hexdigest()[:16]


def stable_repr(value: Any) -> str:
    """Return a text that is equal for equal plain data in every process.

    Plain data are numbers, strings, bytes, None and containers of them. Other objects are reduced
    to the name of their type, code objects to a hash.
    """
    if isinstance(value, Mapping):
        return (
            "{"
            + ",".join(f"{key}:{stable_repr(value[key])}" for key in sorted(value, key=str))
            + "}"
        )
    if isinstance(value, (list, tuple)):
        return "[" + ",".join(stable_repr(item) for item in value) + "]"
    if isinstance(value, (set, frozenset)):
        # Sorted: the iteration order of a set of strings depends on the process's hash seed.
        return "{" + ",".join(sorted(stable_repr(item) for item in value)) + "}"
    if isinstance(value, types.CodeType):
        return _hash_code(value)
    # Other objects by type only: their repr may contain an address, which differs per process.
    if value is None or isinstance(value, (bool, int, float, str, bytes)):
        return repr(value)
    return type(value).__qualname__


def _hash_code(code: types.CodeType) -> str:
    # Not marshal or co_linetable: these contain line numbers and file names.
    content = code.co_code + stable_repr((code.co_names, code.co_varnames, code.co_consts)).encode()
    return hashlib.sha256(content).hexdigest()


def _referenced_names(code: types.CodeType) -> Iterator[str]:
    """List the global names that the code and its nested functions may look up."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _referenced_names(constant)


def _select_constants(values: Mapping[str, Any]) -> dict[str, Any]:
    """Select immutable values. Mutable ones change while a script runs, without a code change."""
    return {
        name: value
        for name, value in values.items()
        if isinstance(value, _CONSTANTS) and not name.startswith("__")
    }
