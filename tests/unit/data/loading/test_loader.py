"""The rows of each rank and step: every row once, for any numbers of ranks and any restarts."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spotfit.core.errors import ConfigError, InfrastructureError
from spotfit.data.dataset import Dataset
from spotfit.data.file_readers import read_parquet
from spotfit.data.loading import loader
from spotfit.data.loading.loader import RankReader, ReadPosition
from spotfit.data.order import EpochOrder, OrderSettings, Shuffle
from spotfit.data.plans.transforms import RowCountChangedError
from spotfit.data.sources.tables import TableSource
from tests.unit.data.counting_source import CountingSource, ids_of, int64_array
from tests.unit.data.order_rows import rows_at

Steps: TypeAlias = list[list[int]]
SHUFFLED = OrderSettings(seed=5, lanes=4, window_rows=50, shuffle="rows", slice_rows=7)
SHUFFLES: tuple[Shuffle, ...] = ("none", "units", "rows")


@dataclass(frozen=True)
class Change:
    """A transform by a function."""

    function: Callable[[pa.Table], pa.Table]
    runs_user_code: bool = True
    name: str = "change"
    identity: str = "change"

    def bind(self) -> Callable[[pa.Table], pa.Table]:
        return self.function


def reader_of(
    dataset: Dataset, order: OrderSettings = SHUFFLED, consumed: int = 0, **others: Any
) -> RankReader:
    start = ReadPosition(others.pop("epoch", 0), consumed)
    return RankReader(dataset, order, start=start, **others)


def expected_ids(dataset: Dataset, order: OrderSettings, epoch: int = 0) -> list[int]:
    unit_rows = dataset.manifest.unit_rows
    epoch_order = EpochOrder(unit_rows, order, epoch)
    first_ids = (np.cumsum(unit_rows) - unit_rows).tolist()
    places = range(epoch_order.row_count)
    return [first_ids[unit] + row for unit, row in rows_at(epoch_order, places)]


def global_step(blocks: Sequence[pa.Table]) -> list[int]:
    return [row for block in blocks for row in ids_of(block)]


def all_ranks(dataset: Dataset, world_size: int, **others: Any) -> list[RankReader]:
    return [
        reader_of(dataset, world_size=world_size, rank=rank, **others) for rank in range(world_size)
    ]


# ── rows and positions ────────────────────────────────────────────────────────────────────────────

unit_rows_of_datasets = st.lists(st.integers(0, 30), min_size=1, max_size=12)
orders = st.builds(
    OrderSettings,
    seed=st.integers(0, 2**64 - 1),
    lanes=st.integers(1, 8),
    window_rows=st.integers(0, 50),
    shuffle=st.sampled_from(SHUFFLES),
    slice_rows=st.integers(1, 20),
)


@settings(max_examples=60)
@given(
    unit_rows_of_datasets,
    orders,
    st.lists(st.tuples(st.integers(1, 5), st.integers(1, 6), st.booleans()), max_size=4),
    st.integers(5, 40),
    st.booleans(),
)
def test_global_batches_are_equal_for_all_numbers_of_ranks_and_restarts(
    unit_rows: list[int],
    order: OrderSettings,
    rounds: list[tuple[int, int, bool]],
    step_rows: int,
    is_transformed: bool,
) -> None:
    """With one rank, batches follow the order; with others, they have the same rows in order."""
    dataset = CountingSource(unit_rows).dataset
    if is_transformed:
        dataset = dataset.with_transform(Change(lambda block: block))
    expected = expected_ids(dataset, order)
    position, trained = 0, list[int]()
    for world_size, step_count, is_lost in [*rounds, (2, len(expected) + 1, False)]:
        begin, ended = position, len(trained)
        readers = all_ranks(dataset, world_size, order=order, consumed=position)
        steps = [reader.steps(step_rows, is_global=True) for reader in readers]
        for _, *blocks in zip(range(step_count), *steps, strict=False):
            places = range(position, min(position + step_rows, len(expected)))
            batch = global_step(blocks)
            arranged = [expected[p] for p in sorted(places, key=lambda p: p % order.lanes)]
            left_out = len(places) % world_size if len(places) < step_rows else 0
            assert batch == arranged[: len(places) - left_out]
            position = places.stop
            assert {reader.position.consumed for reader in readers} == {position}
            trained += batch
        for step in steps:
            step.close()  # type: ignore[attr-defined]
        if is_lost:
            position, trained = begin, trained[:ended]

    assert len(set(trained)) == len(trained)
    assert len(expected) - len(trained) < max([2, *(world_size for world_size, _, _ in rounds)])


@pytest.mark.parametrize("world_size", [1, 2, 3, 7])
def test_equal_shares_leave_out_fewer_rows_than_ranks(world_size: int) -> None:
    dataset = CountingSource([33] * 9).dataset
    readers = all_ranks(dataset, world_size)
    rows = [[ids_of(block) for block in reader.steps(10)] for reader in readers]
    trained = [row for steps in rows for step in steps for row in step]

    assert len({tuple(map(len, steps)) for steps in rows}) == 1
    assert len(set(trained)) == len(trained) == 297 // world_size * world_size
    assert all(reader.position == ReadPosition(0, 297) for reader in readers)


def test_the_shares_of_a_last_step_are_equal() -> None:
    readers = all_ranks(CountingSource([50]).dataset, 3)
    lengths = [[block.num_rows for block in reader.steps(10)] for reader in readers]

    assert lengths == [[10, 6]] * 3


def test_fewer_rows_than_ranks_at_the_end_are_no_step() -> None:
    readers = all_ranks(CountingSource([32]).dataset, 3)

    assert [len(list(reader.steps(10))) for reader in readers] == [1, 1, 1]
    assert {reader.position.consumed for reader in readers} == {32}


def test_unequal_shares_leave_out_no_row() -> None:
    readers = all_ranks(CountingSource([31, 20]).dataset, 3, equal=False)
    rows = [global_step(list(reader.steps(8))) for reader in readers]

    assert sorted(row for part in rows for row in part) == list(range(51))
    assert [len(part) for part in rows] == [17, 17, 17]


@pytest.mark.parametrize("by_row", [True, False])
def test_a_rank_without_a_row_of_the_last_step_has_no_such_step(*, by_row: bool) -> None:
    readers = all_ranks(CountingSource([26]).dataset, 3, equal=False)
    lengths = [[block.num_rows for block in reader.steps(4, by_row=by_row)] for reader in readers]

    assert lengths == [[4, 4], [4, 4, 1], [4, 4, 1]]
    assert {reader.position.consumed for reader in readers} == {26}


@pytest.mark.parametrize("equal", [True, False])
@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_steps_by_row_are_in_the_order_of_steps_of_one_row(world_size: int, *, equal: bool) -> None:
    dataset = CountingSource([33] * 3).dataset
    for rank in range(world_size):
        share: dict[str, Any] = {
            "world_size": world_size,
            "rank": rank,
            "equal": equal,
            "consumed": 4,
        }
        by_row = reader_of(dataset, **share).steps(8, by_row=True)
        assert global_step(list(by_row)) == global_step(list(reader_of(dataset, **share).steps(1)))


def test_a_dataset_without_rows_has_no_steps() -> None:
    reader = reader_of(CountingSource([0, 0]).dataset, OrderSettings())

    assert list(reader.steps(10)) == []
    assert list(reader.steps(None)) == []


def test_steps_of_another_size_continue_at_the_position() -> None:
    dataset = CountingSource([20] * 5).dataset
    reader = reader_of(dataset)
    first = reader.steps(10)
    rows = ids_of(next(first)) + ids_of(next(first))
    first.close()  # type: ignore[attr-defined]
    rows += [row for block in reader.steps(16) for row in ids_of(block)]

    assert reader.position == ReadPosition(0, 100)
    assert sorted(rows) == list(range(100))


def test_epochs_have_different_orders() -> None:
    dataset = CountingSource([20] * 5).dataset
    epochs = [
        [row for block in reader_of(dataset, epoch=epoch).steps(10) for row in ids_of(block)]
        for epoch in range(2)
    ]

    assert epochs[0] != epochs[1]
    assert sorted(epochs[0]) == sorted(epochs[1])


def test_without_a_size_each_window_of_a_single_lane_is_a_step() -> None:
    dataset = CountingSource([20, 30, 5]).dataset
    blocks = list(reader_of(dataset, OrderSettings(), consumed=3).steps(None))

    assert [ids_of(block) for block in blocks] == [
        list(range(3, 20)),
        list(range(20, 50)),
        list(range(50, 55)),
    ]


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_without_a_size_ranks_have_equally_many_rows_of_each_step(world_size: int) -> None:
    readers = all_ranks(CountingSource([33] * 20).dataset, world_size)
    steps = [[ids_of(block) for block in reader.steps(None)] for reader in readers]
    trained = [row for rank in steps for step in rank for row in step]

    assert len({tuple(map(len, rank)) for rank in steps}) == 1
    assert len(set(trained)) == len(trained) == 660 // world_size * world_size
    assert len(steps[0]) > 2


@pytest.mark.parametrize(("rows", "is_global"), [(0, False), (-1, False), (3, True)])
def test_steps_with_fewer_rows_than_ranks_are_refused(rows: int, is_global: bool) -> None:
    reader = reader_of(CountingSource([50]).dataset, world_size=4)

    with pytest.raises(ConfigError, match=r"at least one row|cannot be shared by 4 ranks"):
        reader.steps(rows, is_global=is_global)


# ── reading ───────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("world_size", [1, 2, 4, 8])
def test_ranks_whose_number_divides_the_lanes_read_each_unit_once(world_size: int) -> None:
    source = CountingSource([10] * 64)
    order = SHUFFLED._replace(lanes=8)
    for reader in all_ranks(source.dataset, world_size, order=order):
        for _ in reader.steps(40, is_global=True):
            pass

    assert source.reads == dict.fromkeys(range(64), 1)


@pytest.mark.parametrize("rank", range(2))
@pytest.mark.parametrize("step_rows", [5, 32])
def test_a_rank_with_transforms_reads_each_unit_at_most_once(
    rank: int, step_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a slice begins at the end of a window whose rows are those of another rank."""
    source = CountingSource([10] * 64)
    dataset = source.dataset.with_transform(Change(lambda block: block))
    order = OrderSettings(lanes=8, slice_rows=19)
    # Without space, only the next step is requested.
    monkeypatch.setattr(loader, "_PREFETCH_BYTES", 1)
    reader = reader_of(dataset, order, world_size=2, rank=rank)
    for _ in reader.steps(step_rows, is_global=True):
        pass

    assert max(source.reads.values()) == 1


