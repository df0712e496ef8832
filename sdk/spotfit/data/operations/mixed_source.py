"""Rows of several datasets, interleaved by weights.

Row k of a dataset with weight w has the key (k + 1/2) / w, and rows are in order of their keys: in
each stretch of the result the datasets are in proportion to their weights, until one is exhausted.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from spotfit.core.cached import cached_property
from spotfit.core.errors import ConfigError
from spotfit.data.formats.batch_formats import concat_blocks
from spotfit.data.plans.row_plan import RowPlan
from spotfit.data.plans.unit_manifest import UnitManifest
from spotfit.data.source import IntArray, SourceUnits, int_array


class MixStoppingCondition(enum.StrEnum):
    """Where a mix of datasets ends."""

    STOP_ON_SHORTEST = "stop_on_shortest"
    """Where the first dataset is exhausted, relative to its weight."""
    STOP_ON_LONGEST_DROP = "stop_on_longest_drop"
    """With the last row of all; the others continue when a dataset is exhausted."""


@dataclass(frozen=True, eq=False)
class MixedSource:
    """The rows of several plans by their weights. A unit is a range of keys."""

    parts: tuple[RowPlan, ...]
    weights: tuple[float, ...]
    stopping_condition: MixStoppingCondition

    @property
    def plans(self) -> tuple[RowPlan, ...]:
        """The plans that are mixed."""
        return self.parts

    @property
    def runs_user_code(self) -> bool:
        """Whether a transform calls a function of the user."""
        return any(plan.runs_user_code for plan in self.parts)

    @property
    def identity(self) -> str:
        """The plans, the weights and the end."""
        identities = [plan.identity for plan in self.parts]
        return f"mix {identities} {self.weights} {self.stopping_condition.value}"

    def list_units(self) -> SourceUnits:
        """Return as many units as the plan with the most units has."""
        rows = int_array(np.diff(self._bounds, axis=0).sum(axis=1))
        manifest = self._combined.manifest
        sizes = rows * int(manifest.unit_bytes.sum()) // max(manifest.row_count, 1)
        zeros = int_array(rows * 0)
        return SourceUnits((), zeros, zeros, rows, int_array(sizes), self._combined.schema)

    def schema(self, units: SourceUnits) -> pa.Schema:
        """Return the columns of all plans; those that a plan lacks are null in its rows."""
        assert units.schema is not None
        return units.schema

    def read_unit(
        self, _units: SourceUnits, unit: int, columns: Sequence[str] | None = None
    ) -> pa.Table:
        """Return the rows of a unit."""
        begins, ends = self._bounds[unit], self._bounds[unit + 1]

        def slices(manifest: UnitManifest) -> UnitManifest:
            offsets = np.cumsum([0, *self._counts])
            return UnitManifest.concat(
                [
                    manifest.slice(int(offset + begin), int(end - begin))
                    for offset, begin, end in zip(offsets, begins, ends, strict=False)
                ]
            )

        rows = concat_blocks(list(self._combined.map_manifest(slices).blocks(columns)))
        keys = [
            (np.arange(begin, end) + 0.5) / weight
            for begin, end, weight in zip(begins, ends, self.weights, strict=True)
        ]
        # A stable sort: of equal keys, that of the first dataset comes first.
        return rows.take(pa.array(np.argsort(np.concatenate(keys), kind="stable")))

    @cached_property
    def _combined(self) -> RowPlan:
        return RowPlan.concat(self.parts)

    @cached_property
    def _counts(self) -> list[int]:
        return [plan.manifest.row_count for plan in self.parts]

    @cached_property
    def _bounds(self) -> IntArray:
        """The rows of each plan before each unit, and after the last."""
        counts, weights = np.array(self._counts), np.array(self.weights)
        is_shortest = self.stopping_condition is MixStoppingCondition.STOP_ON_SHORTEST
        end = (counts / weights).min() if is_shortest else (counts / weights).max()
        unit_count = max(plan.manifest.unit_count for plan in self.parts)
        keys = np.linspace(0.0, end, unit_count + 1)
        bounds: IntArray = np.floor(keys[:, None] * weights + 0.5).astype(np.int64)
        bounds = np.minimum(bounds, counts)
        bounds[0] = 0
        if not is_shortest:
            bounds[-1] = counts  # independent of rounding
        return bounds

    def __getstate__(self) -> dict[str, Any]:
        names = ("parts", "weights", "stopping_condition")
        return {name: getattr(self, name) for name in names}


def mixed_source(
    plans: Sequence[RowPlan], weights: Sequence[float] | None, stopping_condition: Any
) -> MixedSource:
    """Return the mix of these plans; None: equal weights. Raises `ConfigError`."""
    chosen = tuple(weights) if weights is not None else (1.0,) * len(plans)
    if len(chosen) != len(plans) or not all(weight > 0 for weight in chosen):
        raise ConfigError(
            f"mix(weights={list(chosen)}) must be one positive number for each of {len(plans)} "
            "datasets.",
            do="Pass the weight of this dataset first.",
        )
    condition = getattr(stopping_condition, "value", stopping_condition)
    return MixedSource(tuple(plans), chosen, MixStoppingCondition(condition))
