"""The world's bucket: one truth, told changes, a bill; and stores that keep its promise or not."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from spotfit.core.errors import AlreadyExistsError, NotFoundError, TransientStoreError
from spotfit.store.api import Store
from spotfit_localsim.bucket import Bucket, ChecksThenWrites, IgnoresCreate, SimStore
from spotfit_localsim.engine import Process
from spotfit_localsim.faults import GIVES_UP_S, Faults, Line
from tests.unit.localsim.ground import Ground


@pytest.fixture
def ground() -> Ground:
    return Ground()


@pytest.fixture
def bucket() -> Bucket:
    return Bucket()


def store_for(
    ground: Ground, bucket: Bucket, process: Process, kind: type[SimStore] = SimStore
) -> SimStore:
    return kind(bucket, process, Line(ground.season, ground.dice.stream(f"line {process.name}")))


def test_it_reads_what_was_written_and_lists_folders(
    ground: Ground, bucket: Bucket, tmp_path: Path
) -> None:
    process = ground.process()
    store: Store = store_for(ground, bucket, process)
    (tmp_path / "file").write_bytes(b"from a file")
    given = ground.do(
        process,
        lambda: store.put("a/2", b"two"),
        lambda: store.put("a/10", b"ten"),
        lambda: store.put("ab/1", b"x"),
        lambda: [found.key for found in store.list("a")],
        lambda: [found.key for found in store.list("a", after="a/10")],
        lambda: [found.key for found in store.under("a").list()],
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


def test_of_many_creators_one_wins_whatever_the_order(ground: Ground, bucket: Bucket) -> None:
    assert creators(ground, bucket, SimStore) == [None]


@pytest.mark.parametrize("kind", [ChecksThenWrites, IgnoresCreate])
def test_wrong_stores_let_several_win(ground: Ground, bucket: Bucket, kind: type[SimStore]) -> None:
    assert len(creators(ground, bucket, kind)) > 1


def creators(ground: Ground, bucket: Bucket, kind: type[SimStore]) -> list[None]:
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


def test_changes_are_told_with_what_was_there(ground: Ground, bucket: Bucket) -> None:
    told: list[tuple[str, str, bytes | None, bytes | None]] = []
    bucket.watchers.append(lambda *change: told.append(change))
    process = ground.process("a7")
    store = store_for(ground, bucket, process)
    ground.do(
        process,
        lambda: store.put("k", b"1"),
        lambda: store.put("k", b"2"),
        lambda: store.delete("k"),
        lambda: store.delete("k"),
    )
    assert told == [("a7", "k", None, b"1"), ("a7", "k", b"1", b"2"), ("a7", "k", b"2", None)]


def test_an_unsent_request_has_no_effect_and_a_lost_answer_has_one(bucket: Bucket) -> None:
    for faults, body in ((Faults(unsent=1.0), None), (Faults(lost_answers=1.0), b"1")):
        ground = Ground(faults)
        process = ground.process()
        store = store_for(ground, bucket, process)
        given = ground.do(process, partial(store.create, "k", b"1"))
        assert isinstance(given[0], TransientStoreError)
        assert bucket.objects.get("k") == body


def stalled(ground: Ground, bucket: Bucket, *, for_s: float) -> tuple[object, float]:
    """What a `create` gives that hangs for so long, and when."""
    process = ground.process(f"a{for_s}")
    store = store_for(ground, bucket, process)
    ground.season.stall(ground.engine.now + for_s)
    began = ground.engine.now
    given = ground.do(process, partial(store.create, f"k{for_s}", b"1"), lambda: process.now)
    return given[0], given[1] - began


def test_a_request_that_hangs_is_answered_in_the_end_or_given_up(
    ground: Ground, bucket: Bucket
) -> None:
    answer, took_s = stalled(ground, bucket, for_s=7.0)
    assert answer is None
    assert took_s == pytest.approx(7.0, abs=0.1)
    answer, took_s = stalled(ground, bucket, for_s=40.0)
    assert isinstance(answer, TransientStoreError)
    assert took_s == pytest.approx(GIVES_UP_S, abs=0.1)


def test_what_was_given_up_may_be_done_all_the_same_and_late(
    ground: Ground, bucket: Bucket
) -> None:
    done: list[tuple[str, float]] = []
    bucket.watchers.append(lambda _who, key, _before, _after: done.append((key, ground.engine.now)))
    for seconds in range(30, 50):
        stalled(ground, bucket, for_s=float(seconds))
    assert 0 < len(done) < 20
    begun = 0.0
    for key, at in done:
        assert at > begun + GIVES_UP_S, key
        begun = at


def test_every_request_is_on_the_bill_of_who_made_it(ground: Ground, bucket: Bucket) -> None:
    for name in ("a1", "a2"):
        process = ground.process(name)
        store = store_for(ground, bucket, process)
        ground.do(process, partial(store.put, "k", b""), partial(store.get, "k"))
    assert dict(bucket.requests["a1"]) == {"put": 1, "get": 1}
    assert dict(bucket.bill) == {"put": 2, "get": 2}
