"""Expressions over columns for `with_column` and `filter`: `col("x") * 2 > lit(1)`.

The names are those of `ray.data.expressions`. An expression is evaluated by `pyarrow.compute`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from spotfit.core.errors import ConfigError, ConfigTypeError
from spotfit.core.input_checks import did_you_mean
from spotfit.core.unsupported_names import UnsupportedName, missing_attribute_error
from spotfit.data.formats.batch_formats import to_block
from spotfit.data.user_functions import UserFunction, user_function

Values: TypeAlias = Any
"""A `pyarrow.ChunkedArray`, `Array` or `Scalar`."""


class Expr:
    """A value for each row, computed from its columns. Immutable; can be pickled.

    Operators and methods build further expressions: those below, the mathematical ones of
    `NUMBER_FUNCTIONS`, and the functions of texts, times, lists and structures in the attributes
    `str`, `dt`, `list` and `struct`, such as `col("name").str.upper()`.
    """

    # Equality builds an expression, so expressions are not hashable by value.
    __hash__ = object.__hash__

    @property
    def identity(self) -> str:
        """Text that determines the result for given rows."""
        raise TypeError("an expression is a column, a literal or a call")

    @property
    def runs_user_code(self) -> bool:
        """Whether a function of the user is called."""
        return False

    def columns(self) -> set[str]:
        """Return the columns that are read."""
        return set()

    def bind(self) -> Callable[[pa.Table], Values]:
        """Return the function that evaluates a block; called once per process."""
        raise TypeError("an expression is a column, a literal or a call")

    def __add__(self, other: Any) -> Expr:
        return call("add", self, other)

    def __radd__(self, other: Any) -> Expr:
        return call("add", other, self)

    def __sub__(self, other: Any) -> Expr:
        return call("subtract", self, other)

    def __rsub__(self, other: Any) -> Expr:
        return call("subtract", other, self)

    def __mul__(self, other: Any) -> Expr:
        return call("multiply", self, other)

    def __rmul__(self, other: Any) -> Expr:
        return call("multiply", other, self)

    def __truediv__(self, other: Any) -> Expr:
        return call("divide", self, other)

    def __rtruediv__(self, other: Any) -> Expr:
        return call("divide", other, self)

    def __floordiv__(self, other: Any) -> Expr:
        return call("floor", call("divide", self, other))

    def __rfloordiv__(self, other: Any) -> Expr:
        return call("floor", call("divide", other, self))

    def __mod__(self, other: Any) -> Expr:
        return call("subtract", self, (self // other) * other)

    def __rmod__(self, other: Any) -> Expr:
        return call("subtract", other, (other // self) * self)

    def __neg__(self) -> Expr:
        return call("negate", self)

    def __gt__(self, other: Any) -> Expr:
        return call("greater", self, other)

    def __lt__(self, other: Any) -> Expr:
        return call("less", self, other)

    def __ge__(self, other: Any) -> Expr:
        return call("greater_equal", self, other)

    def __le__(self, other: Any) -> Expr:
        return call("less_equal", self, other)

    def __eq__(self, other: object) -> Expr:  # type: ignore[override]  # as in Ray
        return call("equal", self, other)

    def __ne__(self, other: object) -> Expr:  # type: ignore[override]  # as in Ray
        return call("not_equal", self, other)

    def __and__(self, other: Any) -> Expr:
        return call("and_kleene", self, other)

    def __rand__(self, other: Any) -> Expr:
        return call("and_kleene", other, self)

    def __or__(self, other: Any) -> Expr:
        return call("or_kleene", self, other)

    def __ror__(self, other: Any) -> Expr:
        return call("or_kleene", other, self)

    def __invert__(self) -> Expr:
        return call("invert", self)

    def __bool__(self) -> NoReturn:
        raise ConfigTypeError(
            "An expression has no truth value before it is evaluated.",
            do="Combine expressions with &, | and ~ instead of and, or and not.",
        )

    def is_null(self) -> Expr:
        """Whether the value is missing."""
        return call("is_null", self)

    def is_not_null(self) -> Expr:
        """Whether the value is present."""
        return call("is_valid", self)

    def is_in(self, values: Iterable[Any]) -> Expr:
        """Whether the value is one of these."""
        return IsInExpr((self,), tuple(values))

    def not_in(self, values: Iterable[Any]) -> Expr:
        """Whether the value is none of these."""
        return ~self.is_in(values)

    def cast(self, target_type: Any, *, safe: bool = True) -> Expr:
        """Convert to an Arrow type, or one named as "int64"; `safe` refuses what loses values."""
        arrow_type = getattr(target_type, "to_arrow_dtype", lambda: target_type)()
        if not isinstance(arrow_type, pa.DataType):
            name = arrow_type if isinstance(arrow_type, str) else np.dtype(arrow_type).name
            arrow_type = pa.type_for_alias(name)
        return CallExpr((self,), "cast", (), {"target_type": arrow_type, "safe": safe})

    def alias(self, name: str) -> Expr:
        """Return the expression under a name, which `with_column` replaces."""
        return AliasExpr((self,), name)

    @property
    def name(self) -> str | None:
        """The name of a column or alias; None for other expressions."""
        return None

    def __getattr__(self, name: str) -> Any:
        if name in NAMESPACES:
            return ExpressionNamespace(self, name)
        if name not in NUMBER_FUNCTIONS:
            raise AttributeError(f"an expression has no method {name!r}")
        return partial(call, NUMBER_FUNCTIONS[name], self)


@dataclass(frozen=True, eq=False)
class ColumnExpr(Expr):
    """The values of a column."""

    column: str

    @property
    def name(self) -> str:
        """The column."""
        return self.column

    @property
    def identity(self) -> str:
        """The column."""
        return f"col({self.column!r})"

    def columns(self) -> set[str]:
        """Return the column."""
        return {self.column}

    def bind(self) -> Callable[[pa.Table], Values]:
        """Return the function that selects the column."""
        return lambda block: block.column(self.column)


@dataclass(frozen=True, eq=False)
class LiteralExpr(Expr):
    """The same value for every row."""

    value: Any

    @property
    def identity(self) -> str:
        """Type and value."""
        return f"lit({self.value!r})"

    def bind(self) -> Callable[[pa.Table], Values]:
        """Return the function that returns the value."""
        scalar = _to_scalar(self.value)
        return lambda _block: scalar


@dataclass(frozen=True, eq=False)
class _ComputedExpr(Expr):
    """An expression of the values of others."""

    arguments: tuple[Expr, ...]

    @property
    def runs_user_code(self) -> bool:
        """Whether an argument calls a function of the user."""
        return any(argument.runs_user_code for argument in self.arguments)

    def columns(self) -> set[str]:
        """Return the columns of all arguments."""
        return set().union(*(argument.columns() for argument in self.arguments))


@dataclass(frozen=True, eq=False)
class CallExpr(_ComputedExpr):
    """The result of a function of `pyarrow.compute`."""

    function: str
    values: tuple[Any, ...]
    """Plain arguments after those that are evaluated."""
    options: Mapping[str, Any]

    @property
    def identity(self) -> str:
        """The function with its arguments."""
        arguments = ", ".join(argument.identity for argument in self.arguments)
        return f"{self.function}({arguments}, {self.values}, {dict(self.options)})"

    def bind(self) -> Callable[[pa.Table], Values]:
        """Return the function that evaluates the arguments and calls the function."""
        function = partial(getattr(pc, self.function), **self.options)
        arguments = [argument.bind() for argument in self.arguments]
        if self.function in _COMPARISONS:
            left, right = arguments
            return lambda block: function(*_comparable(left(block), right(block)))
        return lambda block: function(*(get(block) for get in arguments), *self.values)


_COMPARISONS = {"greater", "greater_equal", "less", "less_equal", "equal", "not_equal"}


def _to_scalar(value: Any) -> pa.Scalar:
    if not isinstance(value, int) or -(2**63) <= value < 2**63:
        return pa.scalar(value)
    if 0 <= value < 2**64:
        return pa.scalar(value, pa.uint64())
    raise ConfigError(
        f"The value {value} in an expression does not fit into 64 bits.",
        do="Write it as a floating-point number, such as 1e20.",
    )


def _comparable(left: Values, right: Values) -> tuple[Values, Values]:
    """Return the operands of a comparison; a literal has the type of the column if it can."""
    if isinstance(right, pa.Scalar):
        return left, _literal_as(right, left.type)
    if isinstance(left, pa.Scalar):
        return _literal_as(left, right.type), right
    return left, right


def _literal_as(literal: pa.Scalar, kind: pa.DataType) -> pa.Scalar:
    if pa.types.is_string(literal.type) and pa.types.is_temporal(kind):
        return _parse_texts(pa.array([literal.as_py()]), kind)[0]
    # Arrow would convert the column to signed integers, which have not all of its values.
    if kind == pa.uint64() and literal.type == pa.int64() and (literal.as_py() or 0) >= 0:
        return literal.cast(kind)
    return literal


def _parse_texts(texts: pa.Array, kind: pa.DataType) -> pa.Array:
    """Return dates or times of ISO 8601; those without an offset are in the column's time zone."""
    if not (pa.types.is_timestamp(kind) and kind.tz):
        return texts.cast(kind)
    try:
        return pc.assume_timezone(texts.cast(pa.timestamp(kind.unit)), kind.tz)
    except pa.ArrowInvalid:  # with an offset
        return texts.cast(kind)


