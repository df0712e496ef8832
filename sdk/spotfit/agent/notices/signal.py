"""SIGTERM: what every scheduler sends before it takes a machine away."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType

from spotfit.host import clocks, env
from spotfit.model.world import Notice


class SignalNotice:
    """Turns SIGTERM from an end into a notice. Made outside the main thread it hears nothing."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._came = False
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._hear)

    def poll(self, now: float) -> Notice | None:
        if not self._came:
            return None
        grace_s = env.value(env.SIGNAL_GRACE_S) or None
        deadline_ms = 0 if grace_s is None else clocks.wall_ms() + int(grace_s * 1000)
        return Notice("SIGTERM", grace_s, deadline_ms)

    def _hear(self, _number: int, _frame: FrameType | None) -> None:
        self._came = True
        self._wake()
