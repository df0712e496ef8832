"""A loader whose slices are transformed by the feeders of a pool."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator

import pyarrow as pa
import pytest

from spotfit.data.dataset import Dataset
from spotfit.data.feeding.pool import FeederPool
from spotfit.data.feeding.slice_feeders import PoolSliceFeeders
from spotfit.data.loading.loader import RankReader, ReadPosition
from spotfit.data.loading.slice_tasks import SliceTask
from spotfit.data.loading.slices import SliceReader
from spotfit.data.order import OrderSettings
from spotfit.data.readers import from_items
from spotfit.host.system import SystemClock
from tests.unit.data.feeding.augmented_rows import NAME, dataset_of
from tests.unit.data.feeding.test_pool import RandomLink

SETTINGS = OrderSettings(seed=3, lanes=4, window_rows=8, shuffle="rows", slice_rows=4)


@pytest.fixture
def pool() -> Iterator[FeederPool]:
    pool = FeederPool(SliceReader({NAME: DATASET}).read, SystemClock())
    yield pool
    pool.close()


DATASET = dataset_of(200)


def reader_of(
    dataset: Dataset, pool: FeederPool | None, *, consumed: int = 0, rank: int = 0
) -> RankReader:
    feeders = PoolSliceFeeders(pool, NAME) if pool is not None else None
    return RankReader(
        dataset,
        SETTINGS,
        start=ReadPosition(0, consumed),
        world_size=2,
        rank=rank,
        feeders=feeders,
    )


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("consumed", [0, 70])
def test_steps_are_equal_with_and_without_feeders(
    pool: FeederPool, rank: int, consumed: int
) -> None:
    steps, expected = (
        list(reader_of(DATASET, one, consumed=consumed, rank=rank).steps(7)) for one in (pool, None)
    )
    assert steps == expected


def test_steps_are_equal_whatever_the_feeders_do(pool: FeederPool, rng: random.Random) -> None:
    reader, lock = SliceReader({NAME: DATASET}), threading.Lock()

    def read(task: SliceTask) -> pa.Table:
        with lock:
            return reader.read(task)

    def serve() -> None:
        for _ in range(10):
            pool.serve(RandomLink(rng, read))

    for _ in range(2):
        threading.Thread(target=serve, daemon=True).start()
    expected = list(reader_of(DATASET, None).steps(7, prefetch=2))
    assert list(reader_of(DATASET, pool).steps(7, prefetch=2)) == expected


def test_a_pass_that_is_left_requests_nothing_more(pool: FeederPool) -> None:
    steps = reader_of(DATASET, pool).steps(7, prefetch=3)
    next(steps)
    assert not pool.has_credit
    steps.close()  # type: ignore[attr-defined]
    assert pool.has_credit


def test_transforms_without_user_code_are_not_sent_to_feeders(pool: FeederPool) -> None:
    rows = from_items([{"id": number, "x": number} for number in range(50)]).drop_columns(["x"])
    steps = list(reader_of(rows, pool).steps(7))
    assert sum(step.num_rows for step in steps) == 25
    assert pool.own_count == 0
