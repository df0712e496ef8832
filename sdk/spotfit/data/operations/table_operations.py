"""Operations of datasets that need all rows: in memory where they fit, else in files.

Whether rows fit is decided by their encoded size and the free memory, or by
`DataContext.operation_memory_bytes`. A result that does not fit is written once, as
`materialize(url)` writes, below a folder whose name is the hash of the rows and the operation.
"""

from __future__ import annotations

import errno
import hashlib
import shutil
import tempfile
import uuid
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import pyarrow as pa

from spotfit.core.cached import cached_property
from spotfit.core.errors import ConfigError, InfrastructureError
from spotfit.data.aggregate_base import AggregateFnV2
from spotfit.data.captured_values import digest_captured
from spotfit.data.context import DataContext
from spotfit.data.formats.batch_formats import concat_blocks, empty_table
from spotfit.data.operations import key_database, writers
from spotfit.data.operations.external_parts import (
    GroupedParts,
    JoinedParts,
    ShuffledParts,
    SortedParts,
    Workspace,
    distinct_values,
    group_count,
)
from spotfit.data.operations.file_encoders import ROW_GROUP_BYTES
from spotfit.data.operations.group_aggregates import aggregate_groups
from spotfit.data.operations.relational import (
    JoinKeys,
    aggregated_columns,
    aggregated_table,
    join_rows,
    joined_table,
    map_groups,
    mapped_groups,
    shuffle_key,
    shuffled_table,
    sort_order,
    sort_rows,
    sorted_table,
)
from spotfit.data.operations.sort_keys import can_be_key
from spotfit.data.plans.row_plan import RowPlan
from spotfit.data.plans.transforms import Transform
from spotfit.data.schema import check_columns
from spotfit.data.source import Source
from spotfit.data.sources.file_source import FormatSource
from spotfit.data.sources.tables import TableSource
from spotfit.host import log
from spotfit.host.memory import read_memory_usage
from spotfit.store.api import Store

_MEMORY_FACTOR = 4
"""A sorted or joined table exists twice, and text such as JSON takes twice its size if decoded."""
_MIN_MEMORY_BYTES = 128 * 2**20
"""DuckDB and PyArrow need some memory whatever the rows are."""
_GROUP_BYTES = 1024
"""Memory for the partial results of a group, as Python objects."""
_VALUE_BYTES = 256
"""Memory for a distinct value as a Python object, in a list and in the table it comes from."""


@dataclass(frozen=True, eq=False)
class TableOperation:
    """An operation on all rows of one or two plans. Nothing is read before it is computed."""

    plan: RowPlan

    call: ClassVar[str]
    """The method, for messages."""
    needs_database: ClassVar[bool] = True
    """Whether DuckDB computes it where rows do not fit."""

    @property
    def plans(self) -> tuple[RowPlan, ...]:
        """Whose rows are needed."""
        return (self.plan,)

    @property
    def arguments(self) -> str:
        """Text that determines the result, besides the rows and `captured`."""
        raise TypeError(f"{type(self).__name__} does not define arguments")

    @property
    def captured(self) -> list[Any]:
        """Functions of the user, with their values, that determine the result."""
        return [plan.captured for plan in self.plans]

    @property
    def size_bytes(self) -> int:
        """Size of the rows in memory, before the transforms."""
        return sum(int(plan.manifest.unit_bytes.sum()) for plan in self.plans)

    @cached_property
    def digest(self) -> str | None:
        """Hash of the rows and the operation, in hexadecimal.

        None if a function has captured a value without a digest.
        """
        captured = digest_captured(self.captured)
        if captured is None:
            return None
        rows = [plan.identity for plan in self.plans]
        content = f"{self.call} {self.arguments} {rows} {captured}"
        return hashlib.sha256(content.encode()).hexdigest()

    def schema(self) -> pa.Schema:
        """Return the columns of the result where it has no rows. Raises `ConfigError`."""
        return self.plan.schema

    def exceeds(self, memory_bytes: int) -> bool:
        """Return whether the operation in memory would need more."""
        return self.size_bytes * _MEMORY_FACTOR > memory_bytes

    def table(self) -> pa.Table:
        """Compute the result in memory. Raises `ConfigError`."""
        raise TypeError(f"{type(self).__name__} does not define table()")

    def parts(self, workspace: Workspace) -> writers.NumberedParts:
        """Return the parts of the result. Raises `ConfigError`."""
        raise TypeError(f"{type(self).__name__} does not define parts()")


