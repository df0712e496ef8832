"""Whose lines a run's log holds beside those of its workers, which have their ranks."""

from __future__ import annotations

BESIDE = -1
"""Of the user's callbacks and hooks."""
RUN = -2
"""Of the run itself."""
VALIDATION = -3
"""Of a validation."""

_NAMES = {BESIDE: "beside", RUN: "run", VALIDATION: "validation"}


def speaker(rank: int) -> str:
    """How people are told whose line it is."""
    return _NAMES.get(rank, f"rank {rank}")
