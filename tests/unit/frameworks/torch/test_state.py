"""A training's state: tensors in use by name, everything else to the letter, and all dice."""

from __future__ import annotations

import random
from collections import Counter, OrderedDict
from typing import Any, NamedTuple

import numpy
import pytest
import torch
from torch import nn

from spotfit.core.errors import ConfigError
from spotfit.frameworks.torch.shares import plain
from spotfit.frameworks.torch.state import (
    Training,
    Whole,
    dice,
    give_back,
    gpu_in_use,
    joined,
    put_back,
    renewed,
    split,
)


def trained(lr: float = 0.1) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    return model, optimizer


def test_weights_and_what_optimizers_know_of_them_go_by_name() -> None:
    model, optimizer = trained()
    state = Training(model, [optimizer]).state()
    assert state["model"]["weight"].data_ptr() == next(model.parameters()).data_ptr()
    assert state["optimizer"]["state"]["weight"].keys() == {"step", "exp_avg", "exp_avg_sq"}


def test_buffers_are_what_ranks_may_have_their_own_of() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    model.register_buffer("none", torch.empty(0))
    training = Training(model)
    means = {f"model.1.{name}" for name in ("running_mean", "running_var", "num_batches_tracked")}
    assert training.drifting(training.state()) == means


class Holder:
    def __init__(self, count: int) -> None:
        self.held = torch.zeros(count)

    def state_dict(self) -> dict[str, Any]:
        return {"held": self.held, "name": "it"}


def test_a_small_object_may_be_each_ranks_own_and_is_saved_by_one_of_them() -> None:
    """A big one is saved by all together: it has to be alike."""
    training = Training(nn.Linear(1, 1), (), {"small": Holder(9), "big": Holder(2**20)})
    drifting = training.drifting(training.state())
    assert drifting == {"others.small.whole", "others.small.tensors./held"}


def test_another_training_goes_on_from_it() -> None:
    model, optimizer = trained(0.25)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [5, 9])
    state = Training(model, [optimizer], {"scheduler": scheduler}).state()

    other, its_optimizer = trained()
    its_scheduler = torch.optim.lr_scheduler.MultiStepLR(its_optimizer, [1])
    Training(other, [its_optimizer], {"scheduler": its_scheduler}).adopt(state)

    assert torch.equal(other.weight, model.weight)  # type: ignore[arg-type]
    assert its_optimizer.param_groups[0]["lr"] == 0.25
    assert its_scheduler.milestones == Counter([5, 9])


def test_an_optimizer_of_which_nothing_was_kept_stays_as_it_is() -> None:
    model, _ = trained()
    state = Training(model).state()
    other, optimizer = trained(0.25)
    before = str(optimizer.state_dict())
    assert Training(other, [optimizer]).adopt(state) == []
    assert torch.equal(other.weight, model.weight)  # type: ignore[arg-type]
    assert str(optimizer.state_dict()) == before


def test_who_does_not_take_its_state_back_is_told_by_name() -> None:
    """A model's average of before DDP wrapped it, say."""
    with pytest.raises(ConfigError, match=r"(?s)^ema \(Linear\) did not take back.*module\.weight"):
        give_back({"module.weight": torch.ones(1, 1)}, "ema", nn.Linear(1, 1))


def test_a_scaler_that_was_disabled_begins_anew() -> None:
    def training(*, enabled: bool) -> Training:
        return Training(
            nn.Linear(1, 1), (), {"scaler": torch.amp.GradScaler("cpu", 8, enabled=enabled)}
        )

    kept = training(enabled=False).state()
    scaled = training(enabled=True)
    assert scaled.adopt(kept) == ["scaler"]
    assert scaled.others["scaler"].get_scale() == 8
    assert training(enabled=False).adopt(kept) == []


