"""The simulated bucket and its stores, with and without the guarantees of a correct store."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from spotfit.core.errors import (
    AlreadyExistsError,
    NotFoundError,
    StorePermissionError,
    TransientStoreError,
)
from spotfit.store.api import Store
from spotfit_localsim.virtual.engine import SimProcess
from spotfit_localsim.virtual.faults import CLIENT_TIMEOUT_S, FaultConfig, FaultyConnection
from spotfit_localsim.virtual.sim_store import (
    CheckThenPutStore,
    ConflictAsTakenStore,
    ConflictAsWrittenStore,
    SimBucket,
    SimStore,
    UnconditionalCreateStore,
)
from tests.unit.localsim.sim_harness import SimHarness


@pytest.fixture
def sim() -> SimHarness:
    return SimHarness()


@pytest.fixture
def bucket() -> SimBucket:
    return SimBucket()


def store_for(
    sim: SimHarness, bucket: SimBucket, process: SimProcess, kind: type[SimStore] = SimStore
) -> SimStore:
    return kind(
        bucket,
        process,
        FaultyConnection(sim.active_faults, sim.rng.stream(f"connection {process.name}")),
    )


def test_objects_are_read_and_listed(sim: SimHarness, bucket: SimBucket, tmp_path: Path) -> None:
    process = sim.process()
    store: Store = store_for(sim, bucket, process)
    (tmp_path / "file").write_bytes(b"from a file")
    results = sim.run_jobs(
        process,
        lambda: store.put("a/2", b"two"),
        lambda: store.put("a/10", b"ten"),
        lambda: store.put("ab/1", b"x"),
        lambda: [found.key for found in store.list("a")],
        lambda: [found.key for found in store.list("a", after="a/10")],
        lambda: [found.key for found in store.subtree("a").list()],
        lambda: store.get_range("a/10", 1, 2),
        lambda: store.get("a"),
        lambda: store.delete("a/2"),
        lambda: store.delete("a/2"),
        lambda: store.get("a/2"),
        lambda: store.put_file("file", tmp_path / "file"),
        lambda: store.get_file("file", tmp_path / "copy"),
    )
    assert results[3:7] == [["a/10", "a/2"], ["a/2"], ["10", "2"], b"en"]
    assert isinstance(results[7], NotFoundError)
    assert isinstance(results[10], NotFoundError)
    assert (tmp_path / "copy").read_bytes() == b"from a file"


def test_one_of_many_concurrent_creates_succeeds(sim: SimHarness, bucket: SimBucket) -> None:
    assert results_of_creates(sim, bucket, SimStore) == [None]


@pytest.mark.parametrize("kind", [CheckThenPutStore, UnconditionalCreateStore])
def test_wrong_stores_let_several_creates_succeed(
    sim: SimHarness, bucket: SimBucket, kind: type[SimStore]
) -> None:
    assert len(results_of_creates(sim, bucket, kind)) > 1


def results_of_creates(sim: SimHarness, bucket: SimBucket, kind: type[SimStore]) -> list[None]:
    """The results of the concurrent creates that reported success."""
    outcomes: list[object] = []
    for n in range(5):
        process = sim.process(f"a{n}")
        process.start(create_tick(store_for(sim, bucket, process, kind), outcomes))
    sim.engine.run(until=100.0)
    assert len(outcomes) == 5
    assert all(one is None or isinstance(one, AlreadyExistsError) for one in outcomes)
    return [None for one in outcomes if one is None]


def create_tick(store: SimStore, outcomes: list[object]) -> Callable[[float], None]:
    def tick(_now: float) -> None:
        try:
            store.create("slot", b"body")
        except AlreadyExistsError as error:
            outcomes.append(error)
        else:
            outcomes.append(None)

    return tick


def test_listeners_receive_the_previous_body(sim: SimHarness, bucket: SimBucket) -> None:
    changes: list[tuple[str, str, bytes | None, bytes | None]] = []
    bucket.listeners.append(lambda *change: changes.append(change))
    process = sim.process("a7")
    store = store_for(sim, bucket, process)
    sim.run_jobs(
        process,
        lambda: store.put("k", b"1"),
        lambda: store.put("k", b"2"),
        lambda: store.delete("k"),
        lambda: store.delete("k"),
    )
    assert changes == [("a7", "k", None, b"1"), ("a7", "k", b"1", b"2"), ("a7", "k", b"2", None)]


def test_lost_request_has_no_effect_and_lost_response_has_one(bucket: SimBucket) -> None:
    for faults, body in (
        (FaultConfig(lost_request_probability=1.0), None),
        (FaultConfig(lost_response_probability=1.0), b"1"),
    ):
        sim = SimHarness(faults)
        process = sim.process()
        store = store_for(sim, bucket, process)
        results = sim.run_jobs(process, partial(store.create, "k", b"1"))
        assert isinstance(results[0], TransientStoreError)
        assert bucket.objects.get("k") == body


def test_false_conflict_writes_nothing(bucket: SimBucket) -> None:
    sim = SimHarness(FaultConfig(false_conflict_probability=1.0))
    store = store_for(sim, bucket, process := sim.process())
    results = sim.run_jobs(process, partial(store.create, "k", b"1"), partial(store.put, "p", b""))
    assert isinstance(results[0], AlreadyExistsError)
    assert list(bucket.objects) == ["p"]


def test_damaged_response_lacks_its_last_byte(bucket: SimBucket) -> None:
    sim = SimHarness(FaultConfig(damaged_response_probability=1.0))
    bucket.objects["k"] = b"12"
    store = store_for(sim, bucket, process := sim.process())
    assert sim.run_jobs(process, partial(store.get, "k")) == [b"1"]
    sim.active_faults.stop_faults()
    store = store_for(sim, bucket, process := sim.process("a2"))
    assert sim.run_jobs(process, partial(store.get, "k")) == [b"12"]


def test_flipped_response_differs_in_one_bit(bucket: SimBucket) -> None:
    sim = SimHarness(FaultConfig(flipped_response_probability=1.0))
    bucket.objects |= {"k": b"body", "empty": b""}
    store = store_for(sim, bucket, process := sim.process())
    body, empty = sim.run_jobs(process, partial(store.get, "k"), partial(store.get, "empty"))
    assert (int.from_bytes(body) ^ int.from_bytes(b"body")).bit_count() == 1
    assert empty == b""


def test_truncated_response_is_a_prefix(bucket: SimBucket) -> None:
    sim = SimHarness(FaultConfig(truncated_response_probability=1.0))
    bucket.objects["k"] = b"body"
    store = store_for(sim, bucket, process := sim.process())
    bodies = sim.run_jobs(process, *[partial(store.get, "k")] * 40)
    assert {len(body) for body in bodies} == {0, 1, 2, 3, 4}
    assert all(b"body".startswith(body) for body in bodies)


def test_create_with_a_conflict_may_be_executed(bucket: SimBucket) -> None:
    sim = SimHarness(FaultConfig(conflict_probability=1.0))
    store = store_for(sim, bucket, process := sim.process())
    results = sim.run_jobs(process, *(partial(store.create, f"k{n}", b"1") for n in range(40)))
    assert all(isinstance(result, TransientStoreError) for result in results)
    assert 0 < len(bucket.objects) < 40


@pytest.mark.parametrize(
    ("kind", "error"),
    [(ConflictAsTakenStore, AlreadyExistsError), (ConflictAsWrittenStore, type(None))],
)
def test_wrong_stores_take_a_conflict_for_another_answer(
    bucket: SimBucket, kind: type[SimStore], error: type
) -> None:
    sim = SimHarness(FaultConfig(conflict_probability=1.0))
    store = store_for(sim, bucket, process := sim.process(), kind)
    results = sim.run_jobs(process, *(partial(store.create, f"k{n}", b"1") for n in range(40)))
    assert all(isinstance(result, error) for result in results)
    assert len(bucket.objects) < 40


def test_denied_create_writes_nothing(bucket: SimBucket) -> None:
    sim = SimHarness(FaultConfig(denied_create_probability=1.0))
    store = store_for(sim, bucket, process := sim.process())
    results = sim.run_jobs(process, partial(store.create, "k", b"1"), partial(store.put, "p", b""))
    assert isinstance(results[0], StorePermissionError)
    assert list(bucket.objects) == ["p"]


def stalled_create(sim: SimHarness, bucket: SimBucket, *, for_s: float) -> tuple[object, float]:
    """The result of a `create` during a stall, and its duration in seconds."""
    process = sim.process(f"a{for_s}")
    store = store_for(sim, bucket, process)
    sim.active_faults.stall_until(sim.engine.now + for_s)
    started_at_s = sim.engine.now
    results = sim.run_jobs(process, partial(store.create, f"k{for_s}", b"1"), lambda: process.now)
    return results[0], results[1] - started_at_s


def test_stalled_request_is_answered_or_times_out(sim: SimHarness, bucket: SimBucket) -> None:
    result, duration_s = stalled_create(sim, bucket, for_s=7.0)
    assert result is None
    assert duration_s == pytest.approx(7.0, abs=0.1)
    result, duration_s = stalled_create(sim, bucket, for_s=40.0)
    assert isinstance(result, TransientStoreError)
    assert duration_s == pytest.approx(CLIENT_TIMEOUT_S, abs=0.1)


def test_timed_out_request_may_be_executed_late(sim: SimHarness, bucket: SimBucket) -> None:
    executed: list[tuple[str, float]] = []
    bucket.listeners.append(
        lambda _writer, key, _before, _after: executed.append((key, sim.engine.now))
    )
    for seconds in range(30, 50):
        stalled_create(sim, bucket, for_s=float(seconds))
    assert 0 < len(executed) < 20
    previous_s = 0.0
    for key, executed_at_s in executed:
        assert executed_at_s > previous_s + CLIENT_TIMEOUT_S, key
        previous_s = executed_at_s


def test_requests_are_counted_by_writer(sim: SimHarness, bucket: SimBucket) -> None:
    for name in ("a1", "a2"):
        process = sim.process(name)
        store = store_for(sim, bucket, process)
        sim.run_jobs(process, partial(store.put, "k", b""), partial(store.get, "k"))
    assert dict(bucket.requests["a1"]) == {"put": 1, "get": 1}
    assert dict(bucket.total_requests) == {"put": 2, "get": 2}
