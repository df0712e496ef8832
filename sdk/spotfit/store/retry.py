"""The one place that tries again: what may be repeated, where it is worth it, within a budget."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import tenacity

from spotfit.core.errors import TransientStoreError
from spotfit.store.budget import Budget

Answer = TypeVar("Answer")


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
