"""`Dataset.cache`: the rows of a plan as a source that keeps them on each machine."""

from __future__ import annotations

import hashlib
import os
import sys
import uuid
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from typing import Any

import numpy as np
import pyarrow as pa

from spotfit.core.cached import cached_property
from spotfit.core.errors import ConfigError
from spotfit.data.caching.row_cache import CacheLimits, RowCache
from spotfit.data.captured_values import digest_captured
from spotfit.data.formats.python_objects import PythonObjectType
from spotfit.data.plans.row_plan import PlanSource, RowPlan
from spotfit.data.source import Decode, SourceUnits
from spotfit.host import log

_FORMAT_VERSION = 1
"""Must be increased when the same sources and transforms give other rows."""
_CHECKED_ROWS = 32


@dataclass(frozen=True, eq=False)
class CachedSource(PlanSource):
    """The rows of a plan after its transforms, each unit of which is computed once on a machine.

    Units are those of the plan, so that the order of an epoch is the same with and without it.
    """

    limits: CacheLimits

    @property
    def cached_plan(self) -> RowPlan:
        """The plan; positions in the rows of this source are those in its rows."""
        return self.plan

    def list_units(self) -> SourceUnits:
        """Return the units of the plan.

        Raises `ConfigError` if a function of the user gives other rows in a second call.
        """
        manifest = self.plan.manifest
        zeros = manifest.unit_rows * 0
        units = SourceUnits((), zeros, zeros, manifest.unit_rows, manifest.unit_bytes)
        try:
            schema = self.plan.schema
            _check_rows(self.plan)
        except ConfigError:
            raise
        except Exception as error:  # noqa: BLE001 - a function may need a library of the machines
            log.warning(
                "data.cache_not_checked",
                reason=f"{type(error).__name__}: {error}",
                do="The functions before cache() must not draw random numbers.",
            )
            return units
        return replace(units, schema=schema)

    def schema(self, units: SourceUnits) -> pa.Schema:
        """Return the columns after the transforms; functions of the user may be called."""
        return self.plan.schema if units.schema is None else units.schema

    def is_fetched(self, _units: SourceUnits, unit: int) -> bool:
        """Whether the plan reads the unit by a request."""
        return self.plan.manifest.is_fetched(unit)

    def fetch_unit(
        self, _units: SourceUnits, unit: int, columns: Sequence[str] | None = None
    ) -> Decode:
        """Fetch what is needed to compute a unit that is not kept; see `UnitFetcher`."""
        # Functions are called once, whatever columns are needed later.
        kept = None if columns is None or self.runs_user_code else tuple(columns)
        name = f"{unit}-{_columns_name(kept)}"
        cache = self._cache
        compute = None if cache.contains(name) else self._fetch(unit, kept)

        def load() -> pa.Table:
            table = cache.get(name)
            if table is None:
                table = (compute or self._fetch(unit, kept))()
                # Another number is reported by the reader.
                if table.num_rows == self.plan.manifest.unit_rows[unit]:
                    cache.put(name, table)
            return table if columns is None else table.select(list(columns))

        return load

    def read_unit(
        self, units: SourceUnits, unit: int, columns: Sequence[str] | None = None
    ) -> pa.Table:
        """Return the rows of a unit after the transforms."""
        return self.fetch_unit(units, unit, columns)()

    def _fetch(self, unit: int, columns: Sequence[str] | None) -> Decode:
        plan, rows = self.plan, int(self.plan.manifest.unit_rows[unit])
        decode = plan.manifest.fetch_part(unit, 0, rows, plan.columns_to_read(columns))

        def compute() -> pa.Table:
            user_code = self._cache.user_code if plan.runs_user_code else nullcontext()
            if plan.sources_run_user_code:
                with user_code:
                    return plan.transform(decode(), columns)
            block = decode()
            with user_code:
                return plan.transform(block, columns)

        return compute

    @property
    def _cache(self) -> RowCache:
        # A fork has no threads that could release the locks of its parent.
        name = f"_cache_{os.getpid()}"
        opened: RowCache | None = vars(self).get(name)
        if opened is None:
            opened = vars(self).setdefault(name, RowCache(self.limits, self._group))
        return opened

    @cached_property
    def _group(self) -> str:
        """Name for the rows: equal in all processes, and different where rows may differ."""
        captured = digest_captured(self.plan.captured)
        if captured is None or not self.plan.has_versions:
            if self.limits.directory is not None:
                reason = "a function has values that" if captured is None else "files that"
                log.warning(
                    "data.cache_of_one_run",
                    directory=self.limits.directory,
                    reason=f"{reason} cannot be compared with those of other runs",
                )
            return uuid.uuid4().hex
        versions = [_FORMAT_VERSION, *map(version, ("spotfit", "pyarrow", "numpy"))]
        content = f"{versions} {sys.version_info[:2]} {self.plan.identity} {captured}"
        return hashlib.sha256(content.encode()).hexdigest()[:32]

    # The name is that of the process that has listed the units.
    def __getstate__(self) -> dict[str, Any]:
        return {"plan": self.plan, "limits": self.limits, "_group": self._group}


