"""Retries of storage calls: the only place that repeats a call, within the budget of its caller."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from spotfit.core.errors import TransientStoreError

ResultT = TypeVar("ResultT")


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Budget for one call of a bucket: attempts, and seconds since the first attempt began.

    Delays between attempts double, with jitter, up to `max_backoff_s`. `total_timeout_s` is checked
    after each failed attempt; a running one is not interrupted.
    """

    # Six attempts wait for at most 3 s in between, which throttling by S3 or GCS rarely exceeds.
    # The timeout limits attempts that time out themselves (10 s each).
    max_attempts: int = 6
    total_timeout_s: float = 30.0
    initial_backoff_s: float = 0.1
    max_backoff_s: float = 5.0


# For uploads and restores of workers. Losing them costs more than waiting 15 minutes, in which
# most outages of a region's storage end.
PATIENT_RETRY_POLICY = RetryPolicy(max_attempts=1000, total_timeout_s=900.0)


def call_with_retries(function: Callable[[], ResultT], policy: RetryPolicy) -> ResultT:
    """Return the result of `function`; repeat it while it raises `TransientStoreError`.

    Sleeps between attempts in the calling thread. Raises the last `TransientStoreError` once the
    budget of `policy` is spent, and any other exception at once. `function` must be idempotent.
    `Store.create` is not: after a lost response the second call would report `AlreadyExistsError`
    for the object that the first one wrote.
    """
    # Imported late: processes that never touch a bucket need not pay its import time (40 ms).
    import tenacity

    retrying = tenacity.Retrying(
        retry=tenacity.retry_if_exception_type(TransientStoreError),
        stop=tenacity.stop_after_attempt(policy.max_attempts)
        | tenacity.stop_after_delay(policy.total_timeout_s),
        wait=tenacity.wait_random_exponential(
            multiplier=policy.initial_backoff_s, max=policy.max_backoff_s
        ),
        reraise=True,
    )
    return retrying(function)
