"""`BatchMapper`: a function on batches as a preprocessor, as Ray had it until version 2.3."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pyarrow as pa

from spotfit.core.errors import ConfigError
from spotfit.data.formats.batch_formats import to_batch, to_block
from spotfit.data.preprocessors.batch_kinds import BatchFormat
from spotfit.data.preprocessors.preprocessor_base import ArrowPreprocessor


class BatchMapper(ArrowPreprocessor):
    """Apply a function to batches, which keeps the number and the order of the rows.

    `batch_format` is the kind of the batches, "pandas", "numpy" or "arrow"; `batch_size` is the
    largest number of rows of one, by default ("default" or None) all rows of a block.
    """

    _is_fittable = False

    def __init__(
        self,
        fn: Callable[[Any], Any],
        batch_format: str = "pandas",
        batch_size: int | str | None = "default",
    ) -> None:
        super().__init__()
        if batch_format not in list(BatchFormat):
            raise ConfigError(
                f"The batch format {batch_format!r} is not supported.",
                do=f"Use one of {[kind.value for kind in BatchFormat]}.",
            )
        self.fn = fn
        self.batch_format = BatchFormat(batch_format)
        self.batch_size = batch_size

    def parameters(self) -> dict[str, Any]:
        """Return the arguments of the constructor."""
        return {
            "fn": self.fn,
            "batch_format": self.batch_format.value,
            "batch_size": self.batch_size,
        }

    @property
    def knows_columns(self) -> bool:
        """False: the function may read and write any column."""
        return False

    @property
    def runs_user_code(self) -> bool:
        """True."""
        return True

    def _transform_arrow(self, table: pa.Table) -> pa.Table:
        size = self.batch_size if isinstance(self.batch_size, int) else table.num_rows
        firsts = range(0, table.num_rows, size) if table.num_rows else (0,)
        return pa.concat_tables([self._call(table.slice(first, size)) for first in firsts])

    def _call(self, batch: pa.Table) -> pa.Table:
        kinds: dict[str, Any] = {"pandas": "pandas", "numpy": "numpy", "arrow": "pyarrow"}
        return to_block(self.fn(to_batch(batch, kinds[self.batch_format])))
