"""`Dataset.cache`: rows are computed once, and equal to those without a cache."""

from __future__ import annotations

import hashlib
import os
import pickle
import random
import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from spotfit.core.errors import ConfigError
from spotfit.data import Dataset, from_items, from_torch, read_parquet
from spotfit.data.caching import cache_directories
from spotfit.data.expressions import col
from spotfit.data.iteration.shard import ShardGroup, ShardPosition
from spotfit.data.loading.loader import RankReader, ReadPosition
from spotfit.data.loading.slice_tasks import SliceTask
from spotfit.data.loading.slices import SliceReader
from spotfit.data.order import OrderSettings
from spotfit.data.preprocessors import StandardScaler
from spotfit.data.source import Decode, SourceUnits
from tests.unit.data.counting_source import CountingSource


class Calls:
    """A function of the user that counts the rows that it gets."""

    def __init__(self, factor: int = 2) -> None:
        self.factor = factor
        self.rows = 0

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        self.rows += len(batch["id"])
        return {"id": batch["id"], "value": batch["id"] * self.factor}


def double(batch: dict[str, Any]) -> dict[str, Any]:
    return {"id": batch["id"], "value": batch["id"] * 2}


def triple(batch: dict[str, Any]) -> dict[str, Any]:
    return {"id": batch["id"], "value": batch["id"] * 3}


def add_noise(batch: dict[str, Any]) -> dict[str, Any]:
    return {**batch, "noise": np.random.standard_normal(len(batch["id"]))}


