"""Operations in parts give the rows of the operations in memory, bit by bit."""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Callable, Collection, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import pytest

from spotfit.core.errors import ConfigError
from spotfit.data.aggregate import AsList, Count, CountDistinct, Max, Mean, Min, Quantile, Sum
from spotfit.data.formats.batch_formats import concat_blocks
from spotfit.data.operations import external_parts
from spotfit.data.operations.bucket_file import BucketFile
from spotfit.data.operations.external_parts import (
    GroupedParts,
    JoinedParts,
    ShuffledParts,
    SortedParts,
    Workspace,
    distinct_values,
    group_count,
)
from spotfit.data.operations.group_aggregates import aggregate_groups
from spotfit.data.operations.relational import (
    JOIN_TYPES,
    JoinKeys,
    aggregated_table,
    joined_table,
    map_groups,
    mapped_groups,
    shuffle_key,
    shuffled_table,
    sort_order,
    sorted_table,
)
from spotfit.data.operations.writers import NumberedParts, Piece
from spotfit.data.plans.row_functions import map_batches_transform
from spotfit.data.plans.row_plan import RowPlan
from spotfit.data.source import IntArray
from spotfit.data.user_functions import user_function
from tests.unit.data.row_sources import UnitSource, number_plan

_FLOATS = [0.0, -0.0, 1.5, -1.5, float("nan"), float("inf"), float("-inf"), 1e-310]
KEYS: dict[pa.DataType, Callable[[random.Random], Any]] = {
    pa.int64(): lambda rng: rng.choice([-(2**63), 2**63 - 1, 0, 1, -1, 2]),
    pa.uint64(): lambda rng: rng.choice([0, 1, 2**64 - 1]),
    pa.int8(): lambda rng: rng.randrange(-3, 3),
    pa.float64(): lambda rng: rng.choice(_FLOATS),
    pa.float32(): lambda rng: rng.choice(_FLOATS),
    pa.bool_(): lambda rng: rng.random() < 0.5,
    pa.string(): lambda rng: rng.choice(["", "a", "a\0", "é", "b", "B", "aa" * 20]),
    pa.large_string(): lambda rng: rng.choice(["x", "y"]),
    pa.binary(): lambda rng: rng.choice([b"", b"\0", b"\xff", b"a"]),
    pa.binary(2): lambda rng: rng.choice([b"\0\xff", b"aa"]),
    pa.decimal128(20, 3): lambda rng: Decimal(rng.randrange(-3, 3)) / 8,
    pa.timestamp("ns", "UTC"): lambda rng: rng.choice([0, 1, 2, 1_700_000_000_000_000_001]),
    pa.timestamp("s"): lambda rng: rng.randrange(3),
    pa.date32(): lambda rng: rng.randrange(3),
    # Values of Python have no nanoseconds.
    pa.time64("ns"): lambda rng: 1000 * rng.randrange(3),
    pa.duration("us"): lambda rng: rng.randrange(-2, 2),
}
"""A function for each type that draws values, few enough for equal ones."""
SEEDS = range(25)


def random_key(rng: random.Random, rows: int, kind: pa.DataType | None = None) -> pa.Array:
    kind = kind or rng.choice(list(KEYS))
    null_share = rng.choice([0, 0.2])
    draw = KEYS[kind]
    values = [None if rng.random() < null_share else draw(rng) for _ in range(rows)]
    return pa.array(values, kind)


def random_units(rng: random.Random, rows: int) -> tuple[int, ...]:
    bounds = sorted(rng.randrange(rows + 1) for _ in range(rng.randrange(6)))
    return tuple(int(n) for n in np.diff([0, *bounds, rows]))


def random_plan(rng: random.Random, **columns: pa.Array) -> RowPlan:
    """Rows with these columns, their number, a text and a tensor, in units of any size."""
    rows = len(next(iter(columns.values())))
    tensors = pa.FixedShapeTensorArray.from_numpy_ndarray(
        np.arange(4.0 * (rows + 1), dtype=np.float32).reshape(rows + 1, 2, 2)
    ).slice(1)
    table = pa.table(
        {
            **columns,
            "n": np.arange(rows),
            "text": pa.array([None if n % 7 == 3 else f"é{n}" for n in range(rows)]),
            "tensor": tensors,
            "list": pa.array([[n] * (n % 3) for n in range(rows)]),
        }
    )
    return RowPlan.of_source(UnitSource(table, random_units(rng, rows)))


