from __future__ import annotations

import queue
import random
import threading
from collections.abc import Callable, Iterator
from typing import NamedTuple

import pyarrow as pa
import pytest

from spotfit.core.errors import IntegrityError
from spotfit.data.feeding.link import FeederLink
from spotfit.data.feeding.messages import FailureReply, SliceReply
from spotfit.data.feeding.pool import FeederPool
from spotfit.data.loading.slice_tasks import PendingSlice, SliceTask
from spotfit.data.order import OrderSettings
from spotfit.host.system import SystemClock

TIMEOUT_S = 30.0
"""Longest wait for another thread, on a busy machine."""


class ManualClock:
    """A clock that a test moves, at which also threads wait that wait for a condition."""

    def __init__(self) -> None:
        self.time_s = 0.0
        self.was_read = threading.Event()

    def now(self) -> float:
        time_s = self.time_s
        self.was_read.set()
        return time_s

    def wait(self, seconds: float) -> None:
        self.time_s += seconds


class Sent(NamedTuple):
    number: int
    task: SliceTask


class ManualLink(FeederLink):
    """A connection to a feeder that the test plays."""

    def __init__(self, name: str = "feeder") -> None:
        self.name = name
        self.sent: queue.Queue[Sent] = queue.Queue()
        self._replies: queue.Queue[SliceReply | FailureReply | OSError] = queue.Queue()
        self.is_closed = False

    def send(self, number: int, task: SliceTask) -> None:
        self.sent.put(Sent(number, task))

    def receive(self) -> SliceReply | FailureReply:
        reply = self._replies.get(timeout=TIMEOUT_S)
        if isinstance(reply, OSError):
            raise reply
        return reply

    def check_idle(self) -> None:
        if self.is_closed:
            raise ConnectionResetError("closed")

    def close(self) -> None:
        self.is_closed = True
        self._replies.put(ConnectionResetError("closed"))

    # --- for tests

    def next_sent(self) -> Sent:
        return self.sent.get(timeout=TIMEOUT_S)

    def reply(self, sent: Sent) -> None:
        table = rows_of(sent.task)
        self._replies.put(SliceReply(sent.number, table, table.nbytes))

    def fail(self, sent: Sent) -> None:
        self._replies.put(FailureReply(sent.number, "Traceback: bad row"))

    def reply_with_number(self, number: int) -> None:
        self._replies.put(SliceReply(number, pa.table({}), 0))

    def break_connection(self) -> None:
        self._replies.put(ConnectionResetError("killed"))


def task_of(number: int, lane: int = 0) -> SliceTask:
    return SliceTask(dataset="train", epoch=0, order=OrderSettings(), lane=lane, number=number)


def rows_of(task: SliceTask) -> pa.Table:
    return pa.table({"lane": [task.lane], "number": [task.number]})


def execute_nothing(task: SliceTask) -> pa.Table:
    raise AssertionError(f"{task} was executed by the worker")


Serve = Callable[[ManualLink], threading.Thread]


class Pools:
    def __init__(self) -> None:
        self.threads: list[threading.Thread] = []

    def serve(self, pool: FeederPool, *links: ManualLink) -> threading.Thread:
        """Serve each link in a thread; return the last one."""
        for link in links:
            self.threads.append(threading.Thread(target=pool.serve, args=[link], daemon=True))
            self.threads[-1].start()
        return self.threads[-1]

    def take(
        self, pool: FeederPool, pending: PendingSlice, clock: ManualClock
    ) -> queue.Queue[pa.Table]:
        """Take a slice in a thread; return when it waits, from the current time of the clock on."""
        taken: queue.Queue[pa.Table] = queue.Queue()
        clock.was_read.clear()
        self.threads.append(threading.Thread(target=lambda: taken.put(pool.take(pending))))
        self.threads[-1].start()
        assert clock.was_read.wait(TIMEOUT_S)
        return taken


