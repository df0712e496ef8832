"""Slow calls for a step machine that must never stand still: ask, and ask again for the answer."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class Done:
    """An errand's answer: its value, or the error it raised."""

    value: Any = None
    error: Exception | None = None


class Errands(Protocol):
    """Runs jobs by name, each once at a time."""

    def run(self, name: str, job: Callable[[], Any]) -> Done | None:
        """The answer if the job of that name is done (which forgets it), else None.

        Starts the job if none of that name is under way.
        """
        ...

    def send(self, name: str, job: Callable[[], Any]) -> None:
        """Start the job unless one of that name is under way; nobody waits for its answer."""
        ...


class Inline:
    """Does every errand at once: for simulations, and for callers that may stand still."""

    def run(self, name: str, job: Callable[[], Any]) -> Done | None:
        return _done(job)

    def send(self, name: str, job: Callable[[], Any]) -> None:
        _done(job)


class Threaded:
    """Does errands on a few threads and calls `wake` (from a thread) when one is done."""

    def __init__(self, wake: Callable[[], None], threads: int = 4) -> None:
        self._wake = wake
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="spotfit-errand")
        self._sent = ThreadPoolExecutor(1, thread_name_prefix="spotfit-sent")
        """A lease must not wait behind a slow cloud."""
        self._under_way: dict[str, Future[Done]] = {}

    def run(self, name: str, job: Callable[[], Any]) -> Done | None:
        if name not in self._under_way:
            self._under_way[name] = self._start(job, self._pool)
            return None
        if not self._under_way[name].done():
            return None
        return self._under_way.pop(name).result()

    def send(self, name: str, job: Callable[[], Any]) -> None:
        future = self._under_way.get(name)
        if future is None or future.done():
            self._under_way[name] = self._start(job, self._sent)

    def close(self) -> None:
        """Start nothing more; what is under way may finish."""
        for pool in (self._pool, self._sent):
            pool.shutdown(wait=False, cancel_futures=True)

    def _start(self, job: Callable[[], Any], pool: ThreadPoolExecutor) -> Future[Done]:
        future = pool.submit(_done, job)
        future.add_done_callback(lambda _: self._wake())  # whoever wakes finds the answer
        return future


def _done(job: Callable[[], Any]) -> Done:
    try:
        return Done(job())
    except Exception as error:  # noqa: BLE001  # the border between an errand and who sent it
        return Done(error=error)
