"""FSDP2: which modules gather their weights together, and on which device their shares lie."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy, size_based_auto_wrap_policy
from torch.distributed.tensor import DTensor

from spotfit.core.errors import ConfigError
from spotfit.frameworks.torch.sharding import sharded

CPU = torch.device("cpu")


pytestmark = pytest.mark.usefixtures("group")


class Block(nn.Sequential):
    """Three of them make a model."""


def blocks(device: str = "cpu") -> nn.Sequential:
    with torch.device(device):
        made = [Block(nn.Linear(2, 2), nn.Linear(2, 2)) for _ in range(2)]
        return nn.Sequential(*made, nn.Linear(2, 1))


def groups(model: nn.Module) -> list[str]:
    """Names of the modules that gather their weights as one; the model itself is ''."""
    return [name for name, module in model.named_modules() if isinstance(module, FSDPModule)]


def test_the_model_itself_is_sharded_and_one_group_unless_told() -> None:
    model = blocks()
    assert sharded(model, CPU, {}) is model
    assert groups(model) == [""]
    assert all(isinstance(weight, DTensor) for weight in model.parameters())


@pytest.mark.parametrize(
    "policy",
    [
        {Block},
        [Block],
        Block,
        ModuleWrapPolicy({Block}),
        partial(size_based_auto_wrap_policy, min_num_params=12),
    ],
    ids=["classes", "a list", "a class", "torch's policy", "by size"],
)
def test_blocks_are_groups_of_their_own(policy: Any) -> None:
    model = sharded(blocks(), CPU, {"auto_wrap_policy": policy})
    assert groups(model) == ["", "0", "1"]


def test_a_policy_may_leave_parts_alone() -> None:
    def only_the_first(module: nn.Module, *, recurse: bool, nonwrapped_numel: int) -> bool:
        return isinstance(module, Block) if recurse else isinstance(module, nn.Linear)

    model = sharded(blocks(), CPU, {"auto_wrap_policy": only_the_first})
    assert groups(model) == [""]


@pytest.mark.parametrize("wrong", [5, {"Block"}, set()])
def test_a_policy_that_names_no_modules_is_refused(wrong: Any) -> None:
    with pytest.raises(ConfigError, match="auto_wrap_policy cannot be"):
        sharded(blocks(), CPU, {"auto_wrap_policy": wrong})


def test_options_reach_every_group_and_stay_the_caller_s() -> None:
    half = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    options = {"mp_policy": half, "auto_wrap_policy": {Block}}
    model = sharded(blocks(), CPU, options)
    answer = model(torch.ones(1, 2))
    answer.sum().backward()
    assert answer.dtype is torch.bfloat16
    assert {weight.dtype for weight in model.parameters()} == {torch.float32}
    assert set(options) == {"mp_policy", "auto_wrap_policy"}


def test_a_model_without_memory_is_sharded_first_and_filled_later() -> None:
    model = sharded(blocks("meta"), CPU, {"auto_wrap_policy": {Block}})
    assert {weight.device.type for weight in model.parameters()} == {"meta"}
    model.to_empty(device=CPU)
    for weight in model.parameters():
        nn.init.zeros_(weight)
    assert model(torch.ones(1, 2)).tolist() == [[0.0]]
