"""Weights that a checkpoint brings are not drawn, and nothing else changes for it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from spotfit.core.errors import IntegrityError, SessionMisuseError
from spotfit.frameworks.torch import undrawn


class Noisy(nn.Module):
    """Has weights of all kinds, and a buffer that no state keeps."""

    noise: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("noise", torch.empty(4).normal_(), persistent=False)
        self.linear = nn.Linear(3, 4)
        self.norm = nn.LayerNorm(4)
        self.embedding = nn.Embedding(5, 4, padding_idx=0)
        self.attention = nn.MultiheadAttention(4, 2)


class Training:
    """Whoever knows what was left out."""


def made(training: Training, *, left_out: bool) -> tuple[Noisy, list[Any]]:
    """A model, and what is drawn afterwards."""
    torch.manual_seed(5)
    np.random.seed(5)
    with undrawn.built(training, left_out=left_out):
        model = Noisy()
    return model, [torch.rand(1).item(), np.random.rand()]


def test_what_would_be_drawn_is_left_to_the_checkpoint() -> None:
    model, _ = made(Training(), left_out=True)
    weights = {name: weight.detach() for name, weight in model.named_parameters()}
    drawn = {name for name, weight in weights.items() if weight.isnan().any()}
    assert drawn == {
        "linear.weight",
        "linear.bias",
        "embedding.weight",
        "attention.in_proj_weight",
        "attention.out_proj.weight",
    }
    assert (weights["norm.weight"] == 1).all()
    assert not model.noise.isnan().any()


def test_without_a_checkpoint_all_is_drawn() -> None:
    torch.manual_seed(5)
    plain = Noisy()
    model, _ = made(Training(), left_out=False)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters()))  # noqa: B905


def test_what_is_drawn_afterwards_is_the_same_both_times() -> None:
    assert made(Training(), left_out=True)[1] == made(Training(), left_out=False)[1]


@pytest.mark.parametrize("name", [n for n in dir(nn.init) if n.endswith("_") and n[0] != "_"])
def test_every_way_to_fill_a_weight_still_works(name: str) -> None:
    """What the model's own code makes of a weight, it shall not fail in here."""
    weight = nn.Parameter(torch.zeros(4, 4, 4) if name == "dirac_" else torch.zeros(4, 4))
    more = {"constant_": (1.0,), "sparse_": (0.5,)}.get(name, ())
    with undrawn.built(Training(), left_out=True):
        assert getattr(nn.init, name)(weight, *more) is weight
        weight.data.normal_()
    assert not weight.isnan().any()


def test_who_trains_without_a_restore_is_told() -> None:
    training = Training()
    made(training, left_out=True)
    with pytest.raises(SessionMisuseError, match="nobody has restored it"):
        undrawn.refuse_to_train(training)
    with pytest.raises(IntegrityError, match="cannot be found any more"):
        undrawn.refuse_to_begin(training)
    undrawn.brought(training)
    undrawn.refuse_to_train(training)
    undrawn.refuse_to_begin(training)


def test_only_what_is_made_in_it_is_left_out() -> None:
    with undrawn.built(Training(), left_out=True):
        assert undrawn.leaves_out()
    assert not undrawn.leaves_out()
    assert not nn.Linear(3, 4).weight.isnan().any()
