"""Trainers by the names of earlier versions of Ray Train have the interface of TorchTrainer."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

import spotfit
from spotfit.huggingface import AccelerateTrainer, TransformersTrainer
from spotfit.torch import TorchTrainer


def train(config: dict[str, Any]) -> None:
    """Does nothing with its configuration."""


@pytest.mark.parametrize("kind", [AccelerateTrainer, TransformersTrainer])
def test_the_function_keeps_its_name_and_parameters(kind: type[TorchTrainer]) -> None:
    scaling = spotfit.ScalingConfig(num_workers=3)
    trainer = kind(train, train_loop_config={"lr": 1}, scaling_config=scaling)
    assert isinstance(trainer, TorchTrainer)
    assert trainer.scaling_config is scaling
    assert trainer.train_loop_per_worker.__name__ == "train"
    assert inspect.signature(trainer.train_loop_per_worker) == inspect.signature(train)


@pytest.mark.parametrize("kind", [AccelerateTrainer, TransformersTrainer])
def test_an_unknown_argument_is_rejected(kind: type[TorchTrainer]) -> None:
    with pytest.raises(spotfit.ConfigError, match="Did you mean 'scaling_config'"):
        kind(train, scaling_confg=None)  # type: ignore[call-arg]
