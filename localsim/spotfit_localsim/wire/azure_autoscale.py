"""The language in which pools of Azure Batch say how many nodes they want, as far as it is used.

https://learn.microsoft.com/azure/batch/batch-automatic-scaling: statements, variables, numbers and
vectors of them, time intervals, arithmetic, comparisons, `? :`, avg, max, min, len, sum, and of
metrics Count, GetSample and GetSamplePercent. Timestamps and its other functions are left out.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

SAMPLE_S = 30.0
"""A sample stands for so long."""
_TOKEN = re.compile(r"\s*(\d+\.?\d*|\$?[A-Za-z_]\w*|<=|>=|==|!=|[-+*/<>?:(),.])")
_INTERVALS = {"Second": 1.0, "Minute": 60.0, "Hour": 3600.0, "Day": 86_400.0}
_OPTIONS = ("requeue", "terminate", "taskcompletion", "retaineddata")
_COMPARES: Mapping[str, Callable[[Any, Any], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
}
_COMPUTES: Mapping[str, Callable[[Any, Any], Any]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.truediv,
}

Meaning = Callable[[dict[str, Any]], Any]


class FormulaError(Exception):
    """It says nothing that can be meant, or cannot be computed now."""


class Interval(float):
    """So many seconds."""

    def __mul__(self, other: Any) -> Interval:
        return Interval(float(self) * other)

    __rmul__ = __mul__


class Metric:
    """The history of one number, the newest last."""

    def __init__(self, samples: Sequence[float]) -> None:
        self._samples = list(samples)

    def ask(self, method: str, arguments: Sequence[Any]) -> Any:
        """What the method gives."""
        if method == "Count":
            return float(len(self._samples))
        wanted = self._wanted(arguments)
        if method == "GetSample":
            return self._samples[-wanted:]
        if method == "GetSamplePercent":
            return 100.0 * min(len(self._samples), wanted) / wanted
        raise FormulaError(f"no method {method} is known")

    def _wanted(self, arguments: Sequence[Any]) -> int:
        if not arguments:
            raise FormulaError("it is not said how many samples")
        first = arguments[0]
        return max(1, int(first / SAMPLE_S if isinstance(first, Interval) else first))


def evaluate(formula: str, metrics: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """Every variable and what it came to. Raises `FormulaError`."""
    known: dict[str, Any] = {
        **{f"TimeInterval_{name}": Interval(size) for name, size in _INTERVALS.items()},
        **{option: option for option in _OPTIONS},
        **{name: Metric(samples) for name, samples in metrics.items()},
    }
    set_here: dict[str, Any] = {}
    for statement in filter(str.strip, formula.split(";")):
        name, equals, text = statement.partition("=")
        if not equals:
            raise FormulaError(f"{statement.strip()!r} sets nothing")
        set_here[name.strip()] = known[name.strip()] = _Parser(text).whole()(known)
    return set_here


class _Parser:
    def __init__(self, text: str) -> None:
        self._tokens = _TOKEN.findall(text)
        if "".join(self._tokens) != re.sub(r"\s", "", text):
            raise FormulaError(f"{text.strip()!r} cannot be read")

    def whole(self) -> Meaning:
        meaning = self._choice()
        if self._tokens:
            raise FormulaError(f"nobody expects {self._tokens[0]!r} there")
        return meaning

    def _choice(self) -> Meaning:
        condition = self._comparison()
        if not self._skips("?"):
            return condition
        then = self._choice()
        self._expect(":")
        other = self._choice()
        return lambda known: then(known) if condition(known) else other(known)

    def _comparison(self) -> Meaning:
        left = self._row(("+", "-"), lambda: self._row(("*", "/"), self._one))
        if self._next not in _COMPARES:
            return left
        compares = _COMPARES[self._take()]
        right = self._comparison()
        return lambda known: float(compares(left(known), right(known)))

    def _row(self, signs: tuple[str, ...], part: Callable[[], Meaning]) -> Meaning:
        meaning = part()
        while self._next in signs:
            meaning = _computed(_COMPUTES[self._take()], meaning, part())
        return meaning

    def _one(self) -> Meaning:
        word = self._take()
        if word == "(":
            inner = self._choice()
            self._expect(")")
            return inner
        if word == "-":
            negated = self._one()
            return lambda known: -negated(known)
        if word[0].isdigit():
            return lambda _: float(word)
        if self._skips("("):
            arguments = self._arguments()
            return lambda known: _called(word, [argument(known) for argument in arguments])
        if self._skips("."):
            method = self._take()
            self._expect("(")
            asked = self._arguments()
            return lambda known: _look_up(known, word).ask(method, [one(known) for one in asked])
        return lambda known: _look_up(known, word)

    def _arguments(self) -> list[Meaning]:
        found: list[Meaning] = []
        while not self._skips(")"):
            found.append(self._choice())
            if self._next != ")":
                self._expect(",")
        return found

    @property
    def _next(self) -> str:
        return self._tokens[0] if self._tokens else ""

    def _take(self) -> str:
        if not self._tokens:
            raise FormulaError("it ends too early")
        return str(self._tokens.pop(0))

    def _skips(self, token: str) -> bool:
        if self._next != token:
            return False
        self._take()
        return True

    def _expect(self, token: str) -> None:
        if not self._skips(token):
            raise FormulaError(f"{token!r} is missing before {self._next!r}")


def _computed(computes: Callable[[Any, Any], Any], left: Meaning, right: Meaning) -> Meaning:
    return lambda known: computes(left(known), right(known))


def _look_up(known: Mapping[str, Any], name: str) -> Any:
    if name not in known:
        raise FormulaError(f"nothing is called {name}")
    return known[name]


def _called(function: str, arguments: Sequence[Any]) -> float:
    numbers = [n for one in arguments for n in (one if isinstance(one, list) else [one])]
    if function in ("len", "sum"):
        return float(len(numbers) if function == "len" else sum(numbers))
    if not numbers:
        raise FormulaError(f"{function} of nothing")
    known: Mapping[str, Callable[[list[float]], float]] = {
        "max": max,
        "min": min,
        "avg": lambda them: sum(them) / len(them),
    }
    if function not in known:
        raise FormulaError(f"no function {function} is known")
    return float(known[function](numbers))