@pytest.fixture
def pools() -> Iterator[Pools]:
    yield (created := Pools())
    for thread in created.threads:
        thread.join(TIMEOUT_S)
        assert not thread.is_alive(), "a thread of the pool did not end"


def test_without_feeders_the_worker_executes_the_task() -> None:
    pool = FeederPool(rows_of, SystemClock())
    assert pool.take(pool.request(task_of(3))).equals(rows_of(task_of(3)))
    assert pool.own_count == 1


def test_without_feeders_the_worker_reads_the_next_slices_ahead() -> None:
    calls: list[tuple[str, int]] = []

    def execute(task: SliceTask) -> pa.Table:
        calls.append(("execute", task.number))
        return rows_of(task)

    pool = FeederPool(
        execute,
        SystemClock(),
        prefetch=lambda task: calls.append(("prefetch", task.number)),
        credit=2,
    )
    slices = [pool.request(task_of(number)) for number in range(5)]
    pool.take(slices[0])
    assert calls == [("prefetch", 0), ("prefetch", 1), ("prefetch", 2), ("execute", 0)]


def test_results_are_taken_in_any_order(pools: Pools) -> None:
    pool, link = FeederPool(execute_nothing, SystemClock()), ManualLink()
    slices = [pool.request(task_of(number)) for number in range(4)]
    pools.serve(pool, link)
    for sent in reversed([link.next_sent() for _ in range(4)]):
        link.reply(sent)
    for number, pending in enumerate(slices):
        assert pool.take(pending).equals(rows_of(task_of(number)))
    pool.close()


def test_a_feeder_has_no_more_slices_than_its_credit(pools: Pools) -> None:
    pool, link = FeederPool(execute_nothing, SystemClock(), credit=2), ManualLink()
    for number in range(5):
        pool.request(task_of(number))
    pools.serve(pool, link)
    first, _ = link.next_sent(), link.next_sent()
    assert link.sent.empty()
    link.reply(first)
    assert link.next_sent().task == task_of(2)
    assert link.sent.empty()
    pool.close()


def test_slices_of_a_broken_connection_are_sent_first_to_another_feeder(pools: Pools) -> None:
    pool = FeederPool(execute_nothing, SystemClock(), credit=2)
    lost, other = ManualLink("lost"), ManualLink("other")
    slices = [pool.request(task_of(number)) for number in range(4)]
    thread = pools.serve(pool, lost)
    lost.next_sent(), lost.next_sent()
    lost.break_connection()
    thread.join(TIMEOUT_S)
    pools.serve(pool, other)
    for number, pending in enumerate(slices):
        sent = other.next_sent()
        assert sent.task == task_of(number)
        other.reply(sent)
        assert pool.take(pending).equals(rows_of(task_of(number)))
    assert lost.is_closed
    pool.close()


def test_the_worker_executes_the_slices_of_the_last_feeder_that_is_lost(pools: Pools) -> None:
    pool, link = FeederPool(rows_of, SystemClock()), ManualLink()
    pending = pool.request(task_of(0))
    pools.serve(pool, link)
    link.next_sent()
    threading.Timer(0.05, link.break_connection).start()
    assert pool.take(pending).equals(rows_of(task_of(0)))
    assert pool.own_count == 1


def test_an_exception_in_a_feeder_is_raised_by_the_execution_in_the_worker(pools: Pools) -> None:
    def execute(task: SliceTask) -> pa.Table:
        raise ValueError(f"bad row in slice {task.number}")

    pool, link = FeederPool(execute, SystemClock()), ManualLink()
    pending = pool.request(task_of(5))
    pools.serve(pool, link)
    link.fail(link.next_sent())
    with pytest.raises(ValueError, match="bad row in slice 5"):
        pool.take(pending)
    pool.close()


