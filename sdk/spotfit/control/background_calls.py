"""Slow calls (bucket, cloud APIs) for an event loop that must not block.

A call is identified by name and polled: `run(name, job)` starts it, or returns its result once it
is done. `SynchronousCalls` executes calls at once, `ThreadedCalls` in threads, and `RetryingCalls`
repeats failed ones.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, Protocol

from spotfit.core.backoff import exponential_backoff_s
from spotfit.host import log
from spotfit.host.daemon_threads import start_daemon_thread

# The first retry follows quickly, because most bucket errors are transient. The maximum is short: a
# run without its bucket makes no decisions, and one request every 2 s does not load a recovering
# store.
_MIN_RETRY_DELAY_S = 0.1
_MAX_RETRY_DELAY_S = 2.0


@dataclass(frozen=True, slots=True)
class BackgroundResult:
    """The outcome of a background call: the value returned by its job, or the exception it raised.

    `error` is None if the job succeeded.
    """

    value: Any = None
    error: Exception | None = None


class BackgroundCalls(Protocol):
    """Runs calls by name; at most one call of a name is in flight.

    Used by one event loop: its methods are called in the loop's thread only, and never block it
    unless the implementation is `SynchronousCalls`.
    """

    def run(self, name: str, job: Callable[[], Any]) -> BackgroundResult | None:
        """Start `job` under `name`, or return the result of the call of that name once it is done.

        Returns None while the call is in flight: call it again with the same name until there is a
        result, which is returned once; a further call starts `job` again. While a call is in flight
        `job` is ignored. An `Exception` of the job is returned in `BackgroundResult.error`, not
        raised. The name contains what distinguishes calls, such as "append 42".
        """
        ...

    def send(self, name: str, job: Callable[[], Any]) -> None:
        """Start `job` under `name` and discard its outcome; do nothing if one is in flight.

        For writes whose failure does no harm, such as cached views. Do not pass the name to `run`.
        """
        ...


class SynchronousCalls:
    """Executes every call at once: for simulations, and for callers that may block."""

    def run(self, name: str, job: Callable[[], Any]) -> BackgroundResult | None:
        """Execute `job` before returning; the result is never None. Every call executes a job."""
        return _run_call(job)

    def send(self, name: str, job: Callable[[], Any]) -> None:
        """Execute `job` before returning; its result, also an exception, is discarded."""
        _run_call(job)


class ThreadedCalls:
    """Executes calls in threads, and calls `wake` (from a thread) when one is done.

    One per event loop, which then calls `run` again to collect the result. `threads` is the number
    of calls that run concurrently; calls of `send` (cached views) have one further thread.
    """

    def __init__(self, wake: Callable[[], None], threads: int = 4) -> None:
        self._wake = wake
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="spotfit-background-call")
        # A separate thread: large writes that nothing waits for must not delay the other calls.
        self._send_pool = ThreadPoolExecutor(1, thread_name_prefix="spotfit-background-send")
        self._in_flight: dict[str, Future[BackgroundResult]] = {}

    def run(self, name: str, job: Callable[[], Any]) -> BackgroundResult | None:
        """Start `job` in a thread and return None; later, return its result once it is done."""
        if name not in self._in_flight:
            self._in_flight[name] = self._start(job, self._pool)
            return None
        if not self._in_flight[name].done():
            return None
        return self._in_flight.pop(name).result()

    def send(self, name: str, job: Callable[[], Any]) -> None:
        """Start `job` in the thread reserved for `send`, unless one of that name is in flight."""
        future = self._in_flight.get(name)
        if future is None or future.done():
            self._in_flight[name] = self._start(job, self._send_pool)

    def close(self) -> None:
        """Start no further calls, and cancel those that are queued. Does not block.

        Calls that are executing finish in the background. Nothing may be called afterwards.
        """
        for pool in (self._pool, self._send_pool):
            pool.shutdown(wait=False, cancel_futures=True)

    def _start(self, job: Callable[[], Any], pool: ThreadPoolExecutor) -> Future[BackgroundResult]:
        future = pool.submit(_run_call, job)
        # Callbacks run after the result is set, so the woken loop finds it.
        future.add_done_callback(lambda _: self._wake())
        return future


class DaemonCalls:
    """Executes each call in a daemon thread of its own, which does not keep the process alive.

    For a process of the user, which must be able to exit while a call hangs. `ThreadedCalls` are
    joined without a time limit when the interpreter exits.
    """

    def __init__(self) -> None:
        self._results: dict[str, SimpleQueue[BackgroundResult]] = {}

    def run(self, name: str, job: Callable[[], Any]) -> BackgroundResult | None:
        """Start `job` in a thread and return None; later, return its result once it is done."""
        if name not in self._results:
            results: SimpleQueue[BackgroundResult] = SimpleQueue()
            self._results[name] = results
            start_daemon_thread(name, lambda: results.put(_run_call(job)))
            return None
        if self._results[name].empty():
            return None
        return self._results.pop(name).get()

    def send(self, name: str, job: Callable[[], Any]) -> None:
        """Start `job` in a thread; its result, also an exception, is discarded."""
        start_daemon_thread(name, lambda: _run_call(job))


class RetryingCalls:
    """Repeats background calls with exponential backoff until they succeed.

    Schedules nothing: a call is repeated when its owner calls `run` again after the delay.
    """

    def __init__(self, background_calls: BackgroundCalls) -> None:
        self._background_calls = background_calls
        self._failures: dict[str, int] = {}
        self._retry_at: dict[str, float] = {}

    def run(self, name: str, job: Callable[[], Any], now: float) -> BackgroundResult | None:
        """Return the result of the call with that name once it has succeeded, else None.

        Call it repeatedly, for example in every tick, with `now` from the event loop's
        `Clock.now()`, in seconds. A failed job is started again 0.1 s later, after further failures
        up to 2 s later. The first failure of a series is logged; the returned result never has an
        `error`.
        """
        if now < self._retry_at.get(name, now):
            return None
        result = self._background_calls.run(name, job)
        if result is None:
            return None
        if result.error is not None:
            failures = self._failures.get(name, 0)
            # Logged once per series of failures.
            if failures == 0:
                log.warning("background_call.failed", call=name, reason=str(result.error))
            self._failures[name] = failures + 1
            self._retry_at[name] = now + retry_delay_s(failures)
            return None
        # A later call of this name starts with the short delay again.
        self._failures.pop(name, None)
        self._retry_at.pop(name, None)
        return result


def retry_delay_s(failures: int) -> float:
    """Return the seconds to wait before a retry: 0.1, doubled per earlier failure, at most 2.

    `failures`, from 0, is the number of consecutive failures before the last one.
    """
    return exponential_backoff_s(
        failures, shortest_s=_MIN_RETRY_DELAY_S, longest_s=_MAX_RETRY_DELAY_S
    )


def _run_call(job: Callable[[], Any]) -> BackgroundResult:
    try:
        return BackgroundResult(job())
    except Exception as error:  # noqa: BLE001  # passed on to the caller as a result
        return BackgroundResult(error=error)
