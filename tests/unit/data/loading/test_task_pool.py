from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import CancelledError

import pytest

from spotfit.data.loading.task_pool import TaskPool


@pytest.fixture
def pool() -> Iterator[TaskPool]:
    pool = TaskPool(1, "test-tasks")
    yield pool
    pool.close()


def test_the_most_urgent_task_runs_first(pool: TaskPool) -> None:
    is_submitted, order = threading.Event(), list[int]()
    pool.submit(0, is_submitted.wait)
    tasks = [pool.submit(urgency, lambda u=urgency: order.append(u)) for urgency in (3, 1, 2, 1)]  # type: ignore[misc]
    is_submitted.set()
    for task in tasks:
        task.result()

    assert order == [1, 1, 2, 3]


def test_a_task_after_others_gets_their_results(pool: TaskPool) -> None:
    inputs = [pool.submit(0, lambda n=n: n * n) for n in range(4)]  # type: ignore[misc]

    assert pool.after(inputs, 0, sum).result() == 14
    assert pool.after(inputs, 0, max).result() == 9


def test_an_exception_of_an_input_is_that_of_the_task(pool: TaskPool) -> None:
    inputs = [pool.submit(0, lambda: 1), pool.submit(0, lambda: 1 // 0)]

    with pytest.raises(ZeroDivisionError):
        pool.after(inputs, 0, sum).result()


def test_results_of_inputs_are_freed(pool: TaskPool) -> None:
    class Rows(list[int]):
        """A value to which weak references exist."""

    may_run, references = threading.Event(), list[weakref.ref[Rows]]()

    def read() -> Rows:
        may_run.wait()
        rows = Rows()
        references.append(weakref.ref(rows))
        return rows

    gc.disable()
    try:
        count = pool.after([pool.submit(0, read)], 0, len)
        may_run.set()
        assert count.result() == 1
        # The thread may hold its last task until it takes the next one.
        pool.submit(0, lambda: None).result()
        assert references[0]() is None
    finally:
        gc.enable()


def test_closing_cancels_tasks_that_do_not_run(pool: TaskPool) -> None:
    is_running, may_end = threading.Event(), threading.Event()

    def run() -> bool:
        is_running.set()
        return may_end.wait()

    running = pool.submit(0, run)
    waiting = pool.submit(1, lambda: 1)
    dependent = pool.after([waiting], 1, sum)
    is_running.wait()
    pool.close()
    may_end.set()

    assert running.result() is True
    assert waiting.cancelled()
    with pytest.raises(CancelledError):
        dependent.result()
    with pytest.raises(CancelledError):
        pool.submit(0, lambda: 1).result()
