"""TorchConfig travels as plain data, with the backend chosen."""

from __future__ import annotations

import inspect
from contextlib import nullcontext

from spotfit.frameworks.config import BackendConfig
from spotfit.frameworks.torch.config import TorchConfig
from spotfit.model.config import ScalingConfig


def test_it_has_the_parameters_of_ray_train() -> None:
    assert str(inspect.signature(TorchConfig)).startswith(
        "(backend: 'str | None' = None, init_method: 'str' = 'env', timeout_s: 'int' = 1800)"
    )


def test_the_backend_follows_the_accelerator_unless_it_is_named() -> None:
    def chosen(config: TorchConfig, *, use_gpu: bool) -> object:
        return config.framework_options(ScalingConfig(use_gpu=use_gpu))[1]["backend"]

    assert chosen(TorchConfig(), use_gpu=False) == "gloo"
    assert chosen(TorchConfig(), use_gpu=True) == "nccl"
    assert chosen(TorchConfig("gloo"), use_gpu=True) == "gloo"


def test_a_plain_backend_sets_up_nothing() -> None:
    assert BackendConfig().framework_options(ScalingConfig()) == ("none", {})
    assert BackendConfig().train_func_context is nullcontext
    assert TorchConfig().framework == "torch"
    assert isinstance(TorchConfig(), BackendConfig)
