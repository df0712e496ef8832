"""TorchConfig is passed to workers as plain data with the backend chosen."""

from __future__ import annotations

import inspect
from contextlib import nullcontext
from typing import Any

import pytest

from spotfit.core.errors import ConfigError
from spotfit.frameworks.backend_config import BackendConfig
from spotfit.frameworks.torch.torch_config import TorchConfig
from spotfit.frameworks.torch.torchft_config import TorchftConfig
from spotfit.frameworks.torch.xla_backend import TorchXLAConfig
from spotfit.model.config import ScalingConfig


def test_the_parameters_are_those_of_ray_train() -> None:
    assert str(inspect.signature(TorchConfig)).startswith(
        "(backend: 'str | None' = None, init_method: 'str' = 'env', timeout_s: 'int' = 1800, *, "
    )


@pytest.mark.parametrize(
    ("scaling", "backend"),
    [
        ({}, "gloo"),
        ({"use_gpu": True}, "nccl"),
        ({"use_gpu": True, "resources_per_worker": {"GPU": 2}}, "nccl"),
        ({"use_gpu": True, "resources_per_worker": {"GPU": 0.5}}, "gloo"),
        ({"use_tpu": True}, "tpu_dist"),
    ],
)
def test_the_default_backend_follows_the_devices(scaling: dict[str, Any], backend: str) -> None:
    assert TorchConfig().backend_for(ScalingConfig(**scaling)) == backend


@pytest.mark.parametrize(
    ("wrong", "name"),
    [
        (TorchConfig(init_method="file"), "init_method must be 'env' or 'tcp'"),
        (TorchConfig(timeout_s=0), "timeout_s must be greater than 0"),
    ],
)
def test_invalid_options_are_rejected(wrong: TorchConfig, name: str) -> None:
    with pytest.raises(ValueError, match=name):
        wrong.framework_options(ScalingConfig())


def test_to_dict_returns_the_fields() -> None:
    assert TorchConfig("gloo", "tcp", 60).to_dict() == {
        "backend": "gloo",
        "init_method": "tcp",
        "timeout_s": 60,
        "form_group": True,
    }


def test_the_backend_follows_the_accelerator_unless_it_is_set() -> None:
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


@pytest.mark.parametrize(
    "config", [TorchXLAConfig(form_group=False), TorchftConfig({}, form_group=False)]
)
def test_only_a_group_of_torch_is_formed_by_the_function(config: TorchConfig) -> None:
    with pytest.raises(ConfigError, match=r"\(form_group=False\) is not supported"):
        config.framework_options(ScalingConfig(num_workers=2))
