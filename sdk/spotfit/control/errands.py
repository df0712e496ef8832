"""Slow calls for a step machine that must never stand still: ask, and ask again for the answer."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

from spotfit.host import log

_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 2.0


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


class Insistent:
    """Errands that are run again, after a pause, until they succeed."""

    def __init__(self, errands: Errands) -> None:
        self._errands = errands
        self._failures: dict[str, int] = {}
        self._again_at: dict[str, float] = {}

    def run(self, name: str, job: Callable[[], Any], now: float) -> Done | None:
        """The answer once the job of that name has succeeded (which forgets it), else None."""
        if now < self._again_at.get(name, now):
            return None
        done = self._errands.run(name, job)
        if done is None:
            return None
        if done.error is not None:
            self._put_off(name, done.error, now)
            return None
        self._failures.pop(name, None)
        self._again_at.pop(name, None)
        return done

    def _put_off(self, name: str, error: Exception, now: float) -> None:
        failures = self._failures.get(name, 0)
        if failures == 0:
            log.warning("errand.failed", errand=name, why=str(error))
        self._failures[name] = failures + 1
        self._again_at[name] = now + pause_s(failures)


def pause_s(failures: int) -> float:
    """How long to wait before a call is made again that has failed so often in a row before."""
    return min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2.0 ** min(failures, 10))


def _done(job: Callable[[], Any]) -> Done:
    try:
        return Done(job())
    except Exception as error:  # noqa: BLE001  # the border between an errand and who sent it
        return Done(error=error)
