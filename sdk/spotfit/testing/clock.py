"""A clock that stands still until it is told: time for tests, and none of it wasted."""

from __future__ import annotations


class ManualClock:
    """A `core.clock.Clock` in which waiting takes no time, and time passes only by waiting."""

    def __init__(self, now: float = 0.0) -> None:
        self._now = now

    def now(self) -> float:
        """Seconds since this clock's own zero."""
        return self._now

    def wait(self, seconds: float) -> None:
        """Let that much time pass, at once. Raises `ValueError` for a step back."""
        if seconds < 0:
            raise ValueError(f"time does not run backwards: {seconds} s")
        self._now += seconds
