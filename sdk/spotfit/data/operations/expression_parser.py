"""Expressions as text, for `filter(expr="x > 1 and name in ['a', 'b']")`."""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from spotfit.core.errors import ConfigError
from spotfit.data.expressions import Expr, call, col, lit, to_expression


def parse_expression(text: str) -> Expr:
    """Return the expression of a text in the syntax of Python, as `filter(expr=...)` takes it.

    Names are columns. Supports comparisons, `in`, `and`, `or`, `not`, arithmetic, and the functions
    `is_null`, `is_valid` and `is_nan`. Raises `ConfigError` for other syntax.
    """
    try:
        return _Parser(text).build(ast.parse(text, mode="eval").body)
    except SyntaxError as error:
        raise ConfigError(
            f"The expression {text!r} is not valid: {error.msg}.",
            do="Write it as in Python, such as \"x > 1 and name == 'a'\".",
        ) from error


_OPERATORS: Mapping[type[ast.AST], Callable[[Any, Any], Any]] = {
    ast.Gt: lambda a, b: a > b,
    ast.Lt: lambda a, b: a < b,
    ast.GtE: lambda a, b: a >= b,
    ast.LtE: lambda a, b: a <= b,
    ast.Eq: lambda a, b: a == b,
    ast.NotEq: lambda a, b: a != b,
    ast.Add: lambda a, b: a + b,
    ast.Sub: lambda a, b: a - b,
    ast.Mult: lambda a, b: a * b,
    ast.Div: lambda a, b: a / b,
    ast.FloorDiv: lambda a, b: a // b,
    ast.Mod: lambda a, b: a % b,
    ast.BitAnd: lambda a, b: a & b,
    ast.BitOr: lambda a, b: a | b,
}
_FUNCTIONS = {"is_null": "is_null", "is_valid": "is_valid", "is_nan": "is_nan"}


@dataclass(frozen=True)
class _Parser:
    text: str

    def build(self, node: ast.AST) -> Expr:
        match node:
            case ast.Name(id=name):
                return col(name)
            case ast.Attribute():  # a column whose name contains dots
                return col(ast.unparse(node))
            case ast.Constant(value=value):
                return lit(value)
            case ast.BoolOp(op=operator, values=values):
                function = "and_kleene" if isinstance(operator, ast.And) else "or_kleene"
                return self._chain(function, [self.build(value) for value in values])
            case ast.UnaryOp(op=ast.Not() | ast.Invert(), operand=operand):
                return ~self.build(operand)
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return -self.build(operand)
            case ast.BinOp(left=left, op=operator, right=right) if type(operator) in _OPERATORS:
                return to_expression(
                    _OPERATORS[type(operator)](self.build(left), self.build(right))
                )
            case ast.Compare():
                return self._compare(node)
            case ast.Call(func=ast.Name(id=name), args=args) if name in _FUNCTIONS:
                return call(_FUNCTIONS[name], *(self.build(arg) for arg in args))
        raise self._unsupported(node)

    def _compare(self, node: ast.Compare) -> Expr:
        operands = [node.left, *node.comparators]
        parts = [
            self._comparison(left, operator, right)
            for left, operator, right in zip(operands, node.ops, operands[1:], strict=False)
        ]
        return self._chain("and_kleene", parts)

    def _comparison(self, left: ast.expr, operator: ast.cmpop, right: ast.expr) -> Expr:
        if isinstance(operator, ast.In | ast.NotIn):
            try:
                found = self.build(left).is_in(ast.literal_eval(right))
            except (ValueError, TypeError):
                raise self._unsupported(right) from None
            return found if isinstance(operator, ast.In) else ~found
        if type(operator) not in _OPERATORS:
            raise self._unsupported(operator)
        return to_expression(_OPERATORS[type(operator)](self.build(left), self.build(right)))

    def _chain(self, function: str, parts: Sequence[Expr]) -> Expr:
        result = parts[0]
        for part in parts[1:]:
            result = call(function, result, part)
        return result

    def _unsupported(self, node: ast.AST) -> ConfigError:
        return ConfigError(
            f"The expression {self.text!r} contains {ast.unparse(node) or type(node).__name__}, "
            "which is not supported.",
            do="Use comparisons, in, and, or, not, arithmetic, is_null() and is_valid(), or pass a "
            "function to filter().",
        )
