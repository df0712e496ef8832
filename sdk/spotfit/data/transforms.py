"""Transforms of rows that keep their number and order: `map`, `map_batches`, columns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias

import pyarrow as pa

from spotfit.core.errors import ConfigError

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
