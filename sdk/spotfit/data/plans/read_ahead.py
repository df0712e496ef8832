"""Reads of a pass over a dataset outside of training, several at a time, in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Generic, NamedTuple, TypeVar

READ_THREADS = 8
"""Requests at a time: a bucket answers each after 20 to 50 ms."""
_MAX_PENDING_BYTES = 128 * 2**20
"""Size of what is read ahead; a block that is larger is read alone."""


ResultT = TypeVar("ResultT")


class ReadTask(NamedTuple, Generic[ResultT]):
    """A part of a dataset that is to be read."""

    size_bytes: int
    """Of the rows in memory."""
    read: Callable[[], ResultT]
    """Returns the rows, or what is computed of them."""


def read_in_order(
    tasks: Iterable[ReadTask[ResultT]], *, threads: int = READ_THREADS
) -> Iterator[ResultT]:
    """Yield the results of the tasks in order; see `calls_in_order`."""
    return calls_in_order(tasks, threads=threads)


def calls_in_order(
    calls: Iterable[tuple[int, Callable[[], ResultT]]], *, threads: int
) -> Iterator[ResultT]:
    """Yield the results of the calls in order, and run the next ones in `threads` threads.

    Each call has a size in bytes, which limits how many are pending. With 0 threads, each runs when
    its result is asked for. Raises what a call raises.
    """
    if not threads:
        for _, call in calls:
            yield call()
        return
    executor = ThreadPoolExecutor(threads, "spotfit-read")
    pending: deque[tuple[int, Future[ResultT]]] = deque()
    try:
        for size_bytes, call in calls:
            pending.append((size_bytes, executor.submit(call)))
            while len(pending) > 2 * threads or _exceeds_limit(pending):
                yield pending.popleft()[1].result()
        while pending:
            yield pending.popleft()[1].result()
    finally:
        executor.shutdown(cancel_futures=True)


def _exceeds_limit(pending: deque[tuple[int, Future[Any]]]) -> bool:
    return len(pending) > 1 and sum(size for size, _ in pending) > _MAX_PENDING_BYTES
