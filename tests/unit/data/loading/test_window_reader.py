from __future__ import annotations

import concurrent.futures
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import pyarrow as pa
import pytest

from spotfit.core.errors import ConfigError
from spotfit.data.loading import window_reader
from spotfit.data.loading.lane_blocks import LaneBlock
from spotfit.data.loading.task_pool import TaskPool
from spotfit.data.loading.window_reader import WindowReader
from spotfit.data.order import EpochOrder, OrderSettings
from spotfit.data.plans.unit_manifest import UnitManifest
from spotfit.data.source import Decode, SourceUnits
from spotfit.data.sources.tables import TableSource
from tests.unit.data.counting_source import CountingSource, ids_of
from tests.unit.data.order_rows import rows_at

ROW_BYTES = 16  # of a CountingSource, in memory as encoded


@pytest.fixture
def pool() -> Iterator[TaskPool]:
    pool = TaskPool(2, "test-windows")
    yield pool
    pool.close()


def reader_of(
    manifest: UnitManifest,
    pool: TaskPool,
    *,
    fetch_pool: TaskPool | None = None,
    settings: OrderSettings = OrderSettings(),  # noqa: B008 - immutable
    columns: Sequence[str] | None = None,
    limit_rows: int = 1_000_000,
) -> WindowReader:
    order = EpochOrder(manifest.unit_rows, settings, 0)
    return WindowReader(
        manifest,
        order,
        columns=columns,
        limit_bytes=limit_rows * ROW_BYTES,
        pool=pool,
        fetch_pool=fetch_pool or pool,
    )


def test_a_window_has_the_permuted_rows_of_its_parts(pool: TaskPool) -> None:
    manifest = CountingSource([10] * 8).dataset.manifest
    settings = OrderSettings(3, 1, 40, "rows")
    reader = reader_of(manifest, pool, settings=settings)
    order = EpochOrder(manifest.unit_rows, settings, 0)
    window = reader.locate(0, 50)
    reader.request(window, 0)
    rows = rows_at(order, range(window.first, window.end))

    assert window.rows == 40
    assert ids_of(window.table()) == [unit * 10 + row for unit, row in rows]


def test_space_is_estimated_until_windows_are_read(pool: TaskPool) -> None:
    reader = reader_of(CountingSource([10] * 8).dataset.manifest, pool, limit_rows=45)
    windows = [reader.locate(0, 10 * number) for number in range(8)]

    # Before anything is read, rows are assumed to have twice their size in the manifest.
    assert reader.has_space(windows[:2])
    assert not reader.has_space(windows[:3])
    reader.request(windows[0], 0)
    windows[0].table()
    assert reader.has_space(windows[1:4])
    assert not reader.has_space(windows[1:5])


def test_a_released_window_leaves_its_space_to_others(pool: TaskPool) -> None:
    reader = reader_of(CountingSource([10] * 8).dataset.manifest, pool, limit_rows=30)
    windows = [reader.locate(0, 10 * number) for number in range(8)]
    for window in windows[:3]:
        reader.request(window, 0)
        window.table()

    assert not reader.has_space(windows[3:4])
    reader.release(windows[0])
    assert reader.has_space(windows[3:4])
    assert not reader.has_space(windows[3:5])


