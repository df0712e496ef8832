"""Weights that a checkpoint provides are not drawn; all other random numbers stay the same."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from spotfit.core.errors import ConfigError, IntegrityError, SessionMisuseError
from spotfit.torch.checkpoint import deferred_init


class ModelWithRandomBuffer(nn.Module):
    """A model with several kinds of weights and a non-persistent buffer."""

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
    """Key of the deferred weights."""


def build(training: Training, *, deferred: bool) -> tuple[ModelWithRandomBuffer, list[Any]]:
    """Return a model and the random numbers drawn after it."""
    torch.manual_seed(5)
    np.random.seed(5)
    with deferred_init.defer_init(training, deferred=deferred):
        model = ModelWithRandomBuffer()
    return model, [torch.rand(1).item(), np.random.rand()]


def test_deferred_weights_are_nan() -> None:
    model, _ = build(Training(), deferred=True)
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


def test_without_a_checkpoint_all_weights_are_drawn() -> None:
    model, afterwards = build(Training(), deferred=False)
    drawn = [weight.detach() for weight in model.parameters() if weight.dim() > 1]
    assert not any(weight.isnan().any() for weight in drawn)
    firsts = [*(weight.flatten()[1].item() for weight in drawn), afterwards[0]]
    assert len(set(firsts)) == len(firsts)


def test_drawn_weights_depend_on_the_users_seed() -> None:
    one, other = (build(Training(), deferred=False)[0] for _ in range(2))
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    assert all(torch.equal(first, second) for first, second in pairs)
    torch.manual_seed(6)
    with deferred_init.defer_init(Training(), deferred=False):
        third = ModelWithRandomBuffer()
    assert not torch.equal(third.linear.weight, one.linear.weight)


def test_other_random_numbers_are_the_same_with_and_without_deferral() -> None:
    """Random numbers drawn in the context (buffers) and after it (data) are the same."""
    (one, data), (other, same) = (
        build(Training(), deferred=deferred) for deferred in (True, False)
    )
    assert data == same
    assert torch.equal(one.noise, other.noise)
    assert torch.equal(one.order, other.order)


def test_draws_with_a_generator_of_the_user_are_not_deferred() -> None:
    def draw(*, deferred: bool) -> float:
        generator = torch.Generator().manual_seed(3)
        with deferred_init.defer_init(Training(), deferred=deferred):
            nn.init.normal_(nn.Parameter(torch.empty(4)), generator=generator)
        return torch.rand(1, generator=generator).item()

    assert draw(deferred=True) == draw(deferred=False)


@pytest.mark.parametrize("name", [n for n in dir(nn.init) if n.endswith("_") and n[0] != "_"])
def test_every_initializer_works(name: str) -> None:
    """Initialization code of the model must not fail in the context."""
    weight = nn.Parameter(torch.zeros(4, 4, 4) if name == "dirac_" else torch.zeros(4, 4))
    more = {"constant_": (1.0,), "sparse_": (0.5,)}.get(name, ())
    with deferred_init.defer_init(Training(), deferred=True):
        assert getattr(nn.init, name)(weight, *more) is weight
        weight.data.normal_()
    assert not weight.isnan().any()


def test_training_without_a_restore_is_rejected() -> None:
    training = Training()
    build(training, deferred=True)
    with pytest.raises(SessionMisuseError, match=r"restore\(\) was not called"):
        deferred_init.reject_unrestored(training)
    with pytest.raises(IntegrityError, match="is missing in restore"):
        deferred_init.reject_missing_checkpoint(training)
    deferred_init.check_initialized(training, {})
    deferred_init.reject_unrestored(training)
    deferred_init.reject_missing_checkpoint(training)


def test_only_weights_created_in_the_context_are_deferred() -> None:
    with deferred_init.defer_init(Training(), deferred=True):
        assert deferred_init.is_deferring_init()
    assert not deferred_init.is_deferring_init()
    assert not nn.Linear(3, 4).weight.isnan().any()


class Copy:
    """A stateful object with a tensor of a weight's shape, such as an average."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.weight = weight

    def state_dict(self) -> dict[str, Any]:
        return {"none yet": torch.tensor(torch.nan), "kept": [self.weight]}


def test_weights_that_are_still_nan_are_reported() -> None:
    training = Training()
    with deferred_init.defer_init(training, deferred=True):
        model = nn.Linear(3, 4)
    copied, restored = Copy(model.weight.detach().clone()), Copy(torch.zeros(4, 3))
    nn.init.zeros_(model.weight)
    with pytest.raises(ConfigError, match=r"of shape \(4,\), 'average'\."):
        deferred_init.check_initialized(training, {"average": copied, "other": restored})
    deferred_init.reject_unrestored(training)


def test_weights_that_no_longer_exist_are_ignored() -> None:
    training = Training()
    with deferred_init.defer_init(training, deferred=True):
        nn.Linear(3, 4)
    deferred_init.check_initialized(training, {"none": Copy(torch.full((4, 3), torch.nan))})
