"""The `Clock` protocol. Implementations are `host.system.SystemClock` and test clocks."""

from __future__ import annotations

from typing import Protocol


class Clock(Protocol):
    """Monotonic clock of one machine. Values of two machines must never be compared."""

    def now(self) -> float:
        """Return seconds since an arbitrary fixed moment; only differences are meaningful."""
        ...

    def wait(self, seconds: float) -> None:
        """Block for `seconds`."""
        ...
