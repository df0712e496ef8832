"""The real clock."""

from __future__ import annotations

import time


class SystemClock:
    """This machine's monotonic clock, as a `core.clock.Clock`."""

    def now(self) -> float:
        """Seconds since some fixed moment."""
        return time.monotonic()

    def wait(self, seconds: float) -> None:
        """Let that much time pass."""
        time.sleep(max(0.0, seconds))


def wall_ms() -> int:
    """Milliseconds since 1970: for people to read; nothing may be judged by it."""
    return time.time_ns() // 1_000_000
