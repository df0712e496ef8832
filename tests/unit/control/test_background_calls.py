"""Background calls: never blocking, results returned once, retries."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from spotfit.control.background_calls import (
    BackgroundCalls,
    BackgroundResult,
    DaemonCalls,
    RetryingCalls,
    SynchronousCalls,
    ThreadedCalls,
)
from spotfit.core.errors import TransientStoreError

TIMEOUT_S = 30.0


class Woken:
    """Counts wake-ups; a test may wait for the next one."""

    def __init__(self) -> None:
        self._semaphore = threading.Semaphore(0)

    def __call__(self) -> None:
        self._semaphore.release()

    def wait(self) -> None:
        assert self._semaphore.acquire(timeout=TIMEOUT_S), "no wake-up"


@pytest.fixture
def woken() -> Woken:
    return Woken()


@pytest.fixture
def threaded(woken: Woken) -> Iterator[ThreadedCalls]:
    calls = ThreadedCalls(woken, threads=2)
    yield calls
    calls.close()


def test_synchronous_calls_return_a_result_or_an_error_at_once() -> None:
    calls: BackgroundCalls = SynchronousCalls()
    assert calls.run("a", lambda: 7) == BackgroundResult(7)
    wrong = calls.run("b", lambda: 1 / 0)
    assert wrong is not None
    assert isinstance(wrong.error, ZeroDivisionError)
    calls.send("c", lambda: 1 / 0)  # its result and its error are discarded


def test_a_daemon_call_is_in_flight_until_done_and_does_not_keep_the_process_alive() -> None:
    calls, started, gate = DaemonCalls(), threading.Event(), threading.Event()
    threads: list[threading.Thread] = []

    def job() -> int:
        threads.append(threading.current_thread())
        started.set()
        gate.wait(TIMEOUT_S)
        return 7

    assert calls.run("a", job) is None
    assert started.wait(TIMEOUT_S)
    assert calls.run("a", job) is None
    assert [thread.daemon for thread in threads] == [True]
    gate.set()
    threads[0].join(TIMEOUT_S)
    assert calls.run("a", job) == BackgroundResult(7)


def test_a_threaded_call_is_in_flight_until_done_and_then_wakes(
    threaded: ThreadedCalls, woken: Woken
) -> None:
    gate = threading.Event()
    assert threaded.run("a", lambda: gate.wait(TIMEOUT_S)) is None
    assert threaded.run("a", lambda: 1 / 0) is None, "it is not started twice"
    gate.set()
    assert result_of_call(threaded, "a", woken) == BackgroundResult(value=True)


def test_a_result_is_returned_once(threaded: ThreadedCalls, woken: Woken) -> None:
    threaded.run("a", lambda: 1)
    assert result_of_call(threaded, "a", woken) == BackgroundResult(1)
    assert threaded.run("a", lambda: 2) is None
    assert result_of_call(threaded, "a", woken) == BackgroundResult(2)


def test_an_exception_is_returned_as_a_result(threaded: ThreadedCalls, woken: Woken) -> None:
    threaded.run("a", lambda: 1 / 0)
    answer = result_of_call(threaded, "a", woken)
    assert isinstance(answer.error, ZeroDivisionError)


def test_a_sent_call_is_not_started_twice(threaded: ThreadedCalls, woken: Woken) -> None:
    gate, runs = threading.Event(), []

    def job() -> None:
        runs.append(1)
        gate.wait(TIMEOUT_S)

    for _ in range(3):
        threaded.send("lease", job)
    gate.set()
    woken.wait()
    assert len(runs) == 1


def test_calls_of_different_names_run_concurrently(threaded: ThreadedCalls, woken: Woken) -> None:
    gate = threading.Event()
    threaded.run("slow", lambda: gate.wait(TIMEOUT_S))
    threaded.run("quick", lambda: 1)
    assert result_of_call(threaded, "quick", woken) == BackgroundResult(1)
    gate.set()


def test_a_sent_call_does_not_wait_for_slow_calls(threaded: ThreadedCalls) -> None:
    gate, renewed = threading.Event(), threading.Event()
    for name in ("observe", "submit", "cancel"):  # more calls than threads
        threaded.run(name, gate.wait)
    threaded.send("lease", renewed.set)
    try:
        assert renewed.wait(TIMEOUT_S), "a late lease would cost the leadership"
    finally:
        gate.set()


def result_of_call(calls: ThreadedCalls, name: str, woken: Woken) -> BackgroundResult:
    woken.wait()
    done = calls.run(name, _never)
    assert done is not None, "the result is set before the wake-up"
    return done


def _never() -> None:
    raise AssertionError("the call was started again")


# --- retrying calls ------------------------------------------------------------------------------


class FailingCall:
    """A call that raises the given number of times and then returns 7."""

    def __init__(self, times: int) -> None:
        self.left = times
        self.call_count = 0

    def __call__(self) -> int:
        self.call_count += 1
        if self.left:
            self.left -= 1
            raise TransientStoreError("the bucket is unavailable")
        return 7


def test_a_failed_call_is_retried_after_a_delay_until_it_succeeds() -> None:
    retrying, job = RetryingCalls(SynchronousCalls()), FailingCall(2)
    fields = [retrying.run("offer", job, now) for now in (0.0, 0.05, 0.1, 0.2, 0.4)]
    assert fields == [None, None, None, None, BackgroundResult(7)]
    assert job.call_count == 3
    assert retrying.run("offer", FailingCall(0), 0.3) == BackgroundResult(7), (
        "the failure count is reset"
    )


def test_a_failing_call_does_not_delay_other_calls() -> None:
    retrying = RetryingCalls(SynchronousCalls())
    assert retrying.run("offer", FailingCall(1), 0.0) is None
    assert retrying.run("result", FailingCall(0), 0.0) == BackgroundResult(7)


def test_a_series_of_failures_is_logged_once(capsys: pytest.CaptureFixture[str]) -> None:
    retrying, job = RetryingCalls(SynchronousCalls()), FailingCall(3)
    for now in range(4):
        retrying.run("offer", job, float(now * 10))
    assert capsys.readouterr().err.count("the bucket is unavailable") == 1
