"""Transforms of rows that keep their number and order, and those that only change columns.

`row_functions.py` has the transforms that call functions of the user.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import pyarrow as pa

from spotfit.core.errors import ConfigError, ConfigTypeError
from spotfit.data.expressions import Expr, evaluate_column
from spotfit.data.schema import check_columns

BlockFunction: TypeAlias = Callable[[pa.Table], pa.Table]


class Transform(Protocol):
    """A change of rows that keeps their number and order. Immutable; can be pickled."""

    @property
    def name(self) -> str:
        """What the user has called, such as "map_batches(normalize)", for messages."""
        ...

    @property
    def runs_user_code(self) -> bool:
        """Whether functions of the user are called, which may draw random numbers."""
        ...

    @property
    def identity(self) -> str:
        """Text that determines the result for given rows, as far as that is known."""
        ...

    def bind(self) -> BlockFunction:
        """Return the function for blocks; called once per process.

        Creates the instances of callable classes.
        """
        ...


class RowCountChangedError(ConfigError):
    """A function that must return one row for each row has returned another number."""


def bind_all(transforms: Sequence[Transform]) -> BlockFunction:
    """Return one function that applies all transforms, and checks the number of rows after each.

    It raises `RowCountChangedError`, or what a function of the user raises.
    """
    functions = [(transform, transform.bind()) for transform in transforms]

    def apply(block: pa.Table) -> pa.Table:
        for transform, function in functions:
            result = function(block)
            if result.num_rows != block.num_rows:
                raise _row_count_error(transform, block.num_rows, result.num_rows)
            block = result
        return block

    return apply


def _row_count_error(transform: Transform, given: int, returned: int) -> RowCountChangedError:
    return RowCountChangedError(
        f"{transform.name} returned {returned} rows for {given}. The position in a dataset is a "
        "number of rows, so transforms of a training dataset keep it.",
        do="Use filter() or flat_map(), or write the rows once with write_parquet() and read them "
        "from there.",
    )


# --- Transforms of columns ------------------------------------------------------------------------


class ColumnTransform(ABC):
    """A transform whose columns are known without reading rows, so that others are not read."""

    @property
    @abstractmethod
    def name(self) -> str:
        """The call, for messages."""

    @property
    def runs_user_code(self) -> bool:
        """Whether functions of the user are called."""
        return False

    @property
    def identity(self) -> str:
        """Text that determines the result for given rows."""
        return self.name

    @abstractmethod
    def output_names(self, names: Sequence[str]) -> list[str]:
        """Return the columns of the result for these columns. Raises `ConfigError`."""

    @abstractmethod
    def input_names(self, needed: Sequence[str]) -> list[str]:
        """Return the columns that are read to compute the columns `needed` of the result."""

    @abstractmethod
    def bind(self) -> BlockFunction:
        """Return the function for blocks."""


@dataclass(frozen=True)
class SelectColumns(ColumnTransform):
    """Keeps some columns, in this order."""

    columns: tuple[str, ...]

    @property
    def name(self) -> str:
        """The call."""
        return f"select_columns({list(self.columns)})"

    def output_names(self, names: Sequence[str]) -> list[str]:
        """Return the selected columns. Raises `ConfigError` for an unknown one."""
        check_columns(self.name, self.columns, names)
        return list(self.columns)

    def input_names(self, needed: Sequence[str]) -> list[str]:
        """Return the selected columns."""
        return list(self.columns)

    def bind(self) -> BlockFunction:
        """Return the selection, which raises `ConfigError` for an unknown column."""

        def apply(block: pa.Table) -> pa.Table:
            check_columns(self.name, self.columns, block.column_names)
            return block.select(list(self.columns))

        return apply


@dataclass(frozen=True)
class DropColumns(ColumnTransform):
    """Removes columns."""

    columns: tuple[str, ...]

    @property
    def name(self) -> str:
        """The call."""
        return f"drop_columns({list(self.columns)})"

    def output_names(self, names: Sequence[str]) -> list[str]:
        """Return the other columns. Raises `ConfigError` for an unknown one."""
        check_columns(self.name, self.columns, names)
        return [name for name in names if name not in self.columns]

    def input_names(self, needed: Sequence[str]) -> list[str]:
        """Return the needed columns: those that are dropped are not read."""
        return list(needed)

    def bind(self) -> BlockFunction:
        """Return the function that drops those columns that were read."""
        return lambda block: block.drop_columns(
            [name for name in self.columns if name in block.column_names]
        )


@dataclass(frozen=True, eq=False)
class RenameColumns(ColumnTransform):
    """Renames columns."""

    names: Mapping[str, str]
    """The new name of each old one."""

    @property
    def name(self) -> str:
        """The call."""
        return f"rename_columns({dict(self.names)})"

    def output_names(self, names: Sequence[str]) -> list[str]:
        """Return the new names. Raises `ConfigError` for an unknown old one, or duplicates."""
        check_columns(self.name, self.names, names)
        renamed = [self.names.get(name, name) for name in names]
        if len(set(renamed)) < len(renamed):
            raise ConfigError(
                f"{self.name} gives two columns one name: {renamed}.", do="Drop one of them first."
            )
        return renamed

    def input_names(self, needed: Sequence[str]) -> list[str]:
        """Return the old names of the needed columns."""
        old_names = {new: old for old, new in self.names.items()}
        return [old_names.get(name, name) for name in needed]

    def bind(self) -> BlockFunction:
        """Return the function that renames the columns that were read."""
        return lambda block: block.rename_columns(
            [self.names.get(name, name) for name in block.column_names]
        )


@dataclass(frozen=True, eq=False)
class RenameAllColumns:
    """Replaces the names of all columns, in their order."""

    names: tuple[str, ...]

    name = "rename_columns([...])"
    runs_user_code = False

    @property
    def identity(self) -> str:
        """The new names."""
        return f"rename_columns({list(self.names)})"

    def output_names(self, names: Sequence[str]) -> list[str]:
        """Return the new names. Raises `ConfigError` unless there is one for each column."""
        if len(names) != len(self.names):
            raise ConfigError(
                f"rename_columns() has {len(self.names)} names for {len(names)} columns: "
                f"{', '.join(names)}.",
                do="Pass one name for each column, or a dictionary of old and new names.",
            )
        return list(self.names)

    def bind(self) -> BlockFunction:
        """Return the function that renames all columns."""
        return lambda block: block.rename_columns(self.output_names(block.column_names))


@dataclass(frozen=True, eq=False)
class WithColumns(ColumnTransform):
    """Adds or replaces columns that expressions compute."""

    expressions: Mapping[str, Expr]

    @property
    def runs_user_code(self) -> bool:
        """Whether an expression calls a function of the user."""
        return any(expression.runs_user_code for expression in self.expressions.values())

    @property
    def name(self) -> str:
        """The call, without the expressions."""
        return f"with_columns({list(self.expressions)})"

    @property
    def identity(self) -> str:
        """Names and expressions."""
        texts = {name: expression.identity for name, expression in self.expressions.items()}
        return f"with_columns({texts})"

    def output_names(self, names: Sequence[str]) -> list[str]:
        """Return all columns, new ones last. Raises `ConfigError` if one is needed and unknown."""
        for expression in self.expressions.values():
            check_columns(self.name, sorted(expression.columns()), names)
        return [*names, *(name for name in self.expressions if name not in names)]

    def input_names(self, needed: Sequence[str]) -> list[str]:
        """Return the needed columns that are not computed, and those of all expressions."""
        used = {name for expr in self.expressions.values() for name in expr.columns()}
        kept = [name for name in needed if name not in self.expressions]
        return [*kept, *sorted(used - set(kept))]

    def bind(self) -> BlockFunction:
        """Return the function that evaluates all expressions on the columns before them."""
        functions = {
            name: evaluate_column(expr, self.name) for name, expr in self.expressions.items()
        }

        def apply(block: pa.Table) -> pa.Table:
            self.output_names(block.column_names)
            result = block
            for name, evaluate in functions.items():
                result = set_column(result, name, evaluate(block))
            return result

        return apply


def with_columns_transform(expressions: Mapping[str, Expr]) -> WithColumns:
    """Return the transform of these columns. Raises `ConfigTypeError` for other values."""
    for name, expression in expressions.items():
        if not isinstance(expression, Expr):
            raise ConfigTypeError(
                f"with_column({name!r}, {expression!r}): this is not an expression.",
                do="Pass an expression, such as col('x') + 1 or lit(1).",
            )
    return WithColumns(dict(expressions))


def set_column(block: pa.Table, name: str, values: pa.Array | pa.ChunkedArray) -> pa.Table:
    """Return the block with this column added at the end, or replaced where it is."""
    index = block.column_names.index(name) if name in block.column_names else block.num_columns
    if index < block.num_columns:
        return block.set_column(index, name, values)
    return block.append_column(name, values)


def columns_to_read(
    transforms: Sequence[Transform], available: Sequence[str], columns: Sequence[str] | None = None
) -> list[str] | None:
    """Return which of the `available` columns are read to compute `columns`; None: all.

    `columns` None stands for all columns of the result. Transforms of columns before the first
    other transform restrict what is read. Raises `ConfigError` for unknown columns.
    """
    leading: list[ColumnTransform] = []
    names = list(available)
    for transform in transforms:
        if not isinstance(transform, ColumnTransform):
            break
        leading.append(transform)
        names = transform.output_names(names)
    needed = names
    if columns is not None and len(leading) == len(transforms):
        check_columns("A column of the dataset", columns, names)
        needed = list(columns)
    for step in reversed(leading):
        needed = step.input_names(needed)
    if set(needed) >= set(available):
        return None
    # A block without columns would lose its number of rows.
    return [name for name in available if name in set(needed)] or list(available[:1])
