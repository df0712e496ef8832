"""Which rows of a dataset stay: expressions, functions of the user, hashes of row numbers.

A random sample consists of the rows whose number has a hash in a range. It is the same in every
process, and the samples of distinct ranges have no row in common.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from spotfit.core.errors import ConfigError, ConfigTypeError
from spotfit.data.expressions import Expr, evaluate_column, evaluation_errors
from spotfit.data.operations.expression_parser import parse_expression
from spotfit.data.order import hash_key, hash_numbers
from spotfit.data.plans.row_functions import block_rows
from spotfit.data.source import IntArray, int_array
from spotfit.data.user_functions import UserFunction, check_resources, user_function

Mask: TypeAlias = "np.ndarray[tuple[int], np.dtype[np.bool_]]"
MaskFunction: TypeAlias = Callable[[pa.Table, int], Mask]
"""Returns which rows of a block stay; the integer is the number of its first row."""

_SELECTION_STREAM = 2
"""Distinguishes the hashes that select rows from those of the orders of epochs."""
_HASH_END = 2**64
_CHUNK_ROWS = 2**20


class RowFilter(Protocol):
    """Decides for each row whether it stays; the same for every call. Can be pickled."""

    @property
    def name(self) -> str:
        """The call, for messages."""
        ...

    @property
    def identity(self) -> str:
        """Text that determines which rows stay."""
        ...

    @property
    def columns(self) -> Sequence[str] | None:
        """The columns that are read for the decision; None: all; empty: the number decides."""
        ...

    @property
    def runs_user_code(self) -> bool:
        """Whether it calls a function of the user."""
        ...

    def bind(self) -> MaskFunction:
        """Return the function of blocks; called once per process."""
        ...


def row_filter(function: Any, expression: Any, options: Mapping[str, Any]) -> RowFilter:
    """Return the filter of a call of `Dataset.filter`. Raises `ConfigError`.

    An expression is a text, an `Expr`, or one of `pyarrow.compute`.
    """
    if (function is None) == (expression is None):
        raise ConfigError(
            "filter() needs either a function or an expression.",
            do='Pass fn=, or expr= such as "x > 0".',
        )
    if expression is None and isinstance(function, Expr | pc.Expression):
        function, expression = None, function
    if function is not None:
        return FunctionFilter(user_function("filter", function, options))
    check_resources("filter()", options)
    if isinstance(expression, pc.Expression):
        return ArrowFilter(expression)
    if isinstance(expression, str):
        return ExpressionFilter(parse_expression(expression), expression)
    if not isinstance(expression, Expr):
        raise ConfigTypeError(
            f"filter(expr={expression!r}) is not an expression.",
            do="Pass a text such as \"x > 0\", or col('x') > 0.",
        )
    return ExpressionFilter(expression)


@dataclass(frozen=True, eq=False)
class ExpressionFilter:
    """Rows for which an expression is true; not those for which it is null."""

    expression: Expr
    text: str | None = None
    """What the user wrote, if it is a text."""

    @property
    def runs_user_code(self) -> bool:
        """Whether the expression calls a function of the user."""
        return self.expression.runs_user_code

    @property
    def name(self) -> str:
        """The call."""
        return self.identity if self.text is None else f"filter(expr={self.text!r})"

    @property
    def identity(self) -> str:
        """The expression."""
        return f"filter({self.expression.identity})"

    @property
    def columns(self) -> Sequence[str]:
        """The columns of the expression."""
        return sorted(self.expression.columns())

    def bind(self) -> MaskFunction:
        """Return the function that evaluates the expression."""
        evaluate = evaluate_column(self.expression, self.name)
        return lambda block, _first: _to_mask(self.name, evaluate(block))


@dataclass(frozen=True, eq=False)
class ArrowFilter:
    """Rows for which an expression of `pyarrow.compute` is true."""

    expression: Any

    columns = None
    runs_user_code = False

    @property
    def name(self) -> str:
        """The call."""
        return f"filter({self.expression})"

    @property
    def identity(self) -> str:
        """The expression."""
        return self.name

    def bind(self) -> MaskFunction:
        """Return the function that evaluates the expression."""

        def evaluate(block: pa.Table, _first: int) -> Mask:
            numbers = pa.array(np.arange(block.num_rows))
            with evaluation_errors(self.name, block.schema):
                numbered = block.append_column("__row_number", numbers).filter(self.expression)
            mask = np.zeros(block.num_rows, dtype=np.bool_)
            mask[numbered.column("__row_number").to_numpy()] = True
            return mask

        return evaluate


@dataclass(frozen=True, eq=False)
class FunctionFilter:
    """Rows for which a function of the user returns a true value."""

    function: UserFunction

    columns = None
    runs_user_code = True

    @property
    def name(self) -> str:
        """The call."""
        return self.function.name

    @property
    def identity(self) -> str:
        """Code and arguments of the function."""
        return self.function.identity

    def bind(self) -> MaskFunction:
        """Return the function that calls that of the user for each row."""
        keeps = self.function.bind()
        return lambda block, _first: np.fromiter(
            (bool(keeps(row)) for row in block_rows(block)), np.bool_, block.num_rows
        )


@dataclass(frozen=True)
class HashFilter:
    """Rows whose number has a hash in [`begin`, `end`): a uniform sample. Reads no rows."""

    seed: int
    begin: int
    end: int

    columns = ()
    runs_user_code = False

    @property
    def name(self) -> str:
        """The selection."""
        return f"select_by_hash(seed={self.seed}, {self.begin}, {self.end})"

    @property
    def identity(self) -> str:
        """The selection."""
        return self.name

    def bind(self) -> MaskFunction:
        """Return the function that hashes the numbers of the rows."""

        def select(block: pa.Table, first: int) -> Mask:
            hashes = row_hashes(self.seed, first, block.num_rows)
            if self.end <= self.begin:
                return np.zeros(block.num_rows, dtype=np.bool_)
            mask: Mask = (hashes >= np.uint64(self.begin)) & (hashes <= np.uint64(self.end - 1))
            return mask

        return select


@dataclass(frozen=True)
class KeyFilter:
    """Rows by the hash of a column's value, so that equal values stay together."""

    column: str
    end: int
    """The rows with a hash below it."""
    is_complement: bool = False
    """The other rows instead."""

    runs_user_code = False

    @property
    def name(self) -> str:
        """The selection."""
        return f"streaming_train_test_split(hash_column={self.column!r})"

    @property
    def identity(self) -> str:
        """The selection."""
        return f"{self.name} {self.end} {self.is_complement}"

    @property
    def columns(self) -> Sequence[str]:
        """The column."""
        return (self.column,)

    def bind(self) -> MaskFunction:
        """Return the function that hashes the values."""

        def select(block: pa.Table, _first: int) -> Mask:
            below = [
                _text_hash(value) < self.end for value in block.column(self.column).to_pylist()
            ]
            return ~np.array(below, np.bool_) if self.is_complement else np.array(below, np.bool_)

        return select


