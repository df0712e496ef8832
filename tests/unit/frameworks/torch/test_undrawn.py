"""Weights that a checkpoint brings are not drawn, and nothing else changes for it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from spotfit.core.errors import ConfigError, IntegrityError, SessionMisuseError
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
        nn.init.trunc_normal_(self.linear.weight)
        nn.init.orthogonal_(self.attention.out_proj.weight)
        self.order = torch.randperm(50)


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
    }
    assert (weights["norm.weight"] == 1).all()
    assert not model.noise.isnan().any()


def test_without_a_checkpoint_all_is_drawn_and_no_two_alike() -> None:
    model, afterwards = made(Training(), left_out=False)
    drawn = [weight.detach() for weight in model.parameters() if weight.dim() > 1]
    assert not any(weight.isnan().any() for weight in drawn)
    firsts = [*(weight.flatten()[1].item() for weight in drawn), afterwards[0]]
    assert len(set(firsts)) == len(firsts)


def test_it_goes_by_the_users_seed() -> None:
    one, other = (made(Training(), left_out=False)[0] for _ in range(2))
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    assert all(torch.equal(mine, theirs) for mine, theirs in pairs)
    torch.manual_seed(6)
    with undrawn.built(Training(), left_out=False):
        third = Noisy()
    assert not torch.equal(third.linear.weight, one.linear.weight)


def test_whatever_else_is_drawn_is_the_same_in_every_life() -> None:
    """In it: buffers that nobody keeps, an order. Afterwards: data."""
    (one, data), (other, same) = (made(Training(), left_out=left) for left in (True, False))
    assert data == same
    assert torch.equal(one.noise, other.noise)
    assert torch.equal(one.order, other.order)


def test_a_draw_with_the_users_own_dice_throws_them_in_every_life() -> None:
    def thrown(*, left_out: bool) -> float:
        dice = torch.Generator().manual_seed(3)
        with undrawn.built(Training(), left_out=left_out):
            nn.init.normal_(nn.Parameter(torch.empty(4)), generator=dice)
        return torch.rand(1, generator=dice).item()

    assert thrown(left_out=True) == thrown(left_out=False)


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
    undrawn.brought(training, {})
    undrawn.refuse_to_train(training)
    undrawn.refuse_to_begin(training)


def test_only_what_is_made_in_it_is_left_out() -> None:
    with undrawn.built(Training(), left_out=True):
        assert undrawn.leaves_out()
    assert not undrawn.leaves_out()
    assert not nn.Linear(3, 4).weight.isnan().any()


class Copy:
    """An average of weights, or what else has their shape."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.weight = weight

    def state_dict(self) -> dict[str, Any]:
        return {"none yet": torch.tensor(torch.nan), "kept": [self.weight]}


def test_what_no_checkpoint_has_brought_is_told() -> None:
    training = Training()
    with undrawn.built(training, left_out=True):
        model = nn.Linear(3, 4)
    copied, restored = Copy(model.weight.detach().clone()), Copy(torch.zeros(4, 3))
    nn.init.zeros_(model.weight)
    with pytest.raises(ConfigError, match=r"of shape \(4,\), 'average'\."):
        undrawn.brought(training, {"average": copied, "other": restored})
    undrawn.refuse_to_train(training)


def test_what_is_gone_meanwhile_is_nobodys() -> None:
    training = Training()
    with undrawn.built(training, left_out=True):
        nn.Linear(3, 4)
    undrawn.brought(training, {"none": Copy(torch.full((4, 3), torch.nan))})