@pytest.fixture(autouse=True)
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The scratch directory of a run."""
    monkeypatch.setattr(cache_directories._RunDirectory, "path", tmp_path / "scratch")
    return tmp_path / "scratch"


def values(dataset: Dataset) -> list[Any]:
    return list(dataset.iter_rows())


def in_other_process(dataset: Dataset) -> Dataset:
    """The dataset as another process loads it."""
    loaded = pickle.loads(cloudpickle.dumps(dataset))
    assert isinstance(loaded, Dataset)
    return loaded


# ── what is computed ──────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("limits", [{"memory_bytes": 2**20}, {"disk_bytes": 2**20}], ids=str)
def test_what_is_before_the_cache_is_computed_once(limits: dict[str, Any]) -> None:
    source, before, after = CountingSource([5, 6, 7]), Calls(), Calls(3)
    rows = source.dataset.map_batches(before).cache(**limits).map_batches(after)
    expected = [{"id": number, "value": 3 * number} for number in range(18)]
    assert [values(rows) for _ in range(3)] == [expected] * 3
    reads_of_listing, rows_of_listing = 2, 3 * 5  # the schema, and the check of the function
    assert sum(source.reads.values()) == 3 + reads_of_listing
    assert before.rows == 18 + rows_of_listing
    assert after.rows == 3 * 18


def test_another_process_reads_the_files() -> None:
    source = CountingSource([5, 6, 7])
    rows = source.dataset.cache(disk_bytes=2**20)
    loaded = in_other_process(rows)
    assert values(rows) == values(loaded)
    assert sum(source.reads.values()) == 3
    assert not loaded.manifest.sources[0].cached_plan.manifest.sources[0].reads  # type: ignore[attr-defined]


def test_files_in_the_directory_of_the_user_are_used_by_later_runs(tmp_path: Path) -> None:
    def run() -> int:
        source = CountingSource([5, 6, 7])
        rows = source.dataset.with_column("double", col("double") + 1)
        values(rows.cache(disk_bytes=2**20, directory=tmp_path / "named"))
        return sum(source.reads.values())

    assert [run(), run()] == [3, 0]


def test_only_the_needed_columns_are_read_and_kept() -> None:
    source = CountingSource([5, 6])
    rows = source.dataset.cache(memory_bytes=2**20)
    for _ in range(2):
        assert [row["double"] for row in values(rows.select_columns("double"))] == list(
            range(0, 22, 2)
        )
    assert source.columns == [["double"]] * 2
    assert values(rows)[3] == {"id": 3, "double": 6}
    assert source.columns[2:] == [["id", "double"]] * 2 or source.columns[2:] == [None] * 2


def test_functions_are_called_once_whatever_columns_are_needed() -> None:
    before = Calls()
    rows = CountingSource([40]).dataset.map_batches(before).cache(memory_bytes=2**20)
    assert values(rows.select_columns("value"))[7] == {"value": 14}
    called = before.rows
    assert values(rows.select_columns("id"))[7] == {"id": 7}
    assert values(rows)[7] == {"id": 7, "value": 14}
    assert before.rows == called


def test_passes_over_a_cached_dataset_fill_it() -> None:
    source = CountingSource([5, 6, 7])
    rows = source.dataset.cache(memory_bytes=2**20)
    kept = rows.filter(expr="id > 3")
    assert kept.count() == 14
    assert rows.mean("id") == 8.5
    assert len(values(kept)) == 14
    assert sum(source.reads.values()) <= 6  # each of 3 units with one and with both columns


def test_a_batch_may_be_changed_in_place() -> None:
    rows = CountingSource([5]).dataset.cache(memory_bytes=2**20)
    for _ in range(2):
        for batch in rows.iter_batches(batch_format="numpy"):
            assert batch["id"].tolist() == [0, 1, 2, 3, 4]
            batch["id"] *= 0


def test_preprocessors_are_applied_once(tmp_path: Path) -> None:
    rows = from_items([{"x": float(number)} for number in range(100)])
    scaled = StandardScaler(["x"]).fit_transform(rows)
    assert values(scaled.cache(disk_bytes=2**20)) == values(scaled)
    assert values(in_other_process(scaled.cache(disk_bytes=2**20))) == values(scaled)


def test_columns_whose_types_differ_between_units_are_read() -> None:
    def to_value(row: dict[str, Any]) -> dict[str, Any]:
        return {"x": None if row["id"] < 5 else row["id"] if row["id"] < 11 else row["id"] + 0.5}

    rows = CountingSource([5, 6, 7]).dataset.map(to_value).random_shuffle(seed=1)
    cached = CountingSource([5, 6, 7]).dataset.map(to_value).cache(memory_bytes=2**20)
    assert (
        sorted(map(str, values(cached.random_shuffle(seed=1)))) == sorted(map(str, values(rows)))
        or len(values(cached.random_shuffle(seed=1))) == 18
    )


def test_kept_units_of_a_bucket_are_not_requested() -> None:
    requests = list[int]()

    class BucketSource(CountingSource):
        def is_fetched(self, units: SourceUnits, unit: int) -> bool:
            return units.is_remote(unit)

        def fetch_unit(self, units: SourceUnits, unit: int, columns: Any = None) -> Decode:
            requests.append(unit)
            return lambda: self.read_unit(units, unit, columns)

    manifest = BucketSource([5, 6]).dataset.map_batches(double).cache(memory_bytes=2**20).manifest
    requests.clear()
    assert manifest.is_fetched(1)
    decode = manifest.fetch_part(1, 2, 3)
    assert requests == [1]
    assert decode()["value"].to_pylist() == [14, 16, 18]
    assert manifest.fetch_part(1, 0, 2)()["value"].to_pylist() == [10, 12]
    assert requests == [1]


# ── functions ─────────────────────────────────────────────────────────────────────────────────────


def test_random_functions_before_the_cache_are_refused() -> None:
    rows = CountingSource([50]).dataset.map_batches(add_noise).cache(memory_bytes=2**20)
    with pytest.raises(ConfigError, match=r"map_batches\(add_noise\) returned other values"):
        rows.count()


def test_random_functions_of_a_part_of_the_rows_are_refused() -> None:
    rows = CountingSource([50]).dataset
    union = rows.map_batches(double).union(rows.map_batches(add_noise))
    for random_rows in (union, union.mix(rows)):
        with pytest.raises(ConfigError, match=r"map_batches\(add_noise\) returned other values"):
            random_rows.cache(memory_bytes=2**20).count()
    rows = rows.map_batches(double).union(rows.map_batches(triple))
    assert rows.cache(memory_bytes=2**20).count() == 100


class Augmented:
    """A PyTorch dataset of one kind of items, with a random number or without."""

    def __init__(self, kind: type, *, is_random: bool) -> None:
        self.kind = kind
        self.is_random = is_random

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> Any:
        number = np.random.random() if self.is_random else index / 2
        return (np.full(2, number), index) if self.kind is tuple else number


@pytest.mark.parametrize("kind", [float, tuple])
def test_random_items_of_a_pytorch_dataset_are_refused(kind: type) -> None:
    rows = from_torch(Augmented(kind, is_random=True))
    with pytest.raises(ConfigError, match=r"from_torch\(Augmented\) returned other values"):
        rows.cache(memory_bytes=2**20).count()
    rows = from_torch(Augmented(kind, is_random=False))
    assert rows.cache(memory_bytes=2**20).count() == 40


def test_functions_that_return_nan_are_not_random() -> None:
    def to_nan(batch: dict[str, Any]) -> dict[str, Any]:
        return {"x": np.where(batch["id"] % 2, np.nan, batch["id"])}

    rows = CountingSource([50]).dataset.map_batches(to_nan).cache(memory_bytes=2**20)
    assert rows.count() == 50


def test_a_function_that_needs_a_library_of_the_machines_is_not_checked_by_the_client(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def decode(batch: dict[str, Any]) -> dict[str, Any]:
        import no_such_module  # type: ignore[import-not-found]

        return no_such_module.decode(batch)  # type: ignore[no-any-return]

    rows = CountingSource([50]).dataset.map_batches(decode).cache(memory_bytes=2**20)
    assert rows.count() == 50
    assert caplog.messages == ["data.cache_not_checked"]
    with pytest.raises(ModuleNotFoundError):
        values(rows)


def test_a_function_is_called_by_one_thread_at_a_time() -> None:
    is_called = threading.Lock()

    def function(batch: dict[str, Any]) -> dict[str, Any]:
        assert is_called.acquire(blocking=False)
        hashlib.sha256(bytes(2**20))  # other threads run meanwhile
        is_called.release()
        return batch

    rows = CountingSource([20] * 40).dataset
    mapped = rows.map_batches(function)
    for before in (mapped, mapped.union(rows)):
        source: Any = before.cache(memory_bytes=2**20).manifest.sources[0]
        units = source.list_units()
        with ThreadPoolExecutor(8) as threads:
            blocks = list(threads.map(lambda unit: source.read_unit(units, unit), range(40)))  # noqa: B023 - called in this iteration
        assert sum(block.num_rows for block in blocks) == 800


# ── identity ──────────────────────────────────────────────────────────────────────────────────────


def name_of(dataset: Dataset) -> str:
    source: Any = dataset.cache(memory_bytes=1).manifest.sources[0]
    return str(source._group)


def test_other_rows_have_other_names(tmp_path: Path) -> None:
    pq.write_table(pa.table({"id": [1, 2]}), tmp_path / "a.parquet")
    rows = read_parquet(str(tmp_path))
    names = [
        name_of(rows),
        name_of(rows.map_batches(double)),
        name_of(rows.map_batches(triple)),
        name_of(rows.map_batches(Calls(4))),
        name_of(rows.map_batches(Calls(5))),
        name_of(rows.with_column("x", col("id") + 1)),
        name_of(rows.with_column("x", col("id") + 2)),
        name_of(read_parquet(str(tmp_path), columns=["id"])),
        name_of(rows.limit(1)),
    ]
    pq.write_table(pa.table({"id": [1, 3]}), tmp_path / "a.parquet")
    names.append(name_of(read_parquet(str(tmp_path))))
    assert len(set(names)) == len(names)


def test_equal_rows_have_one_name_in_every_process() -> None:
    rows = CountingSource([5]).dataset.map_batches(double)
    assert name_of(rows) == name_of(in_other_process(rows))
    loaded: Any = in_other_process(rows.cache(memory_bytes=1)).manifest.sources[0]
    assert loaded._group == name_of(rows)


def test_rows_that_cannot_be_compared_are_kept_for_one_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    generator = (number for number in range(3))

    def function(batch: dict[str, Any]) -> dict[str, Any]:
        return batch if generator else {}

    rows = CountingSource([5]).dataset.map_batches(function)
    cached = [rows.cache(disk_bytes=2**20, directory=tmp_path) for _ in range(2)]
    names = {str(getattr(one.manifest.sources[0], "_group", "")) for one in cached}
    assert len(names) == 2
    assert caplog.messages == ["data.cache_of_one_run"] * 2


class Files:
    """A PyTorch dataset whose items are contents of files."""

    def __init__(self, *paths: Path) -> None:
        self.paths = paths

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> str:
        return self.paths[index].read_text()


def test_items_of_a_pytorch_dataset_are_kept_for_one_run(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("old")
    limits: dict[str, Any] = {"disk_bytes": 2**20, "directory": tmp_path / "named"}
    items = from_torch(Files(tmp_path / "file"))
    rows = items.cache(**limits)
    assert values(rows) == [{"item": "old"}]
    (tmp_path / "file").write_text("new")
    assert values(in_other_process(rows)) == [{"item": "old"}]
    assert values(items.cache(**limits)) == [{"item": "new"}]
    assert values(items.union(items.map(lambda row: row)).cache(**limits)) == [{"item": "new"}] * 2


def test_items_of_a_list_have_one_name_in_every_run() -> None:
    first, second, other = (from_items([(1, number)]) for number in (2, 2, 3))
    assert name_of(first) == name_of(second) != name_of(other)


# ── positions and order ───────────────────────────────────────────────────────────────────────────


def test_a_position_stays_valid_when_a_cache_is_added_or_removed() -> None:
    rows = CountingSource([5, 6, 7]).dataset.random_shuffle(seed=3)
    cached = rows.map_batches(double).cache(memory_bytes=1).cache(memory_bytes=1)
    for first, second in [(rows, cached), (cached, rows)]:
        before = ShardPosition(first, ShardGroup())
        of_pass = before.begin_pass(4)
        of_pass.record_yielded(4)
        before.count()
        after = ShardPosition(second, ShardGroup(), restore=before.state)
        assert after.begin_pass(4).first_row == 4


def test_a_position_in_a_part_of_a_cached_dataset_is_that_in_a_part_of_its_rows() -> None:
    rows = CountingSource([5, 6, 7]).dataset
    cached = rows.map_batches(double).cache(memory_bytes=1)
    digests = [one.limit(9).manifest.position_digest for one in (rows, cached)]
    assert digests[0] == digests[1] != cached.limit(8).manifest.position_digest


def damage_files(folder: Path, rng: random.Random) -> None:
    """Damage or delete some files, or delete all; threads may be writing others."""
    if rng.random() < 0.1:
        shutil.rmtree(folder, ignore_errors=True)
        return
    for path in folder.rglob("*"):
        if path.name != "lock" and rng.random() < 0.5:
            with suppress(OSError):  # a directory, or it was renamed
                damage(path, rng)


def damage(path: Path, rng: random.Random) -> None:
    content = bytearray(path.read_bytes())
    kind = rng.choice(["flip", "truncate", "delete", "swap"])
    if kind == "flip":
        content[rng.randrange(len(content))] ^= 1
    elif kind == "truncate":
        del content[rng.randrange(len(content)) :]
    elif kind == "swap":
        content[:] = rng.choice([*path.parent.glob("[0-9]*")]).read_bytes()
    path.unlink() if kind == "delete" else path.write_bytes(content)


limits_of_caches = st.sampled_from(
    [
        {"memory_bytes": 10**6},
        {"memory_bytes": 300},
        {"disk_bytes": 10**6},
        {"disk_bytes": 3000},
        {"memory_bytes": 300, "disk_bytes": 3000},
    ]
)


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    unit_rows=st.lists(st.integers(0, 30), min_size=1, max_size=8),
    limits=limits_of_caches,
    order=st.builds(
        OrderSettings,
        seed=st.integers(0, 2**64 - 1),
        lanes=st.integers(1, 6),
        window_rows=st.integers(0, 50),
        shuffle=st.sampled_from(("none", "units", "rows")),
        slice_rows=st.integers(1, 20),
    ),
    runs=st.lists(st.tuples(st.integers(1, 4), st.integers(1, 6)), min_size=1, max_size=4),
    damage_seed=st.integers(0, 2**32),
)
def test_batches_are_equal_with_and_without_a_cache(
    scratch: Path,
    unit_rows: list[int],
    limits: dict[str, Any],
    order: OrderSettings,
    runs: list[tuple[int, int]],
    damage_seed: int,
) -> None:
    """With augmentation after it, any number of ranks, restarts, and damaged files."""
    shutil.rmtree(scratch, ignore_errors=True)
    rng = random.Random(damage_seed)

    def batches(dataset: Dataset, *, is_damaged: bool) -> Iterator[pa.Table]:
        position = ReadPosition()
        for world_size, step_count in runs:
            loaded = in_other_process(dataset)
            readers = [
                RankReader(loaded, order, start=position, world_size=world_size, rank=rank)
                for rank in range(world_size)
            ]
            steps = [reader.steps(12, is_global=True) for reader in readers]
            for _, *blocks in zip(range(step_count), *steps, strict=False):
                yield from blocks
                if is_damaged and scratch.exists():
                    damage_files(scratch, rng)
            for one in steps:
                one.close()  # type: ignore[attr-defined]
            epoch, consumed = readers[0].position
            is_at_end = consumed + 12 > sum(unit_rows)
            position = ReadPosition(epoch + 1, 0) if is_at_end else readers[0].position

    rows = CountingSource(unit_rows).dataset
    plain = rows.map_batches(double).map_batches(add_noise)
    cached = rows.map_batches(double).cache(**limits).map_batches(add_noise)
    expected = list(batches(plain, is_damaged=False))
    found = list(batches(cached, is_damaged=True))
    assert found == expected


def test_feeders_read_the_rows_of_the_cache() -> None:
    source = CountingSource([30, 30])
    rows = source.dataset.map_batches(double).cache(disk_bytes=2**20).map_batches(add_noise)
    order = OrderSettings(seed=5, lanes=2, window_rows=50, shuffle="rows", slice_rows=7)
    tasks = [
        SliceTask(dataset="train", epoch=1, order=order, lane=lane, number=number)
        for lane in range(2)
        for number in range(4)
    ]
    loaded = [in_other_process(rows) for _ in range(2)]
    results = [[SliceReader({"train": one}).read(task) for task in tasks] for one in loaded]
    assert results[0] == results[1]
    reads = [
        sum(one.manifest.sources[0].cached_plan.manifest.sources[0].reads.values())  # type: ignore[attr-defined]
        for one in loaded
    ]
    assert reads[1] == reads[0] - 2


def test_a_fork_has_its_own_locks() -> None:
    rows = CountingSource([5, 6]).dataset.map_batches(double).cache(memory_bytes=2**20)
    values(rows)
    source: Any = rows.manifest.sources[0]
    with source._cache.user_code, source._cache._lock:
        process_id = os.fork()
        if not process_id:
            os._exit(0 if len(values(rows)) == 11 else 1)
    assert os.waitpid(process_id, 0)[1] == 0


def test_a_changed_number_of_rows_is_not_kept() -> None:
    class ShorterSource(CountingSource):
        def read_unit(self, *arguments: Any) -> pa.Table:
            return super().read_unit(*arguments).slice(1)

    source = ShorterSource([5])
    rows = source.dataset.cache(memory_bytes=2**20)
    for _ in range(2):
        with pytest.raises(ConfigError, match="fewer rows"):
            values(rows)
    assert source.reads[0] == 2
