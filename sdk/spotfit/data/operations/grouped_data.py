"""`GroupedData`: what `Dataset.groupby` returns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar, Unpack

from spotfit.data.aggregate import Count, Max, Mean, Min, Std, Sum
from spotfit.data.expressions import Expr
from spotfit.data.formats.batch_formats import BatchFormat
from spotfit.data.operations.table_operations import (
    AggregateOperation,
    MapGroupsOperation,
    TableOperation,
)
from spotfit.data.plans.row_functions import map_batches_transform
from spotfit.data.plans.row_plan import RowPlan
from spotfit.data.plans.transforms import with_columns_transform
from spotfit.data.user_functions import FunctionOptions, ResourceOptions, user_function

DatasetT = TypeVar("DatasetT")


class GroupedData(Generic[DatasetT]):
    """The rows of a dataset, grouped by the values of columns.

    Every method returns a dataset that is computed on first use, sorted by the keys: in memory, or
    by DuckDB if the rows do not fit.
    """

    def __init__(
        self,
        plan: RowPlan,
        ordered_plan: RowPlan,
        keys: Sequence[str],
        to_dataset: Callable[[TableOperation], DatasetT],
    ) -> None:
        """`ordered_plan` has the rows of `plan` in the order in which functions get them."""
        self._plan, self._ordered_plan = plan, ordered_plan
        self._keys = list(keys)
        self._to_dataset = to_dataset

    def aggregate(self, *aggs: Any) -> DatasetT:
        """Return a row for each group, with the keys and these aggregates."""
        return self._aggregate(lambda: aggs)

    def count(self) -> DatasetT:
        """Return the number of rows of each group in the column `count()`."""
        return self.aggregate(Count())

    def sum(self, on: str | Sequence[str] | None = None, ignore_nulls: bool = True) -> DatasetT:  # noqa: FBT001, FBT002 - as in Ray
        """Return the sums of columns, in columns such as `sum(x)`; None: of all other columns."""
        return self._aggregate_on(Sum, on, ignore_nulls=ignore_nulls)

    def min(self, on: str | Sequence[str] | None = None, ignore_nulls: bool = True) -> DatasetT:  # noqa: FBT001, FBT002 - as in Ray
        """Return the minima of columns."""
        return self._aggregate_on(Min, on, ignore_nulls=ignore_nulls)

    def max(self, on: str | Sequence[str] | None = None, ignore_nulls: bool = True) -> DatasetT:  # noqa: FBT001, FBT002 - as in Ray
        """Return the maxima of columns."""
        return self._aggregate_on(Max, on, ignore_nulls=ignore_nulls)

    def mean(self, on: str | Sequence[str] | None = None, ignore_nulls: bool = True) -> DatasetT:  # noqa: FBT001, FBT002 - as in Ray
        """Return the means of columns."""
        return self._aggregate_on(Mean, on, ignore_nulls=ignore_nulls)

    def std(
        self,
        on: str | Sequence[str] | None = None,
        ddof: int = 1,
        ignore_nulls: bool = True,  # noqa: FBT001, FBT002 - as in Ray
    ) -> DatasetT:
        """Return the standard deviations of columns."""
        return self._aggregate_on(Std, on, ignore_nulls=ignore_nulls, ddof=ddof)

    def map_groups(
        self,
        fn: Any,
        *,
        batch_format: BatchFormat = "default",
        zero_copy_batch: bool = True,
        **options: Unpack[FunctionOptions],
    ) -> DatasetT:
        """Return the batches that the function returns for the rows of each group."""
        function = user_function("map_groups", fn, options)
        transform = map_batches_transform(function, batch_format, None)
        return self._to_dataset(MapGroupsOperation(self._ordered_plan, self._keys, transform))

    def with_column(
        self, column_name: str, expr: Expr, **_resources: Unpack[ResourceOptions]
    ) -> DatasetT:
        """Return the rows with another column, which an expression computes for each group."""
        transform = with_columns_transform({column_name: expr})
        return self._to_dataset(MapGroupsOperation(self._plan, self._keys, transform))

    def _aggregate_on(self, kind: Any, on: str | Sequence[str] | None, **options: Any) -> DatasetT:
        def choose() -> list[Any]:
            names = [name for name in self._plan.schema.names if name not in self._keys]
            columns = names if on is None else [on] if isinstance(on, str) else on
            return [kind(column, **options) for column in columns]

        return self._aggregate(choose)

    def _aggregate(self, choose: Callable[[], Sequence[Any]]) -> DatasetT:
        return self._to_dataset(AggregateOperation(self._plan, self._keys, choose))
