"""`Dataset`: an immutable description of rows, which are read when they are needed."""

from __future__ import annotations

import hashlib
import sys
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, TypeVar, Unpack

import pyarrow as pa

from spotfit.core.cached import cached_property
from spotfit.core.errors import ConfigError
from spotfit.data.aggregate import Max, Mean, Min, Std, Sum, Unique
from spotfit.data.aggregate_base import fold_all
from spotfit.data.caching.cached_source import CachedSource
from spotfit.data.caching.row_cache import cache_limits
from spotfit.data.captured_values import digest_captured
from spotfit.data.context import DataContext, RandomSeedConfig
from spotfit.data.expressions import Expr
from spotfit.data.formats.batch_formats import BatchFormat, concat_blocks, empty_table, to_batch
from spotfit.data.iteration.data_iterator import DataIterator
from spotfit.data.iteration.shard import ShardGroup, ShardPosition
from spotfit.data.operations import file_encoders, writers
from spotfit.data.operations.dataset_pipeline import DatasetPipeline
from spotfit.data.operations.grouped_data import GroupedData
from spotfit.data.operations.mixed_source import MixStoppingCondition, mixed_source
from spotfit.data.operations.relational import JoinKeys
from spotfit.data.operations.row_filters import row_filter
from spotfit.data.operations.selections import FlatMapSource
from spotfit.data.operations.splits import (
    Bounds,
    even_bounds,
    filtered_plan,
    hashed_plans,
    index_bounds,
    part_plans,
    proportion_bounds,
    sample_filter,
    sampled_plan,
    stratified_plans,
    train_test_bounds,
)
from spotfit.data.operations.summary import DatasetSummary, describe, summarize
from spotfit.data.operations.table_operations import (
    JoinOperation,
    ShuffleOperation,
    SortOperation,
    TableOperation,
    compute,
    compute_to,
    unique_values,
)
from spotfit.data.operations.unsupported import REFUSED_METHODS, refused_method
from spotfit.data.operations.zipped_source import ZippedSource
from spotfit.data.plans.row_functions import (
    MapRows,
    add_column_transform,
    block_rows,
    map_batches_transform,
)
from spotfit.data.plans.row_plan import UNSHUFFLED, PlanSource, RowPlan, Rows, ordered_blocks
from spotfit.data.plans.row_plan import ShuffleSettings as ShuffleSettings
from spotfit.data.plans.transforms import (
    DropColumns,
    RenameAllColumns,
    RenameColumns,
    SelectColumns,
    Transform,
    with_columns_transform,
)
from spotfit.data.plans.unit_manifest import UnitManifest
from spotfit.data.schema import Schema
from spotfit.data.source import Source
from spotfit.data.sources.frame_writers import hadoop_url, spark_url
from spotfit.data.sources.tables import TableSource
from spotfit.data.user_functions import (
    FunctionOptions,
    ResourceOptions,
    check_resources,
    user_function,
)
from spotfit.host import log

ResultT = TypeVar("ResultT")