@dataclass(frozen=True, eq=False)
class IsInExpr(_ComputedExpr):
    """Whether the value of an expression is one of several."""

    values: tuple[Any, ...]

    @property
    def identity(self) -> str:
        """The expression and the values."""
        return f"is_in({self.arguments[0].identity}, {self.values})"

    def bind(self) -> Callable[[pa.Table], Values]:
        """Return the function that evaluates the expression and looks the results up."""
        evaluate = self.arguments[0].bind()

        def apply(block: pa.Table) -> Values:
            found = evaluate(block)
            is_text = all(isinstance(value, str) for value in self.values)
            if is_text and pa.types.is_temporal(found.type):
                values = _parse_texts(pa.array(self.values, pa.string()), found.type)
            else:
                values = pa.array(self.values, type=found.type)
            return pc.is_in(found, value_set=values)

        return apply


@dataclass(frozen=True, eq=False)
class AliasExpr(_ComputedExpr):
    """An expression with a name."""

    alias_name: str

    @property
    def name(self) -> str:
        """The name."""
        return self.alias_name

    @property
    def identity(self) -> str:
        """The expression; the name does not change its values."""
        return self.arguments[0].identity

    def bind(self) -> Callable[[pa.Table], Values]:
        """Return the function of the expression."""
        return self.arguments[0].bind()