@dataclass(frozen=True, eq=False)
class SortOperation(TableOperation):
    """`Dataset.sort`."""

    key: str | Sequence[str]
    descending: bool | Sequence[bool]

    call = "sort()"

    @property
    def arguments(self) -> str:
        """Columns and directions."""
        return f"{self.key!r} {self.descending!r}"

    def table(self) -> pa.Table:
        """Sort in memory."""
        return sorted_table(self.plan, self.key, self.descending)

    def parts(self, workspace: Workspace) -> writers.NumberedParts:
        """Sort by DuckDB."""
        order = sort_order(self.plan.schema, self.key, self.descending)
        sort_rows(empty_table(self.plan.schema), order)  # refuses the same types of columns
        return SortedParts(self.plan, order, workspace)


@dataclass(frozen=True, eq=False)
class JoinOperation(TableOperation):
    """`Dataset.join`."""

    right: RowPlan
    keys: JoinKeys

    call = "join()"

    @property
    def plans(self) -> tuple[RowPlan, ...]:
        """Both sides."""
        return self.plan, self.right

    @property
    def arguments(self) -> str:
        """Type, columns and suffixes."""
        return repr(tuple(self.keys))

    def schema(self) -> pa.Schema:
        """Return the columns of both sides."""
        left, right = self.plan.schema, self.right.schema
        self.keys.check(left, right)
        return join_rows(empty_table(left), empty_table(right), self.keys).schema

    def table(self) -> pa.Table:
        """Join in memory."""
        return joined_table(self.plan, self.right, self.keys)

    def parts(self, workspace: Workspace) -> writers.NumberedParts:
        """Join by DuckDB."""
        self.schema()  # refuses the same names and types of columns
        return JoinedParts(self.plan, self.right, self.keys, workspace)


@dataclass(frozen=True, eq=False)
class MapGroupsOperation(TableOperation):
    """`GroupedData.map_groups` and `with_column`."""

    keys: Sequence[str]
    transform: Transform

    call = "map_groups()"

    @property
    def arguments(self) -> str:
        """Columns and what is called for each group."""
        return f"{list(self.keys)} {self.transform.identity}"

    def exceeds(self, memory_bytes: int) -> bool:
        """False for one group of all rows, which has to be in memory in any case."""
        return bool(self.keys) and super().exceeds(memory_bytes)

    @property
    def captured(self) -> list[Any]:
        """Also the function for groups."""
        return [*super().captured, self.transform if self.transform.runs_user_code else None]

    def table(self) -> pa.Table:
        """Call the function for groups in memory."""
        return mapped_groups(self.plan, self.keys, self.transform.bind())

    def parts(self, workspace: Workspace) -> writers.NumberedParts:
        """Call the function for groups that DuckDB finds."""
        check_columns("groupby()", self.keys, self.plan.schema.names)
        apply = self.transform.bind()
        return GroupedParts(
            self.plan,
            self.keys,
            lambda blocks: map_groups(concat_blocks([*blocks]), self.keys, apply),
            workspace,
        )


