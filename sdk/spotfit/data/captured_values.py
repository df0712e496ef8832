"""Digests of functions of the user with all values that they have captured.

Unlike a fingerprint of the code, a digest covers arrays, attributes of objects, global variables
and functions that are called. Equal functions and values have equal digests in every process.
"""

from __future__ import annotations

import dis
import functools
import hashlib
import pickle
import sys
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

from spotfit.code.fingerprint import fingerprint_function
from spotfit.data.user_functions import UserFunction
from spotfit.host import log

_LOCKS = (type(threading.Lock()), type(threading.RLock()))
_CachedFunction = type(functools.cache(len))
_LOADS = ("LOAD_GLOBAL", "LOAD_NAME")
_IGNORED_MEMBERS = {
    *("__annotations__", "__dataclass_fields__", "__dataclass_params__", "__dict__", "__doc__"),
    *("__firstlineno__", "__static_attributes__", "__weakref__", "_abc_impl"),
}
"""Members of classes that do not determine results, some of which cannot be pickled."""


def digest_captured(values: Iterable[Any]) -> str | None:
    """Return a hexadecimal digest of functions and other values; None if one has no digest.

    Objects are pickled, so one that cannot be pickled has none. Definitions of installed packages
    are identified by their names.
    """
    try:
        return _Digests().of(list(values))
    except Exception as error:  # noqa: BLE001 - of any type: methods of the user's objects are called
        log.debug("data.captured_value_unknown", error=repr(error))
        return None


class _Digests:
    """Digests of values. Every function and class is described once."""

    def __init__(self) -> None:
        self._definitions: dict[int, str] = {}

    def of(self, value: Any) -> str:
        sink = _HashSink()
        _DigestPickler(sink, self).dump(value)
        return sink.digest.hexdigest()

    def of_definition(self, definition: Any) -> str:
        """Return the text of a function or class: the name if it is installed or recursive."""
        name = f"{definition.__module__}.{definition.__qualname__}"
        if id(definition) not in self._definitions:
            self._definitions[id(definition)] = name
            if _is_of_user(definition.__module__):
                is_class = isinstance(definition, type)
                parts = _class_parts(definition) if is_class else _function_parts(definition)
                self._definitions[id(definition)] = f"{name} {self.of(parts)}"
        return self._definitions[id(definition)]


class _HashSink:
    def __init__(self) -> None:
        self.digest = hashlib.sha256()

    def write(self, chunk: Any) -> int:
        self.digest.update(chunk)
        return len(chunk)


class _DigestPickler(pickle.Pickler):
    """Pickles equal values to equal bytes in every process."""

    def __init__(self, sink: _HashSink, digests: _Digests) -> None:
        super().__init__(sink, protocol=5)
        # Without the memo, which distinguishes two equal strings from one that is used twice.
        self.fast = True
        self._digests = digests

    def persistent_id(self, value: Any) -> str | None:
        # Not cloudpickle: it gives the classes of a script a random identifier in each process.
        if isinstance(value, FunctionType | type):
            return self._digests.of_definition(value)
        if isinstance(value, UserFunction):
            return self._digests.of(value.captured)
        if isinstance(value, _CachedFunction):  # pickled by its name only
            return self._digests.of(value.__wrapped__)
        if isinstance(value, set | frozenset):
            # Sorted: the iteration order of a set of strings depends on the process's hash seed.
            return f"{{{','.join(sorted(map(self._digests.of, value)))}}}"
        if isinstance(value, ModuleType):
            return value.__name__
        if isinstance(value, _LOCKS):
            return "lock"
        return _tensor_text(value) if "torch" in sys.modules else None


def _tensor_text(value: Any) -> str | None:
    import torch

    if not isinstance(value, torch.Tensor):
        return None
    # Not its pickle, which has addresses. As bytes: numpy lacks types such as bfloat16.
    elements = value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
    digest = hashlib.sha256(elements.tobytes()).hexdigest()
    return f"{value.dtype}{list(value.shape)}{digest}"


def _is_of_user(module: str | None) -> bool:
    """Whether a module is part of the script or its project, not an installed package."""
    package = (module or "").partition(".")[0]
    if package in {*sys.builtin_module_names, *sys.stdlib_module_names, "spotfit"}:
        return package == "__main__"
    file = getattr(sys.modules.get(module or ""), "__file__", None) or ""
    return not {"site-packages", "dist-packages"} & set(Path(file).parts)


def _function_parts(function: FunctionType) -> list[Any]:
    closure = [_cell_contents(cell) for cell in function.__closure__ or ()]
    referenced = dict(sorted(_referenced(function)))
    attributes = {name: vars(function)[name] for name in sorted(vars(function))}
    defaults = (function.__defaults__, function.__kwdefaults__)
    return [fingerprint_function(function), defaults, closure, referenced, attributes]


def _cell_contents(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # the variable is not bound
        return None


def _referenced(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """Yield the global variables of a function, and what it uses of the project's modules."""
    for code in _codes(function.__code__):
        loaded = {one.argval for one in dis.get_instructions(code) if one.opname in _LOADS}
        for name in loaded & function.__globals__.keys():
            value = function.__globals__[name]
            yield name, value
            if isinstance(value, ModuleType) and _is_of_user(value.__name__):
                used = set(code.co_names) & vars(value).keys()
                yield from ((f"{name}.{member}", vars(value)[member]) for member in used)


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def _class_parts(definition: type) -> list[Any]:
    members = {
        name: _unwrap(vars(definition)[name])
        for name in sorted(vars(definition).keys() - _IGNORED_MEMBERS)
    }
    return [definition.__bases__, members]


def _unwrap(member: Any) -> Any:
    if isinstance(member, staticmethod | classmethod):
        return type(member).__name__, member.__func__
    if isinstance(member, property):
        return "property", member.fget
    return member.func if isinstance(member, functools.cached_property) else member  # noqa: TID251 - of users