def test_what_is_read_into_a_renewed_state_nobody_has_before_it_is_adopted() -> None:
    noted = {"deep": [{"n": 1}]}

    class Noting(nn.Linear):
        def get_extra_state(self) -> Any:
            return noted

    model = Noting(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    known = optimizer.state[model.weight]
    known["lists"] = [{"n": 1}]
    state = renewed(Training(model, [optimizer]).state())
    assert state["model"]["weight"].data_ptr() == model.weight.data_ptr()
    assert state["model"]._metadata[""] == {"version": 1}
    state["model"]["_extra_state"]["deep"][0]["n"] = 2
    state["optimizer"]["state"]["weight"]["lists"][0]["n"] = 2
    assert (noted, known) == ({"deep": [{"n": 1}]}, {"lists": [{"n": 1}]})


def test_tensors_lie_apart_and_come_together_again() -> None:
    value: dict[Any, Any] = {
        1: torch.ones(2),
        "deep": [{"t": torch.zeros(1)}, (2, torch.ones(1))],
        "kind": Counter([3]),
    }
    apart = split(value)
    assert isinstance(apart["whole"], Whole)
    assert apart["tensors"].keys() == {"/1", "/deep/0/t", "/deep/1/1"}
    again = joined(**apart)
    assert str(again) == str(value)
    assert type(again["kind"]) is Counter


@pytest.mark.parametrize(
    "value",
    [
        {"a/b": torch.zeros(1), "a": {"b": torch.ones(1)}},
        {1: torch.zeros(1), "1": torch.ones(1), "1'": torch.ones(2)},
        OrderedDict(x=torch.ones(1), y=OrderedDict(z=torch.zeros(1))),
        {"x": ("spotfit: tensor", "of the user's own")},
        {"mask": torch.eye(2).to_sparse(), "dense": torch.ones(1)},
    ],
)
def test_whatever_keys_are_called_each_tensor_comes_back_to_its_own(value: Any) -> None:
    apart = split(value)
    assert all(tensor.layout is torch.strided for tensor in apart["tensors"].values())
    assert str(joined(**apart)) == str(value)


class Pair(NamedTuple):
    weight: torch.Tensor
    steps: int


def test_a_class_of_the_users_is_told_by_its_place() -> None:
    whole = split({"pair": Pair(torch.ones(1), 2)})["whole"].value
    with pytest.raises(ConfigError, match=r"others\.mine\.whole\.pair holds"):
        plain([whole], of=[("others", "mine", "whole")])


def test_an_expanded_buffer_is_told_by_its_name() -> None:
    model = nn.Linear(1, 1)
    model.register_buffer("mask", torch.zeros(1).expand(5))
    with pytest.raises(ConfigError, match="mask of the model is expanded") as refused:
        Training(model).state()
    assert ".clone()" in refused.value.do
    model.register_buffer("mask", torch.zeros(1).expand(5).clone())
    model.register_buffer("one", torch.zeros(1).expand(1, 1))
    Training(model).state()


def test_a_sparse_buffer_is_told_by_its_name() -> None:
    model = nn.Linear(2, 1)
    model.register_buffer("mask", torch.eye(2).to_sparse())
    with pytest.raises(ConfigError, match="mask of the model is sparse"):
        Training(model).state()
    model.register_buffer("mask", torch.eye(2).to_sparse(), persistent=False)
    Training(model).state()


def test_only_of_tensors_elsewhere_it_is_told_where() -> None:
    assert "homes" not in split({"x": torch.ones(1)})
    assert split({"x": torch.empty(1, device="meta")})["homes"].value == {"/x": ("meta", False)}


def test_what_holds_no_tensor_is_kept_as_it_is() -> None:
    value = {"milestones": Counter({5: 1}), "last": [0.1]}
    assert split(value)["whole"].value is value


def test_dice_fall_again_as_they_would_have() -> None:
    def thrown() -> list[float]:
        return [random.random(), float(numpy.random.rand()), float(torch.rand(()))]

    before = dice()
    first = thrown()
    put_back(before)
    assert thrown() == first
    assert ("cuda" in before) == gpu_in_use()
