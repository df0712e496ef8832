"""Manifests: which units a dataset consists of, and how many rows each has.

A manifest refers to units of one or several sources, and to slices of them. `slice`, `concat` and
`select_units` read no data.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import pyarrow as pa

from spotfit.core.cached import cached_property
from spotfit.core.errors import ConfigError
from spotfit.data.source import (
    Decode,
    IntArray,
    Source,
    SourceUnits,
    UnitFetcher,
    int_array,
)

_FORMAT_VERSION = 1


@dataclass(frozen=True, eq=False)
class UnitManifest:
    """Units of `sources`, in the order of the rows. The arrays have one element per unit."""

    sources: tuple[Source, ...]
    source_units: tuple[SourceUnits, ...]
    unit_sources: IntArray
    """Index into `sources`."""
    unit_indices: IntArray
    """Index into the units of the source."""
    unit_first_rows: IntArray
    """The first row of the source's unit that belongs to this dataset."""
    unit_rows: IntArray

    @classmethod
    def of_source(cls, source: Source) -> UnitManifest:
        """List the units of a source. Raises `ConfigError` as `Source.list_units` does."""
        units = source.list_units()
        count = len(units.unit_rows)
        zeros = int_array(np.zeros(count, dtype=np.int64))
        return cls(
            sources=(source,),
            source_units=(units,),
            unit_sources=zeros,
            unit_indices=int_array(np.arange(count)),
            unit_first_rows=zeros,
            unit_rows=units.unit_rows,
        )

    @property
    def unit_count(self) -> int:
        """Number of units, also of those without rows."""
        return len(self.unit_rows)

    @cached_property
    def row_count(self) -> int:
        """Number of rows."""
        return int(self.unit_rows.sum())

    @cached_property
    def unit_bytes(self) -> IntArray:
        """Size of the rows of each unit in memory; of a slice, in proportion to its rows."""
        sizes = np.zeros(self.unit_count, dtype=np.int64)
        for index, units in enumerate(self.source_units):
            of_source = self.unit_sources == index
            indices = self.unit_indices[of_source]
            whole_rows = np.maximum(units.unit_rows[indices], 1)
            sizes[of_source] = units.unit_bytes[indices] * self.unit_rows[of_source] // whole_rows
        return int_array(sizes)

    @cached_property
    def schema(self) -> pa.Schema:
        """Names and types of the columns.

        Raises `ConfigError` if the sources have columns that cannot be unified.
        """
        try:
            return pa.unify_schemas(self._schemas, promote_options="permissive")
        except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
            raise ConfigError(
                f"The parts of this dataset have different columns: {error}.",
                do="Rename, drop or cast the columns before union().",
            ) from error

    @cached_property
    def digest(self) -> str:
        """Hexadecimal SHA-256 of what determines all rows and their order."""
        content = hashlib.sha256(f"manifest {_FORMAT_VERSION}".encode())
        for source, units in zip(self.sources, self.source_units, strict=True):
            content.update(repr((source.identity, units.files)).encode())
            for array in (units.unit_files, units.unit_positions, units.unit_rows):
                content.update(array.astype("<i8").tobytes())
        for array in self._unit_arrays:
            content.update(array.astype("<i8").tobytes())
        return content.hexdigest()

    @cached_property
    def position_digest(self) -> str:
        """Hexadecimal SHA-256 of the rows that a position counts, which a cache does not change."""
        plan = getattr(self.sources[0], "cached_plan", None) if len(self.sources) == 1 else None
        if plan is None:
            return self.digest
        inner: UnitManifest = plan.manifest.select_units(self.unit_indices)
        first_rows = int_array(inner.unit_first_rows + self.unit_first_rows)
        return replace(inner, unit_first_rows=first_rows, unit_rows=self.unit_rows).position_digest

    def read_part(
        self, unit: int, first: int, count: int, columns: Sequence[str] | None = None
    ) -> pa.Table:
        """Return `count` rows of a unit from row `first` of the unit on."""
        return self.fetch_part(unit, first, count, columns)()

    def fetch_part(
        self, unit: int, first: int, count: int, columns: Sequence[str] | None = None
    ) -> Decode:
        """Fetch what is needed for `read_part`, which is what the returned function returns.

        Unless `is_fetched`, nothing is fetched, and the function does all of the work.
        """
        number = int(self.unit_sources[unit])
        schema = self._unified_schema(number, columns)
        if schema is not None:
            columns = [name for name in schema.names if name in self._schemas[number].names] or None
        source = self.sources[number]
        arguments = self.source_units[number], int(self.unit_indices[unit]), columns
        if isinstance(source, UnitFetcher) and self.is_fetched(unit):
            read = source.fetch_unit(*arguments)
        else:
            read = partial(source.read_unit, *arguments)
        begin = int(self.unit_first_rows[unit]) + first

        def decode() -> pa.Table:
            part = read().slice(begin, count)
            return part if schema is None else _conform(part, schema)

        return decode

    def is_fetched(self, unit: int) -> bool:
        """Whether the bytes of a unit are fetched by requests, apart from their decoding."""
        number = int(self.unit_sources[unit])
        source, units = self.sources[number], self.source_units[number]
        return isinstance(source, UnitFetcher) and source.is_fetched(
            units, int(self.unit_indices[unit])
        )

    @cached_property
    def _schemas(self) -> list[pa.Schema]:
        return [
            source.schema(units)
            for source, units in zip(self.sources, self.source_units, strict=True)
        ]

    def _unified_schema(self, source: int, columns: Sequence[str] | None) -> pa.Schema | None:
        """Return the columns of a block; None if those of the source need no change."""
        if len(self.sources) == 1 or self._schemas[source].equals(self.schema):
            return None
        names = self.schema.names if columns is None else columns
        return pa.schema([self.schema.field(name) for name in names])

    def select_units(self, order: Sequence[int] | IntArray) -> UnitManifest:
        """Return a manifest of the units with these indices, in this order."""
        sources, indices, first_rows, rows = (
            int_array(array[order]) for array in self._unit_arrays
        )
        return replace(
            self,
            unit_sources=sources,
            unit_indices=indices,
            unit_first_rows=first_rows,
            unit_rows=rows,
        )

    def slice(self, first: int, count: int | None = None) -> UnitManifest:
        """Return a manifest of `count` rows from row `first` on, or of all rows from there on.

        Fewer at the end. Rows of a unit that is cut stay in one unit.
        """
        end = self.row_count if count is None else min(first + count, self.row_count)
        ends = np.cumsum(self.unit_rows)
        begins = ends - self.unit_rows
        kept = np.flatnonzero((begins < end) & (ends > first))
        part = self.select_units(kept)
        cut = np.maximum(first - begins[kept], 0)
        rows = np.minimum(ends[kept], end) - begins[kept] - cut
        return replace(
            part, unit_first_rows=int_array(part.unit_first_rows + cut), unit_rows=int_array(rows)
        )

    @staticmethod
    def concat(manifests: Sequence[UnitManifest]) -> UnitManifest:
        """Return the rows of all manifests, one after the other. Requires at least one."""
        offsets = np.cumsum([0, *(len(manifest.sources) for manifest in manifests)])
        sources = [
            manifest.unit_sources + offset
            for manifest, offset in zip(manifests, offsets, strict=False)
        ]
        return UnitManifest(
            sources=tuple(source for manifest in manifests for source in manifest.sources),
            source_units=tuple(units for manifest in manifests for units in manifest.source_units),
            unit_sources=int_array(np.concatenate(sources)),
            unit_indices=int_array(np.concatenate([m.unit_indices for m in manifests])),
            unit_first_rows=int_array(np.concatenate([m.unit_first_rows for m in manifests])),
            unit_rows=int_array(np.concatenate([m.unit_rows for m in manifests])),
        )

    @property
    def _unit_arrays(self) -> tuple[IntArray, IntArray, IntArray, IntArray]:
        return self.unit_sources, self.unit_indices, self.unit_first_rows, self.unit_rows


def _conform(block: pa.Table, schema: pa.Schema) -> pa.Table:
    """Return the columns of `schema`, cast to its types; those that the block lacks are null."""
    columns = [
        block.column(field.name).cast(field.type)
        if field.name in block.column_names
        else pa.nulls(block.num_rows, field.type)
        for field in schema
    ]
    return pa.Table.from_arrays(columns, schema=schema)
