"""Requests side by side: all of them, in order, and never too many."""

from __future__ import annotations

import threading

import pytest

from spotfit.store.abreast import AT_ONCE, abreast


class Counter:
    """Knows how many ask at a time, and keeps each until `together` are there."""

    def __init__(self, together: int) -> None:
        self._all_here = threading.Barrier(together, timeout=60)
        self._lock = threading.Lock()
        self._now = 0
        self.most = 0

    def ask(self, thing: int) -> int:
        with self._lock:
            self._now += 1
            self.most = max(self.most, self._now)
        self._all_here.wait()
        with self._lock:
            self._now -= 1
        return thing * 2


def test_as_many_as_may_are_asked_together_and_no_more() -> None:
    counter = Counter(AT_ONCE)
    assert abreast(counter.ask, range(3 * AT_ONCE)) == [2 * n for n in range(3 * AT_ONCE)]
    assert counter.most == AT_ONCE


def test_for_a_few_no_thread_is_started() -> None:
    asked = abreast(lambda _: threading.current_thread(), range(2))
    assert asked == [threading.current_thread()] * 2
    assert abreast(str, []) == []


def test_what_one_raises_is_raised() -> None:
    with pytest.raises(ZeroDivisionError):
        abreast(lambda n: 1 // n, [3, 2, 0, 1])