def test_a_resumed_rank_reads_no_windows_that_are_finished() -> None:
    source = CountingSource([10] * 40)
    order = SHUFFLED._replace(lanes=1, window_rows=20)
    for _ in reader_of(source.dataset, order, consumed=200).steps(20):
        pass

    assert sum(source.reads.values()) <= 22


@pytest.mark.parametrize("slice_rows", [1, 7, 500])
def test_windows_ahead_stay_within_the_limit(
    slice_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit_units, step_rows = 8, 10
    source = CountingSource([10] * 200)
    dataset = source.dataset.with_transform(Change(lambda block: block))
    order = OrderSettings(1, 2, 20, "rows", slice_rows if slice_rows < 500 else 20)
    monkeypatch.setattr(loader, "_PREFETCH_BYTES", limit_units * 160)
    for number, _ in enumerate(reader_of(dataset, order).steps(step_rows)):
        consumed_units = number * step_rows // 10
        # A window that is not finished, of 2 units, is in memory for each lane.
        assert sum(source.reads.values()) <= consumed_units + limit_units + 4


def test_more_than_the_limit_is_read_if_the_next_step_needs_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    dataset = CountingSource([100] * 8).dataset
    monkeypatch.setattr(loader, "_PREFETCH_BYTES", 1)

    assert sum(block.num_rows for block in reader_of(dataset).steps(64)) == 800


def test_only_the_wanted_columns_are_read() -> None:
    source = CountingSource([20] * 4)
    blocks = list(reader_of(source.dataset.select_columns(["double"])).steps(16))

    assert {tuple(columns or ()) for columns in source.columns} == {("double",)}
    assert blocks[0].column_names == ["double"]


def test_sources_with_different_types_have_one_schema_in_all_steps() -> None:
    tables = [
        pa.table({"id": pa.array(range(50), pa.int32())}),
        pa.table({"id": pa.array(range(50, 100), pa.int64())}),
    ]
    first, second = (Dataset.of_source(TableSource(table)) for table in tables)
    blocks = list(reader_of(first.union(second), OrderSettings()).steps(20))

    assert {str(block.schema.field("id").type) for block in blocks} == {"int64"}
    assert [row for block in blocks for row in ids_of(block)] == list(range(100))


def test_the_first_step_imports_no_pandas() -> None:
    program = """
import sys
from spotfit.data.loading.loader import RankReader
from spotfit.data.order import OrderSettings
from tests.unit.data.counting_source import CountingSource

dataset = CountingSource([100] * 8).dataset
reader = RankReader(dataset, OrderSettings(1, 4, 150, "rows"))
print(next(reader.steps(16)).num_rows, "pandas" in sys.modules)
"""
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )

    assert result.stdout.split() == ["16", "False"]


