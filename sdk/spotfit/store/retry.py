"""The one place that tries again: what may be repeated, where it is worth it, within a budget."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import tenacity

from spotfit.core.errors import TransientStoreError

Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True)
class Budget:
    """How often and how long to insist. Pauses double, with jitter, up to `longest_pause_s`."""

    attempts: int = 6
    within_s: float = 30.0
    first_pause_s: float = 0.1
    longest_pause_s: float = 5.0


def persistently(call: Callable[[], Answer], budget: Budget) -> Answer:
    """What `call` answers, repeated while it raises `TransientStoreError` and the budget lasts.

    `call` must be harmless to repeat; a `create` is not: its second answer would tell of its first.
    """
    insist = tenacity.Retrying(
        retry=tenacity.retry_if_exception_type(TransientStoreError),
        stop=tenacity.stop_after_attempt(budget.attempts)
        | tenacity.stop_after_delay(budget.within_s),
        wait=tenacity.wait_random_exponential(
            multiplier=budget.first_pause_s, max=budget.longest_pause_s
        ),
        reraise=True,
    )
    return insist(call)