@dataclass(frozen=True, eq=False)
class UDFExpr(_ComputedExpr):
    """The result of a function of the user, which takes and returns Arrow arrays."""

    function: UserFunction

    @property
    def identity(self) -> str:
        """Code and arguments."""
        arguments = ", ".join(argument.identity for argument in self.arguments)
        return f"{self.function.identity}({arguments})"

    @property
    def runs_user_code(self) -> bool:
        """True."""
        return True

    def bind(self) -> Callable[[pa.Table], Values]:
        """Return the function that evaluates the arguments and calls the function."""
        function = self.function.bind()
        arguments = [argument.bind() for argument in self.arguments]

        def evaluate(block: pa.Table) -> Values:
            values = [get(block) for get in arguments]
            return function(*(_combined(value) for value in values))

        return evaluate


def _combined(values: Values) -> Values:
    return values.combine_chunks() if isinstance(values, pa.ChunkedArray) else values


def col(name: str) -> ColumnExpr:
    """Return the expression of a column."""
    return ColumnExpr(name)


def lit(value: Any) -> LiteralExpr:
    """Return the expression of a constant."""
    return LiteralExpr(value)


def udf(return_dtype: Any = None) -> Callable[[Any], Callable[..., UDFExpr]]:
    """Decorate a function, or callable class, of Arrow arrays for use in expressions.

    The type of the result is that of the array which the function returns.
    """

    def decorate(function: Any) -> Callable[..., UDFExpr]:
        bound = user_function("udf", function, {})
        return lambda *args: UDFExpr(tuple(map(to_expression, args)), bound)

    return decorate


def call(function: str, *arguments: Any, **options: Any) -> CallExpr:
    """Return the expression of a function of `pyarrow.compute`; values become literals."""
    return CallExpr(tuple(map(to_expression, arguments)), function, (), options)


def to_expression(value: Any) -> Expr:
    """Return an expression unchanged, and a literal for another value."""
    return value if isinstance(value, Expr) else LiteralExpr(value)


@contextmanager
def evaluation_errors(call_name: str, schema: pa.Schema) -> Iterator[None]:
    """Raise `ConfigError` with the types of these columns instead of an error of Arrow."""
    try:
        yield
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError, pa.ArrowTypeError) as error:
        types = ", ".join(f"{field.name!r} is {field.type}" for field in schema)
        raise ConfigError(
            f"{call_name} cannot be evaluated: {str(error).rstrip('.')}. Types: {types}.",
            do="Use values of the column's type, or convert the column, such as "
            "col('x').cast('int64').",
        ) from error


def evaluate_column(
    expression: Expr, call_name: str = "The expression"
) -> Callable[[pa.Table], pa.Array | pa.ChunkedArray]:
    """Return the function that gives one value for each row of a block, also for a constant.

    It raises `ConfigError` with the call where the types do not fit, and what a function of the
    user raises.
    """
    evaluate = expression.bind()
    columns = expression.columns()

    def apply(block: pa.Table) -> pa.Array | pa.ChunkedArray:
        if expression.runs_user_code:
            values = evaluate(block)
        else:
            fields = [field for field in block.schema if field.name in columns]
            with evaluation_errors(call_name, pa.schema(fields)):
                values = evaluate(block)
        if isinstance(values, pa.Scalar):
            return pa.repeat(values, block.num_rows)
        if isinstance(values, pa.Array | pa.ChunkedArray):
            return values
        return to_block({"values": values}).column(0)

    return apply


