"""LightningTrainer is a TorchTrainer whose machines preload Lightning."""

from __future__ import annotations

import inspect

from spotfit.lightning import LightningTrainer
from spotfit.torch import TorchftConfig, TorchTrainer


def test_it_takes_the_arguments_of_torch_trainer() -> None:
    assert inspect.signature(LightningTrainer) == inspect.signature(TorchTrainer)


def test_workers_use_the_framework_that_preloads_lightning() -> None:
    request = LightningTrainer(print)._build_request()
    assert (request.framework, request.framework_options["backend"]) == ("lightning", "gloo")


def test_another_framework_is_kept() -> None:
    trainer = LightningTrainer(print, torch_config=TorchftConfig({}))
    assert trainer._build_request().framework == "torchft"
