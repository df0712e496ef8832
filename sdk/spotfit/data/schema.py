"""`Schema`: names and types of a dataset's columns; checks of names."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import pyarrow as pa

from spotfit.core.errors import ConfigError
from spotfit.core.input_checks import did_you_mean


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


def check_columns(call: str, columns: Iterable[str], known: Iterable[str]) -> None:
    """Raise `ConfigError` if one of `columns` is not in `known`; `call` is what the user wrote."""
    unknown = [name for name in columns if name not in known]
    if unknown:
        raise ConfigError(
            f"{call}: there is no column {', '.join(map(repr, unknown))}.",
            do=" ".join(did_you_mean(name, known) for name in unknown),
        )
