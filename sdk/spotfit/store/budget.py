"""How long a call may insist. Apart from `retry`, which is slow to import."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Budget:
    """How often and how long to insist. Pauses double, with jitter, up to `longest_pause_s`."""

    attempts: int = 6
    within_s: float = 30.0
    first_pause_s: float = 0.1
    longest_pause_s: float = 5.0


PATIENT = Budget(attempts=1000, within_s=900.0)
"""For who has nothing better to do than to wait: what a worker saves or loads is worth more than
the quarter of an hour a bucket may be away."""
