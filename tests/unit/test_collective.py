"""Public collectives use the session of the worker."""

from __future__ import annotations

from typing import Any

import pytest

from spotfit import collective
from spotfit.worker import training_api
from spotfit.worker.local_session import LocalSession


def test_collectives_use_the_current_session() -> None:
    training_api.set_session(LocalSession("run"))
    try:
        collective.barrier()
        assert collective.broadcast_from_rank_zero({"seed": 1}) == {"seed": 1}
    finally:
        training_api.clear_session()


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("barrier", collective.barrier),
        ("broadcast_from_rank_zero", lambda: collective.broadcast_from_rank_zero(1)),
    ],
)
def test_collectives_outside_of_a_training_function_raise(name: str, call: Any) -> None:
    with pytest.raises(RuntimeError, match=f"`spotfit.collective.{name}` cannot be used outside"):
        call()
