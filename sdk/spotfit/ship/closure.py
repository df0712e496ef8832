"""What does this object drag along, and which part of it cannot travel?

Nothing here pickles: the caller passes `refusal`, which says why an object cannot be pickled, and
the search follows the first part that cannot down to the one that has no such part.
"""

from __future__ import annotations

import copyreg
import dis
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from types import CodeType, FunctionType, MappingProxyType, MethodType, ModuleType
from typing import Any, NamedTuple

Part = tuple[str, Any]
"""How the part is reached from the whole, and the part."""

Refusal = Callable[[Any], Exception | None]
"""Why an object cannot be pickled; None when it can."""

_DEEPEST = 40
_ATOMS = (bool, int, float, complex, str, bytes, bytearray, type(None))
_NOT_PICKLED = {"__dict__", "__weakref__", "_abc_impl", "__builtins__"}


class Culprit(NamedTuple):
    """The innermost part that cannot be pickled."""

    path: tuple[str, ...]
    thing: Any
    why: Exception

    def __str__(self) -> str:
        return " -> ".join((*self.path, f"{_kind(self.thing)} cannot be pickled"))


def find_culprit(thing: Any, name: str, refusal: Refusal) -> Culprit | None:
    """The part of `thing` to blame, or None when it can be pickled."""
    if why := refusal(thing):
        return _Search(refusal).below(Culprit((name,), thing, why))
    return None


def heaviest(thing: Any, size: Callable[[Any], int], *, top: int = 3) -> list[tuple[str, int]]:
    """The parts that weigh most, by `size`, heaviest first."""
    sizes = [(label, size(part)) for label, part in parts(thing)]
    return sorted(sizes, key=lambda each: -each[1])[:top]


def parts(thing: Any) -> Iterator[Part]:
    """What a by-value pickle of `thing` would pickle next."""
    match thing:
        case FunctionType():
            return _parts_of_function(thing)
        case MethodType():
            return iter([("its object", thing.__self__), ("its function", thing.__func__)])
        case partial():
            return _parts_of_partial(thing)
        case dict() | MappingProxyType():
            return _parts_of_mapping(thing)
        case list() | tuple() | set() | frozenset():
            return _items(thing)
        case ModuleType() | type():
            return _attributes(vars(thing))
        case staticmethod() | classmethod():
            return iter([("its function", thing.__func__)])
        case property():
            return _attributes({"fget": thing.fget, "fset": thing.fset, "fdel": thing.fdel})
    return _parts_of_instance(thing)


class _Search:
    """Depth first. What failed once is not entered again, so cycles end."""

    def __init__(self, refusal: Refusal) -> None:
        self._refusal = refusal
        self._entered: dict[int, Any] = {}  # keeps what it names alive, or ids would repeat

    def below(self, suspect: Culprit) -> Culprit | None:
        """The innermost culprit in `suspect`; None when its only failing parts led us here."""
        self._entered[id(suspect.thing)] = suspect.thing
        in_a_cycle = False
        for part in self._failing_parts(suspect):
            if id(part.thing) in self._entered:
                in_a_cycle = True
            elif found := self.below(part):
                return found
        return None if in_a_cycle else suspect

    def _failing_parts(self, whole: Culprit) -> Iterator[Culprit]:
        if len(whole.path) >= _DEEPEST:
            return
        for label, part in parts(whole.thing):
            if isinstance(part, _ATOMS):
                continue
            if why := self._refusal(part):
                yield Culprit((*whole.path, label), part, why)


def _parts_of_function(function: FunctionType) -> Iterator[Part]:
    yield from _closure(function)
    for name in _names_of_globals(function.__code__):
        if name in function.__globals__:
            yield f"global {name!r}", function.__globals__[name]
    yield from _defaults(function)
    yield from _attributes(vars(function))


def _closure(function: FunctionType) -> Iterator[Part]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield f"closure variable {name!r}", cell.cell_contents
        except ValueError:  # a variable that is not bound yet
            continue


def _names_of_globals(code: CodeType) -> Iterable[str]:
    names = {
        step.argval: None
        for step in dis.get_instructions(code)
        if step.opname in {"LOAD_GLOBAL", "STORE_GLOBAL", "DELETE_GLOBAL"}
    }
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names |= dict.fromkeys(_names_of_globals(constant))
    return names


def _defaults(function: FunctionType) -> Iterator[Part]:
    code, defaults = function.__code__, function.__defaults__ or ()
    positional = code.co_varnames[: code.co_argcount][code.co_argcount - len(defaults) :]
    by_name = dict(zip(positional, defaults, strict=True)) | (function.__kwdefaults__ or {})
    for name, default in by_name.items():
        yield f"default of {name!r}", default


def _parts_of_partial(bound: partial[Any]) -> Iterator[Part]:
    yield "its function", bound.func
    for n, argument in enumerate(bound.args):
        yield f"bound argument {n}", argument
    for name, argument in bound.keywords.items():
        yield f"bound argument {name!r}", argument


def _parts_of_mapping(mapping: dict[Any, Any] | MappingProxyType[Any, Any]) -> Iterator[Part]:
    for key, value in mapping.items():
        yield f"key {_short(key)}", key
        yield f"[{_short(key)}]", value


def _items(items: Iterable[Any]) -> Iterator[Part]:
    for n, item in enumerate(items):
        yield f"[{n}]", item


def _attributes(attributes: dict[str, Any] | MappingProxyType[str, Any]) -> Iterator[Part]:
    for name, value in attributes.items():
        if name not in _NOT_PICKLED:
            yield f".{name}", value


def _parts_of_instance(thing: Any) -> Iterator[Part]:
    reduced = _reduced(thing)
    if not isinstance(reduced, tuple):
        return
    _, arguments, state, items, pairs = (*reduced, None, None, None)[:5]
    for argument in arguments:
        label = f"its class {argument.__qualname__}" if isinstance(argument, type) else "its value"
        yield label, argument
    for part in state if isinstance(state, tuple) else (state,):
        if part is not None:
            yield from _attributes(part) if isinstance(part, dict) else [("its state", part)]
    yield from _items(items or ())
    yield from _parts_of_mapping(dict(pairs or ()))


def _reduced(thing: Any) -> Any:
    reduce = copyreg.dispatch_table.get(type(thing))
    try:
        return reduce(thing) if reduce else thing.__reduce_ex__(5)
    except Exception:  # noqa: BLE001 - the user's own __reduce__; why it failed is known already
        return None


def _short(key: Any) -> str:
    text = repr(key) if isinstance(key, _ATOMS) else f"<{_kind(key)}>"
    return text if len(text) <= 40 else f"{text[:37]}…"


def _kind(thing: Any) -> str:
    if isinstance(thing, (FunctionType, type, ModuleType)):
        return f"{type(thing).__name__} {thing.__name__!r}"
    module, name = type(thing).__module__, type(thing).__qualname__
    return name if module == "builtins" else f"{module}.{name}"
