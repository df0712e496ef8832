"""Which rows a dataset has and how they are transformed, without its public methods."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any, Literal, NamedTuple, Protocol, TypeVar

import numpy as np
import pyarrow as pa

from spotfit.core.cached import cached_property
from spotfit.data.files import FileSet, path_of
from spotfit.data.formats.batch_formats import concat_blocks
from spotfit.data.formats.column_arrays import arrow_array
from spotfit.data.order import EpochOrder, OrderSettings, UnitPart, Window
from spotfit.data.plans.read_ahead import READ_THREADS, ReadTask, read_in_order
from spotfit.data.plans.transforms import (
    BlockFunction,
    ColumnTransform,
    Transform,
    bind_all,
    columns_to_read,
)
from spotfit.data.plans.unit_manifest import UnitManifest
from spotfit.data.schema import check_columns
from spotfit.data.source import DataFile, IntArray, Source, SourceUnits, int_array

ResultT = TypeVar("ResultT")

_SCHEMA_ROWS = 32
"""How many rows are transformed to find the columns of the result. One may have null values."""


class ShuffleSettings(NamedTuple):
    """How each epoch of a dataset is shuffled."""

    kind: Literal["none", "units", "rows"] = "none"
    """"units" permutes row groups; "rows" also the rows within windows."""
    seed: int | None = None
    """None: the run chooses one, and keeps it."""
    window_rows: int | None = None
    """Rows of a window; None: chosen from the size of the rows."""


UNSHUFFLED = ShuffleSettings()


class Rows:
    """The rows of a dataset before its transforms: a manifest that is listed on first use."""

    operation: Any = None
    """The operation on other rows whose result these are, to compute it elsewhere."""

    def __init__(self, build: Callable[[], UnitManifest], operation: Any = None) -> None:
        self._build = build
        self.operation = operation

    @cached_property
    def manifest(self) -> UnitManifest:
        """The manifest. Raises `ConfigError` as `Source.list_units` does."""
        return self._build()

    def map(self, change: Callable[[UnitManifest], UnitManifest]) -> Rows:
        """Return the rows of the manifest that `change` makes of this one, when it is needed."""
        return Rows(lambda: change(self.manifest))

    # A pickle contains the manifest instead of the functions that build it.
    def __getstate__(self) -> dict[str, Any]:
        return {"manifest": self.manifest}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)


def find_changed_files(manifest: UnitManifest, *, since: int) -> list[DataFile]:
    """Return the files that have changed since they were listed; see `FileSet.find_changed`."""
    changed = []
    for source, units in zip(manifest.sources, manifest.source_units, strict=True):
        for plan in getattr(source, "plans", ()):
            changed += find_changed_files(plan.manifest, since=since)
        files = getattr(source, "files", None)
        if isinstance(files, FileSet):
            changed += files.find_changed(units.files, since=since)
    return list(dict.fromkeys(changed))


class ShuffledRows(Protocol):
    """What determines the rows of every epoch: a `Dataset` without its public methods."""

    @property
    def manifest(self) -> UnitManifest:
        """The units of the rows before the transforms."""
        ...

    @property
    def transforms(self) -> tuple[Transform, ...]:
        """The transforms, in the order of their application."""
        ...

    @property
    def shuffle_settings(self) -> ShuffleSettings:
        """How each epoch is shuffled."""
        ...

    @property
    def runs_user_code(self) -> bool:
        """Whether reading calls functions of the user."""
        ...

    def columns_to_read(self) -> list[str] | None:
        """Return the columns of the sources that are read; None: all."""
        ...


@dataclass(frozen=True, eq=False)
class RowPlan:
    """Rows of sources and their transforms. Immutable; nothing is read until it is asked for."""

    rows: Rows
    transforms: tuple[Transform, ...] = ()

    @classmethod
    def of_source(cls, source: Source) -> RowPlan:
        """Return the plan of all rows of a source."""
        return cls(Rows(lambda: UnitManifest.of_source(source)))

    @property
    def manifest(self) -> UnitManifest:
        """The units, listed on first use. Raises `ConfigError`."""
        return self.rows.manifest

    @classmethod
    def concat(cls, plans: Sequence[RowPlan]) -> RowPlan:
        """Return the plan of the rows of all plans, one after the other.

        Plans with equal transforms share them; otherwise each is a source of its own.
        """
        # Not equal identities, which do not cover all values that a function has captured.
        # Transforms that call functions of the user are equal only if they are the same object.
        first, *others = ([(step, step.identity) for step in plan.transforms] for plan in plans)
        if all(steps == first for steps in others):
            rows = Rows(lambda: UnitManifest.concat([plan.manifest for plan in plans]))
            return cls(rows, plans[0].transforms)
        sources = [
            plan if not plan.transforms else cls.of_source(PlanSource(plan)) for plan in plans
        ]
        return cls(Rows(lambda: UnitManifest.concat([plan.manifest for plan in sources])))

    @cached_property
    def row_offsets(self) -> IntArray:
        """The number of the first row of each unit."""
        return int_array(np.cumsum(self.manifest.unit_rows) - self.manifest.unit_rows)

    @cached_property
    def identity(self) -> str:
        """Text that determines every row, as far as the functions of the user are known."""
        names = [transform.identity for transform in self.transforms]
        return f"{self.manifest.digest} {names}"

    @property
    def digest(self) -> str:
        """Hash of `identity`, in hexadecimal."""
        return hashlib.sha256(self.identity.encode()).hexdigest()

    @property
    def captured(self) -> list[Any]:
        """What determines the rows besides `identity`: functions of the user with their values."""
        sources = self.manifest.sources
        inner = (plan for source in sources for plan in getattr(source, "plans", ()))
        return [
            [step for step in self.transforms if step.runs_user_code],
            [getattr(source, "captured", None) for source in sources],
            [plan.captured for plan in inner],
        ]

    @property
    def runs_user_code(self) -> bool:
        """Whether reading calls functions of the user, also to select or multiply rows."""
        return self.sources_run_user_code or any(step.runs_user_code for step in self.transforms)

    @property
    def sources_run_user_code(self) -> bool:
        """Whether reading calls functions of the user before the transforms."""
        return any(getattr(source, "runs_user_code", False) for source in self.manifest.sources)

    @property
    def input_files(self) -> set[str]:
        """Paths of the files that are read."""
        files = {path_of(file) for units in self.manifest.source_units for file in units.files}
        inner = (plan for source in self.manifest.sources for plan in getattr(source, "plans", ()))
        return files.union(*(plan.input_files for plan in inner))

    def with_transform(self, transform: Transform) -> RowPlan:
        """Return the plan with another transform after all others."""
        return replace(self, transforms=(*self.transforms, transform))

    def map_manifest(self, change: Callable[[UnitManifest], UnitManifest]) -> RowPlan:
        """Return the plan with other units, such as a slice of them."""
        return replace(self, rows=self.rows.map(change))

    def columns_to_read(self, columns: Sequence[str] | None = None) -> list[str] | None:
        """Return the columns of the sources that are read to compute `columns`; None: all."""
        if not self.transforms and columns is None:
            return None
        return columns_to_read(self.transforms, self.manifest.schema.names, columns)

    @cached_property
    def schema(self) -> pa.Schema:
        """Names and types of the columns after the transforms.

        Functions of the user are called with the first rows. Raises `ConfigError` for unknown
        columns, and what a function of the user raises.
        """
        manifest = self.manifest
        read = self.columns_to_read()  # also checks the names of columns
        if not self.transforms:
            return manifest.schema
        apply = bind_all(self.transforms)
        filled = np.flatnonzero(manifest.unit_rows)
        if len(filled) == 0 or all(map(_needs_no_rows, self.transforms)):
            names = manifest.schema.names if read is None else read
            return apply(manifest.schema.empty_table().select(names)).schema
        unit = int(filled[0])
        count = min(int(manifest.unit_rows[unit]), _SCHEMA_ROWS)
        return apply(manifest.read_part(unit, 0, count, read)).schema

    def blocks(self, columns: Sequence[str] | None = None) -> Iterator[pa.Table]:
        """Yield all rows after the transforms, in unshuffled order, a block per non-empty unit.

        Further units are read ahead in threads. Functions of the user are called in this thread.
        """
        units = np.flatnonzero(self.manifest.unit_rows).tolist()
        parts = [UnitPart(unit, 0, int(self.manifest.unit_rows[unit])) for unit in units]
        for block in self.read_parts(parts, self.columns_to_read(columns)):
            yield self.transform(block, columns)

    def map_blocks(
        self, function: Callable[[pa.Table], ResultT], columns: Sequence[str] | None = None
    ) -> Iterator[ResultT]:
        """Yield what a function returns for each block of `blocks`, in the order of the rows.

        Where files are read, it is called in threads, unless there are functions of the user.
        """
        if self.runs_user_code or not self.reads_files:
            yield from map(function, self.blocks(columns))
            return
        sizes = self.manifest.unit_bytes

        def task(unit: int) -> ReadTask[ResultT]:
            return ReadTask(int(sizes[unit]), lambda: function(self.read_unit(unit, columns)))

        yield from read_in_order(map(task, np.flatnonzero(self.manifest.unit_rows).tolist()))

    def read_parts(
        self, parts: Iterable[UnitPart], columns: Sequence[str] | None, *, ahead: bool = True
    ) -> Iterator[pa.Table]:
        """Yield parts of units before the transforms, in order; `ahead` reads further ones."""
        manifest, sizes = self.manifest, self.manifest.unit_bytes
        tasks = (
            ReadTask(int(sizes[part.unit]), partial(manifest.read_part, *part, columns))
            for part in parts
        )
        is_slow = self.reads_files and not self.sources_run_user_code
        return read_in_order(tasks, threads=READ_THREADS if ahead and is_slow else 0)

    @cached_property
    def reads_files(self) -> bool:
        """Whether units are read from files, which takes time without taking a processor."""
        units, sources = self.manifest.source_units, self.manifest.sources
        inner = (plan for source in sources for plan in getattr(source, "plans", ()))
        return any(one.files for one in units) or any(plan.reads_files for plan in inner)

    @property
    def has_versions(self) -> bool:
        """Whether the versions of all files that are read are known."""
        units, sources = self.manifest.source_units, self.manifest.sources
        inner = (plan for source in sources for plan in getattr(source, "plans", ()))
        return (
            all(file.version for one in units for file in one.files)
            and all(getattr(source, "has_versions", True) for source in sources)
            and all(plan.has_versions for plan in inner)
        )

    def read_unit(self, unit: int, columns: Sequence[str] | None = None) -> pa.Table:
        """Return the rows of a unit after the transforms; with `columns`, only these.

        Callable classes of the user are created by the first call in a process.
        """
        count = int(self.manifest.unit_rows[unit])
        return self.transform(
            self.manifest.read_part(unit, 0, count, self.columns_to_read(columns)), columns
        )

    def transform(self, block: pa.Table, columns: Sequence[str] | None = None) -> pa.Table:
        """Apply all transforms to rows that were read for `columns`."""
        result = self._apply(block)
        if columns is None:
            return result
        check_columns("A column of the dataset", columns, result.column_names)
        return result.select(list(columns))

    @cached_property
    def _apply(self) -> BlockFunction:
        return bind_all(self.transforms)

    # Not the instances of callable classes.
    def __getstate__(self) -> dict[str, Any]:
        return {"rows": self.rows, "transforms": self.transforms}


def _needs_no_rows(transform: Transform) -> bool:
    return isinstance(transform, ColumnTransform) and not transform.runs_user_code


@dataclass(frozen=True, eq=False)
class PlanSource:
    """The rows of a plan after its transforms, as a source of another dataset."""

    plan: RowPlan

    @property
    def plans(self) -> tuple[RowPlan]:
        """The plan whose rows these are."""
        return (self.plan,)

    @property
    def runs_user_code(self) -> bool:
        """Whether a transform calls a function of the user."""
        return self.plan.runs_user_code

    @property
    def identity(self) -> str:
        """The rows and the transforms."""
        return f"dataset {self.plan.identity}"

    def list_units(self) -> SourceUnits:
        """Return the units of the plan."""
        manifest = self.plan.manifest
        zeros = manifest.unit_rows * 0
        # Stored with the units, so that no worker calls functions of the user for it.
        schema = self.plan.schema
        return SourceUnits((), zeros, zeros, manifest.unit_rows, manifest.unit_bytes, schema)

    def schema(self, units: SourceUnits) -> pa.Schema:
        """Return the schema after the transforms."""
        assert units.schema is not None
        return units.schema

    def read_unit(
        self, _units: SourceUnits, unit: int, columns: Sequence[str] | None = None
    ) -> pa.Table:
        """Return the rows of a unit after the transforms."""
        return self.plan.read_unit(unit, columns)


_WINDOW_BYTES = 256 * 2**20
"""Rows that are shuffled together in a pass over a shuffled dataset."""
_SAMPLE_BYTES = 16 * 2**20
"""The same where only a few rows are needed."""


def ordered_blocks(
    plan: RowPlan,
    shuffle: ShuffleSettings,
    *,
    columns: Sequence[str] | None = None,
    limit: int | None = None,
    epoch: int = 0,
) -> Iterator[pa.Table]:
    """Yield all rows once, or the first `limit`, in the order of one pass of a shuffled dataset.

    Rows are shuffled in windows of `shuffle.window_rows`; if that is None, of 256 MiB,
    or 16 MiB with a limit. Only rows that are yielded are transformed.
    """
    read = plan.columns_to_read(columns)
    remaining = plan.manifest.row_count if limit is None else limit
    if not remaining:
        return
    is_sample = limit is not None
    for block in _shuffled_parts(plan, shuffle, read, is_sample=is_sample, epoch=epoch):
        yield plan.transform(block.slice(0, remaining), columns)
        remaining -= block.num_rows
        if remaining <= 0:  # before the next block is read
            return


def _shuffled_parts(
    plan: RowPlan,
    shuffle: ShuffleSettings,
    columns: Sequence[str] | None,
    *,
    is_sample: bool,
    epoch: int,
) -> Iterator[pa.Table]:
    manifest = plan.manifest
    budget = _SAMPLE_BYTES if is_sample else _WINDOW_BYTES
    rows = budget * manifest.row_count // max(int(manifest.unit_bytes.sum()), 1)
    window_rows = shuffle.window_rows or rows
    settings = OrderSettings(shuffle.seed or 0, 1, window_rows, shuffle.kind)
    order = EpochOrder(manifest.unit_rows, settings, epoch)
    parts = (part for window in _windows(order) for part in window.parts)
    blocks = plan.read_parts(parts, columns, ahead=not is_sample)
    for window in _windows(order):
        block = concat_blocks(list(islice(blocks, len(window.parts))))
        permutation = order.permutation(0, window)
        yield block if permutation is None else block.take(arrow_array(permutation))


def _windows(order: EpochOrder) -> Iterator[Window]:
    row = 0
    while row < order.row_count:
        window = order.window_at(0, row)
        yield window
        row = window.end
