"""PyTorch datasets and lists: `__len__` and `__getitem__`. A unit is a range of indices."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from numbers import Real
from typing import Any

import cloudpickle
import numpy as np
import pyarrow as pa

from spotfit.core.cached import cached_property
from spotfit.core.errors import ConfigError
from spotfit.data.formats.column_arrays import column_from_values
from spotfit.data.formats.python_objects import object_column
from spotfit.data.source import SourceUnits, int_array

COLUMN = "item"
_UNIT_ITEMS = 64
MAX_PICKLED_BYTES = 256 * 2**20
"""Larger datasets have their rows in memory, and would be sent to every process."""


class TorchSource:
    """The items of a dataset, in the column `item`.

    Arrays, tensors, numbers, text and bytes become values of the column, other items Python
    objects. The dataset is pickled with the source; it opens files on the machine that reads.
    """

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    @property
    def captured(self) -> Any:
        """The dataset."""
        return self._dataset

    @property
    def name(self) -> str:
        """The call, for messages."""
        return f"from_torch({type(self._dataset).__name__})"

    @property
    def has_versions(self) -> bool:
        """Whether `captured` determines every item. Other datasets may read files."""
        return isinstance(self._dataset, list)

    @cached_property
    def identity(self) -> str:
        """Class and length: what an item contains is unknown until it is loaded."""
        kind = type(self._dataset)
        return f"torch {kind.__module__}.{kind.__qualname__} {len(self._dataset)}"

    def list_units(self) -> SourceUnits:
        """Return ranges of indices; loads the first item for the columns."""
        count = len(self._dataset)
        first_rows = np.arange(0, count, _UNIT_ITEMS)
        rows = np.minimum(count - first_rows, _UNIT_ITEMS)
        first_item = [self._dataset[0]] if count else []
        column = _to_column(first_item)
        return SourceUnits(
            files=(),
            unit_files=int_array(first_rows * 0),
            unit_positions=int_array(first_rows),
            unit_rows=int_array(rows),
            unit_bytes=int_array(rows * column.nbytes),
            schema=pa.schema([(COLUMN, column.type)]),
        )

    def schema(self, units: SourceUnits) -> pa.Schema:
        """Return the column with the type of the first item."""
        assert units.schema is not None
        return units.schema

    def read_unit(
        self, units: SourceUnits, unit: int, columns: Sequence[str] | None = None
    ) -> pa.Table:
        """Load the items of a unit. Raises what the dataset raises."""
        first, rows = int(units.unit_positions[unit]), int(units.unit_rows[unit])
        items = [self._dataset[index] for index in range(first, first + rows)]
        table = pa.table({COLUMN: _to_column(items)})
        return table if columns is None else table.select(list(columns))

    def __getstate__(self) -> bytes:
        # With cloudpickle, which sends classes of a script as they are.
        state: bytes = cloudpickle.dumps(self._dataset)
        if len(state) > MAX_PICKLED_BYTES:
            raise ConfigError(
                f"The PyTorch dataset has {len(state) / 2**20:.0f} MiB as a pickle, and would be "
                "sent to every process.",
                do="Let its __getitem__ load the items from files or a bucket, or write the rows "
                "as Parquet and use read_parquet().",
            )
        return state

    def __setstate__(self, state: bytes) -> None:
        self._dataset = pickle.loads(state)  # noqa: S301  # a part of the pickle that is loaded


def _to_column(items: Sequence[Any]) -> pa.Array:
    if items and all(_is_value(item) for item in items):
        return column_from_values(list(items), name=COLUMN)
    return object_column(items)


def _is_value(item: Any) -> bool:
    return isinstance(item, Real | str | bytes) or hasattr(item, "__array__")
