"""What optimizers keep goes by name, and looking at it changes nothing of a training."""

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
from spotfit.frameworks.torch.optimizers import go_on_from, is_flattened, kept_by, names_in


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
def test_it_has_the_form_that_torch_gives_it(make: Callable[[nn.Module], list[Optimizer]]) -> None:
    """What was saved in either way is read in either way."""
    model = a_model()
    optimizers = make(model)
    trained(model, optimizers, 2)
    assert str(kept_by(optimizers, model)) == str(get_optimizer_state_dict(model, optimizers))


def _never(*_: Any) -> None:
    raise AssertionError("it took a step")


@pytest.mark.parametrize("make", [adam, two, plain, sparse, lists])
def test_nobody_steps_to_be_looked_at_or_to_go_on(
    make: Callable[[nn.Module], list[Optimizer]],
) -> None:
    model = a_model()
    optimizers = make(model)
    for optimizer in optimizers:
        optimizer.register_step_pre_hook(_never)
    kept = kept_by(optimizers, model)
    assert kept["state"] == {}
    assert [group["params"] for group in kept["param_groups"]] == [
        [names_in(model)[weight] for weight in group["params"]]
        for optimizer in optimizers
        for group in optimizer.param_groups
    ]
    go_on_from(kept, optimizers, model)
    assert all(weight.grad is None for weight in model.parameters())
    assert not any(optimizer.state for optimizer in optimizers)


@pytest.mark.parametrize("make", [adam, two, plain])
def test_another_goes_on_from_it(make: Callable[[nn.Module], list[Optimizer]]) -> None:
    model, other = a_model(), a_model()
    optimizers, others = make(model), make(other)
    optimizers[0].param_groups[0]["lr"] = 0.25
    trained(model, optimizers, 2)
    go_on_from(deepcopy(kept_by(optimizers, model)), others, other)
    other.load_state_dict(model.state_dict())
    assert str(kept_by(others, other)) == str(kept_by(optimizers, model))
    trained(model, optimizers, 2)
    trained(other, others, 2)
    assert str(other.state_dict()) == str(model.state_dict())


def test_groups_are_found_by_their_weights() -> None:
    model = a_model()
    first, second = two(model)
    kept = kept_by([second, first], model)
    again = two(model)
    for group in again[0].param_groups:
        group["lr"] = 7.0
    go_on_from(kept, again, model)
    assert [group["lr"] for one in again for group in one.param_groups] == [0.3, 0.2, 0.001]


def test_what_wraps_a_model_is_in_no_name() -> None:
    wrapped: Any = torch.compile(a_model(), backend="eager")
    assert list(names_in(wrapped).values()) == ["0.weight", "0.bias", "1.weight", "1.bias"]


def test_weights_of_no_model_are_told() -> None:
    model, head = a_model(), nn.Linear(7, 1)
    optimizer = torch.optim.Adam([*model.parameters(), *head.parameters()])
    with pytest.raises(ConfigError, match=r"Adam has 2 parameters.* first is of shape \(1, 7\)"):
        kept_by([optimizer], model)


def test_what_is_of_no_weight_is_told() -> None:
    model = a_model()
    (optimizer,) = adam(model)
    optimizer.state["count"] = {"n": 1}  # type: ignore[index]
    with pytest.raises(ConfigError, match="keeps 'count' in its state"):
        kept_by([optimizer], model)


class Counting(torch.optim.SGD):
    """Keeps more than torch's form has a place for."""

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "cycles": 3}


def test_what_an_optimizer_keeps_beside_state_and_groups_is_told() -> None:
    model = a_model()
    with pytest.raises(ConfigError, match="Counting keeps 'cycles' in its state"):
        kept_by([Counting(model.parameters())], model)


def test_options_kept_with_another_stages_weights_are_found_by_their_place() -> None:
    """Of a model in stages, one rank keeps the groups of all."""
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    kept = kept_by([torch.optim.SGD(first.parameters(), lr=0.125)], first)
    groups = [{**group, "params": ["elsewhere.weight"]} for group in kept["param_groups"]]
    optimizer = torch.optim.SGD(second.parameters(), lr=1.0)
    go_on_from({"state": {}, "param_groups": groups}, [optimizer], second)
    assert optimizer.param_groups[0]["lr"] == 0.125
    assert optimizer.param_groups[0]["params"] == list(second.parameters())


def flattened() -> nn.Module:
    return FullyShardedDataParallel(a_model(), device_id=torch.device("cpu"), use_orig_params=True)


@pytest.mark.filterwarnings("ignore:.*")
@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("make", [a_model, flattened])
def test_options_that_were_not_kept_stay(make: Callable[[], nn.Module]) -> None:
    """A scheduler that is given for the first time has written them."""
    model, other = make(), make()
    assert is_flattened(model) == (make is flattened)
    optimizers, others = adam(model), adam(other)
    optimizers[0].param_groups[0]["lr"] = 0.25
    trained(model, optimizers, 2)
    torch.optim.lr_scheduler.OneCycleLR(others[0], 0.5, total_steps=9)
    go_on_from(deepcopy(kept_by(optimizers, model)), others, other)
    group = others[0].param_groups[0]
    assert (group["lr"], group["max_lr"]) == (0.25, 0.5)
    assert len(others[0].state) == len(optimizers[0].state)
