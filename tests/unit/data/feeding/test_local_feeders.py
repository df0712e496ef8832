"""Feeder processes beside a worker, some of which are killed."""

from __future__ import annotations

import itertools
import os
import random
import signal
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator

import cloudpickle
import pyarrow as pa
import pytest

from spotfit.core.clock import Clock
from spotfit.data.feeding import local_feeders, processes
from spotfit.data.feeding.feeder_process import FeederInit
from spotfit.data.feeding.local_feeders import LocalFeeders
from spotfit.data.feeding.pool import FeederPool
from spotfit.data.feeding.processes import FeederProcess
from spotfit.data.loading.slice_tasks import SliceTask
from spotfit.data.loading.slices import SliceReader
from spotfit.data.plans.transforms import BlockFunction
from spotfit.host.system import SystemClock
from tests.unit.data.feeding.augmented_rows import (
    NAME,
    Pass,
    RaiseAt,
    dataset_of,
    shipped,
)

pytestmark = pytest.mark.real_time("starts processes")
TIMEOUT_S = 60.0
LOOKAHEAD = 24


def execute_nothing(task: SliceTask) -> pa.Table:
    raise AssertionError(f"{task} was executed by the worker")


Start = Callable[..., tuple[FeederPool, LocalFeeders]]


@pytest.fixture
def start() -> Iterator[Start]:
    started: list[tuple[FeederPool, LocalFeeders]] = []

    def start_feeders(
        shipped_datasets: object,
        count: int,
        execute: Callable[[SliceTask], pa.Table],
        clock: Clock | None = None,
    ) -> tuple[FeederPool, LocalFeeders]:
        pool = FeederPool(execute, clock or SystemClock())
        feeders = LocalFeeders(pool, FeederInit(), cloudpickle.dumps(shipped_datasets))
        started.append((pool, feeders))
        feeders.start(count)
        wait_until(lambda: pool.feeder_count == count)
        return pool, feeders

    yield start_feeders
    for pool, feeders in started:
        pool.close()
        feeders.close()


def wait_until(condition: Callable[[], bool]) -> None:
    ends_at = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < ends_at, "the condition did not become true"
        time.sleep(0.01)


def read_pass(
    pool: FeederPool, one_pass: Pass, before_each: Callable[[], None] = lambda: None
) -> list[pa.Table]:
    """Take all slices in order, with those of the next steps requested."""
    tasks, requested, taken = one_pass.tasks(), deque[object](), []
    for _ in one_pass.expected:
        while len(requested) < LOOKAHEAD and (task := next(tasks, None)) is not None:
            requested.append(pool.request(task))
        before_each()
        taken.append(pool.take(requested.popleft()))  # type: ignore[arg-type]
    return taken


def test_results_of_processes_have_the_bytes_of_those_of_this_process(start: Start) -> None:
    dataset = dataset_of(300)
    pool, _ = start(shipped(dataset), 2, execute_nothing)
    assert read_pass(pool, one_pass := Pass(dataset)) == one_pass.expected


def test_results_are_equal_while_processes_are_killed(start: Start, rng: random.Random) -> None:
    dataset = dataset_of(360)
    one_pass = Pass(dataset, seed=rng.randrange(2**32))
    pool, feeders = start(shipped(dataset), 3, SliceReader({NAME: dataset}).read)
    killed = 0

    def kill_some() -> None:
        nonlocal killed
        if rng.random() < 0.1 and (pids := feeders.pids):
            os.kill(rng.choice(pids), signal.SIGKILL)
            killed += 1

    assert read_pass(pool, one_pass, kill_some) == one_pass.expected
    assert killed


def test_results_are_equal_if_a_process_is_stopped_and_not_killed(start: Start) -> None:
    dataset = dataset_of(300)
    one_pass = Pass(dataset)
    pool, feeders = start(shipped(dataset), 2, SliceReader({NAME: dataset}).read)
    steps = iter(range(len(one_pass.expected)))

    def stop_one() -> None:
        if next(steps) == 20:
            os.kill(feeders.pids[0], signal.SIGSTOP)

    assert read_pass(pool, one_pass, stop_one) == one_pass.expected