def _check_rows(plan: RowPlan) -> None:
    """Call functions of the user twice with the first rows. Raises `ConfigError`."""
    manifest, has_functions = plan.manifest, any(step.runs_user_code for step in plan.transforms)
    filled = np.flatnonzero(manifest.unit_rows)
    numbers, places = np.unique(manifest.unit_sources[filled], return_index=True)
    for number, unit in zip(numbers.tolist(), filled[places].tolist(), strict=True):
        source = manifest.sources[number]
        is_first = unit == filled[0]
        if not _calls_user_code(source) and not (is_first and has_functions):
            continue
        if _calls_user_code(source):
            for inner in getattr(source, "plans", ()):
                _check_rows(inner)
        rows = min(int(manifest.unit_rows[unit]), _CHECKED_ROWS)
        read = partial(manifest.read_part, unit, 0, rows, plan.columns_to_read())
        block = read()
        if _calls_user_code(source) and not _have_equal_values(block, read()):
            raise _random_rows(getattr(source, "name", "a function"))
        if has_functions and not _have_equal_values(plan.transform(block), plan.transform(block)):
            raise _random_rows(
                ", ".join(step.name for step in plan.transforms if step.runs_user_code)
            )


def _calls_user_code(source: Any) -> bool:
    """Whether rows of a source may be random. Those of a cache have been checked."""
    if isinstance(source, CachedSource):
        return False
    inner = getattr(source, "plans", ())
    return (
        getattr(source, "runs_user_code", False)
        or not getattr(source, "has_versions", True)
        or any(_calls_user_code(one) for plan in inner for one in plan.manifest.sources)
    )


def _random_rows(names: str) -> ConfigError:
    return ConfigError(
        f"cache() would keep random rows: {names} returned other values for the same rows "
        "in a second call.",
        do="Call functions that draw random numbers after cache(), such as "
        "rows.map_batches(decode).cache(...).map_batches(augment).",
    )


def _columns_name(columns: tuple[str, ...] | None) -> str:
    return "all" if columns is None else hashlib.sha256(repr(columns).encode()).hexdigest()[:16]


def _have_equal_values(first: pa.Table, second: pa.Table) -> bool:
    if first.equals(second):
        return True
    if second.schema != first.schema:
        return False
    objects = {one.name for one in first.schema if isinstance(one.type, PythonObjectType)}
    # Arrow finds NaN different from NaN. Texts of Python objects may contain addresses.
    names = [name for name in first.column_names if name not in objects]
    texts = {repr(table.select(names).to_pylist()) for table in (first, second)}
    return len(texts) == 1 and all(
        _may_be_equal(first.column(name).to_pylist(), second.column(name).to_pylist())
        for name in objects
    )


def _may_be_equal(first: list[Any], second: list[Any]) -> bool:
    digests = digest_captured(first), digest_captured(second)
    return None in digests or digests[0] == digests[1]
