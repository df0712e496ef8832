"""Retries of transient errors within the budget of the caller."""

import subprocess
import sys
from collections.abc import Callable

import pytest

from spotfit.core.errors import NotFoundError, StorePermissionError, TransientStoreError
from spotfit.store.factory import open_store
from spotfit.store.retry import (
    RetryPolicy,
    call_with_denials_repeated,
    call_with_retries,
    repeat_read,
)
from tests.unit.store.conftest import ScriptedBucket

WITHOUT_DELAYS = RetryPolicy(max_attempts=3, max_backoff_s=0.0)


def failing(*errors: Exception) -> tuple[Callable[[], str], list[Exception]]:
    """Return a function that raises these errors, one per call, and the list of those left."""
    remaining = list(errors)

    def call() -> str:
        if remaining:
            raise remaining.pop(0)
        return "result"

    return call, remaining


def test_transient_errors_are_retried() -> None:
    call, _ = failing(TransientStoreError("1"), TransientStoreError("2"))
    assert call_with_retries(call, WITHOUT_DELAYS) == "result"


def test_the_last_error_is_raised_once_all_attempts_failed() -> None:
    call, remaining = failing(*(TransientStoreError(str(n)) for n in range(5)))
    with pytest.raises(TransientStoreError, match="2"):
        call_with_retries(call, WITHOUT_DELAYS)
    assert len(remaining) == 2


def test_the_timeout_limits_the_attempts() -> None:
    call, remaining = failing(TransientStoreError("1"), TransientStoreError("2"))
    with pytest.raises(TransientStoreError, match="1"):
        call_with_retries(call, RetryPolicy(max_attempts=9, total_timeout_s=0.0))
    assert len(remaining) == 1


def test_a_permanent_error_is_not_retried() -> None:
    call, remaining = failing(NotFoundError("gone"), NotFoundError("still"))
    with pytest.raises(NotFoundError, match="gone"):
        call_with_retries(call, WITHOUT_DELAYS)
    assert len(remaining) == 1


def test_a_denial_that_does_not_last_is_retried() -> None:
    """New credentials are not known to all servers at once."""
    call, _ = failing(*(StorePermissionError(str(n)) for n in range(3)))
    assert call_with_retries(call, RetryPolicy(max_backoff_s=0.0)) == "result"


def test_a_denial_that_lasts_is_raised_after_four_attempts() -> None:
    call, remaining = failing(*(StorePermissionError(str(n)) for n in range(9)))
    with pytest.raises(StorePermissionError, match="3"):
        call_with_retries(call, RetryPolicy(max_attempts=1000, max_backoff_s=0.0))
    assert len(remaining) == 5


def test_a_denial_at_the_end_of_an_outage_is_retried() -> None:
    errors = [TransientStoreError("hangs") for _ in range(5)]
    call, _ = failing(*errors, StorePermissionError("denied"))
    assert call_with_retries(call, RetryPolicy(max_attempts=6, max_backoff_s=0.0)) == "result"


def test_a_call_that_is_not_idempotent_is_repeated_only_after_denials() -> None:
    call, _ = failing(*(StorePermissionError(str(n)) for n in range(3)))
    assert call_with_denials_repeated(call, RetryPolicy(max_backoff_s=0.0)) == "result"
    call, remaining = failing(StorePermissionError("1"), TransientStoreError("2"), ValueError())
    with pytest.raises(TransientStoreError, match="2"):
        call_with_denials_repeated(call, RetryPolicy(max_backoff_s=0.0))
    assert len(remaining) == 1


def test_an_invalid_read_is_repeated_twice() -> None:
    call, _ = failing(ValueError("1"), ValueError("2"))
    assert repeat_read(call, errors=(ValueError,)) == "result"
    call, remaining = failing(*(ValueError(str(n)) for n in range(4)))
    with pytest.raises(ValueError, match="2"):
        repeat_read(call, errors=(ValueError,))
    assert len(remaining) == 1


def test_an_error_of_the_store_does_not_repeat_a_read() -> None:
    call, remaining = failing(NotFoundError("gone"), NotFoundError("still"))
    with pytest.raises(NotFoundError, match="gone"):
        repeat_read(call)
    assert len(remaining) == 1


def test_a_single_attempt_raises_the_first_error(bucket: ScriptedBucket) -> None:
    bucket.enqueue_responses(503)
    store = open_store(bucket.url, RetryPolicy(max_attempts=1))
    with pytest.raises(TransientStoreError):
        store.get("a")
    assert len(bucket.requests) == 1


def test_opening_a_store_does_not_import_tenacity() -> None:
    script = """
import sys
import spotfit.store.retry, spotfit.store.factory
assert "tenacity" not in sys.modules
"""
    subprocess.run(
        [sys.executable, "-c", script], check=True, env={"PYTHONPATH": ":".join(sys.path)}
    )
