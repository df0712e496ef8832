"""Conversion of steps to batches ahead of the training loop, in a thread beside it."""

from __future__ import annotations

import atexit
import os
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import cache
from queue import SimpleQueue
from typing import Any, Generic, TypeAlias, TypeVar
from weakref import WeakSet

from spotfit.core.errors import InfrastructureError
from spotfit.host.daemon_threads import start_daemon_thread

Step = TypeVar("Step")
Batch = TypeVar("Batch")
_Task: TypeAlias = "tuple[Callable[[], Any], Future[Any]] | None"
_END = object()


class ConvertedSteps(Iterator[Batch], Generic[Step, Batch]):
    """Yields `convert(step)` for each step, in order, and prepares `ahead` further batches.

    `convert` is called in a thread beside the caller's, and `steps` is advanced there too if
    `advance_in_thread`, else in the thread that asks for batches. With `ahead` 0 everything happens
    in the latter. An exception is raised in place of its batch, and ends the iteration. The thread
    ends with the iteration, when this object is closed or collected, and when the interpreter
    exits.

    A class, because a generator would keep every batch alive until the next one is ready.
    """

    def __init__(
        self,
        steps: Iterator[Step],
        convert: Callable[[Step], Batch],
        *,
        ahead: int,
        advance_in_thread: bool,
    ) -> None:
        self._steps = steps
        self._convert = convert
        self._ahead = ahead
        self._advances_in_thread = advance_in_thread
        self._pending: deque[Future[Any]] = deque()
        self._has_more = True
        self._thread: _TaskThread | None = None
        self._process_id = os.getpid()

    def __next__(self) -> Batch:
        if os.getpid() != self._process_id:
            raise InfrastructureError(
                "This iterator over a dataset was created before the process was forked; its "
                "thread does not exist here.",
                do="Create the iterator in the process that uses it.",
            )
        try:
            if not self._ahead:
                return self._convert(next(self._steps))
            while self._has_more and len(self._pending) <= self._ahead:
                self._submit_step()
            batch: Any = self._pending.popleft().result() if self._pending else _END
        except BaseException:
            self.close()
            raise
        if batch is _END:
            self.close()
            raise StopIteration
        return batch  # type: ignore[no-any-return]

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        """End the iteration and the thread, without waiting for a call that is in progress."""
        self._has_more = False
        while self._pending:
            self._pending.popleft().cancel()
        steps, self._steps = self._steps, iter(())
        close_steps: Callable[[], None] | None = getattr(steps, "close", None)
        if self._thread is None:
            if close_steps is not None:
                close_steps()
            return
        # A generator cannot be closed while another thread executes it.
        if close_steps is not None and self._advances_in_thread:
            self._thread.submit(close_steps)
        elif close_steps is not None:
            close_steps()
        self._thread.close()
        self._thread = None

    def _submit_step(self) -> None:
        if self._thread is None:
            self._thread = _TaskThread("spotfit-batches")
        steps, convert = self._steps, self._convert
        if self._advances_in_thread:
            self._pending.append(self._thread.submit(lambda: _convert_next(steps, convert)))
            return
        try:
            step = next(steps, _END)
        except Exception as error:  # noqa: BLE001 - of the user's functions
            # Raised in its place: batches of earlier steps are still to be returned.
            failed: Future[Any] = Future()
            failed.set_exception(error)
            self._pending.append(failed)
            self._has_more = False
            return
        self._has_more = step is not _END
        if self._has_more:
            self._pending.append(self._thread.submit(lambda: convert(step)))  # type: ignore[arg-type]


def _convert_next(steps: Iterator[Step], convert: Callable[[Step], Any]) -> Any:
    for step in steps:
        return convert(step)
    return _END


class _TaskThread:
    """A daemon thread that calls functions in the order of their submission."""

    def __init__(self, name: str) -> None:
        self._tasks: SimpleQueue[_Task] = SimpleQueue()
        tasks = self._tasks
        # The function does not refer to this object, which may be collected while it waits.
        start_daemon_thread(name, lambda: _run_tasks(tasks))
        _open_threads.add(self)
        # After the start: the exit calls this first, and then waits for the threads.
        _close_at_exit()

    def submit(self, function: Callable[[], Any]) -> Future[Any]:
        """Call `function` in the thread; its result or exception is that of the future."""
        future: Future[Any] = Future()
        self._tasks.put((function, future))
        return future

    def close(self) -> None:
        """End the thread after the submitted calls, without waiting."""
        self._tasks.put(None)
        _open_threads.discard(self)


_open_threads: WeakSet[_TaskThread] = WeakSet()


def _run_tasks(tasks: SimpleQueue[_Task]) -> None:
    while (task := tasks.get()) is not None:
        function, future = task
        if not future.set_running_or_notify_cancel():
            continue
        try:
            future.set_result(function())
        except BaseException as error:  # noqa: BLE001 - of the user's functions; raised by result()
            future.set_exception(error)
        # The batch must not be kept alive until the next task comes.
        del task, function, future


@cache
def _close_at_exit() -> None:
    atexit.register(_close_threads)


def _close_threads() -> None:
    for thread in tuple(_open_threads):
        thread.close()
