"""Transforms that call functions of the user: `map`, `map_batches`, `add_column`.

Their arrays are writable: scripts for older versions of Ray change their batch in place.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from spotfit.core.errors import ConfigError, ConfigTypeError
from spotfit.data.formats.batch_formats import (
    BatchFormat,
    check_batch_format,
    concat_blocks,
    to_batch,
    to_block,
)
from spotfit.data.formats.column_arrays import column_to_numpy
from spotfit.data.formats.tensor_storage import is_tensor_field
from spotfit.data.plans.transforms import BlockFunction, set_column
from spotfit.data.user_functions import UserFunction


@dataclass(frozen=True, eq=False)
class UserTransform:
    """A transform that calls a function of the user."""

    function: UserFunction

    runs_user_code = True

    @property
    def name(self) -> str:
        """The call."""
        return self.function.name

    @property
    def identity(self) -> str:
        """Code and arguments of the function."""
        return self.function.identity


@dataclass(frozen=True, eq=False)
class MapRows(UserTransform):
    """Calls the function with each row, a dictionary, and takes the dictionary that it returns."""

    def bind(self) -> BlockFunction:
        """Return the function of blocks."""
        call = self.function.bind()

        def apply(block: pa.Table) -> pa.Table:
            return rows_to_block([self._check(call(row)) for row in block_rows(block)])

        return apply

    def _check(self, row: Any) -> Mapping[str, Any]:
        return check_row(self.name, row)


@dataclass(frozen=True, eq=False)
class MapBatches(UserTransform):
    """Calls the function with batches of the block, and takes the batches that it returns."""

    batch_format: BatchFormat
    batch_size: int | None
    """Rows of a batch; the last one of a block may have fewer. None: the whole block."""

    @property
    def identity(self) -> str:
        """Code and arguments of the function, and the batches that it gets."""
        return f"{self.function.identity} {self.batch_format} {self.batch_size}"

    def bind(self) -> BlockFunction:
        """Return the function of blocks."""
        call = self.function.bind()

        def apply(block: pa.Table) -> pa.Table:
            size = self.batch_size or max(block.num_rows, 1)
            batches = [block.slice(first, size) for first in range(0, block.num_rows, size)]
            results = [
                result
                for batch in batches
                for result in self._blocks_of(call(to_batch(batch, self.batch_format)))
            ]
            # A generator that yields nothing has returned no rows.
            return concat_blocks(results) if results else block.slice(0, 0)

        return apply

    def _blocks_of(self, result: Any) -> Iterator[pa.Table]:
        # A generator yields several batches for one.
        for batch in result if isinstance(result, Iterator) else (result,):
            if batch is None:
                raise ConfigTypeError(
                    f"{self.name} returned None instead of a batch.",
                    do="Return the batch at the end of the function, also if it was changed in "
                    "place.",
                )
            yield to_block(batch)


@dataclass(frozen=True, eq=False)
class AddColumn(UserTransform):
    """Adds or replaces one column, which the function returns for a batch."""

    column: str
    batch_format: BatchFormat

    @property
    def identity(self) -> str:
        """Code and arguments of the function, the column, and the format of the batch."""
        return f"{self.function.identity} {self.column} {self.batch_format}"

    def bind(self) -> BlockFunction:
        """Return the function of blocks."""
        call = self.function.bind()

        def apply(block: pa.Table) -> pa.Table:
            values = call(to_batch(block, self.batch_format))
            if np.ndim(values) == 0:  # one value for all rows, as pandas allows
                values = [values] * block.num_rows
            return set_column(block, self.column, to_block({self.column: values}).column(0))

        return apply


def map_batches_transform(
    function: UserFunction, batch_format: BatchFormat, batch_size: int | str | None
) -> MapBatches:
    """Return the transform of a call of `map_batches`. Raises `ConfigError`."""
    check_batch_format(batch_format)
    if batch_size in (None, "auto", "default"):
        return MapBatches(function, batch_format, None)
    if not isinstance(batch_size, int) or batch_size < 1:
        raise ConfigError(
            f"{function.name}: batch_size={batch_size!r} is not a number of rows.",
            do="Pass an integer of at least 1, or None for whole blocks.",
        )
    return MapBatches(function, batch_format, batch_size)


def add_column_transform(
    function: UserFunction, column: str, batch_format: BatchFormat
) -> AddColumn:
    """Return the transform of a call of `add_column`. Raises `ConfigError`."""
    check_batch_format(batch_format)
    return AddColumn(function, column, batch_format)


def block_rows(block: pa.Table) -> list[dict[str, Any]]:
    """Return the rows as dictionaries of Python values; tensors are writable arrays."""
    columns = [
        _column_values(column, is_tensor=is_tensor_field(field))
        for column, field in zip(block.columns, block.schema, strict=True)
    ]
    if not columns:
        return [{} for _ in range(block.num_rows)]
    return [
        dict(zip(block.column_names, values, strict=True)) for values in zip(*columns, strict=True)
    ]


def _column_values(column: pa.ChunkedArray, *, is_tensor: bool) -> list[Any]:
    if is_tensor:
        return list(column_to_numpy(column))
    values: list[Any] = column.to_pylist()
    return values


def rows_to_block(rows: list[Mapping[str, Any]]) -> pa.Table:
    """Return the block of the rows; a column that a row lacks is null there."""
    names = dict.fromkeys(name for row in rows for name in row)
    return to_block({name: [row.get(name) for row in rows] for name in names})


def check_row(name: str, row: Any) -> Mapping[str, Any]:
    """Return `row` unchanged. Raises `ConfigTypeError` if it is not a dictionary."""
    if not isinstance(row, Mapping):
        raise ConfigTypeError(
            f"{name} returned {type(row).__name__} instead of a row.",
            do='Return a dictionary of the columns, such as {"item": value}.',
        )
    return row
