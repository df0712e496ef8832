"""Reads of several parts at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterator

import pyarrow as pa
import pytest

from spotfit.data.plans.read_ahead import READ_THREADS, ReadTask, read_in_order


def task(number: int, size_bytes: int = 1) -> ReadTask[pa.Table]:
    return ReadTask(size_bytes, lambda: pa.table({"n": [number]}))


def numbers(tasks: list[ReadTask[pa.Table]], threads: int) -> list[int]:
    return [block["n"][0].as_py() for block in read_in_order(tasks, threads=threads)]


@pytest.mark.parametrize("threads", [0, 1, READ_THREADS])
def test_results_are_in_order(threads: int) -> None:
    assert numbers([task(n) for n in range(100)], threads) == list(range(100))


def test_several_tasks_run_at_the_same_time() -> None:
    barrier = threading.Barrier(3)

    def read() -> pa.Table:
        barrier.wait(timeout=30)
        return pa.table({"n": [1]})

    assert numbers([ReadTask(1, read)] * 3, threads=3) == [1, 1, 1]


def test_without_threads_a_task_runs_when_it_is_needed() -> None:
    started: list[int] = []

    def counted(number: int) -> Callable[[], pa.Table]:
        def read() -> pa.Table:
            started.append(number)
            return pa.table({"n": [number]})

        return read

    blocks = read_in_order([ReadTask(1, counted(n)) for n in range(5)], threads=0)
    next(blocks)
    assert started == [0]


def test_large_blocks_are_not_read_ahead_beyond_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spotfit.data.plans.read_ahead._MAX_PENDING_BYTES", 100)
    requested: list[int] = []

    def tasks() -> Iterator[ReadTask[pa.Table]]:
        for number in range(10):
            requested.append(number)
            yield task(number, size_bytes=60)

    blocks = read_in_order(tasks(), threads=4)
    next(blocks)
    assert len(requested) == 2


def test_an_error_is_raised_where_its_result_is_due() -> None:
    def fail() -> pa.Table:
        raise OSError("no such bucket")

    blocks = read_in_order([task(0), ReadTask(1, fail), task(2)], threads=2)
    assert next(blocks)["n"].to_pylist() == [0]
    with pytest.raises(OSError, match="no such bucket"):
        next(blocks)


def test_no_thread_remains_after_a_pass_that_was_not_finished() -> None:
    threads: set[threading.Thread] = set()

    def read() -> int:
        threads.add(threading.current_thread())
        return 0

    blocks = read_in_order((ReadTask(1, read) for _ in range(1000)), threads=2)
    assert isinstance(blocks, Generator)
    next(blocks)
    blocks.close()
    assert threads
    assert not [thread.name for thread in threads if thread.is_alive()]
