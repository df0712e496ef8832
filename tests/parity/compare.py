"""Differences between two API descriptions, as sentences."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from tests.parity.describe import Description


class Difference(NamedTuple):
    """A difference of `member`, or of the object itself if empty."""

    member: str
    what: str


def differences(
    ray: Description, spotfit: Description, *, known: frozenset[str]
) -> Iterator[Difference]:
    """Return what is missing or different in spotfit; additions are no difference.

    `known` are the compared names: a parent class counts only if it is one of them.
    """
    for what in _own_differences(ray, spotfit, known):
        yield Difference("", what)
    members = spotfit.get("members", {})
    for name, description in ray.get("members", {}).items():
        if name not in members and not (
            description["kind"] == "property" and name in _readable(spotfit)
        ):
            yield Difference(name, f"has no {description['kind']} {name}")
        elif name in members:
            for what in _own_differences(description, members[name], known):
                yield Difference(name, f"{name} {what}")
    for name in ray.get("attributes", ()):
        if name not in members and name not in _readable(spotfit):
            yield Difference(name, f"has no attribute {name}")


def _own_differences(
    ray: Description, spotfit: Description, known: frozenset[str]
) -> Iterator[str]:
    if ray["kind"] != spotfit["kind"]:
        yield f"is a {spotfit['kind']}, not a {ray['kind']}"
        return
    for what in ("value", "values", "dataclass"):
        if what in ray and ray[what] != spotfit.get(what):
            yield f"{what} is {spotfit.get(what)}, not {ray[what]}"
    for parent in sorted(known & set(ray.get("parents", ())) - set(spotfit.get("parents", ()))):
        yield f"is no {parent}"
    if "parameters" in ray:
        yield from _parameters(ray["parameters"], spotfit.get("parameters", []))


def _parameters(ray: list[list[Any]], spotfit: list[list[Any]]) -> Iterator[str]:
    """Compare parameters in order; spotfit may have additional optional keyword-only ones.

    If the function of Ray takes arbitrary arguments, nothing is compared.
    """
    if {kind for _, kind, _ in ray} == {"*", "**"}:
        return
    own_parameters = {one[0]: one for one in spotfit}
    for one in ray:
        if one[0] not in own_parameters:
            yield f"has no parameter {one[0]}"
        elif own_parameters[one[0]] != one:
            yield f"parameter {one[0]} is {own_parameters[one[0]][1:]}, not {one[1:]}"
    if _positions(spotfit)[: len(_positions(ray))] != _positions(ray):
        yield f"takes {_positions(spotfit)} by position, not {_positions(ray)}"
    names = {one[0] for one in ray}
    for name, kind, default in spotfit:
        if name not in names and kind in ("positional", "keyword only") and default is None:
            yield f"requires {name}"


def _positions(parameters: list[list[Any]]) -> list[str]:
    return [name for name, kind, _ in parameters if kind == "positional"]


def _readable(spotfit: Mapping[str, Any]) -> set[str]:
    """Return the attributes of an instance that are no properties."""
    return {*spotfit.get("attributes", ()), *(one[0] for one in spotfit.get("parameters", ()))}


def answers_match(ray: Any, spotfit: Any) -> bool:
    """Whether two results of a probe match; errors of spotfit may have additional classes."""
    match ray, spotfit:
        case {"is": list(expected_classes)}, {"is": list(found)}:
            return set(expected_classes) <= set(found)
        case dict(), dict():
            return ray.keys() == spotfit.keys() and all(
                answers_match(ray[k], spotfit[k]) for k in ray
            )
        case list(), list():
            same_length = len(ray) == len(spotfit)
            return same_length and all(map(answers_match, ray, spotfit))
        case _:
            return bool(ray == spotfit)
