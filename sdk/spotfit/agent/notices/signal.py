"""Preemption notices by SIGTERM, which most schedulers send before they stop a machine."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType

from spotfit.host import env, system
from spotfit.model.topology import Notice


class SignalNoticeSource:
    """Handles SIGTERM as a notice instead of the end of the process.

    The deadline follows from SPOTFIT_SIGNAL_GRACE_S. Signals can only be handled in the main
    thread: a source that is created in another thread never returns a notice.
    """

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._received = False
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._on_sigterm)

    def poll(self, now: float) -> Notice | None:
        if not self._received:
            return None
        # 0 is the default: the time between SIGTERM and SIGKILL depends on the scheduler.
        grace_s = env.read(env.SIGNAL_GRACE_S) or None
        deadline_ms = 0 if grace_s is None else system.wall_ms() + int(grace_s * 1000)
        return Notice(reason="SIGTERM", seconds_left=grace_s, deadline_ms=deadline_ms)

    def _on_sigterm(self, _number: int, _frame: FrameType | None) -> None:
        # A handler must not log or lock: it may interrupt code that holds the same lock.
        self._received = True
        self._wake()