def test_windows_beyond_the_limit_are_read_one_at_a_time(
    pool: TaskPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_read = threading.Event()

    def as_completed(futures: Collection[Future[pa.Table]]) -> list[Future[pa.Table]]:
        may_read.set()
        completed = list(concurrent.futures.as_completed(futures))
        may_read.clear()
        return completed

    def read_when_waited_for(_unit: int) -> None:
        may_read.wait()

    monkeypatch.setattr(window_reader, "as_completed", as_completed)
    source = CountingSource([10] * 8, read_when_waited_for)
    reader = reader_of(source.dataset.manifest, pool, limit_rows=20)
    windows = [reader.locate(0, 10 * number) for number in range(8)]
    unread: list[int] = []

    def requested() -> Iterator[LaneBlock]:
        for window in windows:
            futures = [one.future for one in windows if one.future is not None]
            unread.append(sum(not future.done() for future in futures))
            yield window

    reader.request_all(requested(), 0)
    may_read.set()
    assert unread == [0, *[1] * 7]
    assert [ids_of(window.table())[0] for window in windows] == list(range(0, 80, 10))


def test_an_error_names_the_unit_and_its_file(pool: TaskPool) -> None:
    def fail(unit: int) -> None:
        raise OSError(f"disk of unit {unit}")

    reader = reader_of(CountingSource([10] * 8, fail).dataset.manifest, pool)
    window = reader.locate(0, 30)
    reader.request(window, 0)

    with pytest.raises(OSError, match="disk of unit 3") as caught:
        window.table()
    assert caught.value.__notes__ == ["while unit 3 (memory://rows/3.table) was read"]


class ShorterSource(CountingSource):
    def read_unit(
        self, units: SourceUnits, unit: int, columns: Sequence[str] | None = None
    ) -> pa.Table:
        return super().read_unit(units, unit, columns).slice(0, 7)


def test_missing_rows_are_an_error(pool: TaskPool) -> None:
    reader = reader_of(ShorterSource([10] * 8).dataset.manifest, pool)
    window = reader.locate(0, 30)
    reader.request(window, 0)

    with pytest.raises(ConfigError, match=r"3\.table\) has fewer rows .* 7 instead of 10"):
        window.table()


@dataclass(eq=False)
class FetchedSource(CountingSource):
    """Its units are fetched in threads, whose names are recorded."""

    before_fetch: Callable[[], object] = lambda: None
    fetch_threads: set[str] = field(default_factory=set)
    decode_threads: set[str] = field(default_factory=set)

    def is_fetched(self, units: SourceUnits, unit: int) -> bool:
        return units.is_remote(unit)

    def fetch_unit(
        self, units: SourceUnits, unit: int, columns: Sequence[str] | None = None
    ) -> Decode:
        self.before_fetch()
        self.fetch_threads.add(thread_pool_name())

        def decode() -> pa.Table:
            self.decode_threads.add(thread_pool_name())
            return self.read_unit(units, unit, columns)

        return decode


def thread_pool_name() -> str:
    return threading.current_thread().name.rpartition("_")[0]


@pytest.fixture
def fetch_pool() -> Iterator[TaskPool]:
    pool = TaskPool(6, "test-fetches")
    yield pool
    pool.close()


def test_more_units_are_fetched_at_a_time_than_decoded(
    pool: TaskPool, fetch_pool: TaskPool
) -> None:
    all_fetch = threading.Barrier(6, timeout=30.0)
    source = FetchedSource([10] * 6, before_fetch=all_fetch.wait)
    settings = OrderSettings(3, 1, 60, "rows")
    manifest = source.dataset.manifest
    reader = reader_of(manifest, pool, fetch_pool=fetch_pool, settings=settings)
    window = reader.locate(0, 0)
    reader.request(window, 0)

    assert sorted(ids_of(window.table())) == list(range(60))
    assert source.fetch_threads == {"test-fetches"}
    assert source.decode_threads == {"test-windows"}


def test_an_error_of_a_fetch_names_the_unit(pool: TaskPool, fetch_pool: TaskPool) -> None:
    def fail() -> None:
        raise OSError("connection lost")

    source = FetchedSource([10] * 8, before_fetch=fail)
    reader = reader_of(source.dataset.manifest, pool, fetch_pool=fetch_pool)
    window = reader.locate(0, 30)
    reader.request(window, 0)

    with pytest.raises(OSError, match="connection lost") as caught:
        window.table()
    assert caught.value.__notes__ == ["while unit 3 (memory://rows/3.table) was read"]


def test_parts_of_different_sources_have_one_schema(pool: TaskPool) -> None:
    tables = [
        pa.table({"a": pa.array([1, 2], pa.int32()), "b": ["x", "y"]}),
        pa.table({"a": pa.array([3, 4], pa.int64())}),
    ]
    manifest = UnitManifest.concat([UnitManifest.of_source(TableSource(table)) for table in tables])
    reader = reader_of(manifest, pool, columns=["b", "a"])
    windows = [reader.locate(0, row) for row in (0, 2)]
    for window in windows:
        reader.request(window, 0)

    assert windows[0].table().schema == windows[1].table().schema
    assert windows[1].table().to_pydict() == {"b": [None, None], "a": [3, 4]}
