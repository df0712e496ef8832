"""What one description lacks that another has: the differences, as sentences."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from tests.parity.describe import Facts


class Difference(NamedTuple):
    """`what` is other in `member`, or in the thing itself where that is empty."""

    member: str
    what: str


def differences(theirs: Facts, ours: Facts, *, known: frozenset[str]) -> Iterator[Difference]:
    """What of theirs is missing or other here. More than theirs is no difference.

    `known` are the names that are compared at all: a parent class counts only if it is one.
    """
    for what in _of_itself(theirs, ours, known):
        yield Difference("", what)
    mine = ours.get("members", {})
    for name, fact in theirs.get("members", {}).items():
        if name not in mine and not (fact["kind"] == "property" and name in _readable(ours)):
            yield Difference(name, f"has no {fact['kind']} {name}")
        elif name in mine:
            for what in _of_itself(fact, mine[name], known):
                yield Difference(name, f"{name} {what}")
    for name in theirs.get("attributes", ()):
        if name not in mine and name not in _readable(ours):
            yield Difference(name, f"has no attribute {name}")


def _of_itself(theirs: Facts, ours: Facts, known: frozenset[str]) -> Iterator[str]:
    if theirs["kind"] != ours["kind"]:
        yield f"is a {ours['kind']}, not a {theirs['kind']}"
        return
    for what in ("value", "values", "dataclass"):
        if what in theirs and theirs[what] != ours.get(what):
            yield f"{what} is {ours.get(what)}, not {theirs[what]}"
    for parent in sorted(known & set(theirs.get("parents", ())) - set(ours.get("parents", ()))):
        yield f"is no {parent}"
    if "parameters" in theirs:
        yield from _parameters(theirs["parameters"], ours.get("parameters", []))


def _parameters(theirs: list[list[Any]], ours: list[list[Any]]) -> Iterator[str]:
    """Theirs in their order; of ours only such besides as nobody has to give, or to count.

    Where theirs takes anything, to hand it on, nothing can be said.
    """
    if {kind for _, kind, _ in theirs} == {"*", "**"}:
        return
    mine = {one[0]: one for one in ours}
    for one in theirs:
        if one[0] not in mine:
            yield f"has no parameter {one[0]}"
        elif mine[one[0]] != one:
            yield f"parameter {one[0]} is {mine[one[0]][1:]}, not {one[1:]}"
    if _positions(ours)[: len(_positions(theirs))] != _positions(theirs):
        yield f"takes {_positions(ours)} by position, not {_positions(theirs)}"
    names = {one[0] for one in theirs}
    for name, kind, default in ours:
        if name not in names and kind in ("positional", "keyword only") and default is None:
            yield f"asks for {name}"


def _positions(parameters: list[list[Any]]) -> list[str]:
    return [name for name, kind, _ in parameters if kind == "positional"]


def _readable(ours: Mapping[str, Any]) -> set[str]:
    """What an instance answers to without a property."""
    return {*ours.get("attributes", ()), *(one[0] for one in ours.get("parameters", ()))}


def alike(theirs: Any, ours: Any) -> bool:
    """Whether two answers of a probe are the same; an error may be more than theirs is."""
    match theirs, ours:
        case {"is": list(wanted)}, {"is": list(found)}:
            return set(wanted) <= set(found)
        case dict(), dict():
            return theirs.keys() == ours.keys() and all(alike(theirs[k], ours[k]) for k in theirs)
        case list(), list():
            same_length = len(theirs) == len(ours)
            return same_length and all(map(alike, theirs, ours))
        case _:
            return bool(theirs == ours)
