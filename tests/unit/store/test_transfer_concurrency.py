"""`concurrent_map`: results in order, bounded concurrency."""

from __future__ import annotations

import threading

import pytest

from spotfit.store.transfer import MAX_CONCURRENCY, concurrent_map


class Counter:
    """Measures concurrent calls, and blocks each until `together` run at once."""

    def __init__(self, together: int) -> None:
        self._all_here = threading.Barrier(together, timeout=60)
        self._lock = threading.Lock()
        self._now = 0
        self.most = 0

    def call(self, item: int) -> int:
        with self._lock:
            self._now += 1
            self.most = max(self.most, self._now)
        self._all_here.wait()
        with self._lock:
            self._now -= 1
        return item * 2


def test_calls_run_concurrently_up_to_the_limit() -> None:
    counter = Counter(MAX_CONCURRENCY)
    assert concurrent_map(counter.call, range(3 * MAX_CONCURRENCY)) == [
        2 * n for n in range(3 * MAX_CONCURRENCY)
    ]
    assert counter.most == MAX_CONCURRENCY


def test_few_items_start_no_thread() -> None:
    threads = concurrent_map(lambda _: threading.current_thread(), range(2))
    assert threads == [threading.current_thread()] * 2
    assert concurrent_map(str, []) == []


def test_an_error_of_one_call_is_raised() -> None:
    with pytest.raises(ZeroDivisionError):
        concurrent_map(lambda n: 1 // n, [3, 2, 0, 1])