@dataclass(frozen=True, eq=False)
class AggregateOperation(TableOperation):
    """`GroupedData.aggregate` and the like."""

    keys: Sequence[str]
    choose: Callable[[], Sequence[Any]]
    """Returns the aggregates, which may depend on the columns."""

    call = "aggregate()"

    @cached_property
    def aggregates(self) -> Sequence[Any]:
        """The aggregates."""
        return self.choose()

    @property
    def arguments(self) -> str:
        """Columns, and names of the aggregates."""
        return f"{list(self.keys)} {[aggregate.name for aggregate in self.aggregates]}"

    @property
    def captured(self) -> list[Any]:
        """Also the aggregates with their parameters and functions."""
        return [*super().captured, list(self.aggregates)]

    def schema(self) -> pa.Schema:
        """Return the columns without types of the aggregates."""
        empty = empty_table(self.plan.schema).select(list(self.keys))
        for aggregate in self.aggregates:
            empty = empty.append_column(aggregate.name, pa.nulls(0))
        return empty.schema

    def exceeds(self, memory_bytes: int) -> bool:
        """Return whether the partial results would need more. May read the keys."""
        if not self.keys or not super().exceeds(memory_bytes) or not key_database.is_available():
            return False  # blocks are aggregated one by one
        check_columns("groupby()", self.keys, self.plan.schema.names)
        if any(isinstance(one, AggregateFnV2) and one.holds_values for one in self.aggregates):
            return True
        with _workspace(memory_bytes) as workspace:
            groups = group_count(self.plan, self.keys, workspace)
        return groups * _GROUP_BYTES * (1 + len(self.aggregates)) > memory_bytes

    def table(self) -> pa.Table:
        """Aggregate in memory."""
        return aggregated_table(self.plan, self.keys, self.aggregates)

    def parts(self, workspace: Workspace) -> writers.NumberedParts:
        """Aggregate groups that DuckDB finds."""
        columns = aggregated_columns(self.plan.schema, self.keys, self.aggregates)

        def aggregate(blocks: Iterator[pa.Table]) -> pa.Table:
            result = aggregate_groups(blocks, self.keys, self.aggregates)
            assert result is not None  # a part has rows
            return result

        return GroupedParts(self.plan, self.keys, aggregate, workspace, columns)


@dataclass(frozen=True, eq=False)
class ShuffleOperation(TableOperation):
    """`Dataset.random_shuffle(exact=True)`."""

    seed: int | None

    call = "random_shuffle(exact=True)"
    needs_database = False

    @property
    def arguments(self) -> str:
        """The seed."""
        return str(self.seed or 0)

    def table(self) -> pa.Table:
        """Shuffle in memory."""
        return shuffled_table(self.plan, self.seed)

    def parts(self, workspace: Workspace) -> writers.NumberedParts:
        """Shuffle part by part."""
        return ShuffledParts(self.plan, shuffle_key(self.seed), workspace)


# --- Where it is computed -------------------------------------------------------------------------


def compute(operation: TableOperation) -> Source:
    """Return the rows of the result: in memory, or in files if they do not fit.

    Files are in `DataContext.materialize_path`, or in a temporary folder of this process. Raises
    `ConfigError` if rows do not fit and DuckDB is not installed.
    """
    memory_bytes = _available_bytes()
    if not _is_external(operation, memory_bytes):
        return TableSource(operation.table())
    path = DataContext.get_current().materialize_path
    if path is not None:
        return compute_to(operation, path)
    return _write_temporary(operation)


def compute_to(
    operation: TableOperation, path: str | Path, row_group_bytes: int = ROW_GROUP_BYTES
) -> FormatSource:
    """Return the rows of the result in files below `path`, which an earlier call may have written.

    If a function has captured a value without a digest, they are written again.
    """
    digest = operation.digest
    if digest is None:
        log.warning("data.always_materialized", dataset=operation.call)
        digest = uuid.uuid4().hex
    folder = writers.open_folder(path).subtree(digest[:16])
    if writers.is_complete(folder):
        return replace(writers.stored_source(folder), fits_path=str(path))
    if _is_external(operation, _available_bytes()):
        source = _write_parts(operation, folder, row_group_bytes)
    else:
        table = operation.table()
        source = writers.materialize(folder, [table], table.schema, row_group_bytes)
    return replace(source, fits_path=str(path))


