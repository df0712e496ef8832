"""The world's bucket: one truth, told changes, a bill; and stores that keep its promise or not."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from spotfit.core.errors import AlreadyExistsError, NotFoundError, TransientStoreError
from spotfit.store.api import Store
from spotfit_localsim.virtual.engine import SimProcess
from spotfit_localsim.virtual.faults import CLIENT_TIMEOUT_S, FaultConfig, FaultyConnection
from spotfit_localsim.virtual.sim_store import (
    CheckThenPutStore,
    SimBucket,
    SimStore,
    UnconditionalCreateStore,
)
from tests.unit.localsim.sim_harness import SimHarness


@pytest.fixture
def ground() -> SimHarness:
    return SimHarness()


@pytest.fixture
def bucket() -> SimBucket:
    return SimBucket()


def store_for(
    ground: SimHarness, bucket: SimBucket, process: SimProcess, kind: type[SimStore] = SimStore
) -> SimStore:
    return kind(
        bucket, process, FaultyConnection(ground.season, ground.rng.stream(f"line {process.name}"))
    )


def test_it_reads_what_was_written_and_lists_folders(
    ground: SimHarness, bucket: SimBucket, tmp_path: Path
) -> None:
    process = ground.process()
    store: Store = store_for(ground, bucket, process)
    (tmp_path / "file").write_bytes(b"from a file")
    given = ground.run_jobs(
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
    assert given[3:7] == [["a/10", "a/2"], ["a/2"], ["10", "2"], b"en"]
    assert isinstance(given[7], NotFoundError)
    assert isinstance(given[10], NotFoundError)
    assert (tmp_path / "copy").read_bytes() == b"from a file"


def test_one_of_many_concurrent_creates_succeeds(ground: SimHarness, bucket: SimBucket) -> None:
    assert creators(ground, bucket, SimStore) == [None]


@pytest.mark.parametrize("kind", [CheckThenPutStore, UnconditionalCreateStore])
def test_wrong_stores_let_several_creates_succeed(
    ground: SimHarness, bucket: SimBucket, kind: type[SimStore]
) -> None:
    assert len(creators(ground, bucket, kind)) > 1


def creators(ground: SimHarness, bucket: SimBucket, kind: type[SimStore]) -> list[None]:
    """What those were told who may take themselves for the winner."""
    outcomes: list[object] = []
    for n in range(5):
        process = ground.process(f"a{n}")
        process.start(creating(store_for(ground, bucket, process, kind), outcomes))
    ground.engine.run(until=100.0)
    assert len(outcomes) == 5
    assert all(one is None or isinstance(one, AlreadyExistsError) for one in outcomes)
    return [None for one in outcomes if one is None]


def creating(store: SimStore, outcomes: list[object]) -> Callable[[float], None]:
    def tick(_now: float) -> None:
        try:
            store.create("slot", b"me")
        except AlreadyExistsError as lost:
            outcomes.append(lost)
        else:
            outcomes.append(None)

    return tick


def test_listeners_receive_the_previous_body(ground: SimHarness, bucket: SimBucket) -> None:
    told: list[tuple[str, str, bytes | None, bytes | None]] = []
    bucket.listeners.append(lambda *change: told.append(change))
    process = ground.process("a7")
    store = store_for(ground, bucket, process)
    ground.run_jobs(
        process,
        lambda: store.put("k", b"1"),
        lambda: store.put("k", b"2"),
        lambda: store.delete("k"),
        lambda: store.delete("k"),
    )
    assert told == [("a7", "k", None, b"1"), ("a7", "k", b"1", b"2"), ("a7", "k", b"2", None)]


def test_lost_request_has_no_effect_and_lost_response_has_one(bucket: SimBucket) -> None:
    for faults, body in (
        (FaultConfig(lost_request_probability=1.0), None),
        (FaultConfig(lost_response_probability=1.0), b"1"),
    ):
        ground = SimHarness(faults)
        process = ground.process()
        store = store_for(ground, bucket, process)
        given = ground.run_jobs(process, partial(store.create, "k", b"1"))
        assert isinstance(given[0], TransientStoreError)
        assert bucket.objects.get("k") == body


def test_false_conflict_writes_nothing(bucket: SimBucket) -> None:
    ground = SimHarness(FaultConfig(false_conflict_probability=1.0))
    store = store_for(ground, bucket, process := ground.process())
    given = ground.run_jobs(process, partial(store.create, "k", b"1"), partial(store.put, "p", b""))
    assert isinstance(given[0], AlreadyExistsError)
    assert list(bucket.objects) == ["p"]


def test_damaged_response_lacks_its_last_byte(bucket: SimBucket) -> None:
    ground = SimHarness(FaultConfig(damaged_response_probability=1.0))
    bucket.objects["k"] = b"12"
    store = store_for(ground, bucket, process := ground.process())
    assert ground.run_jobs(process, partial(store.get, "k")) == [b"1"]
    ground.season.stop_faults()
    store = store_for(ground, bucket, process := ground.process("a2"))
    assert ground.run_jobs(process, partial(store.get, "k")) == [b"12"]


def stalled(ground: SimHarness, bucket: SimBucket, *, for_s: float) -> tuple[object, float]:
    """What a `create` gives that hangs for so long, and when."""
    process = ground.process(f"a{for_s}")
    store = store_for(ground, bucket, process)
    ground.season.stall_until(ground.engine.now + for_s)
    began = ground.engine.now
    given = ground.run_jobs(process, partial(store.create, f"k{for_s}", b"1"), lambda: process.now)
    return given[0], given[1] - began


def test_stalled_request_is_answered_or_times_out(ground: SimHarness, bucket: SimBucket) -> None:
    answer, took_s = stalled(ground, bucket, for_s=7.0)
    assert answer is None
    assert took_s == pytest.approx(7.0, abs=0.1)
    answer, took_s = stalled(ground, bucket, for_s=40.0)
    assert isinstance(answer, TransientStoreError)
    assert took_s == pytest.approx(CLIENT_TIMEOUT_S, abs=0.1)


def test_timed_out_request_may_be_executed_late(ground: SimHarness, bucket: SimBucket) -> None:
    done: list[tuple[str, float]] = []
    bucket.listeners.append(
        lambda _who, key, _before, _after: done.append((key, ground.engine.now))
    )
    for seconds in range(30, 50):
        stalled(ground, bucket, for_s=float(seconds))
    assert 0 < len(done) < 20
    begun = 0.0
    for key, at in done:
        assert at > begun + CLIENT_TIMEOUT_S, key
        begun = at


def test_requests_are_counted_by_writer(ground: SimHarness, bucket: SimBucket) -> None:
    for name in ("a1", "a2"):
        process = ground.process(name)
        store = store_for(ground, bucket, process)
        ground.run_jobs(process, partial(store.put, "k", b""), partial(store.get, "k"))
    assert dict(bucket.requests["a1"]) == {"put": 1, "get": 1}
    assert dict(bucket.total_requests) == {"put": 2, "get": 2}