def _text_hash(value: Any) -> int:
    return int.from_bytes(hashlib.blake2b(str(value).encode(), digest_size=8).digest(), "big")


@dataclass(frozen=True, eq=False)
class StratifiedFilter:
    """A share of the rows of each class, chosen by the hashes of their numbers."""

    column: str
    ends: Mapping[Any, int]
    """For each class, the rows with a hash below it belong to the share."""
    is_complement: bool = False
    """The other rows instead."""

    runs_user_code = False

    @property
    def name(self) -> str:
        """The selection."""
        return f"train_test_split(stratify={self.column!r})"

    @property
    def identity(self) -> str:
        """The selection."""
        return f"{self.name} {sorted(self.ends.items(), key=repr)} {self.is_complement}"

    @property
    def columns(self) -> Sequence[str]:
        """The column of the classes."""
        return (self.column,)

    def bind(self) -> MaskFunction:
        """Return the function that compares hashes with the end of the row's class."""

        def select(block: pa.Table, first: int) -> Mask:
            hashes = row_hashes(0, first, block.num_rows)
            selected = np.zeros(block.num_rows, dtype=np.bool_)
            for value, rows in rows_by_class(block.column(self.column)):
                end = self.ends[value]
                selected[rows] = hashes[rows] <= np.uint64(end - 1) if end else False
            return ~selected if self.is_complement else selected

        return select


def rows_by_class(column: pa.ChunkedArray) -> list[tuple[Any, IntArray]]:
    """Return each distinct value with the indices of its rows; None is a value."""
    encoded = column.combine_chunks().dictionary_encode(null_encoding="encode")
    codes = encoded.indices.to_numpy(zero_copy_only=False)
    return [
        (value, int_array(np.flatnonzero(codes == code)))
        for code, value in enumerate(encoded.dictionary.to_pylist())
    ]


def _to_mask(name: str, values: pa.Array | pa.ChunkedArray) -> Mask:
    if not pa.types.is_boolean(values.type):
        raise ConfigError(
            f"{name} is of type {values.type}, not a truth value.",
            do="Pass a comparison, such as col('x') > 0.",
        )
    mask: Mask = np.asarray(values.fill_null(False), dtype=np.bool_)  # noqa: FBT003 - of Arrow
    return mask


# --- Hashes of row numbers ------------------------------------------------------------------------


def row_hashes(seed: int, first: int, count: int) -> Any:
    """Return the hash of each row number from `first` on; uniform and distinct."""
    return hash_numbers(hash_key(_SELECTION_STREAM, seed), first, count)


def share_end(fraction: float) -> int:
    """Return the end of the hashes of a fraction of all rows."""
    return int(fraction * _HASH_END)


def count_end(seed: int, row_count: int, count: int) -> int:
    """Return the end below which exactly `count` of the first `row_count` rows have their hash.

    Two passes over the numbers, in constant memory.
    """
    if count >= row_count:
        return _HASH_END
    starts = range(0, row_count, _CHUNK_ROWS)
    chunks = [(first, min(_CHUNK_ROWS, row_count - first)) for first in starts]
    histogram = np.zeros(2**16, dtype=np.int64)
    for first, rows in chunks:
        histogram += np.bincount(_prefixes(row_hashes(seed, first, rows)), minlength=2**16)
    totals = np.cumsum(histogram)
    prefix = int(np.searchsorted(totals, count, side="right"))
    near = [_with_prefix(row_hashes(seed, first, rows), prefix) for first, rows in chunks]
    return kth_smallest(np.concatenate(near), count - int(totals[prefix] - histogram[prefix]))


def _prefixes(hashes: Any) -> IntArray:
    prefixes: IntArray = (hashes >> np.uint64(48)).astype(np.int64)
    return prefixes


def _with_prefix(hashes: Any, prefix: int) -> Any:
    return hashes[_prefixes(hashes) == prefix]


def kth_smallest(hashes: Any, k: int) -> int:
    """Return the end below which `k` of the hashes are."""
    return int(np.partition(hashes, k)[k]) if k < len(hashes) else _HASH_END
