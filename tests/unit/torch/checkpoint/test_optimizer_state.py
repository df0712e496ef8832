"""Optimizer state is keyed by name, and reading it does not change the training."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.optim import Optimizer

from spotfit.core.errors import ConfigError
from spotfit.torch.checkpoint.optimizer_state import (
    has_flat_parameters,
    load_optimizer_state_dict,
    optimizer_state_dict,
    parameter_names,
)


def a_model(*, inputs: int = 3) -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(inputs, 2), nn.Linear(2, 4))


def adam(model: nn.Module) -> list[Optimizer]:
    return [torch.optim.Adam(model.parameters(), lr=0.1)]


def two(model: Any) -> list[Optimizer]:
    first, second = model.children()
    groups: list[dict[str, Any]] = [
        {"params": [second.weight], "lr": 0.3},
        {"params": [second.bias]},
    ]
    return [torch.optim.SGD(groups, lr=0.2, momentum=0.9), torch.optim.Adam(first.parameters())]


def plain(model: nn.Module) -> list[Optimizer]:
    return [torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.1)]


def sparse(model: nn.Module) -> list[Optimizer]:
    return [torch.optim.SparseAdam(model.parameters())]


def lists(model: nn.Module) -> list[Optimizer]:
    return [torch.optim.LBFGS(model.parameters())]


def trained(model: nn.Module, optimizers: list[Optimizer], steps: int) -> None:
    for _ in range(steps):
        model(torch.ones(5, 3)).square().sum().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("make", [adam, two, plain])
def test_the_state_dict_has_the_form_of_torch_s(
    make: Callable[[nn.Module], list[Optimizer]],
) -> None:
    """State dicts of torch and ours can be loaded by either function."""
    model = a_model()
    optimizers = make(model)
    trained(model, optimizers, 2)
    assert str(optimizer_state_dict(optimizers, model)) == str(
        get_optimizer_state_dict(model, optimizers)
    )


def _never(*_: Any) -> None:
    raise AssertionError("it took a step")


@pytest.mark.parametrize("make", [adam, two, plain, sparse, lists])
def test_saving_and_loading_take_no_step(
    make: Callable[[nn.Module], list[Optimizer]],
) -> None:
    model = a_model()
    optimizers = make(model)
    for optimizer in optimizers:
        optimizer.register_step_pre_hook(_never)
    saved = optimizer_state_dict(optimizers, model)
    assert saved["state"] == {}
    assert [group["params"] for group in saved["param_groups"]] == [
        [parameter_names(model)[weight] for weight in group["params"]]
        for optimizer in optimizers
        for group in optimizer.param_groups
    ]
    load_optimizer_state_dict(saved, optimizers, model)
    assert all(weight.grad is None for weight in model.parameters())
    assert not any(optimizer.state for optimizer in optimizers)


@pytest.mark.parametrize("make", [adam, two, plain])
def test_another_optimizer_continues_from_the_state(
    make: Callable[[nn.Module], list[Optimizer]],
) -> None:
    model, other = a_model(), a_model()
    optimizers, others = make(model), make(other)
    optimizers[0].param_groups[0]["lr"] = 0.25
    trained(model, optimizers, 2)
    load_optimizer_state_dict(deepcopy(optimizer_state_dict(optimizers, model)), others, other)
    other.load_state_dict(model.state_dict())
    assert str(optimizer_state_dict(others, other)) == str(optimizer_state_dict(optimizers, model))
    trained(model, optimizers, 2)
    trained(other, others, 2)
    assert str(other.state_dict()) == str(model.state_dict())


def test_param_groups_are_matched_by_their_parameters() -> None:
    model = a_model()
    first, second = two(model)
    saved = optimizer_state_dict([second, first], model)
    again = two(model)
    for group in again[0].param_groups:
        group["lr"] = 7.0
    load_optimizer_state_dict(saved, again, model)
    assert [group["lr"] for one in again for group in one.param_groups] == [0.3, 0.2, 0.001]


def test_names_do_not_contain_the_prefix_of_a_wrapper() -> None:
    wrapped: Any = torch.compile(a_model(), backend="eager")
    assert list(parameter_names(wrapped).values()) == ["0.weight", "0.bias", "1.weight", "1.bias"]


def test_parameters_that_are_not_in_the_model_are_rejected() -> None:
    model, head = a_model(), nn.Linear(7, 1)
    optimizer = torch.optim.Adam([*model.parameters(), *head.parameters()])
    with pytest.raises(ConfigError, match=r"Adam holds 2 parameters.* first has shape \(1, 7\)"):
        optimizer_state_dict([optimizer], model)


def test_state_that_belongs_to_no_parameter_is_rejected() -> None:
    model = a_model()
    (optimizer,) = adam(model)
    optimizer.state["count"] = {"n": 1}  # type: ignore[index]
    with pytest.raises(ConfigError, match="contains 'count', which belongs"):
        optimizer_state_dict([optimizer], model)


class Counting(torch.optim.SGD):
    """An optimizer with additional entries in its state dict."""

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "cycles": 3}


def test_additional_entries_of_the_state_dict_are_rejected() -> None:
    model = a_model()
    with pytest.raises(ConfigError, match="Counting contains 'cycles'"):
        optimizer_state_dict([Counting(model.parameters())], model)


def test_options_of_another_stage_are_matched_by_position() -> None:
    """With pipeline stages one rank saves the param_groups of all."""
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    saved = optimizer_state_dict([torch.optim.SGD(first.parameters(), lr=0.125)], first)
    groups = [{**group, "params": ["elsewhere.weight"]} for group in saved["param_groups"]]
    optimizer = torch.optim.SGD(second.parameters(), lr=1.0)
    load_optimizer_state_dict({"state": {}, "param_groups": groups}, [optimizer], second)
    assert optimizer.param_groups[0]["lr"] == 0.125
    assert optimizer.param_groups[0]["params"] == list(second.parameters())


def flattened() -> nn.Module:
    return FullyShardedDataParallel(a_model(), device_id=torch.device("cpu"), use_orig_params=True)


@pytest.mark.filterwarnings("ignore:.*")
@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("make", [a_model, flattened])
def test_options_that_were_not_saved_are_kept(make: Callable[[], nn.Module]) -> None:
    """A new scheduler has added options that were not saved."""
    model, other = make(), make()
    assert has_flat_parameters(model) == (make is flattened)
    optimizers, others = adam(model), adam(other)
    optimizers[0].param_groups[0]["lr"] = 0.25
    trained(model, optimizers, 2)
    torch.optim.lr_scheduler.OneCycleLR(others[0], 0.5, total_steps=9)
    load_optimizer_state_dict(deepcopy(optimizer_state_dict(optimizers, model)), others, other)
    group = others[0].param_groups[0]
    assert (group["lr"], group["max_lr"]) == (0.25, 0.5)
    assert len(others[0].state) == len(optimizers[0].state)
