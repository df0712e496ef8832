"""Sorting, joining, grouping and exact shuffling of rows that do not fit into memory.

1. DuckDB sorts or joins the keys, and gives each row its place in the result. A shuffle needs none:
   the place follows from the hash of the row's number.
2. The rows are read in their order, and written to a local file, into the part of their place.
3. Each part is read, and computed by the operation in memory. Parts whose rows are larger than
   expected are divided into pieces before.

A part is a file of the result, or several. Which rows it has depends on `part_rows` only, so that
an interrupted operation computes the missing parts only.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import pyarrow as pa

from spotfit.core.errors import ConfigError
from spotfit.data.formats.batch_formats import concat_blocks, empty_table
from spotfit.data.operations.bucket_file import BucketFile
from spotfit.data.operations.group_aggregates import changes
from spotfit.data.operations.key_database import (
    PLACEMENT_COLUMNS,
    KeyDatabase,
    Placement,
    int64_values,
    key_batches,
    placement_batch,
)
from spotfit.data.operations.relational import (
    SORT_DIRECTIONS,
    JoinKeys,
    joined_columns,
)
from spotfit.data.operations.row_sizes import row_sizes
from spotfit.data.operations.sort_keys import equality_key, order_key
from spotfit.data.operations.writers import Piece
from spotfit.data.order import hash_numbers
from spotfit.data.plans.row_plan import RowPlan
from spotfit.data.source import IntArray

_MAX_PART_BYTES = 128 * 2**20
"""Decoded size of a part, as of a file that `write_parquet` writes."""
_MAX_PART_FACTOR = 2
"""Parts of this size, relative to that of others, are not divided."""
_SAMPLED_UNITS = 3
_PLACE = "spotfit.place"
"""The column of the places beside those of the user."""

Encoder: TypeAlias = Callable[[str, pa.ChunkedArray], pa.ChunkedArray]
"""Returns the keys of a column with a name, see `sort_keys`."""
Part: TypeAlias = tuple[Piece, pa.Table]


class Workspace(NamedTuple):
    """A local folder for temporary files, and how much memory an operation may use."""

    folder: Path
    memory_bytes: int

    @property
    def engine_bytes(self) -> int:
        """The limit of DuckDB, which fails with less than about 64 MiB."""
        return self.memory_bytes // 2

    @property
    def buffer_bytes(self) -> int:
        """Rows that are collected before they are written."""
        return self.memory_bytes // 8

    @property
    def part_bytes(self) -> int:
        """Decoded size of a part. Several copies are in memory, as rows and as encoded files.

        A power of two, so that another run with about the same memory has the same parts.
        """
        wanted = min(self.memory_bytes // 16, _MAX_PART_BYTES)
        return 1 << (max(wanted, 1).bit_length() - 1)


class StoredRows:
    """The rows of a plan, for several passes. Functions of the user are called in one of them.

    They may give other rows the next time. Their results are therefore in a local file.
    """

    def __init__(self, plan: RowPlan, workspace: Workspace, name: str) -> None:
        self._plan = plan
        self._file: BucketFile | None = None
        self._schema: pa.Schema | None = None
        if plan.runs_user_code:
            self._file = BucketFile(workspace.folder / f"{name}.rows", workspace.buffer_bytes)
            self._store(self._file)

    @property
    def schema(self) -> pa.Schema:
        """Columns of all blocks."""
        return self._plan.schema if self._schema is None else self._schema

    @property
    def row_count(self) -> int:
        """Number of rows."""
        return self._plan.manifest.row_count

    def row_bytes(self) -> int:
        """Return the decoded size of a row, from a few blocks: the largest average of them."""
        units = np.flatnonzero(self._plan.manifest.unit_rows).tolist()
        last = len(units) - 1
        numbers = {last * n // _SAMPLED_UNITS for n in range(_SAMPLED_UNITS + 1)} if units else ()
        blocks = (self._read(number, units[number]) for number in sorted(numbers))
        return max((block.nbytes // block.num_rows + 1 for block in blocks), default=1)

    def blocks(self, columns: Sequence[str] | None = None) -> Iterator[pa.Table]:
        """Yield all rows in order, with the types of `schema` where only columns are asked for."""
        if self._file is None:
            yield from self._plan.blocks(columns)
            return
        for number in self._file.numbers():
            for block in self._file.read(number):
                yield block if columns is None else block.select(list(columns))

    def keys(
        self, names: Sequence[str], encoders: Sequence[Encoder]
    ) -> tuple[pa.Schema, Iterator[pa.RecordBatch]]:
        """Return columns for a `KeyDatabase`: `row`, and `k0`, `k1`, … of these columns."""
        keys = [
            (self.schema.field(name), encode) for name, encode in zip(names, encoders, strict=True)
        ]
        empty = [encode(one.name, pa.chunked_array([], one.type)) for one, encode in keys]
        labels = [f"k{number}" for number in range(len(names))]
        types = [("row", pa.int64()), *zip(labels, [one.type for one in empty], strict=True)]
        encoded = (
            [encode(one.name, block.column(one.name).cast(one.type)) for one, encode in keys]
            for block in self.blocks(list(dict.fromkeys(names)))
        )
        return pa.schema(types), key_batches(labels, encoded)

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()

    def _read(self, number: int, unit: int) -> pa.Table:
        if self._file is None:
            return self._plan.read_unit(unit)
        return concat_blocks([*self._file.read(number)])

    def _store(self, file: BucketFile) -> None:
        schemas: list[pa.Schema] = []
        for number, block in enumerate(self._plan.blocks()):
            file.append(np.full(block.num_rows, number), block)
            if not schemas or not schemas[-1].equals(block.schema):
                schemas.append(block.schema)
        if schemas:
            self._schema = _unified_schema(schemas)


def _unified_schema(schemas: Sequence[pa.Schema]) -> pa.Schema:
    """Return the columns that `concat_blocks` gives to rows with these columns."""
    rows = [
        pa.Table.from_arrays(
            [pa.nulls(1, field.type) for field in schema],
            schema=pa.schema([field.with_nullable(nullable=True) for field in schema]),
        )
        for schema in schemas
    ]
    return concat_blocks(rows).schema


# --- Sorted rows and groups -----------------------------------------------------------------------


class _OrderedParts:
    """The rows in the order of some columns, in parts with the same number of rows."""

    def __init__(
        self, plan: RowPlan, order: Sequence[tuple[str, str]], workspace: Workspace, name: str
    ) -> None:
        self._rows = StoredRows(plan, workspace, name)
        self._order = order
        self._workspace = workspace
        self._part_rows = part_rows(self._rows.row_bytes(), workspace)

    @property
    def tag(self) -> str:
        """The number of rows of a part. The rows of a group are in the part of the first one."""
        return f"{self._part_rows}-rows"

    def _sorted_pieces(
        self,
        complete: Collection[int],
        place: Callable[[Iterable[pa.RecordBatch]], Iterator[pa.RecordBatch]],
        *,
        keys: str,
        columns: Sequence[str] | None = None,
    ) -> Iterator[tuple[Piece, Iterator[pa.Table]]]:
        """Sort the keys, distribute the rows, and yield those of each piece as in the dataset.

        `place` returns the places of rows that it gets in the order of their keys, as columns of
        the table of keys: `keys` are their names in SQL.
        """
        file = BucketFile(self._workspace.folder / "parts", self._workspace.buffer_bytes)
        with closing(self._rows), closing(file):
            with closing(_open_database(self._workspace)) as database:
                order = _load_order_keys(database, self._rows, self._order)
                batches = place(database.stream(f"SELECT {keys} FROM keys ORDER BY {order}"))  # noqa: S608
                _place(database, batches)
                target = _Target(file, self._part_rows, complete)
                _distribute(self._rows.blocks(columns), _placements(database), target)
            for piece, (bucket,) in _pieces([file], self._workspace):
                yield piece, bucket.tables()


class SortedParts(_OrderedParts):
    """The rows sorted by columns. Equal ones keep their order."""

    def __init__(
        self, plan: RowPlan, order: Sequence[tuple[str, str]], workspace: Workspace
    ) -> None:
        super().__init__(plan, order, workspace, "sorted")

    def read(self, complete: Collection[int]) -> Generator[Part, None, None]:
        """Sort the keys, distribute the rows, and yield the parts."""
        for piece, tables in self._sorted_pieces(complete, _numbered, keys="row"):
            yield piece, _in_order(tables)


class GroupedParts(_OrderedParts):
    """Results of a function for the rows of some groups, whose parts are sorted by the keys.

    The function gets the rows of whole groups, in their order, as blocks that are parts of those of
    the dataset, and returns a table of results sorted by the keys.
    """

    def __init__(
        self,
        plan: RowPlan,
        keys: Sequence[str],
        apply: Callable[[Iterator[pa.Table]], pa.Table],
        workspace: Workspace,
        columns: Sequence[str] | None = None,
    ) -> None:
        super().__init__(plan, [(key, "ascending") for key in keys], workspace, "grouped")
        self._apply, self._columns = apply, columns

    def read(self, complete: Collection[int]) -> Generator[Part, None, None]:
        """Sort the keys, distribute the rows of each group, and yield the results."""
        found = self._sorted_pieces(complete, _numbered_groups, keys="*", columns=self._columns)
        for piece, tables in found:
            yield piece, self._apply(block.remove_column(0) for block in tables)


def group_count(plan: RowPlan, keys: Sequence[str], workspace: Workspace) -> int:
    """Return the number of groups of equal keys. Reads the keys only."""
    rows = StoredRows(plan, workspace, "counted")
    with closing(rows), closing(_open_database(workspace)) as database:
        database.load("keys", *rows.keys(keys, [order_key] * len(keys)))
        names = ", ".join(f"k{number}" for number in range(len(keys)))
        query = f"SELECT count(*) FROM (SELECT DISTINCT {names} FROM keys)"  # noqa: S608 - numbers
        return next(int(batch.column(0)[0].as_py()) for batch in database.stream(query))


def part_rows(row_bytes: int, workspace: Workspace) -> int:
    """Return how many rows a part has."""
    return max(1, workspace.part_bytes // row_bytes)


def _open_database(workspace: Workspace) -> KeyDatabase:
    return KeyDatabase(workspace.folder, workspace.engine_bytes)


def _load_order_keys(
    database: KeyDatabase, rows: StoredRows, order: Sequence[tuple[str, str]]
) -> str:
    """Load the table `keys`; return the terms of its order."""
    names = [name for name, _ in order]
    encoders = [partial(order_key, descending=one == "descending") for _, one in order]
    database.load("keys", *rows.keys(names, encoders))
    directions = [SORT_DIRECTIONS[one] for _, one in order]
    terms = [f"k{number} {direction} NULLS LAST" for number, direction in enumerate(directions)]
    return ", ".join([*terms, "row"])


def _place(database: KeyDatabase, batches: Iterator[pa.RecordBatch]) -> None:
    """Load the table `places` with what is computed of the table `keys`, which is deleted."""
    database.load("places", PLACEMENT_COLUMNS, batches)
    database.drop("keys")


def _placements(database: KeyDatabase) -> Iterator[Placement]:
    return database.placements("SELECT row, place FROM places ORDER BY row, place")


def _numbered(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    first = 0
    for batch in batches:
        rows = int64_values(batch.column(0))
        yield placement_batch(rows, np.arange(first, first + len(rows)))
        first += len(rows)


def _numbered_groups(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yield the place of each row: that of the first row of its group."""
    first, group_start = 0, 0
    previous: pa.Table | None = None
    for batch in batches:
        keys = pa.Table.from_batches([batch]).drop_columns(["row"])
        is_first = _changes(keys, previous)
        numbers = np.arange(first, first + len(is_first))
        starts = np.maximum.accumulate(np.where(is_first, numbers, group_start))
        yield placement_batch(int64_values(batch.column("row")), starts)
        group_start = int(starts[-1])
        first += len(is_first)
        previous = keys.slice(keys.num_rows - 1)


