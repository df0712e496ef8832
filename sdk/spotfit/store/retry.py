"""Retries of storage calls: the only place that repeats a call, within the budget of its caller.

Also repeats a read whose body cannot be decoded: the response may have been damaged on the way.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from spotfit.core.codec import DECODE_ERRORS
from spotfit.core.errors import StorePermissionError, TransientStoreError

if TYPE_CHECKING:
    import tenacity

ResultT = TypeVar("ResultT")

# One damaged response is rare, three in a row mean that the object itself cannot be decoded.
_MAX_READS = 3
# New or renewed credentials are not known to all servers of a cloud at once, so that single
# requests may be denied. A denial that lasts is reported within a second.
_MAX_DENIALS = 4


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
# For background calls of an agent, which are repeated as a whole: one that sends hundreds of
# requests would otherwise never have all of them answered. Shorter than the timeout of a request
# (10 s), because calls that hang are repeated by the event loop.
AGENT_RETRY_POLICY = RetryPolicy(total_timeout_s=5.0)


def call_with_retries(function: Callable[[], ResultT], policy: RetryPolicy) -> ResultT:
    """Return the result of `function`; repeat it while it raises `TransientStoreError`.

    Sleeps between attempts in the calling thread. Raises the last `TransientStoreError` once the
    budget of `policy` is spent, the fourth `StorePermissionError` in a row, for which a policy with
    at least four attempts exceeds its budget, and any other exception at once. `function` must be
    idempotent.
    `Store.create` is not: after a lost response the second call would report `AlreadyExistsError`
    for the object that the first one wrote. Use `call_with_denials_repeated` for it.
    """
    return _call(function, policy, (TransientStoreError,))


def call_with_denials_repeated(function: Callable[[], ResultT], policy: RetryPolicy) -> ResultT:
    """Return the result of `function`; call it up to four times while it is denied.

    For calls that are not idempotent: a request that is denied has not been executed. Raises the
    fourth `StorePermissionError`, and any other exception at once, also a `TransientStoreError`.
    """
    return _call(function, policy, ())


def _call(
    function: Callable[[], ResultT],
    policy: RetryPolicy,
    retried: tuple[type[Exception], ...],
) -> ResultT:
    # Imported late: processes that never touch a bucket need not pay its import time (40 ms).
    import tenacity

    denials = 0  # in a row

    def is_retryable(state: tenacity.RetryCallState) -> bool:
        nonlocal denials
        error = _error_of(state)
        is_denied = isinstance(error, StorePermissionError)
        if not is_denied or isinstance(error, TransientStoreError):
            denials = 0
            return isinstance(error, retried)
        denials += 1
        return denials < _MAX_DENIALS

    is_exhausted = tenacity.stop_after_attempt(policy.max_attempts) | tenacity.stop_after_delay(
        policy.total_timeout_s
    )

    def should_stop(state: tenacity.RetryCallState) -> bool:
        # One denial at the end of an outage does not mean that the credentials are insufficient.
        is_undecided = denials > 0 and policy.max_attempts >= _MAX_DENIALS
        return is_exhausted(state) and not is_undecided

    retrying = tenacity.Retrying(
        retry=is_retryable,
        stop=should_stop,
        wait=tenacity.wait_random_exponential(
            multiplier=policy.initial_backoff_s, max=policy.max_backoff_s
        ),
        reraise=True,
    )
    return retrying(function)


def _error_of(state: tenacity.RetryCallState) -> BaseException | None:
    return state.outcome.exception() if state.outcome is not None else None


def repeat_read(
    read: Callable[[], ResultT], *, errors: tuple[type[Exception], ...] = DECODE_ERRORS
) -> ResultT:
    """Return the result of `read`; call it up to three times while it raises one of `errors`.

    `errors` mean that the bytes that were read are invalid: they may have been damaged on the way.
    The last of them is raised, and any other exception, such as a `StoreError`, at once.
    """
    for _ in range(_MAX_READS - 1):
        with suppress(*errors):
            return read()
    return read()
