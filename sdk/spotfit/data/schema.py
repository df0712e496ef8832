"""`Schema`: names and types of a dataset's columns."""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow as pa


@dataclass(frozen=True, repr=False)
class Schema:
    """Names and Arrow types of the columns, printed as a table."""

    base_schema: pa.Schema

    @property
    def names(self) -> list[str]:
        """The names of the columns, in order."""
        names: list[str] = self.base_schema.names
        return names

    @property
    def types(self) -> list[pa.DataType]:
        """The Arrow types of the columns, in order."""
        types: list[pa.DataType] = self.base_schema.types
        return types

    def __repr__(self) -> str:
        width = max(map(len, ["Column", *self.names])) + 2
        lines = [("Column", "Type"), ("------", "----")]
        lines += [(name, str(kind)) for name, kind in zip(self.names, self.types, strict=True)]
        return "\n".join(f"{name:<{width}}{kind}" for name, kind in lines)
