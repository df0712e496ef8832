"""Parts of a dataset: which rows belong to each, and the plans of the parts.

Numbers of rows are looked up when a part is used, so a split reads nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from itertools import pairwise
from typing import TypeAlias

import numpy as np

from spotfit.core.errors import ConfigError, ConfigTypeError
from spotfit.data.operations.row_filters import (
    HashFilter,
    KeyFilter,
    RowFilter,
    StratifiedFilter,
    share_end,
)
from spotfit.data.operations.selections import FilteredSource, select_places, stratified_ends
from spotfit.data.plans.row_plan import RowPlan, Rows, ShuffleSettings
from spotfit.data.plans.unit_manifest import UnitManifest

Bounds: TypeAlias = Callable[[int], Sequence[int]]
"""Returns, for a number of rows, the place where each part begins, and the end of the last."""


def part_plans(
    plan: RowPlan, shuffle: ShuffleSettings, bounds: Bounds, count: int
) -> list[RowPlan]:
    """Return the plans of `count` parts of a dataset that is shuffled by `shuffle`.

    Parts of shuffled rows are random samples that have no row in common.
    """

    def manifest_of(part: int) -> UnitManifest:
        begin, end = list(pairwise(bounds(plan.manifest.row_count)))[part]
        return select_places(plan, shuffle, begin, end)

    return [RowPlan(Rows(partial(manifest_of, part)), plan.transforms) for part in range(count)]


def filtered_plan(plan: RowPlan, row_filter: RowFilter) -> RowPlan:
    """Return the plan of those rows for which the filter is true, after the transforms."""
    return RowPlan.of_source(FilteredSource(plan, row_filter))


def even_bounds(parts: int, *, equal: bool) -> Bounds:
    """Return the bounds of `parts` parts; `equal` leaves out the remainder of the division."""
    _check(isinstance(parts, int) and parts > 0, f"split({parts!r}): n must be a positive integer.")
    if equal:
        return lambda count: [part * (count // parts) for part in range(parts + 1)]
    return lambda count: [part * count // parts for part in range(parts + 1)]


def index_bounds(indices: Sequence[int]) -> Bounds:
    """Return the bounds of parts that are separated at these rows."""
    call = f"split_at_indices({list(indices)})"
    _check(len(indices) > 0, f"{call}: indices must not be empty.")
    _check(sorted(indices) == list(indices), f"{call}: indices must be sorted.")
    _check(indices[0] >= 0, f"{call}: indices must not be negative.")
    return lambda count: [0, *(min(index, count) for index in indices), count]


def proportion_bounds(proportions: Sequence[float]) -> Bounds:
    """Return the bounds of parts of these proportions, and of a last part with all other rows."""
    call = f"split_proportionately({list(proportions)})"
    _check(len(proportions) > 0, f"{call}: proportions must not be empty.")
    _check(sum(proportions) < 1, f"{call}: proportions must sum to less than 1.")
    _check(all(part > 0 for part in proportions), f"{call}: proportions must be positive.")

    def bounds(count: int) -> Sequence[int]:
        ends = [int(count * total) for total in np.cumsum(proportions)]
        # Every part has a row, as in Ray, if there are enough.
        for part in range(len(ends)):
            ends[part] = max(ends[part], (ends[part - 1] if part else 0) + 1)
        _check(ends[-1] < count, f"{call}: {count} rows are too few.")
        return [0, *ends, count]

    return bounds


def train_test_bounds(test_size: int | float) -> Bounds:
    """Return the bounds of a training part and, at the end, a test part.

    `test_size` is a fraction if it is a float, and a number of rows if it is an integer.
    """
    _check_test_size(test_size)
    if isinstance(test_size, float):
        return proportion_bounds([1 - test_size])

    def bounds(count: int) -> Sequence[int]:
        _check(test_size < count, f"train_test_split({test_size}): there are {count} rows only.")
        return [0, count - int(test_size), count]

    return bounds


def stratified_plans(plan: RowPlan, column: str, test_size: int | float) -> tuple[RowPlan, RowPlan]:
    """Return the plans of a training and a test part with the same proportions of the classes."""
    _check_test_size(test_size)

    @cache
    def ends() -> dict[object, int]:
        is_fraction = isinstance(test_size, float)
        share = test_size if is_fraction else test_size / max(plan.manifest.row_count, 1)
        return stratified_ends(plan, column, share)

    def manifest_of(*, is_train: bool) -> UnitManifest:
        stratified = StratifiedFilter(column, ends(), is_complement=is_train)
        return UnitManifest.of_source(FilteredSource(plan, stratified))

    return (
        RowPlan(Rows(partial(manifest_of, is_train=True))),
        RowPlan(Rows(partial(manifest_of, is_train=False))),
    )


def hashed_plans(
    plan: RowPlan, test_size: float, *, column: str | None, seed: int | None
) -> tuple[RowPlan, RowPlan]:
    """Return the plans of a training and a test part to which each row belongs by its hash.

    The hash is that of the row's number, or of its value in `column`.
    """
    _check_test_size(float(test_size))
    end = share_end(test_size)
    if column is not None:
        return (
            filtered_plan(plan, KeyFilter(column, end, is_complement=True)),
            filtered_plan(plan, KeyFilter(column, end)),
        )
    train, test = HashFilter(seed or 0, end, share_end(1)), HashFilter(seed or 0, 0, end)
    return sampled_plan(plan, train), sampled_plan(plan, test)


def sampled_plan(plan: RowPlan, sample: HashFilter) -> RowPlan:
    """Return the plan of the rows with these numbers; only they are transformed."""

    def manifest_of() -> UnitManifest:
        return UnitManifest.of_source(FilteredSource(RowPlan(plan.rows), sample))

    return RowPlan(Rows(manifest_of), plan.transforms)


def sample_filter(fraction: float, seed: int | None) -> HashFilter:
    """Return the filter of a random sample. Raises `ConfigError` for an invalid fraction."""
    _check(0 <= fraction <= 1, f"random_sample({fraction}): the fraction must be from 0 to 1.")
    return HashFilter(seed or 0, 0, share_end(fraction))


def _check_test_size(test_size: int | float) -> None:
    if isinstance(test_size, bool) or not isinstance(test_size, int | float):
        raise ConfigTypeError(
            f"test_size={test_size!r} is neither a fraction nor a number of rows.",
            do="Pass a float between 0 and 1, or an integer.",
        )
    if isinstance(test_size, float):
        _check(0 < test_size < 1, f"test_size={test_size} must be between 0 and 1.")
    else:
        _check(test_size > 0, f"test_size={test_size} must be positive.")


def _check(condition: bool, message: str) -> None:  # noqa: FBT001 - reads as an assertion
    if not condition:
        raise ConfigError(message, do="Correct this argument.")