@dataclass(frozen=True, eq=False, repr=False)
class Dataset:
    """Rows of sources, transformed block by block. The methods are those of `ray.data.Dataset`.

    Nothing is read until rows, their number or the schema are asked for. Every method returns a new
    dataset. Invalid arguments raise `ConfigError`, which is a `ValueError`. Arguments of Ray that
    concern its scheduler, such as `num_cpus`, are accepted and have no effect.
    """

    _plan: RowPlan
    _shuffle: ShuffleSettings = UNSHUFFLED
    _name: str | None = None
    _steps: tuple[Any, ...] | None = ()

    @classmethod
    def of_source(cls, source: Source) -> Dataset:
        """Return the dataset of all rows of a source."""
        return cls(RowPlan.of_source(source))

    @property
    def manifest(self) -> UnitManifest:
        """The units of this dataset, listed on first use. Raises `ConfigError`."""
        return self._plan.manifest

    @property
    def transforms(self) -> tuple[Transform, ...]:
        """The transforms of the rows, in the order of their application."""
        return self._plan.transforms

    @property
    def steps(self) -> tuple[Any, ...] | None:
        """What has changed the values of these rows, also before they were computed or written.

        Transforms, and functions of `flat_map`; None if they are unknown or differ among the rows.
        """
        return self._steps

    @property
    def shuffle_settings(self) -> ShuffleSettings:
        """How each epoch is shuffled."""
        return self._shuffle

    def with_transform(self, transform: Transform) -> Dataset:
        """Return this dataset with another transform after all others."""
        plan = self._plan.with_transform(transform)
        return replace(self, _plan=plan, _steps=self._steps_with(transform))

    def as_source(self) -> Source:
        """Return a source of this dataset's rows, after its transforms and in unshuffled order."""
        return PlanSource(self._plan)

    def blocks(self, columns: Sequence[str] | None = None) -> Iterator[pa.Table]:
        """Yield all rows, after the transforms and in unshuffled order, a block per unit."""
        return self._plan.blocks(columns)

    def map_blocks(
        self, function: Callable[[pa.Table], ResultT], columns: Sequence[str] | None = None
    ) -> Iterator[ResultT]:
        """Yield what a function returns for each block of `blocks`, as `RowPlan.map_blocks`."""
        return self._plan.map_blocks(function, columns)

    def content_digest(self) -> str | None:
        """Return a hash of all rows in unshuffled order, the same in every process.

        None if a function of the user has captured a value without a digest.
        """
        captured = digest_captured(self._plan.captured)
        if captured is None:
            return None
        return hashlib.sha256(f"{self._plan.identity} {captured}".encode()).hexdigest()

    @property
    def fits_path(self) -> str | None:
        """Where fits of preprocessors to this dataset are stored; None: nowhere.

        That is where `materialize(url)` has written its rows, else `DataContext.materialize_path`.
        """
        paths = {getattr(source, "fits_path", "") for source in self.manifest.sources}
        stored = paths.pop() if len(paths) == 1 else ""
        return stored or DataContext.get_current().materialize_path

    @property
    def reads_files(self) -> bool:
        """Whether rows are read from files."""
        return self._plan.reads_files

    @property
    def runs_user_code(self) -> bool:
        """Whether reading calls functions of the user, also to select or multiply rows."""
        return self._plan.runs_user_code

    def columns_to_read(self, columns: Sequence[str] | None = None) -> list[str] | None:
        """Return the columns of the sources that are read to compute `columns`; None: all."""
        return self._plan.columns_to_read(columns)

    # --- Transforms that keep the number of rows --------------------------------------------------

    def map(self, fn: Any, **options: Unpack[FunctionOptions]) -> Dataset:
        """Return this dataset with a function applied to each row, a dictionary."""
        return self.with_transform(MapRows(user_function("map", fn, options)))

    def map_batches(
        self,
        fn: Any,
        *,
        batch_size: int | str | None = None,
        batch_format: BatchFormat = "default",
        zero_copy_batch: bool = True,
        udf_modifying_row_count: bool = True,
        **options: Unpack[FunctionOptions],
    ) -> Dataset:
        """Return this dataset with a function, or callable class, applied to batches.

        The function returns as many rows as it gets, else reading raises `RowCountChangedError`.
        `batch_size` None gives it whole blocks, whose size is that of a step of training.
        """
        function = user_function("map_batches", fn, options)
        return self.with_transform(map_batches_transform(function, batch_format, batch_size))

    def add_column(
        self,
        col: str,
        fn: Any,
        *,
        batch_format: BatchFormat = "pandas",
        **options: Unpack[ResourceOptions],
    ) -> Dataset:
        """Return this dataset with the column that the function returns for a batch."""
        function = user_function("add_column", fn, options)
        return self.with_transform(add_column_transform(function, col, batch_format))

    def with_column(
        self, column_name: str, expr: Expr, **options: Unpack[ResourceOptions]
    ) -> Dataset:
        """Return this dataset with the column that an expression computes."""
        return self.with_columns({column_name: expr}, **options)

    def with_columns(
        self,
        exprs: Mapping[str, Expr],
        *more_exprs: Mapping[str, Expr],
        **options: Unpack[ResourceOptions],
    ) -> Dataset:
        """Return this dataset with columns that expressions compute."""
        check_resources("with_columns()", options)
        merged = {name: expr for part in (exprs, *more_exprs) for name, expr in part.items()}
        return self.with_transform(with_columns_transform(merged))

    def drop_columns(
        self, cols: str | Sequence[str], **options: Unpack[ResourceOptions]
    ) -> Dataset:
        """Return this dataset without these columns, which are not read if nothing needs them."""
        check_resources("drop_columns()", options)
        names = _distinct_names("drop_columns", cols)
        return self.with_transform(DropColumns(names)) if names else self

    def select_columns(
        self, cols: str | Sequence[str], **options: Unpack[ResourceOptions]
    ) -> Dataset:
        """Return this dataset with these columns only; others are read only if needed."""
        check_resources("select_columns()", options)
        return self.with_transform(SelectColumns(_distinct_names("select_columns", cols)))

    def rename_columns(
        self, names: Mapping[str, str] | Sequence[str], **options: Unpack[ResourceOptions]
    ) -> Dataset:
        """Return this dataset with other names: a dictionary from old ones, or one per column."""
        check_resources("rename_columns()", options)
        new_names = names.values() if isinstance(names, Mapping) else names
        _distinct_names("rename_columns", list(new_names))
        if isinstance(names, Mapping):
            return self.with_transform(RenameColumns(dict(names)))
        return self.with_transform(RenameAllColumns(tuple(names)))

    # --- Other rows -------------------------------------------------------------------------------

    def filter(
        self, fn: Any = None, expr: Any = None, **options: Unpack[FunctionOptions]
    ) -> Dataset:
        """Return the rows for which an expression, or a function of the row, is true.

        A pass counts the rows on first use: over the columns of an expression, or over all rows for
        a function. The function must depend on its row only.
        """
        return self._with_plan(filtered_plan(self._plan, row_filter(fn, expr, options)))

    def flat_map(self, fn: Any, **options: Unpack[FunctionOptions]) -> Dataset:
        """Return all rows of the lists of rows that a function returns for each row.

        A pass over all rows counts them on first use, and the function is called again when rows
        are read: it must depend on its row only. Use `materialize(url)` for expensive ones.
        """
        function = user_function("flat_map", fn, options)
        plan = RowPlan.of_source(FlatMapSource(self._plan, function))
        return replace(self, _plan=plan, _steps=self._steps_with(function))

    def limit(self, limit: int) -> Dataset:
        """Return the first rows; of shuffled rows, a random sample."""
        if limit < 0:
            raise ConfigError(f"limit({limit}) must not be negative.", do="Pass 0 or more.")
        return self._parts(lambda count: [0, min(limit, count)], 1)[0]

    def random_sample(
        self, fraction: float, *, seed: int | RandomSeedConfig | None = None
    ) -> Dataset:
        """Return each row with this probability, decided by the hash of its number and the seed.

        The sample is the same in every process. Without a seed, 0 is used.
        """
        return self._with_plan(sampled_plan(self._plan, sample_filter(fraction, _seed(seed))))

    def union(self, *other: Dataset) -> Dataset:
        """Return the rows of this dataset and of others, one after the other.

        Columns that a dataset lacks are null in its rows. If one of them is shuffled, all rows are.
        """
        datasets = (self, *other)
        plans = [dataset._plan for dataset in datasets]  # noqa: SLF001 - the same class
        steps = _common_steps(datasets)
        shuffle = _first_shuffle(datasets)
        return replace(self, _plan=RowPlan.concat(plans), _shuffle=shuffle, _steps=steps)

    def zip(self, *other: Dataset) -> Dataset:
        """Return the columns of this dataset and of others of the same size, row by row.

        The rows of a shuffled one are brought into one random order on first use, as
        `random_shuffle(exact=True)` does, which is that of every epoch.
        """
        plans = [dataset._fixed_order() for dataset in (self, *other)]  # noqa: SLF001 - the same class
        plan = RowPlan.of_source(ZippedSource(tuple(plans)))
        return Dataset(plan, _name=self._name, _steps=_common_steps((self, *other)))

    def mix(
        self,
        *other: Dataset,
        weights: Sequence[float] | None = None,
        stopping_condition: MixStoppingCondition = MixStoppingCondition.STOP_ON_LONGEST_DROP,
    ) -> Dataset:
        """Return the rows of this dataset and of others, interleaved by their weights.

        If one of them is shuffled, all rows are.
        """
        plans = [dataset._plan for dataset in (self, *other)]  # noqa: SLF001 - the same class
        source = mixed_source(plans, weights, stopping_condition)
        datasets = (self, *other)
        shuffle, steps = _first_shuffle(datasets), _common_steps(datasets)
        return replace(self, _plan=RowPlan.of_source(source), _shuffle=shuffle, _steps=steps)

    def sort(
        self,
        key: str | Sequence[str],
        descending: bool | Sequence[bool] = False,  # noqa: FBT001, FBT002 - as in Ray
        boundaries: Any = None,
    ) -> Dataset:
        """Return the rows sorted by columns; equal ones keep their order, null values are last.

        They are sorted on first use: in memory, or by DuckDB if they do not fit.
        """
        ordered = self._from_operation(SortOperation(self._plan, key, descending))
        return replace(ordered, _steps=self._steps)

    def join(
        self,
        ds: Dataset,
        join_type: str,
        num_partitions: int = 1,
        on: Sequence[str] = ("id",),
        right_on: Sequence[str] | None = None,
        left_suffix: str | None = None,
        right_suffix: str | None = None,
        **_options: Any,
    ) -> Dataset:
        """Return the join with another dataset on equal columns, in order of the left rows.

        It is computed on first use: in memory, or by DuckDB if the rows do not fit.
        """
        keys = JoinKeys.of_arguments(join_type, on, right_on, (left_suffix, right_suffix))
        joined = self._from_operation(JoinOperation(self._plan, ds._plan, keys))
        return replace(joined, _steps=() if self._steps == () and ds.steps == () else None)

    def groupby(
        self,
        key: str | Sequence[str] | None,
        num_partitions: int | None = None,
    ) -> GroupedData[Dataset]:
        """Return the rows grouped by columns; None: one group.

        Functions of `map_groups` get the rows of a group in their order; if the dataset is
        shuffled, in that of `random_shuffle(exact=True)`.
        """
        keys = [] if key is None else [key] if isinstance(key, str) else list(key)
        return GroupedData(self._plan, self._fixed_order(), keys, self._from_operation)

    def aggregate(self, *aggs: Any) -> dict[str, Any]:
        """Return the values of aggregates such as `Sum("x")` over all rows, in one pass."""
        return fold_all(aggs, lambda columns: self._plan.blocks(columns))

    # --- Order ------------------------------------------------------------------------------------

    def random_shuffle(
        self,
        *,
        seed: int | RandomSeedConfig | None = None,
        exact: bool = False,
        num_blocks: int | None = None,
        **options: Unpack[ResourceOptions],
    ) -> Dataset:
        """Return this dataset with another order in every epoch.

        Units and, within windows, rows are shuffled while they are read; nothing is moved. Parts
        and samples of the result are random samples of all rows.

        With `exact`, all rows are shuffled together once, on first use, by the seed (without one,
        0), and this order is that of every epoch. Rows that do not fit into memory are written to
        files. `random_shuffle()` of the result gives another order in every epoch, whose windows
        mix as well as a shuffle of all rows.
        """
        check_resources("random_shuffle()", options)
        if num_blocks is not None:
            log.debug("data.argument_ignored", function="random_shuffle", argument="num_blocks")
        if exact:
            shuffled = self._from_operation(ShuffleOperation(self._plan, _seed(seed)))
            return replace(shuffled, _steps=self._steps)
        return replace(self, _shuffle=ShuffleSettings("rows", _seed(seed)))

    def randomize_block_order(self, *, seed: int | RandomSeedConfig | None = None) -> Dataset:
        """Return this dataset with its units in another order in every epoch."""
        if self._shuffle.kind == "rows":
            return self
        return replace(self, _shuffle=ShuffleSettings("units", _seed(seed)))

    def repartition(
        self,
        num_blocks: int | None = None,
        target_num_rows_per_block: int | None = None,
        *,
        strict: bool = False,
        shuffle: bool = False,
        keys: Sequence[str] | None = None,
        sort: bool = False,
    ) -> Dataset:
        """Return this dataset: rows are dealt out in steps, whatever the number of units is.

        `shuffle` shuffles as `random_shuffle` does; `sort` sorts by `keys`. For other row groups in
        files, use `materialize(url)` or `write_parquet`.
        """
        log.info(
            "data.repartition_ignored",
            num_blocks=num_blocks,
            rows=target_num_rows_per_block,
            strict=strict,
            reason="rows are dealt out in steps, whatever the number of units is",
        )
        result = self.sort(list(keys)) if sort and keys else self
        return result.random_shuffle() if shuffle else result

    # --- Parts ------------------------------------------------------------------------------------

    def split(
        self,
        n: int,
        *,
        equal: bool = False,
        locality_hints: Any = None,
    ) -> list[Dataset]:
        """Return `n` parts; `equal` leaves out the remainder of the division."""
        return self._parts(even_bounds(n, equal=equal), n)

    def split_at_indices(self, indices: Sequence[int]) -> list[Dataset]:
        """Return the parts between these rows."""
        return self._parts(index_bounds(indices), len(indices) + 1)

    def split_proportionately(self, proportions: Sequence[float]) -> list[Dataset]:
        """Return parts of these proportions, and a last part with all other rows."""
        return self._parts(proportion_bounds(proportions), len(proportions) + 1)

    def train_test_split(
        self,
        test_size: float,
        *,
        shuffle: bool = False,
        seed: int | RandomSeedConfig | None = None,
        stratify: str | None = None,
    ) -> tuple[Dataset, Dataset]:
        """Return a training and a test part. The split is the same in every process.

        `test_size` is a fraction, or a number of rows. The test part is the last rows; with
        `shuffle`, a random sample of exactly that size, and both parts are shuffled as by
        `random_shuffle`. `stratify` is a column of classes that both parts have in the same
        proportions.
        """
        if shuffle and stratify is not None:
            raise ConfigError(
                "train_test_split(shuffle=True, stratify=...) is not supported.",
                do="Leave shuffle out: a stratified split is a random sample of each class.",
            )
        if stratify is not None:
            train, test = map(self._with_plan, stratified_plans(self._plan, stratify, test_size))
            return train, test
        bounds = train_test_bounds(test_size)
        order = ShuffleSettings("rows", _seed(seed)) if shuffle else self._shuffle
        train, test = map(self._with_plan, part_plans(self._plan, order, bounds, 2))
        if shuffle:
            return train.random_shuffle(seed=seed), test.random_shuffle(seed=seed)
        return train, test

    def streaming_train_test_split(
        self,
        test_size: float,
        *,
        split_type: str = "random",
        hash_column: str | None = None,
        seed: int | RandomSeedConfig | None = None,
        **_options: Any,
    ) -> tuple[Dataset, Dataset]:
        """Return a training and a test part of about this fraction, decided row by row.

        `split_type="hash"` decides by the value of `hash_column`: equal values stay together.
        """
        if split_type not in ("random", "hash") or (split_type == "hash") != (
            hash_column is not None
        ):
            raise ConfigError(
                f"streaming_train_test_split(split_type={split_type!r}, "
                f"hash_column={hash_column!r}) is not valid.",
                do='Pass split_type="random", or split_type="hash" with a hash_column.',
            )
        train, test = hashed_plans(self._plan, test_size, column=hash_column, seed=_seed(seed))
        return self._with_plan(train), self._with_plan(test)

    # --- Looking ----------------------------------------------------------------------------------

    def count(self) -> int:
        """Return the number of rows; reads headers of files only, unless rows were filtered."""
        return self.manifest.row_count

    def schema(self, fetch_if_missing: bool = True) -> Schema:  # noqa: FBT001, FBT002 - as in Ray
        """Return names and types of the columns.

        Functions of the user are called with the first rows.
        """
        return Schema(self._plan.schema)

    def columns(self, fetch_if_missing: bool = True) -> list[str]:  # noqa: FBT001, FBT002 - as in Ray
        """Return the names of the columns."""
        return self.schema().names

    def take(self, limit: int = 20) -> list[dict[str, Any]]:
        """Return the first rows as dictionaries."""
        return [row for block in self._ordered_blocks(limit) for row in block_rows(block)]

    def take_all(self, limit: int | None = None) -> list[dict[str, Any]]:
        """Return all rows. Raises `ConfigError` if there are more than `limit`."""
        self._check_limit("take_all", limit)
        return [row for block in self._ordered_blocks() for row in block_rows(block)]

    def take_batch(self, batch_size: int = 20, *, batch_format: BatchFormat = "default") -> Any:
        """Return the first rows as a batch. Raises `ConfigError` if there are none."""
        blocks = list(self._ordered_blocks(batch_size))
        if not blocks:
            raise ConfigError("take_batch(): the dataset is empty.", do="Check its source.")
        return to_batch(concat_blocks(blocks), batch_format)

    def show(self, limit: int = 20) -> None:
        """Print the first rows."""
        for row in self.take(limit):
            sys.stdout.write(f"{row}\n")

    def unique(self, column: str, ignore_nulls: bool = False) -> list[Any]:  # noqa: FBT001, FBT002 - as in Ray
        """Return the distinct values of a column, in order of first occurrence."""
        found = unique_values(self._plan, column)
        if found is None:
            found = self._statistic(Unique, column, ignore_nulls=ignore_nulls)
        return [value for value in found if not (ignore_nulls and value is None)]

    def sum(self, on: str | Sequence[str] | None = None, ignore_nulls: bool = True) -> Any:  # noqa: FBT001, FBT002 - as in Ray
        """Return the sum of a column; of several, or of all (None), by names such as `sum(x)`."""
        return self._statistic(Sum, on, ignore_nulls=ignore_nulls)

    def min(self, on: str | Sequence[str] | None = None, ignore_nulls: bool = True) -> Any:  # noqa: FBT001, FBT002 - as in Ray
        """Return the minimum of a column, or of several."""
        return self._statistic(Min, on, ignore_nulls=ignore_nulls)

    def max(self, on: str | Sequence[str] | None = None, ignore_nulls: bool = True) -> Any:  # noqa: FBT001, FBT002 - as in Ray
        """Return the maximum of a column, or of several."""
        return self._statistic(Max, on, ignore_nulls=ignore_nulls)

    def mean(self, on: str | Sequence[str] | None = None, ignore_nulls: bool = True) -> Any:  # noqa: FBT001, FBT002 - as in Ray
        """Return the mean of a column, or of several."""
        return self._statistic(Mean, on, ignore_nulls=ignore_nulls)

    def std(
        self,
        on: str | Sequence[str] | None = None,
        ddof: int = 1,
        ignore_nulls: bool = True,  # noqa: FBT001, FBT002 - as in Ray
    ) -> Any:
        """Return the standard deviation of a column, or of several."""
        return self._statistic(Std, on, ddof=ddof, ignore_nulls=ignore_nulls)

    def summary(self, columns: Sequence[str] | None = None, **_options: Any) -> DatasetSummary:
        """Return statistics of columns as a `DatasetSummary`, in one pass."""
        names = self.columns() if columns is None else list(columns)
        return summarize(self._plan, names)

    def num_blocks(self) -> int:
        """Return the number of units."""
        return self.manifest.unit_count

    def size_bytes(self) -> int:
        """Return the size in memory of the units that are read, before the transforms."""
        return int(self.manifest.unit_bytes.sum())

    def input_files(self) -> list[str]:
        """Return the paths of the files that are read, as `include_paths` of readers does."""
        return sorted(self._plan.input_files)

    def stats(self) -> str:
        """Return a description of what is read and how it is transformed."""
        return describe(self._plan, self._shuffle, self._name)

    def get_stats_summary(self, detail: bool = False) -> str:  # noqa: FBT001, FBT002 - as in Ray
        """Return `stats()`."""
        return self.stats()

    def explain(self) -> None:
        """Print `stats()`."""
        sys.stdout.write(f"{self.stats()}\n")

    @property
    def name(self) -> str | None:
        """The name that `set_name` has set."""
        return self._name

    def set_name(self, name: str | None) -> None:
        """Set a name for messages."""
        object.__setattr__(self, "_name", name)

    @property
    def context(self) -> DataContext:
        """The settings of this process."""
        return DataContext.get_current()

    @staticmethod
    def copy(ds: Dataset, **_options: Any) -> Dataset:
        """Return an equal dataset."""
        return replace(ds)

    def get_dataset_id(self) -> str:
        """Return a hexadecimal text that identifies rows, transforms and shuffle."""
        content = f"{self._plan.identity} {tuple(self._shuffle)}"
        return hashlib.sha256(content.encode()).hexdigest()

    def has_serializable_lineage(self) -> bool:
        """Return True: a dataset can be pickled."""
        return True

    def __len__(self) -> int:
        raise AttributeError("Use ds.count() for the number of rows, which may read files.")

    def __iter__(self) -> Iterator[Any]:
        raise TypeError("Use ds.iter_rows() or ds.iter_batches() to iterate over a dataset.")

    def __repr__(self) -> str:
        names = ", ".join(transform.name for transform in self.transforms)
        return f"Dataset(name={self._name}, transforms=[{names}], shuffle={self._shuffle.kind})"

    # --- Out --------------------------------------------------------------------------------------

    def iterator(self) -> DataIterator:
        """Return an iterator over all rows, read in this process; each pass is an epoch.

        Each iterator of a shuffled dataset begins with another epoch: loops that call
        `iter_batches` once per epoch get another order each time.
        """
        position = ShardPosition(self, ShardGroup())
        position.epoch = next(self._first_epochs)
        return DataIterator(position)

    def iter_rows(self) -> Iterable[dict[str, Any]]:
        """Iterate over the rows as dictionaries."""
        return self.iterator().iter_rows()

    def iter_batches(self, **options: Any) -> Iterable[Any]:
        """Iterate over batches, as `DataIterator.iter_batches` does."""
        return self.iterator().iter_batches(**options)

    def iter_torch_batches(self, **options: Any) -> Iterable[Any]:
        """Iterate over batches of tensors, as `DataIterator.iter_torch_batches` does."""
        return self.iterator().iter_torch_batches(**options)

    def iter_tf_batches(self, **options: Any) -> Iterable[Any]:
        """Iterate over batches of TensorFlow, as `DataIterator.iter_tf_batches` does."""
        return self.iterator().iter_tf_batches(**options)

    def iter_jax_batches(self, **options: Any) -> Iterable[Any]:
        """Iterate over batches of JAX, as `DataIterator.iter_jax_batches` does."""
        return self.iterator().iter_jax_batches(**options)

    def to_tf(self, feature_columns: Any, label_columns: Any, **options: Any) -> Any:
        """Return a `tf.data.Dataset`, as `DataIterator.to_tf` does."""
        return self.iterator().to_tf(feature_columns, label_columns, **options)

    def to_torch(self, **options: Any) -> Any:
        """Return a `torch.utils.data.IterableDataset`, as `DataIterator.to_torch` does."""
        return self.iterator().to_torch(**options)

    def streaming_split(
        self,
        n: int,
        *,
        equal: bool = False,
        locality_hints: Any = None,
    ) -> list[DataIterator]:
        """Return `DataIterator`s that share the rows of each epoch, for `n` ranks.

        Their numbers of rows differ by at most one. With `equal` they do not differ: a remainder of
        fewer than `n` rows is left out.
        """
        even_bounds(n, equal=equal)  # refuses other numbers
        groups = [
            ShardGroup(rank=rank, world_size=n, world_sizes=(n,), equal=equal) for rank in range(n)
        ]
        return [DataIterator(ShardPosition(self, group)) for group in groups]

    def materialize(
        self,
        path: str | Path | None = None,
        *,
        row_group_bytes: int = file_encoders.ROW_GROUP_BYTES,
    ) -> Dataset:
        """Return a dataset of the transformed rows, which are computed now, in this order.

        Without `path` they are held in memory. With the path or URL of a folder they are written to
        a subfolder as Parquet files for fast reading, with row groups of `row_group_bytes`, and
        read from there. A later call with the same rows, transforms and captured values reads
        these files: delete them after an update of a package that the functions import. If a
        captured value cannot be pickled, every call writes to another subfolder.
        """
        if path is None:
            table = concat_blocks([*self._ordered_blocks()] or [empty_table(self._plan.schema)])
            source: Source = TableSource(table)
        else:
            source = self._write_once(path, row_group_bytes)
        return replace(Dataset.of_source(source), _name=self._name, _steps=self._steps)

    def _write_once(self, path: str | Path, row_group_bytes: int) -> Source:
        operation = self._plan.rows.operation
        if operation is not None and not self.transforms and self._shuffle.kind == "none":
            return compute_to(operation, path, row_group_bytes)
        folder = writers.open_folder(path).subtree(self._content_id()[:16])
        blocks, schema = self._ordered_blocks(), self._plan.schema
        source = writers.materialize(folder, blocks, schema, row_group_bytes)
        return replace(source, fits_path=str(path))

    def _content_id(self) -> str:
        """Return `get_dataset_id()` with the captured values, or a random text if unknown."""
        captured = digest_captured(self._plan.captured)
        if captured is None:
            log.warning("data.always_materialized", dataset=repr(self))
            return uuid.uuid4().hex
        return hashlib.sha256(f"{self.get_dataset_id()} {captured}".encode()).hexdigest()

    def cache(
        self,
        *,
        memory_bytes: float = 0,
        disk_bytes: float = 0,
        directory: str | Path | None = None,
    ) -> Dataset:
        """Return this dataset with its rows kept on each machine that reads them.

        What is before `cache` is read and computed once on a machine, what is after it in every
        epoch. Each process keeps at most `memory_bytes` in memory, and the processes of a machine
        together `disk_bytes` in files, which are removed when the run ends, unless they are in a
        `directory` of the user. Functions before `cache` must depend on their rows only. Rows and
        their order are those without `cache`, whatever happens to the files.
        """
        limits = cache_limits(memory_bytes, disk_bytes, directory)
        return self._with_plan(RowPlan.of_source(CachedSource(self._plan, limits)))

    def to_pandas(self, limit: int | None = None) -> Any:
        """Return all rows as a DataFrame. Raises `ConfigError` if there are more than `limit`."""
        self._check_limit("to_pandas", limit)
        blocks = [*self._ordered_blocks()] or [empty_table(self._plan.schema)]
        return to_batch(concat_blocks(blocks), "pandas")

    def write_parquet(self, path: str | Path, **options: Any) -> None:
        """Write Parquet files to a folder.

        Ray's arguments are `partition_cols`, `filesystem`, `filename_provider`,
        `min_rows_per_file`, `max_rows_per_file`, `mode`, and those of `pyarrow`'s writer.
        """
        self._write("write_parquet", path, "parquet", file_encoders.parquet_encoder, options)

    def write_csv(self, path: str | Path, **options: Any) -> None:
        """Write CSV files to a folder; arguments as for `write_parquet`, and `pyarrow.csv`'s."""
        self._write("write_csv", path, "csv", file_encoders.csv_encoder, options)

    def write_json(self, path: str | Path, **options: Any) -> None:
        """Write files with a line of JSON per row to a folder; arguments as for `write_parquet`."""
        self._write("write_json", path, "json", file_encoders.json_encoder, options)

    def write_orc(self, path: str | Path, **options: Any) -> None:
        """Write ORC files to a folder; arguments as for `write_parquet`."""
        self._write("write_orc", path, "orc", file_encoders.orc_encoder, options)

    def write_numpy(self, path: str | Path, *, column: str, **options: Any) -> None:
        """Write `.npy` files with the values of a column to a folder."""
        encoder = partial(file_encoders.numpy_encoder, column)
        self._write("write_numpy", path, "npy", encoder, options)

    def write_images(
        self, path: str | Path, column: str, file_format: str = "png", **options: Any
    ) -> None:
        """Write an image file for each row to a folder; needs Pillow."""
        encode = file_encoders.image_encoder(column, file_format)
        write_options, _ = writers.WriteOptions.of_arguments("write_images", options)
        blocks = ordered_blocks(self._plan, self._shuffle, columns=[column])
        store = writers.open_folder(path, write_options.filesystem)
        writers.write_rows(store, blocks, file_format, encode, write_options)

    def to_dask(self, *, path: str | None = None, **_options: Any) -> Any:
        """Write Parquet files to `path`, and return the Dask DataFrame that reads them."""
        read = writers.import_library("dask.dataframe").read_parquet
        return writers.export_to(read, path, self._ordered_blocks())

    def to_modin(self, *, path: str | None = None) -> Any:
        """Write Parquet files to `path`, and return the Modin DataFrame that reads them."""
        read = writers.import_library("modin.pandas").read_parquet
        return writers.export_to(read, path, self._ordered_blocks())

    def to_daft(self, *, path: str | None = None) -> Any:
        """Write Parquet files to `path`, and return the Daft DataFrame that reads them."""
        read = writers.import_library("daft").read_parquet
        return writers.export_to(read, path, self._ordered_blocks(), url=hadoop_url)

    def to_spark(self, spark: Any, *, path: str | None = None) -> Any:
        """Write Parquet files to `path`, and return the Spark DataFrame that reads them."""
        return writers.export_to(spark.read.parquet, path, self._ordered_blocks(), url=spark_url)

    # --- Names of older versions of Ray -----------------------------------------------------------

    def window(self, **_options: Any) -> DatasetPipeline[Dataset]:
        """Return a pipeline of one pass: windows are chosen by the order of the dataset."""
        return DatasetPipeline(self)

    def repeat(self, times: int | None = None) -> DatasetPipeline[Dataset]:
        """Return a pipeline of several passes; None: without end."""
        return DatasetPipeline(self, times)

    def iter_epochs(self, max_epoch: int = -1) -> Iterator[Dataset]:
        """Yield this dataset once for each epoch, without end unless `max_epoch` is given."""
        return DatasetPipeline(self, None).iter_epochs(max_epoch)

    def fully_executed(self) -> Dataset:
        """Return `materialize()`."""
        return self.materialize()

    def is_fully_executed(self) -> bool:
        """Return False: transforms are applied when rows are read."""
        return False

    def lazy(self) -> Dataset:
        """Return this dataset: every dataset is lazy."""
        return self

    # --- Shared -----------------------------------------------------------------------------------

    @cached_property
    def _first_epochs(self) -> Iterator[int]:
        return count()

    # Without the counter of iterators.
    def __getstate__(self) -> dict[str, Any]:
        state = {"_plan": self._plan, "_shuffle": self._shuffle, "_name": self._name}
        # The functions of steps before materialize() may be large, or impossible to pickle.
        return {**state, "_steps": None}

    def _fixed_order(self) -> RowPlan:
        """Return the plan of all rows in one order, which is a random one if they are shuffled."""
        shuffle = self._shuffle
        if shuffle.kind == "none":
            return self._plan
        if shuffle.kind == "units":
            return part_plans(self._plan, shuffle, even_bounds(1, equal=False), 1)[0]
        return _operation_plan(ShuffleOperation(self._plan, shuffle.seed))

    def _with_plan(self, plan: RowPlan) -> Dataset:
        return replace(self, _plan=plan)

    def _from_operation(self, operation: TableOperation) -> Dataset:
        steps = None if self._steps else self._steps
        return Dataset(_operation_plan(operation), _name=self._name, _steps=steps)

    def _steps_with(self, step: Any) -> tuple[Any, ...] | None:
        return None if self._steps is None else (*self._steps, step)

    def _parts(self, bounds: Bounds, count: int) -> list[Dataset]:
        return [
            self._with_plan(plan) for plan in part_plans(self._plan, self._shuffle, bounds, count)
        ]

    def _ordered_blocks(self, limit: int | None = None) -> Iterator[pa.Table]:
        return ordered_blocks(self._plan, self._shuffle, limit=limit)

    def _check_limit(self, method: str, limit: int | None) -> None:
        if limit is not None and self.count() > limit:
            raise ConfigError(
                f"{method}(limit={limit}): the dataset has {self.count()} rows.",
                do=f"Call limit({limit}) first, or {method}() if all rows fit into memory.",
            )

    def _statistic(
        self, kind: Callable[..., Any], on: str | Sequence[str] | None, **options: Any
    ) -> Any:
        columns = self.columns() if on is None else [on] if isinstance(on, str) else list(on)
        if not columns:
            raise ConfigError("There is no column to aggregate.", do="Name at least one column.")
        values = self.aggregate(*(kind(column, **options) for column in columns))
        return next(iter(values.values())) if len(values) == 1 else values

    def _write(
        self,
        method: str,
        path: str | Path,
        suffix: str,
        encoder: Callable[..., file_encoders.Encoder],
        options: Mapping[str, Any],
    ) -> None:
        write_options, encoder_options = writers.WriteOptions.of_arguments(method, options)
        encode = encoder(**encoder_options)
        store = writers.open_folder(path, write_options.filesystem)
        writers.write_files(store, self._ordered_blocks(), suffix, encode, write_options)


