"""Calls of libraries that may block."""

from __future__ import annotations

import threading

from spotfit.frameworks.framework import NoFramework, call_in_thread


def test_a_call_that_ends_is_waited_for() -> None:
    called: list[bool] = []
    assert call_in_thread(lambda: called.append(True), timeout_s=60.0)
    assert called == [True]


def test_a_call_that_blocks_is_abandoned() -> None:
    event = threading.Event()

    def wait() -> None:
        event.wait()

    assert not call_in_thread(wait, timeout_s=0.0)
    event.set()


def test_ranks_without_a_library_do_not_wait_for_each_other() -> None:
    assert not NoFramework().leaves_together
