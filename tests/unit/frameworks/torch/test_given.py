"""What nobody could save is refused before a training begins, all of it at once."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from spotfit.core.errors import ConfigError
from spotfit.frameworks.torch.given import Given


class Endless(IterableDataset[int]):
    """It has no length, and neither has its loader."""

    def __iter__(self) -> Iterator[int]:
        return itertools.count()


MODEL = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
FIRST, SECOND = (torch.optim.SGD(layer.parameters(), lr=0.1) for layer in MODEL)
SCHEDULER = torch.optim.lr_scheduler.StepLR(FIRST, 1)


@pytest.mark.parametrize(
    "fit",
    [
        {},
        {"optimizer": FIRST},
        {"optimizer": [FIRST, None, SECOND], "scheduler": SCHEDULER},
        {"optimizer": (FIRST, SECOND), "scaler": torch.amp.GradScaler("cpu")},
        {"loader": DataLoader(Endless()), "extra": {"ema": MODEL}, "own": {}},
    ],
)
def test_what_can_be_kept_is_taken(fit: dict[str, Any]) -> None:
    Given(MODEL, **fit).check()


@pytest.mark.parametrize(
    ("unfit", "told"),
    [
        ({"model": None}, "model is None, and no torch.nn.Module"),
        ({"model": [MODEL]}, "model is a list"),
        (
            {"optimizer": {"a": FIRST}},
            "optimizer is a dict, which has no param_groups and no state",
        ),
        ({"optimizer": [FIRST, 5]}, "optimizer is an int"),
        ({"scheduler": [SCHEDULER]}, "scheduler is a list, which has no state_dict"),
        ({"scaler": 5}, "scaler is an int"),
        ({"loader": [1]}, "loader is a list, and no DataLoader"),
        ({"loader": 5}, "loader is an int"),
        ({"extra": [MODEL]}, "extra is a list, and no dictionary"),
        ({"extra": {"clock": object()}}, r"extra\['clock'\] is an object, which has no state_dict"),
        ({"extra": {5: MODEL}}, "extra has the name 5"),
        (
            {"model": nn.Sequential(nn.LazyLinear(1), nn.LazyBatchNorm1d())},
            "model has 6 weights without a shape yet, 0.weight for one",
        ),
        ({"extra": {"ema": nn.LazyLinear(1)}}, r"extra\['ema'\] has 2 weights without a shape"),
        ({"own": {"scaler": MODEL}}, "own may not use the names scaler"),
        ({"optimizer": [FIRST, FIRST]}, "More than one optimizer learns 0.bias, 0.weight"),
        (
            {"optimizer": torch.optim.Adam(nn.Linear(7, 1, bias=False).parameters())},
            r"an Adam learns 1 parameters that the model has not, one of shape \(1, 7\)",
        ),
    ],
)
def test_what_cannot_is_told(unfit: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        Given(**{"model": MODEL, **unfit}).check()


def test_all_of_it_is_told_at_once() -> None:
    with pytest.raises(ConfigError, match=r"(?s)model is None.*scheduler is .*own is "):
        Given(None, scheduler=3, own=4).check()