def test_a_feeder_that_only_fails_gets_no_further_slices(pools: Pools) -> None:
    pool, link = FeederPool(rows_of, SystemClock(), credit=1), ManualLink()
    slices = [pool.request(task_of(number)) for number in range(5)]
    thread = pools.serve(pool, link)
    for _ in range(3):
        link.fail(link.next_sent())
    thread.join(TIMEOUT_S)
    assert link.is_closed
    assert [pool.take(one).equals(rows_of(one.task)) for one in slices] == [True] * 5
    assert pool.own_count == 5


def test_an_answer_to_an_unknown_request_closes_the_connection(pools: Pools) -> None:
    pool, link = FeederPool(rows_of, SystemClock()), ManualLink()
    pool.request(task_of(0))
    thread = pools.serve(pool, link)
    link.next_sent()
    link.reply_with_number(99)
    thread.join(TIMEOUT_S)
    assert link.is_closed


def test_a_late_slice_is_also_given_to_another_feeder_and_the_first_result_counts(
    pools: Pools,
) -> None:
    clock = ManualClock()
    pool = FeederPool(execute_nothing, clock, credit=1)
    slow, fast = ManualLink("slow"), ManualLink("fast")
    pools.serve(pool, slow)
    for number in range(5):  # the median is 1 s
        pending = pool.request(task_of(number))
        sent = slow.next_sent()
        clock.time_s += 1.0
        slow.reply(sent)
        pool.take(pending)
    pending = pool.request(task_of(5))
    late = slow.next_sent()
    pools.serve(pool, fast)
    clock.time_s += 4.5
    taken: queue.Queue[pa.Table] = queue.Queue()
    threading.Thread(target=lambda: taken.put(pool.take(pending)), daemon=True).start()
    fast.reply(fast.next_sent())
    assert taken.get(timeout=TIMEOUT_S).equals(rows_of(task_of(5)))
    pool.retire(fast)
    slow.reply(late)  # ignored
    following = pool.request(task_of(6))
    sent = slow.next_sent()
    slow.reply(sent)
    assert pool.take(following).equals(rows_of(task_of(6)))
    pool.close()


def test_the_worker_executes_a_late_slice_without_another_feeder(pools: Pools) -> None:
    clock = ManualClock()
    pool, link = FeederPool(rows_of, clock), ManualLink()
    pending = pool.request(task_of(0))
    pools.serve(pool, link)
    link.next_sent()
    clock.time_s += 60.0  # there is no median yet
    assert pool.take(pending).equals(rows_of(task_of(0)))
    assert pool.own_count == 1
    pool.close()


def test_the_worker_executes_a_queued_slice_that_no_feeder_takes_in_time(pools: Pools) -> None:
    clock = ManualClock()
    pool, link = FeederPool(rows_of, clock, credit=1), ManualLink()
    slices = [pool.request(task_of(number)) for number in range(3)]
    pools.serve(pool, link)
    first = link.next_sent()
    taken = pools.take(pool, slices[2], clock)
    clock.time_s = 59.0
    link.reply(first)
    link.next_sent()
    clock.time_s = 60.0  # there is no median yet
    pool.request(task_of(3))  # wakes the thread that waits
    assert taken.get(timeout=TIMEOUT_S).equals(rows_of(task_of(2)))
    assert pool.own_count == 1
    pool.close()


def test_no_thread_waits_for_a_silent_feeder_whose_credit_is_used(pools: Pools) -> None:
    clock = ManualClock()
    pool, link = FeederPool(rows_of, clock, credit=2), ManualLink()
    slices = [pool.request(task_of(number)) for number in range(5)]
    pools.serve(pool, link)
    link.next_sent(), link.next_sent()
    clock.time_s = 60.0
    assert all(pool.take(one).equals(rows_of(one.task)) for one in slices)
    assert pool.own_count == 5
    pool.close()


