"""`ManualClock`: virtual time for tests."""

from __future__ import annotations


class ManualClock:
    """A `core.clock.Clock` whose time advances only by `wait()`, which returns at once."""

    def __init__(self, now: float = 0.0) -> None:
        self._now = now

    def now(self) -> float:
        """Return the virtual time in seconds."""
        return self._now

    def wait(self, seconds: float) -> None:
        """Advance the time. Raises `ValueError` for negative values."""
        if seconds < 0:
            raise ValueError(f"cannot wait for {seconds} s: the duration is negative")
        self._now += seconds