def test_a_killed_process_is_replaced(start: Start) -> None:
    dataset = dataset_of(30)
    pool, feeders = start(shipped(dataset), 1, execute_nothing)
    (pid,) = feeders.pids
    pool.take(pool.request(next(Pass(dataset).tasks())))
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: feeders.pids not in ([], [pid]))
    wait_until(lambda: pool.feeder_count == 1)
    assert pool.take(pool.request(next(Pass(dataset).tasks()))) == Pass(dataset).expected[0]


class FastClock(SystemClock):
    """A clock of which each reading is an hour after the one before."""

    def __init__(self) -> None:
        self.hours = itertools.count()

    def now(self) -> float:
        return 3600.0 * next(self.hours)


def test_a_process_that_hangs_is_killed_and_replaced(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "_EXIT_TIMEOUT_S", 0.0)
    dataset = dataset_of(30)
    pool, feeders = start(shipped(dataset), 1, SliceReader({NAME: dataset}).read, FastClock())
    (pid,) = feeders.pids
    os.kill(pid, signal.SIGSTOP)
    task = next(Pass(dataset).tasks())
    pool.request(task)  # for the process: at this clock no thread waits until it has another one

    def is_replaced() -> bool:
        assert pool.take(pool.request(task)) == Pass(dataset).expected[0]
        return feeders.pids not in ([], [pid])

    wait_until(is_replaced)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_an_exception_of_user_code_is_raised_where_the_slice_is_taken(start: Start) -> None:
    dataset = dataset_of(30, RaiseAt(7))
    good = Pass(dataset_of(30, RaiseAt(-1)))
    pool, _ = start(shipped(dataset), 1, SliceReader({NAME: dataset}).read)
    with pytest.raises(ValueError, match="bad row 7"):
        read_pass(pool, good)


class Crash:
    """Ends the process in which it is called, unless that is the one of the test."""

    name = identity = "map_batches(crash)"
    runs_user_code = True

    def __init__(self, survivor: int) -> None:
        self.survivor = survivor

    def bind(self) -> BlockFunction:
        return self._crash

    def _crash(self, block: pa.Table) -> pa.Table:
        if os.getpid() != self.survivor:
            os.kill(os.getpid(), signal.SIGKILL)
        return block


def test_code_that_crashes_every_feeder_is_executed_by_the_worker(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    dataset = dataset_of(30, Crash(os.getpid()))
    one_pass = Pass(dataset)
    pool, _ = start(shipped(dataset), 1, SliceReader({NAME: dataset}).read)
    assert read_pass(pool, one_pass) == one_pass.expected
    task = next(one_pass.tasks())
    wait_until(
        lambda: (
            pool.take(pool.request(task)) == one_pass.expected[0]
            and "feeder.abandoned" in caplog.text
        )
    )


def test_feeders_import_no_torch_for_transforms_without_it(start: Start) -> None:
    dataset = dataset_of(30, ReportModules())
    pool, _ = start(shipped(dataset), 1, execute_nothing)
    table = pool.take(pool.request(next(Pass(dataset).tasks())))
    assert table.column("has_torch").to_pylist() == [False] * 4


class ReportModules:
    name = identity = "map_batches(report_modules)"
    runs_user_code = True

    def bind(self) -> BlockFunction:
        return self._report

    def _report(self, block: pa.Table) -> pa.Table:
        import sys

        return block.append_column("has_torch", pa.array(["torch" in sys.modules] * len(block)))


def test_feeders_closed_during_a_start_leave_no_socket_or_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started: list[ClosingProcess] = []

    class ClosingProcess(FeederProcess):
        """Closes the feeders between the start of the process and its registration."""

        connection: socket.socket

        def connect(self) -> socket.socket:
            started.append(self)
            feeders.close()
            self.connection = super().connect()
            return self.connection

    monkeypatch.setattr(local_feeders, "FeederProcess", ClosingProcess)
    pool = FeederPool(execute_nothing, SystemClock())
    feeders = LocalFeeders(pool, FeederInit(), cloudpickle.dumps(shipped(dataset_of(30))))
    feeders.start(1)
    wait_until(lambda: bool(started) and not started[0].is_running)
    (process,) = started
    assert process.connection.fileno() == -1


def test_processes_end_with_their_owner(start: Start) -> None:
    dataset = dataset_of(30)
    _, feeders = start(shipped(dataset), 2, execute_nothing)
    pids = feeders.pids
    feeders.close()
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
