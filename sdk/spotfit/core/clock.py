"""What a clock is. This room holds none: time is always an argument."""

from __future__ import annotations

from typing import Protocol


class Clock(Protocol):
    """Monotonic seconds of one machine; never compared with those of another."""

    def now(self) -> float:
        """Seconds since some fixed moment; only differences mean anything."""
        ...

    def wait(self, seconds: float) -> None:
        """Let that much time pass."""
        ...
