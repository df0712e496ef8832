"""`Schema`: names and types of a dataset's columns; checks of names, and sizes of types."""

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


def fixed_width_bytes(kind: pa.DataType) -> float:
    """Return the size in memory of each value of a type, 0 if values have different sizes.

    That of a struct is the size of those of its fields whose values all have one size.
    """
    if isinstance(kind, pa.BaseExtensionType):
        return fixed_width_bytes(kind.storage_type)
    if pa.types.is_struct(kind):
        return sum(fixed_width_bytes(field.type) for field in kind)
    if pa.types.is_fixed_size_list(kind):
        return int(kind.list_size) * fixed_width_bytes(kind.value_type)
    try:
        return int(kind.bit_width) / 8
    except ValueError:
        return 0
