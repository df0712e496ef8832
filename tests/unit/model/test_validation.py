"""What the user says of validations: what is meant, and what cannot be."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from spotfit.core.errors import ConfigError
from spotfit.model.validation import ValidationConfig, ValidationTaskConfig


def look(checkpoint: Any) -> dict[str, Any]:
    return {"seen": checkpoint}


def test_nothing_said_is_no_argument_and_no_limit() -> None:
    task = ValidationTaskConfig()
    assert (task.fn_kwargs, task.timeout_s) == ({}, None)
    config = ValidationConfig(look)
    assert (config.fn, config.task_config, config.ray_remote_kwargs) == (look, task, {})
    assert config.own_machine is None


@pytest.mark.parametrize("timeout_s", [0, -1.0, float("nan")])
def test_a_timeout_that_cannot_be_met_is_refused(timeout_s: float) -> None:
    with pytest.raises(AssertionError, match="greater than zero") as refused:
        ValidationTaskConfig(timeout_s=timeout_s)
    assert isinstance(refused.value, ConfigError)
    assert str(pickle.loads(pickle.dumps(refused.value))) == str(refused.value)


def test_what_is_no_function_validates_nothing() -> None:
    with pytest.raises(ConfigError, match="takes a function, not a str"):
        ValidationConfig("validate")  # type: ignore[arg-type]  # that is the story


@pytest.mark.parametrize(
    ("asked", "needs"),
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
def test_what_it_needs_is_said_as_of_a_worker(asked: Any, needs: Any) -> None:
    assert ValidationConfig(look, None, asked).resources == needs


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ({"num_gpu": 1}, "Did you mean 'num_gpus'"),
        ({"runtime_env": {}}, "The environment of the workers is that of validations"),
        ({"num_gpus": -1}, "no amount"),
        ({"num_cpus": "two"}, "no amount"),
    ],
)
def test_what_cannot_be_had_is_refused_where_it_is_said(asked: Any, told: str) -> None:
    with pytest.raises(ConfigError) as refused:
        ValidationConfig(look, ray_remote_kwargs=asked)
    assert told in str(refused.value)