def unique_values(plan: RowPlan, column: str) -> list[Any] | None:
    """Return the distinct values of a column of rows that do not fit into memory.

    None if the rows fit, or DuckDB is not installed or cannot compare them: then they are found
    block by block. Raises `ConfigError` if their list does not fit.
    """
    memory_bytes = _available_bytes()
    size = int(plan.manifest.unit_bytes.sum())
    if memory_bytes is None or size * _MEMORY_FACTOR <= memory_bytes:
        return None
    check_columns("unique()", [column], plan.schema.names)
    if not key_database.is_available() or not can_be_key(plan.schema.field(column).type):
        return None
    with _workspace(memory_bytes) as workspace:
        found = distinct_values(plan, column, workspace, max_count=memory_bytes // _VALUE_BYTES)
    values: list[Any] = found.to_pylist()
    return values


@dataclass(frozen=True, eq=False)
class TemporaryFiles(FormatSource):
    """Files of a result that this process deletes, at the latest when it ends."""

    call: str = ""

    def __reduce__(self) -> Any:
        raise ConfigError(
            f"The rows of {self.call} do not fit into memory; they are in temporary files of this "
            "process, which other machines cannot read.",
            do="Write them to storage that the machines can read: call materialize('s3://…') on "
            "the result, or set DataContext.get_current().materialize_path before.",
        )


def _write_temporary(operation: TableOperation) -> TemporaryFiles:
    folder = tempfile.mkdtemp(
        prefix="spotfit-result-", dir=DataContext.get_current().spill_directory
    )
    try:
        found = _write_parts(operation, writers.open_folder(folder), ROW_GROUP_BYTES)
    except BaseException:
        _delete(folder)
        raise
    source = TemporaryFiles(found.files, found.format, call=operation.call)
    weakref.finalize(source, _delete, folder)
    return source


def _delete(folder: str) -> None:
    """Delete a folder of temporary files. An error is logged: no caller can correct it."""
    try:
        shutil.rmtree(folder)
    except FileNotFoundError:
        return  # the user, or a program that deletes old files, was first
    except OSError as error:
        log.warning("data.temporary_files_remain", folder=folder, reason=str(error))


def _available_bytes() -> int | None:
    """Return the memory that an operation may use; None if it is unknown."""
    limit = DataContext.get_current().operation_memory_bytes
    if limit is not None:
        if limit < _MIN_MEMORY_BYTES:
            raise ConfigError(
                f"DataContext.operation_memory_bytes is {limit}.",
                do=f"Set at least {_MIN_MEMORY_BYTES}, or None for the free memory.",
            )
        return int(limit)
    usage = read_memory_usage()
    return None if usage is None else usage.limit_bytes - usage.used_bytes


def _is_external(operation: TableOperation, memory_bytes: int | None) -> bool:
    if memory_bytes is None or not operation.exceeds(memory_bytes):
        return False
    if operation.needs_database and not key_database.is_available():
        size = operation.size_bytes
        raise ConfigError(
            f"{operation.call} holds all rows in memory: {size / 2**30:.1f} GiB, about "
            f"{_MEMORY_FACTOR} times as much in use.",
            do="Run `pip install 'spotfit[duckdb]'`: with DuckDB, rows beyond the memory are on "
            "local disk. Or write the dataset with write_parquet(url), let Dask or Spark process "
            "the files, and read their result with read_parquet().",
            size_bytes=size,
        )
    return True


def _write_parts(operation: TableOperation, folder: Store, row_group_bytes: int) -> FormatSource:
    memory_bytes = _available_bytes()
    assert memory_bytes is not None
    log.info(
        "data.operation_in_files",
        operation=operation.call,
        size_bytes=operation.size_bytes,
        memory_bytes=memory_bytes,
        folder=folder.url,
    )
    with _workspace(memory_bytes) as workspace:
        parts = operation.parts(workspace)
        return writers.write_parts(
            folder,
            parts,
            operation.schema,
            row_group_bytes,
            # Functions of the user may give other rows in another call.
            is_repeatable=not any(plan.runs_user_code for plan in operation.plans),
        )


@contextmanager
def _workspace(memory_bytes: int) -> Iterator[Workspace]:
    """Yield a temporary folder. Raises `InfrastructureError` if the disk is full."""
    # Of free memory, half: the rest of the process needs some, too.
    is_limit = DataContext.get_current().operation_memory_bytes is not None
    share = memory_bytes if is_limit else memory_bytes // 2
    directory = DataContext.get_current().spill_directory
    with tempfile.TemporaryDirectory(prefix="spotfit-spill-", dir=directory) as folder:
        try:
            yield Workspace(Path(folder), max(share, _MIN_MEMORY_BYTES))
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            raise InfrastructureError(
                f"The disk of {folder} is full: an operation writes all rows there.",
                do="Set DataContext.get_current().spill_directory to a directory with more space.",
            ) from error