def test_a_silent_feeder_that_returns_a_slice_gets_further_ones(pools: Pools) -> None:
    clock = ManualClock()
    pool, link = FeederPool(rows_of, clock, credit=1), ManualLink()
    slices = [pool.request(task_of(number)) for number in range(3)]
    pools.serve(pool, link)
    late = link.next_sent()
    clock.time_s = 60.0
    pool.take(slices[0])
    link.reply(late)
    for pending in slices[1:]:
        link.reply(link.next_sent())
        assert pool.take(pending).equals(rows_of(pending.task))
    assert pool.own_count == 1
    pool.close()


def test_a_feeder_that_stays_silent_is_disconnected(pools: Pools) -> None:
    clock = ManualClock()
    pool, link = FeederPool(rows_of, clock, credit=1), ManualLink()
    slices = [pool.request(task_of(number)) for number in range(2)]
    thread = pools.serve(pool, link)
    link.next_sent()
    clock.time_s = 599.0
    pool.take(slices[0])
    assert pool.feeder_count == 1
    clock.time_s = 600.0
    pool.take(slices[1])
    thread.join(TIMEOUT_S)
    assert link.is_closed
    assert pool.feeder_count == 0


def test_a_feeder_without_tasks_is_not_silent(pools: Pools) -> None:
    clock = ManualClock()
    pool, link = FeederPool(execute_nothing, clock), ManualLink()
    for number in range(2):
        clock.time_s += 1000.0
        pending = pool.request(task_of(number))
        if not number:
            pools.serve(pool, link)
        link.reply(link.next_sent())
        assert pool.take(pending).equals(rows_of(task_of(number)))
    pool.close()


def test_the_worker_executes_a_slice_that_ends_two_feeders(pools: Pools) -> None:
    pool = FeederPool(rows_of, SystemClock(), credit=2)
    slices = [pool.request(task_of(number)) for number in range(2)]
    for name in ("a", "b"):
        lost = ManualLink(name)
        thread = pools.serve(pool, lost)
        assert lost.next_sent().task == task_of(0)
        lost.break_connection()
        thread.join(TIMEOUT_S)
    pools.serve(pool, other := ManualLink("other"))
    # It waited behind the one that ended the feeders, and is not to blame.
    sent = other.next_sent()
    assert sent.task == task_of(1)
    other.reply(sent)
    assert [pool.take(one).equals(rows_of(one.task)) for one in slices] == [True] * 2
    assert pool.own_count == 1
    pool.close()


def test_results_beyond_the_limit_in_bytes_are_not_requested(pools: Pools) -> None:
    size = rows_of(task_of(0)).nbytes
    pool = FeederPool(execute_nothing, SystemClock(), credit=1, max_bytes=2 * size)
    link = ManualLink()
    slices = [pool.request(task_of(number)) for number in range(4)]
    pools.serve(pool, link)
    for _ in range(2):
        link.reply(link.next_sent())
    with pytest.raises(queue.Empty):
        link.sent.get(timeout=0.2)
    pool.take(slices[0])
    assert link.next_sent().task == task_of(2)
    pool.close()


def test_a_slice_that_the_training_waits_for_exceeds_the_limit_in_bytes(pools: Pools) -> None:
    pool = FeederPool(execute_nothing, SystemClock(), credit=1, max_bytes=0)
    link = ManualLink()
    slices = [pool.request(task_of(number)) for number in range(2)]
    pools.serve(pool, link)
    link.reply(link.next_sent())
    taken: queue.Queue[pa.Table] = queue.Queue()
    threading.Thread(target=lambda: taken.put(pool.take(slices[1])), daemon=True).start()
    link.reply(link.next_sent())
    assert taken.get(timeout=TIMEOUT_S).equals(rows_of(task_of(1)))
    pool.close()


def test_each_feeder_gets_the_slices_of_its_lanes(pools: Pools) -> None:
    pool = FeederPool(execute_nothing, SystemClock(), credit=1)
    links = [ManualLink("a"), ManualLink("b")]
    slices = [pool.request(task_of(number, lane)) for number in range(3) for lane in range(2)]
    pools.serve(pool, *links)
    lanes: dict[str, set[int]] = {"a": set(), "b": set()}
    for _ in range(3):
        for link, sent in [(link, link.next_sent()) for link in links]:
            lanes[link.name].add(sent.task.lane)
            link.reply(sent)
    assert sorted(map(len, lanes.values())) == [1, 1]
    assert all(pool.take(one).equals(rows_of(one.task)) for one in slices)
    pool.close()