def _changes(keys: pa.Table, previous: pa.Table | None) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Return for each row whether its keys differ from those of the row before."""
    table = keys if previous is None else pa.concat_tables([previous, keys])
    is_first = np.zeros(table.num_rows, dtype=np.bool_)
    is_first[0] = True
    for column in table.columns:
        is_first[1:] |= changes(column)
    return is_first if previous is None else is_first[1:]


# --- Rows in parts --------------------------------------------------------------------------------


class _Target(NamedTuple):
    """Where rows are written."""

    file: BucketFile
    part_rows: int
    complete: Collection[int]
    """Parts that are not needed."""

    def append(self, rows: pa.Table, places: IntArray) -> None:
        """Append rows with their places to their parts."""
        parts = places // self.part_rows
        placed = rows.add_column(0, _PLACE, pa.chunked_array([places]))
        if self.complete:
            needed = ~np.isin(parts, [*self.complete])
            parts, placed = parts[needed], placed.filter(pa.array(needed))
        self.file.append(parts, placed)


class _Bucket(NamedTuple):
    """Rows in a file, with their places in the first column."""

    file: BucketFile
    number: int

    @property
    def size_bytes(self) -> int:
        return self.file.size_bytes(self.number)

    def tables(self) -> Iterator[pa.Table]:
        return self.file.read(self.number)


def _pieces(
    files: Sequence[BucketFile], workspace: Workspace
) -> Iterator[tuple[Piece, list[_Bucket]]]:
    """Yield where the rows of each part are: in one piece, or in several that fit into memory.

    The number of rows does not bound the size of a part: the largest ones may be next to each
    other. Large parts are divided once, into one file for each side of a join.
    """
    for part in sorted({number for file in files for number in file.numbers()}):
        buckets = [_Bucket(file, part) for file in files]
        size = sum(bucket.size_bytes for bucket in buckets)
        is_large = size > _MAX_PART_FACTOR * workspace.part_bytes
        bounds = _bounds(buckets, workspace.part_bytes) if is_large else np.zeros(0, np.int64)
        if not len(bounds):
            yield Piece(part), buckets
            continue
        with ExitStack() as stack:
            buffer_bytes = workspace.buffer_bytes // len(buckets)
            divided = [
                _divided(bucket, bounds, _open_file(workspace.folder, buffer_bytes, stack))
                for bucket in buckets
            ]
            for number in range(len(bounds) + 1):
                piece = Piece(part, number, len(bounds) + 1)
                yield piece, [_Bucket(file, number) for file in divided]


def _bounds(buckets: Sequence[_Bucket], piece_bytes: int) -> IntArray:
    """Return the first places of all pieces of a part but the first one.

    A piece exceeds `piece_bytes` by less than the rows of its last place. Rows with the same place,
    which are those of a group, are not divided.
    """
    # Copies of the places: a view may keep the columns in memory that were read with them.
    measured = [
        (_places(rows).copy(), row_sizes(rows)) for bucket in buckets for rows in bucket.tables()
    ]
    places, inverse = np.unique(
        np.concatenate([places for places, _ in measured]), return_inverse=True
    )
    sizes = np.zeros(len(places), dtype=np.int64)
    np.add.at(sizes, inverse, np.concatenate([sizes for _, sizes in measured]))
    numbers = (np.cumsum(sizes) - sizes) // piece_bytes
    bounds: IntArray = places[1:][np.diff(numbers) > 0]
    return bounds


def _divided(bucket: _Bucket, bounds: IntArray, file: BucketFile) -> BucketFile:
    """Write each row of a bucket to the piece of its place."""
    for rows in bucket.tables():
        file.append(np.searchsorted(bounds, _places(rows), side="right"), rows)
    file.flush()
    return file


def _places(rows: pa.Table) -> IntArray:
    """Return the places of rows, or the hashes by which they are ordered."""
    return int64_values(rows.column(0))


def _open_file(folder: Path, buffer_bytes: int, stack: ExitStack) -> BucketFile:
    """Return a file that `stack` closes and deletes."""
    path = folder / f"{uuid.uuid4().hex}.pieces"
    file = BucketFile(path, buffer_bytes)
    stack.callback(path.unlink)
    return stack.enter_context(closing(file))


def _distribute(
    blocks: Iterable[pa.Table], placements: Iterator[Placement], target: _Target
) -> None:
    """Append the rows of blocks to their places. Rows without a place are left out."""
    for block, (rows, places) in _placed_rows(blocks, placements, target.file.buffer_bytes):
        is_whole = len(rows) == block.num_rows and bool((rows == np.arange(len(rows))).all())
        target.append(block if is_whole else block.take(pa.array(rows)), places)


def _placed_rows(
    blocks: Iterable[pa.Table], placements: Iterator[Placement], step_bytes: int
) -> Iterator[tuple[pa.Table, Placement]]:
    """Yield blocks with the placements of their rows, which are numbered within the block.

    A block occurs once if each of its rows has one place. Rows that are in many places of a join
    are placed in steps of about `step_bytes`, or as many rows as the block has.
    """
    first = 0
    current = next(placements, None)
    for block in blocks:
        end = first + block.num_rows
        step = max(1, block.num_rows, step_bytes // max(1, block.nbytes // max(1, block.num_rows)))
        found: list[Placement] = []
        while current is not None and current.rows[0] < end:
            free = step - sum(len(one.rows) for one in found)
            count = min(int(np.searchsorted(current.rows, end)), free)
            found.append(Placement(current.rows[:count] - first, current.places[:count]))
            rest = Placement(current.rows[count:], current.places[count:])
            current = rest if len(rest.rows) else next(placements, None)
            if sum(len(one.rows) for one in found) >= step:
                yield block, _concat(found)
                found = []
        if found:
            yield block, _concat(found)
        first = end


def _concat(placements: Sequence[Placement]) -> Placement:
    rows, places = zip(*placements, strict=True)
    return Placement(np.concatenate(rows), np.concatenate(places))


def _in_order(tables: Iterable[pa.Table]) -> pa.Table:
    """Return the rows of a part by their places."""
    rows = concat_blocks([*tables])
    order = np.argsort(int64_values(rows.column(0)), kind="stable")
    return rows.remove_column(0).take(pa.array(order))


# --- Joins ----------------------------------------------------------------------------------------


class JoinedParts:
    """The join of two plans, in order of the left rows, then of the right ones."""

    def __init__(self, left: RowPlan, right: RowPlan, join: JoinKeys, workspace: Workspace) -> None:
        self._left = StoredRows(left, workspace, "left")
        self._right = StoredRows(right, workspace, "right")
        self._join = join
        self._workspace = workspace
        size = sum(self._side(side).row_bytes() for side in join.sides)
        self._part_rows = part_rows(size, workspace)

    @property
    def tag(self) -> str:
        """The number of rows of a part."""
        return f"{self._part_rows}-rows"

    def read(self, complete: Collection[int]) -> Generator[Part, None, None]:
        """Join the keys, distribute the rows of both sides, and yield the parts."""
        folder, buffer_bytes = self._workspace.folder, self._workspace.buffer_bytes
        files = {
            side: BucketFile(folder / f"{side}.parts", buffer_bytes // 2)
            for side in self._join.sides
        }
        with closing(self._left), closing(self._right):
            try:
                self._distribute_sides(files, complete)
                for piece, buckets in _pieces([*files.values()], self._workspace):
                    yield piece, self._part(buckets)
            finally:
                for file in files.values():
                    file.close()

    def _side(self, side: str) -> StoredRows:
        return self._left if side == "left" else self._right

    def _distribute_sides(self, files: dict[str, BucketFile], complete: Collection[int]) -> None:
        sides = self._join.sides
        with closing(_open_database(self._workspace)) as database:
            for side, keys in (("left", self._join.left), ("right", self._join.right)):
                database.load(
                    f"{side}_keys", *self._side(side).keys(keys, [equality_key] * len(keys))
                )
            # First joined, then sorted: both at the same time may exceed the limit, and then fail.
            database.create("matched", self._query())
            for side in ("left", "right"):
                database.drop(f"{side}_keys")
            columns = pa.schema([("place", pa.int64()), *((side, pa.int64()) for side in sides)])
            order = ", ".join(f'"{side}" NULLS LAST' for side in sides)
            matched = database.stream(f"SELECT * FROM matched ORDER BY {order}")  # noqa: S608
            database.load("pairs", columns, _numbered_pairs(matched, columns))
            database.drop("matched")
            for side in sides:
                query = f'SELECT "{side}", place FROM pairs WHERE "{side}" IS NOT NULL ORDER BY ALL'  # noqa: S608
                target = _Target(files[side], self._part_rows, complete)
                _distribute(self._side(side).blocks(), database.placements(query), target)

    def _query(self) -> str:
        sides = ", ".join(f'"{side}"."row" AS "{side}"' for side in self._join.sides)
        keys = range(len(self._join.left))
        condition = " AND ".join(f'"left".k{key} = "right".k{key}' for key in keys)
        first, second = ("right", "left") if self._join.sides == ("right",) else ("left", "right")
        is_filter = len(self._join.sides) == 1  # SQL has no name of the side that is returned
        kind = self._join.kind.removeprefix(f"{first} ") if is_filter else self._join.kind
        return (
            f'SELECT {sides} FROM {first}_keys AS "{first}" {kind.upper()} JOIN '  # noqa: S608
            f'{second}_keys AS "{second}" ON {condition}'
        )

    def _part(self, buckets: Sequence[_Bucket]) -> pa.Table:
        tables = {side: empty_table(self._side(side).schema) for side in ("left", "right")}
        places = {side: np.zeros(0, dtype=np.int64) for side in self._join.sides}
        for side, bucket in zip(self._join.sides, buckets, strict=True):
            if found := [*bucket.tables()]:
                rows = concat_blocks(found)
                places[side], tables[side] = int64_values(rows.column(0)), rows.remove_column(0)
        # Each place has a row of one side or of both.
        first = min(int(one.min()) for one in places.values() if len(one))
        count = max(int(one.max()) for one in places.values() if len(one)) - first + 1
        indices: dict[str, pa.Array] = {}
        for side, found_places in places.items():
            numbers = np.zeros(count, dtype=np.int64)
            mask = np.ones(count, dtype=np.bool_)
            numbers[found_places - first] = np.arange(len(found_places))
            mask[found_places - first] = False
            indices[side] = pa.array(numbers, mask=mask)
        pairs = pa.table({**self._join.key_values(tables, indices), **indices})
        return joined_columns(pairs, tables["left"], tables["right"], self._join)


def _numbered_pairs(
    batches: Iterable[pa.RecordBatch], columns: pa.Schema
) -> Iterator[pa.RecordBatch]:
    first = 0
    for batch in batches:
        places = pa.array(np.arange(first, first + batch.num_rows))
        yield pa.record_batch([places, *batch.columns], schema=columns)
        first += batch.num_rows


# --- Exact shuffle --------------------------------------------------------------------------------


class ShuffledParts:
    """All rows in the order of the hashes of their numbers.

    A part has the rows whose hashes are in a range, so that the order is the same for any number of
    parts.
    """

    def __init__(self, plan: RowPlan, key: int, workspace: Workspace) -> None:
        self._rows = StoredRows(plan, workspace, "shuffled")
        self._key = key
        self._workspace = workspace
        rows = part_rows(self._rows.row_bytes(), workspace)
        self._part_count = max(1, -(-self._rows.row_count // rows))

    @property
    def tag(self) -> str:
        """The number of parts."""
        return f"of-{self._part_count}"

    def read(self, complete: Collection[int]) -> Generator[Part, None, None]:
        """Distribute the rows by their hashes, and yield the parts."""
        file = BucketFile(self._workspace.folder / "parts", self._workspace.buffer_bytes)
        with closing(self._rows), closing(file):
            first = 0
            for block in self._rows.blocks():
                hashes = hash_numbers(self._key, first, block.num_rows)
                first += block.num_rows
                parts = (hashes >> np.uint64(32)) * np.uint64(self._part_count) >> np.uint64(32)
                placed = block.add_column(0, _PLACE, pa.chunked_array([hashes]))
                numbers = parts.astype(np.int64)
                if complete:
                    needed = ~np.isin(numbers, [*complete])
                    numbers, placed = numbers[needed], placed.filter(pa.array(needed))
                file.append(numbers, placed)
            for piece, (bucket,) in _pieces([file], self._workspace):
                yield piece, _in_order(bucket.tables())


# --- Distinct values ------------------------------------------------------------------------------


def distinct_values(
    plan: RowPlan, column: str, workspace: Workspace, *, max_count: int
) -> pa.ChunkedArray:
    """Return the distinct values of a column in order of their first occurrence.

    Raises `ConfigError` if there are more than `max_count`, which would not fit into memory.
    """
    rows = StoredRows(plan, workspace, "distinct")
    with closing(rows), closing(_open_database(workspace)) as database:
        database.load("keys", *rows.keys([column], [order_key]))
        database.load("firsts", PLACEMENT_COLUMNS, _firsts(database))
        count = next(database.stream("SELECT count(*) FROM firsts")).column(0)[0].as_py()
        if count > max_count:
            raise ConfigError(
                f"unique({column!r}): a list of the {count} distinct values does not fit into "
                "memory.",
                do=f"Use groupby({column!r}).count(), whose result is a dataset.",
                count=count,
            )
        empty = empty_table(rows.schema).column(column)
        placements = database.placements("SELECT row, place FROM firsts ORDER BY row")
        found = [
            block.column(column).take(pa.array(placement.rows)).cast(empty.type)
            for block, placement in _placed_rows(
                rows.blocks([column]), placements, workspace.buffer_bytes
            )
        ]
    return pa.chunked_array([chunk for one in found for chunk in one.chunks], empty.type)


def _firsts(database: KeyDatabase) -> Iterator[pa.RecordBatch]:
    for batch in database.stream("SELECT min(row) AS row FROM keys GROUP BY k0"):
        rows = int64_values(batch.column(0))
        yield placement_batch(rows, rows)
