"""Invalid arguments are reported together before training begins."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from spotfit.core.errors import ConfigError
from spotfit.torch.checkpoint.arguments import CheckpointerArguments


class Endless(IterableDataset[int]):
    """A dataset without a length."""

    def __iter__(self) -> Iterator[int]:
        return itertools.count()


MODEL = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
FIRST, SECOND = (torch.optim.SGD(layer.parameters(), lr=0.1) for layer in MODEL)
SCHEDULER = torch.optim.lr_scheduler.StepLR(FIRST, 1)


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"optimizer": FIRST},
        {"optimizer": [FIRST, None, SECOND], "scheduler": SCHEDULER},
        {"optimizer": (FIRST, SECOND), "scaler": torch.amp.GradScaler("cpu")},
        {"loader": DataLoader(Endless()), "extra": {"ema": MODEL}, "per_rank": {}},
    ],
)
def test_valid_arguments_are_accepted(arguments: dict[str, Any]) -> None:
    CheckpointerArguments(MODEL, **arguments).validate()


def test_an_engine_of_deepspeed_is_rejected_with_its_own_checkpointer() -> None:
    engine = type("DeepSpeedEngine", (nn.Linear,), {"__module__": "deepspeed.runtime.engine"})
    with pytest.raises(ConfigError, match="engine of DeepSpeed") as caught:
        CheckpointerArguments(engine(1, 1)).validate()
    assert "spotfit.deepspeed.Checkpointer" in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"model": None}, "model is None, not a torch.nn.Module"),
        ({"model": [MODEL]}, "model is a list"),
        (
            {"optimizer": {"a": FIRST}},
            "optimizer is a dict, which has no param_groups and no state",
        ),
        ({"optimizer": [FIRST, 5]}, "optimizer is an int"),
        ({"scheduler": [SCHEDULER]}, "scheduler is a list, which has no state_dict"),
        ({"scaler": 5}, "scaler is an int"),
        ({"loader": [1]}, "loader is a list, not a DataLoader"),
        ({"loader": 5}, "loader is an int"),
        ({"extra": [MODEL]}, "extra is a list, not a dictionary"),
        ({"extra": {"clock": object()}}, r"extra\['clock'\] is an object, which has no state_dict"),
        ({"extra": {5: MODEL}}, "extra has the name 5"),
        (
            {"model": nn.Sequential(nn.LazyLinear(1), nn.LazyBatchNorm1d())},
            "model has 6 lazy parameters without a shape, for example 0.weight",
        ),
        (
            {"extra": {"ema": nn.LazyLinear(1)}},
            r"extra\['ema'\] has 2 lazy parameters without a shape",
        ),
        ({"per_rank": {"scaler": MODEL}}, "per_rank uses the reserved names scaler"),
        (
            {"optimizer": [FIRST, FIRST]},
            "More than one optimizer holds the parameters 0.bias, 0.weight",
        ),
        (
            {"optimizer": torch.optim.Adam(nn.Linear(7, 1, bias=False).parameters())},
            r"Adam holds 1 parameters that are not in .* one of shape \(1, 7\)",
        ),
    ],
)
def test_invalid_arguments_are_described(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        CheckpointerArguments(**{"model": MODEL, **arguments}).validate()


def test_all_problems_are_reported_together() -> None:
    with pytest.raises(ConfigError, match=r"(?s)model is None.*scheduler is .*per_rank is "):
        CheckpointerArguments(None, scheduler=3, per_rank=4).validate()
