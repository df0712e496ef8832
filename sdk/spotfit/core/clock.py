"""The `Clock` protocol. Implementations are `host.system.SystemClock` and test clocks."""

from __future__ import annotations

from typing import Protocol


class Clock(Protocol):
    """Monotonic clock of one machine. Values of two machines must never be compared."""

    def now(self) -> float:
        """Return the seconds of a monotonic clock, which starts at an arbitrary moment.

        Only differences between values of one machine are meaningful. Wall-clock changes have no
        effect.
        """
        ...

    def wait(self, seconds: float) -> None:
        """Block the calling thread for `seconds`; 0 returns at once. Test clocks only advance."""
        ...
