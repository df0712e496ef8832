"""`Chain`: preprocessors one after the other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Self

import pyarrow as pa

from spotfit.data.dataset import Dataset
from spotfit.data.preprocessors.preprocessor_base import (
    ArrowPreprocessor,
    Preprocessor,
    fit_together,
)


class Chain(ArrowPreprocessor):
    """Apply preprocessors one after the other; each is fitted to what the one before gives.

    Parts that read only columns which no earlier part writes are fitted in one pass over the rows.
    """

    def __init__(self, *preprocessors: Preprocessor) -> None:
        super().__init__()
        self.preprocessors = preprocessors

    def fit_status(self) -> Preprocessor.FitStatus:
        """Return `PARTIALLY_FITTED` if some parts are fitted and others are not."""
        status = self.FitStatus
        states = {part.fit_status() for part in self.preprocessors} - {status.NOT_FITTABLE}
        if not states:
            return status.NOT_FITTABLE
        return states.pop() if len(states) == 1 else status.PARTIALLY_FITTED

    def has_stats(self) -> bool:
        """Return whether a part has statistics."""
        return any(part.has_stats() for part in self.preprocessors)

    def fit(self, ds: Dataset) -> Self:
        """Fit all parts. A second call warns and replaces the statistics."""
        self._warn_if_fitted(stacklevel=3)
        shared: list[Preprocessor] = []
        for part in _flat(self):
            if _must_wait(part, shared):
                ds = _fit_together(shared, ds)
                shared = []
            if part.shares_fit:
                shared.append(part)
            else:
                part.fit(ds)
                ds = part.transform(ds)
        _fit_together(shared, ds)
        return self

    @property
    def knows_columns(self) -> bool:
        """Whether the columns of all parts are known."""
        return all(part.knows_columns for part in self.preprocessors)

    def get_input_columns(self) -> list[str]:
        """Return the columns that a part reads and no earlier part writes."""
        inputs: dict[str, None] = {}
        written: set[str] = set()
        for part in self.preprocessors:
            read = part.get_input_columns()
            inputs |= dict.fromkeys(name for name in read if name not in written)
            written.update(part.get_output_columns())
        return list(inputs)

    def get_output_columns(self) -> list[str]:
        """Return the columns that a part writes and no later part removes."""
        outputs: dict[str, None] = {}
        for part in self.preprocessors:
            kept = [name for name in outputs if name not in part.removed_columns()]
            outputs = dict.fromkeys([*kept, *part.get_output_columns()])
        return list(outputs)

    def removed_columns(self) -> set[str]:
        """Return the columns that a part removes and no later part writes."""
        removed: set[str] = set()
        for part in self.preprocessors:
            removed = (removed | part.removed_columns()) - set(part.get_output_columns())
        return removed

    def output_names(self, names: Sequence[str]) -> list[str]:
        """Return the columns of the result for these columns. Raises `ConfigError`."""
        for part in self._parts_with_columns():
            names = part.output_names(names)
        return list(names)

    def input_names(self, needed: Sequence[str]) -> list[str]:
        """Return the columns that are read to compute the columns `needed` of the result."""
        for part in reversed(self._parts_with_columns()):
            needed = part.input_names(needed)
        return list(needed)

    def _parts_with_columns(self) -> list[ArrowPreprocessor]:
        return [part for part in self.preprocessors if isinstance(part, ArrowPreprocessor)]

    def parameters(self) -> dict[str, Any]:
        """Return the parts."""
        return {str(index): part for index, part in enumerate(self.preprocessors)}

    @classmethod
    def from_parameters(cls, parameters: dict[str, Any]) -> Self:
        """Return the chain of `parameters`."""
        return cls(*parameters.values())

    @property
    def runs_user_code(self) -> bool:
        """Whether functions of the user are called."""
        return any(part.runs_user_code for part in self.preprocessors)

    def _transform_arrow(self, table: pa.Table) -> pa.Table:
        for part in self.preprocessors:
            table = part.transform_block(table)
        return table

    def snapshot(self) -> Preprocessor:
        return Chain(*(part.snapshot() for part in self.preprocessors))

    def __repr__(self) -> str:
        return f"Chain({', '.join(map(repr, self.preprocessors))})"


def _flat(chain: Chain) -> Iterator[Preprocessor]:
    for part in chain.preprocessors:
        if isinstance(part, Chain):
            yield from _flat(part)
        else:
            yield part


def _must_wait(part: Preprocessor, shared: Sequence[Preprocessor]) -> bool:
    """Whether the fit of a part needs what the `shared` parts, not yet fitted, will write."""
    if not part.shares_fit:
        return bool(shared)
    if not part.is_fittable or not shared:
        return False
    if not all(other.knows_columns for other in shared):
        return True
    inputs = set(part.get_input_columns())
    return any(
        inputs & ({*other.get_output_columns()} | other.removed_columns()) for other in shared
    )


def _fit_together(parts: Sequence[Preprocessor], ds: Dataset) -> Dataset:
    """Fit the parts to the same rows in one pass; return the dataset with their transforms."""
    fit_together([part for part in parts if part.is_fittable], ds)
    for part in parts:
        ds = part.transform(ds)
    return ds
