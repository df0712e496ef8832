"""User-facing validation configuration: defaults and error messages."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from spotfit.core.errors import ConfigError
from spotfit.model.validation_config import ValidationConfig, ValidationTaskConfig


def score(checkpoint: Any) -> dict[str, Any]:
    return {"seen": checkpoint}


def test_the_defaults_are_no_arguments_and_no_timeout() -> None:
    task = ValidationTaskConfig()
    assert (task.fn_kwargs, task.timeout_s) == ({}, None)
    config = ValidationConfig(score)
    assert (config.fn, config.task_config, config.ray_remote_kwargs) == (score, task, {})
    assert config.own_machine is None


@pytest.mark.parametrize("timeout_s", [0, -1.0, float("nan")])
def test_a_non_positive_timeout_raises(timeout_s: float) -> None:
    with pytest.raises(AssertionError, match="greater than zero") as refused:
        ValidationTaskConfig(timeout_s=timeout_s)
    assert isinstance(refused.value, ConfigError)
    assert str(pickle.loads(pickle.dumps(refused.value))) == str(refused.value)


def test_fn_must_be_callable() -> None:
    with pytest.raises(ConfigError, match="must be a function, not str"):
        ValidationConfig("validate")  # type: ignore[arg-type]  # invalid on purpose


@pytest.mark.parametrize(
    ("options", "needs"),
    [
        ({}, {"CPU": 1}),
        ({"num_gpus": 1}, {"CPU": 1, "GPU": 1}),
        ({"num_cpus": 0, "num_gpus": 0.5}, {"GPU": 0.5}),
        (
            {"num_cpus": 4, "memory": 2**30, "resources": {"disk": 2}, "accelerator_type": "L4"},
            {"CPU": 4, "memory": 2**30, "disk": 2, "accelerator_type:L4": 0.001},
        ),
        ({"max_retries": 3, "retry_exceptions": True}, {"CPU": 1}),
    ],
)
def test_resources_use_the_names_of_scaling_config(options: Any, needs: Any) -> None:
    assert ValidationConfig(score, None, options).resources == needs


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_gpu": 1}, "Did you mean 'num_gpus'"),
        ({"runtime_env": {}}, "in the environment of the workers"),
        ({"num_gpus": -1}, "must be a non-negative number"),
        ({"num_cpus": "two"}, "must be a non-negative number"),
    ],
)
def test_an_invalid_option_raises(options: Any, message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        ValidationConfig(score, ray_remote_kwargs=options)
    assert message in str(refused.value)