def test_a_cancelled_slice_is_not_sent(pools: Pools) -> None:
    pool, link = FeederPool(execute_nothing, SystemClock()), ManualLink()
    slices = [pool.request(task_of(number)) for number in range(2)]
    pool.cancel(slices[0])
    pools.serve(pool, link)
    assert link.next_sent().task == task_of(1)
    assert link.sent.empty()
    pool.close()


def test_a_retired_feeder_returns_what_it_has_and_gets_nothing_more(pools: Pools) -> None:
    pool, link = FeederPool(rows_of, SystemClock(), credit=2), ManualLink()
    slices = [pool.request(task_of(number)) for number in range(4)]
    thread = pools.serve(pool, link)
    held = [link.next_sent(), link.next_sent()]
    pool.retire(link)
    for sent in held:
        link.reply(sent)
    thread.join(TIMEOUT_S)
    assert [pool.take(one).equals(rows_of(one.task)) for one in slices] == [True] * 4
    assert pool.own_count == 2
    assert link.is_closed


def test_a_closed_pool_executes_what_is_taken_later(pools: Pools) -> None:
    pool, link = FeederPool(rows_of, SystemClock()), ManualLink()
    pending = pool.request(task_of(0))
    pools.serve(pool, link)
    link.next_sent()
    pool.close()
    assert pool.take(pending).equals(rows_of(task_of(0)))


class RandomFeeder(threading.Thread):
    """Answers in random order, fails, and breaks its connection."""

    def __init__(self, pool: FeederPool, seed: int) -> None:
        super().__init__(daemon=True)
        self._pool, self._rng = pool, random.Random(seed)

    def run(self) -> None:
        for _ in range(20):
            self._pool.serve(RandomLink(self._rng))


class RandomLink(ManualLink):
    def __init__(
        self, rng: random.Random, execute: Callable[[SliceTask], pa.Table] = rows_of
    ) -> None:
        super().__init__()
        self._rng = rng
        self._execute = execute
        self._held: list[Sent] = []

    def send(self, number: int, task: SliceTask) -> None:
        self._held.append(Sent(number, task))

    def receive(self) -> SliceReply | FailureReply:
        if self.is_closed or self._rng.random() < 0.1:
            raise ConnectionResetError("killed")
        sent = self._held.pop(self._rng.randrange(len(self._held)))
        if self._rng.random() < 0.1:
            return FailureReply(sent.number, "Traceback")
        table = self._execute(sent.task)
        return SliceReply(sent.number, table, table.nbytes)


def test_every_slice_is_taken_whatever_the_feeders_do(rng: random.Random) -> None:
    for _ in range(10):
        pool = FeederPool(rows_of, SystemClock(), credit=rng.randint(1, 5))
        feeders = [RandomFeeder(pool, rng.randrange(2**32)) for _ in range(3)]
        for feeder in feeders:
            feeder.start()
        slices = [pool.request(task_of(number, rng.randrange(4))) for number in range(200)]
        assert all(pool.take(one).equals(rows_of(one.task)) for one in slices)
        pool.close()
        for feeder in feeders:
            feeder.join(TIMEOUT_S)


def test_an_invalid_reply_is_a_lost_feeder(pools: Pools) -> None:
    class InvalidLink(ManualLink):
        def receive(self) -> SliceReply | FailureReply:
            raise IntegrityError("A feeder sent an invalid reply.")

    pool, link = FeederPool(rows_of, SystemClock()), InvalidLink()
    pending = pool.request(task_of(0))
    pools.serve(pool, link)
    assert pool.take(pending).equals(rows_of(task_of(0)))
