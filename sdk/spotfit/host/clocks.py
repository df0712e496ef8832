"""The real clock."""

from __future__ import annotations

import time
from datetime import UTC, datetime


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


def wall_stamp() -> str:
    """Date and time of day in UTC down to the microsecond, fit for the name of a folder."""
    return datetime.now(UTC).strftime("%Y-%m-%d_%H-%M-%S.%f")