for _name in REFUSED_METHODS:
    setattr(Dataset, _name, refused_method(_name))

MaterializedDataset = Dataset
"""Ray's class of datasets whose rows are in memory."""


def _distinct_names(method: str, names: str | Sequence[str]) -> tuple[str, ...]:
    columns = (names,) if isinstance(names, str) else tuple(names)
    if not all(isinstance(name, str) for name in columns) or len(set(columns)) < len(columns):
        raise ConfigError(
            f"{method}({list(columns)}): the names must be distinct strings.",
            do="Pass each column once.",
        )
    return columns


def _operation_plan(operation: TableOperation) -> RowPlan:
    return RowPlan(Rows(lambda: UnitManifest.of_source(compute(operation)), operation))


def _first_shuffle(datasets: Sequence[Dataset]) -> ShuffleSettings:
    """Return how the first shuffled dataset is shuffled."""
    shuffles = (dataset.shuffle_settings for dataset in datasets)
    return next((one for one in shuffles if one.kind != "none"), UNSHUFFLED)


def _common_steps(datasets: Sequence[Dataset]) -> tuple[Any, ...] | None:
    """Return the steps of all these datasets if they are equal, else None."""
    first, *others = (_step_identities(dataset) for dataset in datasets)
    return datasets[0].steps if all(other == first for other in others) else None


def _step_identities(dataset: Dataset) -> list[Any] | None:
    if dataset.steps is None:
        return None
    return [getattr(step, "identity", step) for step in dataset.steps]


def _seed(seed: int | RandomSeedConfig | None) -> int | None:
    """Return the integer of a seed."""
    value: Any = getattr(seed, "seed", seed)
    return None if value is None else int(value)
