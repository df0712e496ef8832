"""Columns whose values are in the paths of files, such as `year=2024/month=05/part-0.parquet`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal
from urllib.parse import unquote

import pyarrow as pa

from spotfit.core.errors import ConfigError

_NULL = "__HIVE_DEFAULT_PARTITION__"
_ARROW_TYPES: Mapping[type, pa.DataType] = {
    str: pa.string(),
    int: pa.int64(),
    float: pa.float64(),
    bool: pa.bool_(),
}


@dataclass(frozen=True)
class Partitioning:
    """How the folders of a path name the values of columns; as `ray.data.datasource.Partitioning`.

    "hive" reads folders such as `year=2024`; "dir" reads the folders below `base_dir` as the values
    of `field_names`. Values are strings, unless `field_types` has another type for the column.
    """

    style: Literal["hive", "dir"] = "hive"
    base_dir: str | None = None
    field_names: Sequence[str] | None = None
    field_types: Mapping[str, type] = field(default_factory=dict)
    filesystem: Any = None

    def __post_init__(self) -> None:
        if self.style not in ("hive", "dir"):
            raise ConfigError(
                f"Partitioning(style={self.style!r}) is not supported.", do="Use 'hive' or 'dir'."
            )
        if self.style == "dir" and not self.field_names:
            raise ConfigError(
                "Partitioning('dir') has no names for the folders.",
                do="Pass field_names, one for each folder below base_dir.",
            )
        for name, kind in self.field_types.items():
            if kind not in _ARROW_TYPES:
                raise ConfigError(
                    f"Partitioning(field_types=…) has the type {kind!r} for {name!r}.",
                    do="Use str, int, float or bool.",
                )

    @property
    def identity(self) -> str:
        """Text that determines the columns of a path."""
        types = {name: kind.__name__ for name, kind in self.field_types.items()}
        return f"{self.style} {self.base_dir} {self.field_names} {types}"

    def parse(self, path: str) -> dict[str, str]:
        """Return the values of the columns in a path. Raises `ConfigError` for missing folders."""
        base = (self.base_dir or "").partition("://")[2] or self.base_dir or ""
        folders = path.removeprefix(base.rstrip("/")).strip("/").split("/")[:-1]
        if self.style == "hive":
            pairs = (folder.partition("=") for folder in folders)
            found = {name: unquote(value) for name, equals, value in pairs if name and equals}
        else:
            names = self.field_names or ()
            if len(folders) != len(names):
                raise ConfigError(
                    f"{path} has {len(folders)} folders below {base!r}, but Partitioning has "
                    f"{len(names)} names.",
                    do="Correct base_dir or field_names.",
                )
            found = dict(zip(names, folders, strict=True))
        return found

    def to_columns(self, path: str) -> dict[str, pa.Scalar]:
        """Return the columns of a path with their types. Raises `ConfigError` for others."""
        return {name: self._to_scalar(name, text, path) for name, text in self.parse(path).items()}

    def _to_scalar(self, name: str, text: str, path: str) -> pa.Scalar:
        kind = self.field_types.get(name, str)
        if text == _NULL and self.style == "hive":
            return pa.scalar(None, _ARROW_TYPES[kind])
        try:
            value = text.lower() in ("true", "1") if kind is bool else kind(text)
        except ValueError as error:
            raise ConfigError(
                f"The folder {name}={text} of {path} is not of the type {kind.__name__}.",
                do="Correct field_types of Partitioning.",
            ) from error
        return pa.scalar(value, _ARROW_TYPES[kind])


class PathPartitionFilter:
    """Selects files by the values in their paths; as `ray.data.datasource.PathPartitionFilter`."""

    def __init__(
        self, partitioning: Partitioning, filter_fn: Callable[[dict[str, str]], bool]
    ) -> None:
        self._partitioning = partitioning
        self._filter = filter_fn

    @classmethod
    def of(
        cls,
        filter_fn: Callable[[dict[str, str]], bool],
        style: Literal["hive", "dir"] = "hive",
        base_dir: str | None = None,
        field_names: Sequence[str] | None = None,
        **options: Any,
    ) -> PathPartitionFilter:
        """Return a filter that keeps the files for whose values `filter_fn` returns True."""
        return cls(Partitioning(style, base_dir, field_names, **options), filter_fn)

    def __call__(self, paths: Sequence[str]) -> list[str]:
        """Return the paths that are kept, in their order."""
        return [path for path in paths if self._filter(self._partitioning.parse(path))]
