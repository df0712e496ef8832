"""The user's collectives go through the session, and say so where there is none."""

from __future__ import annotations

from typing import Any

import pytest

from spotfit import collective
from spotfit.worker import current
from spotfit.worker.local import LocalSession


def test_they_ask_the_session() -> None:
    current.enter(LocalSession("run"))
    try:
        collective.barrier()
        assert collective.broadcast_from_rank_zero({"seed": 1}) == {"seed": 1}
    finally:
        current.leave()


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("barrier", collective.barrier),
        ("broadcast_from_rank_zero", lambda: collective.broadcast_from_rank_zero(1)),
    ],
)
def test_outside_of_a_training_function_nobody_answers(name: str, call: Any) -> None:
    with pytest.raises(RuntimeError, match=f"`spotfit.collective.{name}` cannot be used outside"):
        call()
