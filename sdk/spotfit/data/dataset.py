"""`Dataset`: an immutable description of rows, which are read when they are needed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple

import pyarrow as pa

from spotfit.data.data_iterator import DataIterator
from spotfit.data.manifest import Manifest
from spotfit.data.shard import ShardGroup, ShardPosition
from spotfit.data.source import Source, SourceUnits
from spotfit.data.transforms import Transform, bind_all


class ShuffleSettings(NamedTuple):
    """How each epoch of a dataset is shuffled."""

    kind: Literal["none", "units", "rows"] = "none"
    """"units" permutes row groups; "rows" also the rows within windows."""
    seed: int | None = None
    """None: the run chooses one, and keeps it."""
    window_rows: int | None = None
    """Rows of a window; None: chosen from the size of the rows."""


_UNSHUFFLED = ShuffleSettings()


class Rows:
    """The rows of a dataset before its transforms: a manifest that is listed on first use."""

    def __init__(self, build: Callable[[], Manifest]) -> None:
        self._build = build

    @cached_property
    def manifest(self) -> Manifest:
        """The manifest. Raises `ConfigError` as `Source.list_units` does."""
        return self._build()

    def map(self, change: Callable[[Manifest], Manifest]) -> Rows:
        """Return the rows of the manifest that `change` makes of this one, when it is needed."""
        return Rows(lambda: change(self.manifest))

    # A pickle contains the manifest instead of the functions that build it.
    def __getstate__(self) -> dict[str, Any]:
        return {"manifest": self.manifest}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)


@dataclass(frozen=True, eq=False)
class Dataset:
    """Rows of sources, transformed block by block.

    Nothing is read until rows, their number or the schema are asked for. Every method returns a new
    dataset.
    """

    _rows: Rows
    _transforms: tuple[Transform, ...] = ()
    _shuffle: ShuffleSettings = _UNSHUFFLED

    @classmethod
    def of_source(cls, source: Source) -> Dataset:
        """Return the dataset of all rows of a source."""
        return cls(Rows(lambda: Manifest.of_source(source)))

    @property
    def manifest(self) -> Manifest:
        """The units of this dataset, listed on first use. Raises `ConfigError`."""
        return self._rows.manifest

    @property
    def transforms(self) -> tuple[Transform, ...]:
        """The transforms of the rows, in the order of their application."""
        return self._transforms

    @property
    def shuffle_settings(self) -> ShuffleSettings:
        """How each epoch is shuffled."""
        return self._shuffle

    def with_transform(self, transform: Transform) -> Dataset:
        """Return this dataset with another transform after all others."""
        return replace(self, _transforms=(*self._transforms, transform))

    def map_manifest(self, change: Callable[[Manifest], Manifest]) -> Dataset:
        """Return this dataset with other units, such as a slice of them."""
        return replace(self, _rows=self._rows.map(change))

    def as_source(self) -> Source:
        """Return a source of this dataset's rows, after its transforms and in unshuffled order."""
        return DatasetSource(self)

    def blocks(self, columns: Sequence[str] | None = None) -> Iterator[pa.Table]:
        """Yield all rows, after the transforms and in unshuffled order, one block per unit."""
        apply = bind_all(self._transforms)
        for unit, count in enumerate(self.manifest.unit_rows.tolist()):
            block = apply(self.manifest.read_part(unit, 0, count, self._columns_to_read(columns)))
            yield block if columns is None else block.select(list(columns))

    def schema(self) -> pa.Schema:
        """Return names and types of the columns after the transforms."""
        return self.as_source().schema(self.as_source().list_units())

    def iterator(self) -> DataIterator:
        """Return an iterator over all rows."""
        return DataIterator(ShardPosition(self, ShardGroup()))

    def _columns_to_read(self, columns: Sequence[str] | None) -> Sequence[str] | None:
        # A transform may use any column.
        return None if self._transforms else columns


@dataclass(frozen=True, eq=False)
class DatasetSource:
    """The rows of a dataset after its transforms, as a source of another dataset."""

    dataset: Dataset

    @property
    def identity(self) -> str:
        """The rows and the transforms."""
        names = [transform.identity for transform in self.dataset.transforms]
        return f"dataset {self.dataset.manifest.digest} {names}"

    def list_units(self) -> SourceUnits:
        """Return the units of the dataset."""
        manifest = self.dataset.manifest
        zeros = manifest.unit_rows * 0
        return SourceUnits((), zeros, zeros, manifest.unit_rows, manifest.unit_bytes)

    def schema(self, _units: SourceUnits) -> pa.Schema:
        """Return the schema after the transforms, for which the first rows are transformed."""
        return self._apply(self.dataset.manifest.schema.empty_table()).schema

    def read_unit(
        self, _units: SourceUnits, unit: int, columns: Sequence[str] | None = None
    ) -> pa.Table:
        """Return the rows of a unit after the transforms."""
        manifest = self.dataset.manifest
        block = self._apply(manifest.read_part(unit, 0, int(manifest.unit_rows[unit])))
        return block if columns is None else block.select(list(columns))

    @cached_property
    def _apply(self) -> Callable[[pa.Table], pa.Table]:
        return bind_all(self.dataset.transforms)

    def __getstate__(self) -> dict[str, Any]:
        return {"dataset": self.dataset}
