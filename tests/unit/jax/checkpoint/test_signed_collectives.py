"""Values of other ranks are unpickled only if they have the signature of the training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

jax = pytest.importorskip("jax", reason="needs jax: make jax")

import numpy as np  # noqa: E402
from jax.experimental import multihost_utils  # noqa: E402

from spotfit.core.errors import ConfigError, IntegrityError  # noqa: E402
from spotfit.jax.checkpoint.signed_collectives import (  # noqa: E402
    SignedCollectives,
    check_runtime,
)


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[np.ndarray]:
    """Collectives of two ranks, of which the other sends the same bytes; record the bytes."""
    sent: list[np.ndarray] = []

    def gather(row: np.ndarray) -> np.ndarray:
        sent.append(row)
        return np.stack([row, row])

    monkeypatch.setattr(multihost_utils, "process_allgather", gather)
    monkeypatch.setattr(multihost_utils, "broadcast_one_to_all", lambda row: gather(row)[0])
    return sent


CALLS: list[Callable[[SignedCollectives, Any], Any]] = [
    lambda ranks, value: ranks.all_gather(value)[1],
    lambda ranks, value: ranks.broadcast(value),
]


@pytest.mark.parametrize("call", CALLS, ids=["all_gather", "broadcast"])
@pytest.mark.parametrize("size_bytes", [0, 4000, 5000, 100_000])
def test_values_of_any_size_arrive(
    sent: list[np.ndarray], call: Callable[..., Any], size_bytes: int
) -> None:
    value = {"body": b"x" * size_bytes}
    assert call(SignedCollectives(b"key", 2), value) == value
    assert {len(row) & (len(row) - 1) for row in sent} == {0}, "few sizes are compiled"


@pytest.mark.parametrize("call", CALLS, ids=["all_gather", "broadcast"])
def test_a_value_of_another_training_is_rejected(
    monkeypatch: pytest.MonkeyPatch, sent: list[np.ndarray], call: Callable[..., Any]
) -> None:
    call(SignedCollectives(b"other key", 2), 1)
    foreign = sent[0]
    monkeypatch.setattr(multihost_utils, "process_allgather", lambda _: np.stack([foreign] * 2))
    monkeypatch.setattr(multihost_utils, "broadcast_one_to_all", lambda _: foreign)
    with pytest.raises(IntegrityError, match="corrupt, or from another training"):
        call(SignedCollectives(b"key", 2), 1)


def test_a_single_rank_communicates_with_none() -> None:
    value = object()
    ranks = SignedCollectives(b"key", 1)
    assert ranks.all_gather(value) == [value]
    assert ranks.broadcast(value) is value


def test_a_runtime_of_other_processes_is_rejected() -> None:
    check_runtime(0, 1)
    with pytest.raises(ConfigError, match="a JAX runtime of all 4 workers"):
        check_runtime(2, 4)
