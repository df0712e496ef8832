"""Threads that run the most urgent of the submitted tasks first."""

from __future__ import annotations

import heapq
import itertools
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple, TypeVar

T = TypeVar("T")
S = TypeVar("S")


class _Task(NamedTuple):
    urgency: int
    number: int
    """Unique, so that tasks of equal urgency run in the order of their submission."""
    future: Future[Any]
    call: Callable[[], Any]


class TaskPool:
    """Threads for tasks with an urgency: the lowest number runs first."""

    def __init__(self, threads: int, name: str) -> None:
        self._executor = ThreadPoolExecutor(threads, name)
        self._lock = threading.Lock()
        self._tasks: list[_Task] = []
        self._numbers = itertools.count()
        self._is_closed = False
        self._process_id = os.getpid()

    @property
    def is_forked(self) -> bool:
        """Whether this process is a fork of that which created the pool, so has no threads."""
        return os.getpid() != self._process_id

    def submit(self, urgency: int, call: Callable[[], T]) -> Future[T]:
        """Run `call` in a thread. After `close()` the future is cancelled."""
        future: Future[T] = Future()
        self._submit(urgency, call, future)
        return future

    def after(
        self, inputs: Sequence[Future[S]], urgency: int, call: Callable[[list[S]], T]
    ) -> Future[T]:
        """Run `call` with the results of `inputs`, at least one, when all are done.

        If an input has failed, the future has its exception.
        """
        result: Future[T] = Future()
        pending = list(inputs)
        undone = len(pending)
        lock = threading.Lock()

        def run() -> T:
            values = [future.result() for future in pending]
            # The inputs refer to this function, which must not keep them alive.
            pending.clear()
            return call(values)

        def count_down(_done: Future[S]) -> None:
            nonlocal undone
            with lock:
                undone -= 1
                is_last = undone == 0
            if is_last:
                self._submit(urgency, run, result)

        for future in inputs:
            future.add_done_callback(count_down)
        return result

    def close(self) -> None:
        """Cancel the tasks that do not run yet, without waiting for those that do. Idempotent."""
        if self.is_forked:
            return  # a thread of the other process may hold the lock
        with self._lock:
            self._is_closed = True
            tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.future.cancel()
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _submit(self, urgency: int, call: Callable[[], T], future: Future[T]) -> None:
        with self._lock:
            if not self._is_closed:
                heapq.heappush(self._tasks, _Task(urgency, next(self._numbers), future, call))
                self._executor.submit(self._run_next)
                return
        future.cancel()

    def _run_next(self) -> None:
        with self._lock:
            if not self._tasks:
                return
            task = heapq.heappop(self._tasks)
        # An interpreter that exits waits for its threads, but needs no more results.
        if not threading.main_thread().is_alive():
            task.future.cancel()
        if not task.future.set_running_or_notify_cancel():
            return
        try:
            value = task.call()
        except BaseException as error:  # noqa: BLE001 - raised again where the result is taken
            task.future.set_exception(error)
        else:
            task.future.set_result(value)