def test_ranks_read_parquet_files_in_the_same_global_batches(tmp_path: Path) -> None:
    for number in range(4):
        table = pa.table({"id": range(number * 500, number * 500 + 500)})
        pq.write_table(table, tmp_path / f"{number}.parquet", row_group_size=50)
    dataset = read_parquet(str(tmp_path))
    order = OrderSettings(11, 8, 120, "rows")
    expected = [ids_of(block) for block in reader_of(dataset, order).steps(160, is_global=True)]
    position = 0
    for world_size in range(1, 9):
        steps = [
            reader.steps(160, is_global=True)
            for reader in all_ranks(dataset, world_size, order=order, consumed=position)
        ]
        assert global_step([next(step) for step in steps]) == expected[position // 160]
        position += 160

    assert sorted(row for step in expected for row in step) == list(range(2_000))


# ── transforms ────────────────────────────────────────────────────────────────────────────────────


def with_noise(block: pa.Table) -> pa.Table:
    """Add random numbers of Python and NumPy to each row."""
    noise = [random.random() + float(np.random.rand()) for _ in range(block.num_rows)]
    return block.append_column("noise", pa.array(noise))


def noise_of_rows(readers: list[RankReader], step_rows: int) -> dict[int, float]:
    result: dict[int, float] = {}
    for reader in readers:
        for block in reader.steps(step_rows, is_global=True):
            result |= zip(ids_of(block), block["noise"].to_pylist(), strict=True)
    return result


@pytest.mark.parametrize(
    ("world_size", "step_rows", "consumed"),
    [(1, 32, 0), (2, 32, 0), (3, 32, 0), (5, 20, 0), (1, 300, 0), (1, 32, 96), (3, 20, 100)],
)
def test_augmentation_does_not_depend_on_ranks_steps_or_restarts(
    world_size: int, step_rows: int, consumed: int
) -> None:
    dataset = CountingSource([30] * 10).dataset.with_transform(Change(with_noise))
    expected = noise_of_rows([reader_of(dataset)], 8)
    noise = noise_of_rows(
        all_ranks(dataset, world_size, consumed=consumed),
        step_rows,
    )

    assert len(noise) == 300 - consumed
    assert noise == {row: expected[row] for row in noise}
    assert len(set(expected.values())) == 300


def test_epochs_are_augmented_differently() -> None:
    dataset = CountingSource([30] * 10).dataset.with_transform(Change(with_noise))
    first, second = (noise_of_rows([reader_of(dataset, epoch=epoch)], 8) for epoch in range(2))

    assert not set(first.values()) & set(second.values())


def test_transforms_leave_the_random_numbers_of_the_loop_alone() -> None:
    dataset = CountingSource([30] * 10).dataset.with_transform(Change(with_noise))
    random.seed(3)
    expected = [random.random() for _ in range(3)]
    random.seed(3)
    steps = reader_of(dataset).steps(16)
    numbers = [random.random() for _ in range(3) if next(steps)]

    assert numbers == expected


def test_user_code_runs_in_the_thread_that_takes_the_step() -> None:
    threads = set()

    def record(block: pa.Table) -> pa.Table:
        threads.add(threading.current_thread())
        return block

    dataset = CountingSource([30] * 10).dataset.with_transform(Change(record))
    list(reader_of(dataset).steps(16))

    assert threads == {threading.current_thread()}


def test_other_transforms_run_in_threads_before_the_first_with_user_code() -> None:
    calls = list[tuple[str, bool]]()

    def recording(name: str) -> Callable[[pa.Table], pa.Table]:
        def record(block: pa.Table) -> pa.Table:
            calls.append((name, threading.current_thread() is threading.main_thread()))
            return block

        return record

    dataset = CountingSource([30] * 10).dataset
    for name, runs_user_code in (("decode", False), ("augment", True), ("scale", False)):
        dataset = dataset.with_transform(Change(recording(name), runs_user_code))
    list(reader_of(dataset).steps(16))

    assert set(calls) == {("decode", False), ("augment", True), ("scale", True)}


@pytest.mark.parametrize("runs_user_code", [True, False])
def test_each_slice_is_transformed_once(runs_user_code: bool) -> None:
    slices = Counter[tuple[int, ...]]()

    def count(block: pa.Table) -> pa.Table:
        slices[tuple(ids_of(block))] += 1
        return block

    dataset = CountingSource([30] * 10).dataset.with_transform(Change(count, runs_user_code))
    list(reader_of(dataset).steps(5, prefetch=3))

    assert set(slices.values()) == {1}
    # Each of the 4 lanes has 75 rows: 10 slices of 7 rows and one of 5.
    assert Counter(map(len, slices)) == {7: 40, 5: 4}


def test_transforms_run_ahead_as_far_as_stated() -> None:
    started, count = threading.Semaphore(0), list[int]()

    def record(block: pa.Table) -> pa.Table:
        count.append(block.num_rows)
        started.release()
        return block

    change = Change(record, runs_user_code=False)
    dataset = CountingSource([10] * 50).dataset.with_transform(change)
    steps = reader_of(dataset, OrderSettings(slice_rows=10)).steps(10, prefetch=2)
    next(steps)

    assert all(started.acquire(timeout=60) for _ in range(3))
    assert len(count) == 3
    next(steps)
    assert started.acquire(timeout=60)
    assert len(count) == 4


@pytest.mark.parametrize("runs_user_code", [True, False])
def test_slices_are_freed_when_their_rows_are_taken(runs_user_code: bool) -> None:
    references = list[weakref.ref[Any]]()

    def replace(block: pa.Table) -> pa.Table:
        ids = np.array(ids_of(block), dtype=np.int64)
        references.append(weakref.ref(ids))
        return pa.Table.from_arrays([int64_array(ids)], ["id"])

    dataset = CountingSource([30] * 100).dataset.with_transform(Change(replace, runs_user_code))
    for _ in reader_of(dataset).steps(16, prefetch=1):
        alive = sum(reference() is not None for reference in references)
        # In each of 4 lanes, those of this step and of the next one; and what threads still hold.
        assert alive < 40

    assert len(references) > 400


def test_transforms_are_bound_once_for_all_epochs() -> None:
    bound = []

    class Stateful(Change):
        def bind(self) -> Callable[[pa.Table], pa.Table]:
            bound.append(self)
            return self.function

    dataset = CountingSource([10] * 5).dataset.with_transform(Stateful(lambda block: block))
    for epoch in range(3):
        list(reader_of(dataset, epoch=epoch).steps(10))

    assert len(bound) == 1


# ── errors and the end ────────────────────────────────────────────────────────────────────────────


def test_an_error_of_a_source_is_raised_where_the_rows_are_needed() -> None:
    def fail(unit: int) -> None:
        if unit == 3:
            raise OSError("no such object")

    steps = reader_of(CountingSource([10] * 8, fail).dataset, OrderSettings()).steps(10)
    rows = [ids_of(next(steps))[0] for _ in range(3)]

    assert rows == [0, 10, 20]
    with pytest.raises(OSError, match="no such object") as caught:
        next(steps)
    assert caught.value.__notes__ == ["while unit 3 (memory://rows/3.table) was read"]


@pytest.mark.parametrize("runs_user_code", [True, False])
def test_an_error_of_a_transform_is_raised_with_its_type(runs_user_code: bool) -> None:
    def fail(block: pa.Table) -> pa.Table:
        raise LookupError(f"{block.num_rows} labels")

    dataset = CountingSource([30] * 10).dataset.with_transform(Change(fail, runs_user_code))

    with pytest.raises(LookupError, match="7 labels"):
        next(reader_of(dataset).steps(16))


def test_a_transform_that_drops_rows_is_refused() -> None:
    dataset = CountingSource([30] * 10).dataset.with_transform(
        Change(lambda block: block.slice(1), name="map_batches(drop)")
    )

    with pytest.raises(RowCountChangedError, match=r"map_batches\(drop\) returned 6 rows for 7"):
        next(reader_of(dataset).steps(16))


def loader_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if "spotfit-data" in thread.name]


