"""The formula language for automatic scaling of Azure Batch pools, as far as it is used.

https://learn.microsoft.com/azure/batch/batch-automatic-scaling: statements, variables, numbers and
vectors, time intervals, arithmetic, comparisons, `? :`, avg, max, min, len, sum, and of metrics
Count, GetSample and GetSamplePercent. Timestamps and other functions are not supported.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

SAMPLE_S = 30.0
"""The interval between two samples of a metric."""
_TOKEN = re.compile(r"\s*(\d+\.?\d*|\$?[A-Za-z_]\w*|<=|>=|==|!=|[-+*/<>?:(),.])")
_INTERVALS = {"Second": 1.0, "Minute": 60.0, "Hour": 3600.0, "Day": 86_400.0}
_OPTIONS = ("requeue", "terminate", "taskcompletion", "retaineddata")
_COMPARISON_OPERATORS: Mapping[str, Callable[[Any, Any], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
}
_ARITHMETIC_OPERATORS: Mapping[str, Callable[[Any, Any], Any]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.truediv,
}

Expression = Callable[[dict[str, Any]], Any]


class FormulaError(Exception):
    """The formula cannot be parsed or evaluated."""


class AutoscaleInterval(float):
    """A time interval in seconds."""

    def __mul__(self, other: Any) -> AutoscaleInterval:
        return AutoscaleInterval(float(self) * other)

    # Formulas write both `2 * TimeInterval_Minute` and the reverse.
    __rmul__ = __mul__


class MetricHistory:
    """The samples of one metric, the newest last."""

    def __init__(self, samples: Sequence[float]) -> None:
        self._samples = list(samples)

    def call(self, method: str, arguments: Sequence[Any]) -> Any:
        """Return the result of a method of the metric. Raises `FormulaError`."""
        if method == "Count":
            return float(len(self._samples))
        if not arguments:
            raise FormulaError("the number of samples is missing")
        # The argument is a number of samples or a time interval.
        size = arguments[0]
        count = max(1, int(size / SAMPLE_S if isinstance(size, AutoscaleInterval) else size))
        if method == "GetSample":
            return self._samples[-count:]
        if method == "GetSamplePercent":
            return 100.0 * min(len(self._samples), count) / count
        raise FormulaError(f"unknown method {method}")


def evaluate(formula: str, metrics: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """Return every assigned variable with its value. Raises `FormulaError`."""
    variables: dict[str, Any] = {
        **{f"TimeInterval_{name}": AutoscaleInterval(size) for name, size in _INTERVALS.items()},
        **{option: option for option in _OPTIONS},
        **{name: MetricHistory(samples) for name, samples in metrics.items()},
    }
    assigned: dict[str, Any] = {}
    # The language has neither strings nor blocks, so every `;` ends a statement.
    for statement in filter(str.strip, formula.split(";")):
        name, equals, text = statement.partition("=")
        if not equals:
            raise FormulaError(f"{statement.strip()!r} is not an assignment")
        assigned[name.strip()] = variables[name.strip()] = _Parser(text).parse()(variables)
    return assigned


class _Parser:
    def __init__(self, text: str) -> None:
        self._tokens = _TOKEN.findall(text)
        # findall skips what it does not match: then characters are missing.
        if "".join(self._tokens) != re.sub(r"\s", "", text):
            raise FormulaError(f"{text.strip()!r} cannot be parsed")

    def parse(self) -> Expression:
        expression = self._parse_conditional()
        if self._tokens:
            raise FormulaError(f"unexpected token {self._tokens[0]!r}")
        return expression

    def _parse_conditional(self) -> Expression:
        condition = self._parse_comparison()
        if not self._accept("?"):
            return condition
        then = self._parse_conditional()
        self._expect(":")
        other = self._parse_conditional()
        # Expressions are compiled to functions: both branches parse, one is evaluated.
        return lambda known: then(known) if condition(known) else other(known)

    def _parse_comparison(self) -> Expression:
        # Precedence: comparison, then + and -, then * and /.
        left = self._parse_binary_chain(
            ("+", "-"), lambda: self._parse_binary_chain(("*", "/"), self._parse_operand)
        )
        if self._lookahead not in _COMPARISON_OPERATORS:
            return left
        compares = _COMPARISON_OPERATORS[self._take_token()]
        right = self._parse_comparison()
        return lambda known: float(compares(left(known), right(known)))

    def _parse_binary_chain(
        self, operators: tuple[str, ...], parse_operand: Callable[[], Expression]
    ) -> Expression:
        expression = parse_operand()
        while self._lookahead in operators:
            expression = _binary_operation(
                _ARITHMETIC_OPERATORS[self._take_token()], expression, parse_operand()
            )
        return expression

    def _parse_operand(self) -> Expression:
        lexeme = self._take_token()
        if lexeme == "(":
            inner = self._parse_conditional()
            self._expect(")")
            return inner
        if lexeme == "-":
            negated = self._parse_operand()
            return lambda known: -negated(known)
        if lexeme[0].isdigit():
            return lambda _: float(lexeme)
        if self._accept("("):
            arguments = self._parse_arguments()
            return lambda known: _call_function(lexeme, [argument(known) for argument in arguments])
        if self._accept("."):
            method = self._take_token()
            self._expect("(")
            method_arguments = self._parse_arguments()
            return lambda known: _resolve(known, lexeme).call(
                method, [one(known) for one in method_arguments]
            )
        return lambda known: _resolve(known, lexeme)

    def _parse_arguments(self) -> list[Expression]:
        arguments: list[Expression] = []
        while not self._accept(")"):
            arguments.append(self._parse_conditional())
            if self._lookahead != ")":
                self._expect(",")
        return arguments

    @property
    def _lookahead(self) -> str:
        return self._tokens[0] if self._tokens else ""

    def _take_token(self) -> str:
        if not self._tokens:
            raise FormulaError("unexpected end")
        return str(self._tokens.pop(0))

    def _accept(self, token: str) -> bool:
        if self._lookahead != token:
            return False
        self._take_token()
        return True

    def _expect(self, token: str) -> None:
        if not self._accept(token):
            raise FormulaError(f"{token!r} is missing before {self._lookahead!r}")


def _binary_operation(
    function: Callable[[Any, Any], Any], left: Expression, right: Expression
) -> Expression:
    return lambda known: function(left(known), right(known))


def _resolve(variables: Mapping[str, Any], name: str) -> Any:
    if name not in variables:
        raise FormulaError(f"unknown variable {name}")
    return variables[name]


def _call_function(function: str, arguments: Sequence[Any]) -> float:
    # Vectors and numbers may be mixed.
    numbers = [n for one in arguments for n in (one if isinstance(one, list) else [one])]
    if function in ("len", "sum"):
        return float(len(numbers) if function == "len" else sum(numbers))
    if not numbers:
        raise FormulaError(f"{function} of an empty vector")
    functions: Mapping[str, Callable[[list[float]], float]] = {
        "max": max,
        "min": min,
        "avg": lambda values: sum(values) / len(values),
    }
    if function not in functions:
        raise FormulaError(f"unknown function {function}")
    return float(functions[function](numbers))