NUMBER_FUNCTIONS: Mapping[str, str] = {
    **{name: name for name in ("ceil", "floor", "round", "trunc", "ln", "log10", "log2", "exp")},
    **{name: name for name in ("sin", "cos", "tan", "asin", "acos", "atan", "negate", "sign")},
    **{name: name for name in ("power", "abs")},
}
STRING_FUNCTIONS: Mapping[str, str] = {
    "len": "utf8_length",
    "byte_len": "binary_length",
    **{name: f"utf8_{name}" for name in ("upper", "lower", "capitalize", "title", "swapcase")},
    **{name: f"utf8_{name}" for name in ("is_alpha", "is_alnum", "is_digit", "is_decimal")},
    **{name: f"utf8_{name}" for name in ("is_numeric", "is_space", "is_lower", "is_upper")},
    **{name: f"utf8_{name}" for name in ("is_title", "is_printable", "reverse")},
    **{name: f"utf8_{name}" for name in ("center", "lpad", "rpad")},
    "is_ascii": "string_is_ascii",
    "starts_with": "starts_with",
    "ends_with": "ends_with",
    "contains": "match_substring",
    "match": "match_like",
    "find": "find_substring",
    "count": "count_substring",
    "find_regex": "find_substring_regex",
    "count_regex": "count_substring_regex",
    "match_regex": "match_substring_regex",
    "slice": "utf8_slice_codeunits",
    "replace": "replace_substring",
    "replace_regex": "replace_substring_regex",
    "replace_slice": "binary_replace_slice",
    "split": "split_pattern",
    "split_regex": "split_pattern_regex",
    "split_whitespace": "utf8_split_whitespace",
    "extract": "extract_regex",
    "repeat": "binary_repeat",
    "strip": "utf8_trim_whitespace",
    "lstrip": "utf8_ltrim_whitespace",
    "rstrip": "utf8_rtrim_whitespace",
}
TIME_FUNCTIONS: Mapping[str, str] = {
    **{name: name for name in ("year", "month", "day", "hour", "minute", "second", "strftime")},
    **{name: f"{name}_temporal" for name in ("ceil", "floor", "round")},
}
LIST_FUNCTIONS: Mapping[str, str] = {
    "len": "list_value_length",
    "get": "list_element",
    "slice": "list_slice",
}
STRUCT_FUNCTIONS: Mapping[str, str] = {"field": "struct_field"}
NAMESPACES: Mapping[str, Mapping[str, str]] = {
    "str": STRING_FUNCTIONS,
    "dt": TIME_FUNCTIONS,
    "list": LIST_FUNCTIONS,
    "struct": STRUCT_FUNCTIONS,
}
_CHARACTER_FUNCTIONS = {"strip": "utf8_trim", "lstrip": "utf8_ltrim", "rstrip": "utf8_rtrim"}


@dataclass(frozen=True, eq=False)
class ExpressionNamespace:
    """The functions of one kind of values; their arguments are those of `pyarrow.compute`."""

    expression: Expr
    namespace: str

    def __getattr__(self, name: str) -> Callable[..., Expr]:
        functions = NAMESPACES[self.namespace]
        if name not in functions:
            raise AttributeError(
                f"expressions have no .{self.namespace}.{name}(). {did_you_mean(name, functions)}"
            )
        return partial(self._call, name)

    def __getitem__(self, key: Any) -> Expr:
        return self._call("get" if self.namespace == "list" else "field", key)

    def _call(self, name: str, *values: Any, **options: Any) -> Expr:
        function = NAMESPACES[self.namespace][name]
        if name in _CHARACTER_FUNCTIONS and (values or options):
            function = _CHARACTER_FUNCTIONS[name]
        return CallExpr((self.expression,), function, values, options)


pyarrow_udf = udf
"""Ray's name of a function of Arrow arrays."""

_MISSING = {
    "download": "Use read_binary_files() for files, or map() with a client for other addresses.",
    "monotonically_increasing_id": "Use ds.zip(spotfit.data.range(ds.count())), whose `id` it is.",
    "random": "Use add_column() with a function that draws random numbers.",
    "star": "Columns that are not replaced are kept.",
    "unnest": "Use col('s').struct.field('name') for each field.",
    "uuid": "Use add_column() with a function that creates them.",
}
"""Expressions of Ray that do not exist here, and what to do instead."""

__path__: list[str] = []
"""Of a package, which the import system first asks for a name: its import then has the remedy."""


def __getattr__(name: str) -> Any:
    missing = None
    if name in _MISSING:
        missing = UnsupportedName("It is an expression of Ray Data only.", _MISSING[name])
    raise missing_attribute_error(__name__, name, missing)
