"""Daemon threads for calls of client libraries; the exit of the process waits for them briefly.

Until Python 3.14, a daemon thread that returns to Python code while the interpreter finalizes is
ended by `pthread_exit`. If a frame of a Rust extension is on its stack, such as pydantic's in every
call of the Kubernetes client, the process is aborted by SIGABRT. See
https://docs.python.org/3/c-api/init.html#c.PyThread_exit_thread.
"""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Callable
from functools import cache

_MAX_EXIT_WAIT_S = 2.0
"""A call of a cloud API takes less; one that hangs does not return during the finalization."""


class _CallThread(threading.Thread):
    """A thread of a call, for which the exit of the process waits."""


def start_daemon_thread(name: str, function: Callable[[], object]) -> None:
    """Start `function` in a daemon thread.

    The exit of the process waits for the threads started by this function, at most 2 s in total.
    """
    _wait_at_exit()
    _CallThread(target=function, name=name, daemon=True).start()


@cache
def _wait_at_exit() -> None:
    atexit.register(_join_threads)


def _join_threads() -> None:
    end_s = time.monotonic() + _MAX_EXIT_WAIT_S
    for thread in threading.enumerate():
        if isinstance(thread, _CallThread):
            thread.join(max(end_s - time.monotonic(), 0.0))
