from collections.abc import Callable

import pytest

from spotfit.core.errors import NotFoundError, TransientStoreError
from spotfit.store.budget import Budget
from spotfit.store.retry import persistently

AT_ONCE = Budget(attempts=3, longest_pause_s=0.0)


def failing(*errors: Exception) -> tuple[Callable[[], str], list[Exception]]:
    """A call that raises these, one each time, and then answers; and those still to come."""
    to_come = list(errors)

    def call() -> str:
        if to_come:
            raise to_come.pop(0)
        return "answer"

    return call, to_come


def test_a_passing_failure_is_overcome() -> None:
    call, _ = failing(TransientStoreError("1"), TransientStoreError("2"))
    assert persistently(call, AT_ONCE) == "answer"


def test_the_last_failure_is_told_when_the_budget_is_spent() -> None:
    call, to_come = failing(*(TransientStoreError(str(n)) for n in range(5)))
    with pytest.raises(TransientStoreError, match="2"):
        persistently(call, AT_ONCE)
    assert len(to_come) == 2


def test_time_ends_a_budget_too() -> None:
    call, to_come = failing(TransientStoreError("1"), TransientStoreError("2"))
    with pytest.raises(TransientStoreError, match="1"):
        persistently(call, Budget(attempts=9, within_s=0.0))
    assert len(to_come) == 1


def test_what_will_not_pass_is_not_tried_again() -> None:
    call, to_come = failing(NotFoundError("gone"), NotFoundError("still"))
    with pytest.raises(NotFoundError, match="gone"):
        persistently(call, AT_ONCE)
    assert len(to_come) == 1