@pytest.mark.parametrize("end", ["close", "exhaust", "error"])
def test_the_threads_end_with_the_steps(end: str) -> None:
    def fail(unit: int) -> None:
        if end == "error" and unit == 30:
            raise OSError("no such object")

    steps: Iterator[pa.Table] = reader_of(CountingSource([10] * 40, fail).dataset).steps(10)
    next(steps)
    assert loader_threads()
    if end == "close":
        steps.close()  # type: ignore[attr-defined]
    elif end == "exhaust":
        list(steps)
    else:
        with pytest.raises(OSError, match="no such object"):
            list(steps)
    for thread in loader_threads():
        thread.join(60)

    assert not loader_threads()


def test_an_iterator_refuses_to_continue_in_a_fork() -> None:
    steps = reader_of(CountingSource([10] * 40).dataset).steps(10)
    next(steps)
    child = os.fork()
    if not child:
        try:
            next(steps)
        except InfrastructureError as error:
            os._exit(7 if "before the process was forked" in str(error) else 1)
        os._exit(0)
    _, status = os.waitpid(child, 0)

    assert os.waitstatus_to_exitcode(status) == 7
    assert next(steps).num_rows == 10


def test_a_reader_of_the_parent_process_can_be_used_in_a_fork() -> None:
    reader = reader_of(CountingSource([10] * 40).dataset)
    child = os.fork()
    if not child:
        os._exit(7 if sum(block.num_rows for block in reader.steps(10)) == 400 else 1)
    _, status = os.waitpid(child, 0)

    assert os.waitstatus_to_exitcode(status) == 7
