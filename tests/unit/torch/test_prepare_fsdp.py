"""FSDP2: which modules form groups, and on which device their shards are."""

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
from spotfit.torch.prepare import shard_model

CPU = torch.device("cpu")


pytestmark = pytest.mark.usefixtures("group")


class Block(nn.Sequential):
    """A class for the wrap policy; three of them make a model."""


def blocks(device: str = "cpu") -> nn.Sequential:
    with torch.device(device):
        made = [Block(nn.Linear(2, 2), nn.Linear(2, 2)) for _ in range(2)]
        return nn.Sequential(*made, nn.Linear(2, 1))


def groups(model: nn.Module) -> list[str]:
    """Return the names of the modules that form groups; the model itself is ''."""
    return [name for name, module in model.named_modules() if isinstance(module, FSDPModule)]


def test_without_a_policy_the_model_is_one_group() -> None:
    model = blocks()
    assert shard_model(model, CPU, {}) is model
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
def test_each_block_is_a_group(policy: Any) -> None:
    model = shard_model(blocks(), CPU, {"auto_wrap_policy": policy})
    assert groups(model) == ["", "0", "1"]


def test_modules_that_a_policy_rejects_are_not_groups() -> None:
    def only_the_first(module: nn.Module, *, recurse: bool, nonwrapped_numel: int) -> bool:
        return isinstance(module, Block) if recurse else isinstance(module, nn.Linear)

    model = shard_model(blocks(), CPU, {"auto_wrap_policy": only_the_first})
    assert groups(model) == [""]


@pytest.mark.parametrize("wrong", [5, {"Block"}, set()])
def test_an_invalid_policy_is_rejected(wrong: Any) -> None:
    with pytest.raises(ConfigError, match=r"auto_wrap_policy is .* neither"):
        shard_model(blocks(), CPU, {"auto_wrap_policy": wrong})


def test_options_reach_every_group_and_are_not_modified() -> None:
    half = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    options = {"mp_policy": half, "auto_wrap_policy": {Block}}
    model = shard_model(blocks(), CPU, options)
    answer = model(torch.ones(1, 2))
    answer.sum().backward()
    assert answer.dtype is torch.bfloat16
    assert {weight.dtype for weight in model.parameters()} == {torch.float32}
    assert set(options) == {"mp_policy", "auto_wrap_policy"}


def test_a_model_on_the_meta_device_is_sharded() -> None:
    model = shard_model(blocks("meta"), CPU, {"auto_wrap_policy": {Block}})
    assert {weight.device.type for weight in model.parameters()} == {"meta"}
    model.to_empty(device=CPU)
    for weight in model.parameters():
        nn.init.zeros_(weight)
    assert model(torch.ones(1, 2)).tolist() == [[0.0]]