def workspace(folder: Path, *, part_bytes: int = 256) -> Workspace:
    return Workspace(folder, part_bytes * 16)


@pytest.fixture(autouse=True)
def engine_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of a few rows, while DuckDB has what it needs at least."""
    monkeypatch.setattr(Workspace, "engine_bytes", 32 * 2**20)


def rows_of(parts: NumberedParts, complete: Collection[int] = ()) -> list[pa.Table]:
    found = list(parts.read(complete))
    numbers = [number for number, _ in found]
    assert numbers == sorted(set(numbers))
    return [table for _, table in found]


def assert_equal_rows(tables: Sequence[pa.Table], expected: pa.Table, seed: int) -> None:
    """Compare types and bits: NaN and -0.0 are values like others."""
    if not tables:
        assert expected.num_rows == 0
        return
    found = concat_blocks(tables)
    assert found.num_rows == expected.num_rows, f"seed {seed}"
    assert found.schema.equals(expected.schema), f"seed {seed}"
    assert _bits(found) == _bits(expected), f"seed {seed}"


def _bits(table: pa.Table) -> list[list[str]]:
    return [[repr(value) for value in column.to_pylist()] for column in table.columns]


@pytest.mark.parametrize("seed", SEEDS)
def test_sorted_parts_are_the_rows_sorted_in_memory(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    rows = rng.choice([1, 2, 30, 200])
    plan = random_plan(rng, a=random_key(rng, rows), b=random_key(rng, rows))
    keys = rng.choice([["a"], ["b", "a"], ["n"], ["text", "a"]])
    descending = [rng.random() < 0.5 for _ in keys]
    order = sort_order(plan.schema, keys, descending)
    parts = SortedParts(plan, order, workspace(tmp_path))
    assert_equal_rows(rows_of(parts), sorted_table(plan, keys, descending), seed)


@pytest.mark.parametrize("join_type", JOIN_TYPES)
@pytest.mark.parametrize("seed", range(6))
def test_joined_parts_are_the_rows_joined_in_memory(
    join_type: str, seed: int, tmp_path: Path
) -> None:
    rng = random.Random(seed)
    left_rows, right_rows = rng.choice([(1, 1), (40, 30), (100, 3), (0, 9)])
    kinds = [rng.choice(list(KEYS)) for _ in range(2)]
    left = random_plan(rng, **dict(zip("ab", _keys(rng, left_rows, kinds), strict=True)))
    right = random_plan(rng, **dict(zip("ac", _keys(rng, right_rows, kinds), strict=True)))
    on, right_on = rng.choice([(["a"], None), (["a", "b"], ["a", "c"]), (["b"], ["c"])])
    join = JoinKeys.of_arguments(join_type, on, right_on, ("_l", "_r"))
    expected = joined_table(left, right, join)
    parts = JoinedParts(left, right, join, workspace(tmp_path))
    assert_equal_rows(rows_of(parts), expected, seed)


def _keys(rng: random.Random, rows: int, kinds: Sequence[pa.DataType]) -> list[pa.Array]:
    return [random_key(rng, rows, kind) for kind in kinds]


def test_a_row_that_is_joined_with_many_is_taken_in_steps(tmp_path: Path) -> None:
    left = RowPlan.of_source(UnitSource(pa.table({"k": [1], "x": [5]}), (1,)))
    right = RowPlan.of_source(UnitSource(pa.table({"k": np.ones(200_000, np.int64)}), (200_000,)))
    join = JoinKeys.of_arguments("inner", "k", None, (None, None))
    parts = JoinedParts(left, right, join, workspace(tmp_path, part_bytes=2**19))
    tables = rows_of(parts)
    assert sum(table.num_rows for table in tables) == 200_000
    assert len(tables) > 2


@pytest.mark.parametrize("seed", SEEDS)
def test_aggregated_parts_are_the_aggregates_in_memory(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    rows = rng.choice([1, 30, 200])
    values = pa.array([rng.choice([None, 0.1, 0.7, 1e9, -3.3]) for _ in range(rows)], pa.float64())
    plan = random_plan(rng, a=random_key(rng, rows), b=random_key(rng, rows), x=values)
    keys = rng.choice([["a"], ["a", "b"], ["n"]])
    aggregates = rng.choice(
        [
            [Count(), Sum("x"), Mean("x"), Min("x"), Max("n")],
            [AsList("x"), CountDistinct("b"), Quantile("n")],
        ]
    )
    columns = [*dict.fromkeys([*keys, "x", "n", "b"])]
    parts = GroupedParts(
        plan,
        keys,
        lambda blocks: aggregate_groups(blocks, keys, aggregates),
        workspace(tmp_path),
        columns,
    )
    assert_equal_rows(rows_of(parts), aggregated_table(plan, keys, aggregates), seed)


@pytest.mark.parametrize("seed", SEEDS)
def test_mapped_parts_are_the_groups_mapped_in_memory(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    rows = rng.choice([1, 30, 200])
    plan = random_plan(rng, a=random_key(rng, rows), b=random_key(rng, rows))
    keys = rng.choice([["a"], ["b", "a"]])

    def summarize(group: pa.Table) -> pa.Table:
        return group.append_column("size", pa.array([group.num_rows] * group.num_rows)).slice(0, 2)

    def apply(blocks: Any) -> pa.Table:
        return map_groups(concat_blocks([*blocks]), keys, summarize)

    parts = GroupedParts(plan, keys, apply, workspace(tmp_path))
    assert_equal_rows(rows_of(parts), mapped_groups(plan, keys, summarize), seed)


def test_a_large_group_is_in_one_part(tmp_path: Path) -> None:
    table = pa.table({"k": [1, 2, 2, 2, 2, 2, 2, 3], "x": range(8)})
    plan = RowPlan.of_source(UnitSource(table, (3, 5)))
    parts = GroupedParts(plan, ["k"], lambda blocks: concat_blocks([*blocks]), workspace(tmp_path))
    groups = [set(part["k"].to_pylist()) for part in rows_of(parts)]
    assert sum(2 in group for group in groups) == 1


@pytest.mark.parametrize("part_bytes", [64, 256, 2**20])
def test_shuffled_parts_are_the_rows_shuffled_in_memory(part_bytes: int, tmp_path: Path) -> None:
    plan = random_plan(random.Random(0), a=random_key(random.Random(1), 300))
    parts = ShuffledParts(plan, shuffle_key(5), workspace(tmp_path, part_bytes=part_bytes))
    assert_equal_rows(rows_of(parts), shuffled_table(plan, 5), 0)


@pytest.mark.parametrize("kind", KEYS, ids=str)
def test_distinct_values_are_in_order_of_their_first_occurrence(
    kind: pa.DataType, tmp_path: Path
) -> None:
    rng = random.Random(3)
    plan = random_plan(rng, a=random_key(rng, 200, kind))
    found = distinct_values(plan, "a", workspace(tmp_path), max_count=100).to_pylist()
    values = [value for block in plan.blocks(["a"]) for value in block["a"].to_pylist()]
    # NaN differs from itself, and 0.0 equals -0.0.
    texts = ["0.0" if value == 0 else repr(value) for value in values]
    expected = list(dict.fromkeys(texts))
    assert ["0.0" if value == 0 else repr(value) for value in found] == expected


def test_more_distinct_values_than_fit_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="9 distinct values") as caught:
        distinct_values(number_plan(4, 5), "id", workspace(tmp_path), max_count=8)
    assert "groupby('id').count()" in caught.value.do


def test_groups_are_counted(tmp_path: Path) -> None:
    assert group_count(number_plan(4, 5), ["group"], workspace(tmp_path)) == 3


def test_complete_parts_are_not_computed_again(tmp_path: Path) -> None:
    plan = number_plan(50, 50)
    order = sort_order(plan.schema, "id", descending=True)
    all_parts = dict(SortedParts(plan, order, workspace(tmp_path)).read(()))
    assert len(all_parts) > 3
    rest = dict(SortedParts(plan, order, workspace(tmp_path)).read({0, 2}))
    assert rest.keys() == all_parts.keys() - {Piece(0), Piece(2)}
    assert all(table.equals(all_parts[piece]) for piece, table in rest.items())


PART_BYTES = 4096
LARGE_ROW_BYTES = 1000


def uneven_plan(**columns: Any) -> RowPlan:
    """1000 rows, of which 100 are larger than those of the units whose sizes are read."""
    texts = ["x" * (LARGE_ROW_BYTES if 450 <= n < 550 else 1) for n in range(1000)]
    table = pa.table({"n": range(1000), **columns, "text": texts})
    return RowPlan.of_source(UnitSource(table, (250, 100, 50, 200, 50, 100, 250)))


def uneven_parts(operation: str, space: Workspace) -> tuple[NumberedParts, pa.Table]:
    """An operation that places all large rows next to each other, and its result in memory."""
    plan = uneven_plan(k=[n % 50 if 450 <= n < 550 else 50 + n for n in range(1000)])
    if operation == "sort":
        order = [("k", "ascending")]
        return SortedParts(plan, order, space), sorted_table(plan, "k", descending=False)
    if operation == "join":
        join = JoinKeys.of_arguments("full_outer", "n", None, ("_l", "_r"))
        return JoinedParts(plan, plan, join, space), joined_table(plan, plan, join)

    def apply(blocks: Any) -> pa.Table:
        return map_groups(concat_blocks([*blocks]), ["k"], lambda group: group)

    expected = mapped_groups(plan, ["k"], lambda group: group)
    return GroupedParts(plan, ["k"], apply, space), expected


@pytest.mark.parametrize("operation", ["sort", "map_groups", "join"])
def test_parts_with_larger_rows_than_expected_are_divided(operation: str, tmp_path: Path) -> None:
    parts, expected = uneven_parts(operation, workspace(tmp_path, part_bytes=PART_BYTES))
    tables = rows_of(parts)
    assert_equal_rows(tables, expected, 0)
    assert max(table.nbytes for table in tables) <= 2 * PART_BYTES
    assert [*tmp_path.glob("*.pieces")] == []


def test_a_few_large_rows_next_to_each_other_are_in_several_pieces(tmp_path: Path) -> None:
    texts = ["x" * (2000 if 490 <= n < 500 else 1) for n in range(1000)]
    units = (250, 100, 50, 200, 50, 100, 250)
    plan = RowPlan.of_source(UnitSource(pa.table({"n": range(1000), "text": texts}), units))
    space = workspace(tmp_path, part_bytes=PART_BYTES)
    tables = rows_of(SortedParts(plan, [("n", "descending")], space))
    assert_equal_rows(tables, sorted_table(plan, "n", descending=True), 0)
    assert max(table.nbytes for table in tables) <= 2 * PART_BYTES


def test_dictionaries_do_not_divide_parts(tmp_path: Path) -> None:
    words = pa.array([f"word {n:0100d}" for n in range(1000)])
    rng = np.random.default_rng(0)
    table = pa.table(
        {
            "n": rng.permutation(1000),
            "word": pa.DictionaryArray.from_arrays(rng.integers(0, 1000, 1000), words),
        }
    )
    plan = RowPlan.of_source(UnitSource(table, (100,) * 10))
    space = workspace(tmp_path, part_bytes=PART_BYTES)
    found = [*SortedParts(plan, [("n", "ascending")], space).read(())]
    assert {piece.pieces for piece, _ in found} == {1}
    assert_equal_rows([rows for _, rows in found], sorted_table(plan, "n", descending=False), 0)


@pytest.mark.parametrize(("operation", "files"), [("sort", 1), ("map_groups", 1), ("join", 2)])
def test_each_side_of_a_divided_part_has_one_file(
    operation: str, files: int, tmp_path: Path
) -> None:
    parts, _ = uneven_parts(operation, workspace(tmp_path, part_bytes=PART_BYTES))
    counts = [(piece.pieces > 1, len([*tmp_path.glob("*.pieces")])) for piece, _ in parts.read(())]
    assert set(counts) == {(False, 0), (True, files)}


@pytest.mark.parametrize("operation", ["sort", "map_groups", "join"])
def test_rows_that_are_not_written_stay_below_the_buffer_while_parts_are_divided(
    operation: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pending: list[int] = []

    class Recorded(BucketFile):
        files: ClassVar[list[BucketFile]] = []

        def __init__(self, path: Path, buffer_bytes: int) -> None:
            super().__init__(path, buffer_bytes)
            self.files.append(self)

        def append(self, buckets: IntArray, rows: pa.Table) -> None:
            super().append(buckets, rows)
            pending.append(sum(file._pending_bytes for file in self.files))

    monkeypatch.setattr(external_parts, "BucketFile", Recorded)
    space = workspace(tmp_path, part_bytes=PART_BYTES)
    parts, _ = uneven_parts(operation, space)
    pieces = [piece for piece, _ in parts.read(())]
    assert max(piece.pieces for piece in pieces) > 3
    assert 0 < max(pending) < space.buffer_bytes


def test_a_file_for_pieces_that_cannot_be_opened_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def opened(path: Path, buffer_bytes: int) -> BucketFile:
        if path.suffix == ".pieces":
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return BucketFile(path, buffer_bytes)

    monkeypatch.setattr(external_parts, "BucketFile", opened)
    parts, _ = uneven_parts("sort", workspace(tmp_path, part_bytes=PART_BYTES))
    with pytest.raises(OSError, match="Too many open files"):
        [*parts.read(())]


def test_a_group_with_larger_rows_than_expected_is_not_divided(tmp_path: Path) -> None:
    plan = uneven_plan(k=[450 <= n < 550 for n in range(1000)])
    space = workspace(tmp_path, part_bytes=PART_BYTES)
    parts = GroupedParts(plan, ["k"], lambda blocks: concat_blocks([*blocks]), space)
    assert [set(table["k"].to_pylist()) for table in rows_of(parts)] == [{False}, {True}]


def test_a_shuffle_of_uneven_rows_is_that_of_memory(tmp_path: Path) -> None:
    plan = uneven_plan()
    parts = ShuffledParts(plan, shuffle_key(5), workspace(tmp_path, part_bytes=PART_BYTES))
    tables = rows_of(parts)
    assert_equal_rows(tables, shuffled_table(plan, 5), 0)
    assert max(table.nbytes for table in tables) <= 2 * PART_BYTES


def test_a_function_of_the_user_is_called_once_for_each_row(tmp_path: Path) -> None:
    calls: list[int] = []

    def number_calls(batch: dict[str, Any]) -> dict[str, Any]:
        calls.extend(batch["id"])
        return {**batch, "call": np.arange(len(calls) - len(batch["id"]), len(calls))}

    function = user_function("map_batches", number_calls, {})
    plan = number_plan(40, 60).with_transform(map_batches_transform(function, "default", None))
    plan.schema  # noqa: B018 - calls the function with the first rows
    calls.clear()
    order = sort_order(plan.schema, ["group", "call"], [False, True])
    tables = rows_of(SortedParts(plan, order, workspace(tmp_path)))
    assert len(calls) == 100
    assert [value for table in tables for value in table["call"].to_pylist()] == sorted(
        range(100), key=lambda n: (n % 3, -n)
    )


def test_a_type_of_key_without_an_order_is_refused(tmp_path: Path) -> None:
    table = pa.table({"k": pa.array([Decimal(1)], pa.decimal256(50, 2))})
    plan = RowPlan.of_source(UnitSource(table, (1,)))
    parts = SortedParts(plan, [("k", "ascending")], workspace(tmp_path))
    with pytest.raises(ConfigError, match=r"column 'k' of type decimal256"):
        rows_of(parts)
