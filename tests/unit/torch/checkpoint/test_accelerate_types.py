"""Accelerate's wrappers are recognized by their class, without importing Accelerate."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from spotfit.torch.checkpoint.accelerate_types import isinstance_of_accelerate, unwrap_optimizer


class AcceleratedOptimizer:
    """Has an optimizer and its state, and nothing else that torch's Optimizer has."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer


OPTIMIZER = torch.optim.SGD(nn.Linear(1, 1).parameters())


def test_without_accelerate_no_object_is_one_of_its_wrappers() -> None:
    wrapper = AcceleratedOptimizer(OPTIMIZER)
    assert not isinstance_of_accelerate(wrapper, "AcceleratedOptimizer")
    assert unwrap_optimizer(wrapper) is wrapper


def test_wrapped_optimizers_are_unwrapped(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("accelerate.optimizer")
    module.AcceleratedOptimizer = AcceleratedOptimizer  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    assert unwrap_optimizer(AcceleratedOptimizer(AcceleratedOptimizer(OPTIMIZER))) is OPTIMIZER
    assert unwrap_optimizer(OPTIMIZER) is OPTIMIZER
