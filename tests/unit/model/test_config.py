"""What the user writes is checked when it is written, in the words of the API it follows."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest

from spotfit.model.callbacks import UserCallback
from spotfit.model.config import (
    CheckpointConfig,
    FailureConfig,
    LoggingConfig,
    RunConfig,
    ScalingConfig,
    SyncConfig,
)


def parameters(kind: type[Any]) -> list[str]:
    return list(inspect.signature(kind).parameters)


def test_positions_are_those_of_ray_train() -> None:
    assert parameters(ScalingConfig) == [
        "trainer_resources",
        "num_workers",
        "use_gpu",
        "resources_per_worker",
        "placement_strategy",
        "accelerator_type",
        "label_selector",
        "use_tpu",
        "topology",
        "elastic_resize_monitor_interval_s",
    ]
    assert parameters(FailureConfig) == [
        "max_failures",
        "fail_fast",
        "controller_failure_limit",
        "max_preemption_failures",
        "relax_collectives_on_preemption",
        "preemption_grace_s",
    ]
    assert parameters(CheckpointConfig)[:3] == [
        "num_to_keep",
        "checkpoint_score_attribute",
        "checkpoint_score_order",
    ]
    assert parameters(RunConfig)[:8] == [
        "name",
        "storage_path",
        "storage_filesystem",
        "failure_config",
        "checkpoint_config",
        "callbacks",
        "worker_runtime_env",
        "logging_config",
    ]


@pytest.mark.parametrize(
    "make",
    [
        lambda: ScalingConfig(trainer_resources={"CPU": 1}),
        lambda: CheckpointConfig(checkpoint_frequency=1),
        lambda: CheckpointConfig(checkpoint_at_end=True),
        lambda: FailureConfig(fail_fast=False),
        lambda: RunConfig(sync_config=SyncConfig()),
        lambda: RunConfig(verbose=1),
        lambda: RunConfig(stop={"step": 3}),
        lambda: RunConfig(progress_reporter=None),
        lambda: RunConfig(log_to_file=False),
        lambda: ScalingConfig().as_placement_group_factory(),
        lambda: ScalingConfig.from_placement_group_factory(None),
    ],
)
def test_what_is_deprecated_raises(make: Any) -> None:
    with pytest.raises(DeprecationWarning, match=r"no longer supported|no placement groups"):
        make()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"num_workers": "4"}, "must be an int or a tuple of two ints"),
        ({"num_workers": [1, 2]}, "must be an int or a tuple of two ints"),
        ({"num_workers": (1, 2, 3)}, "must be an int or a tuple of two ints"),
        ({"num_workers": -1}, "cannot be negative"),
        ({"num_workers": (4, 2)}, "must be <= max_workers"),
        ({"num_workers": (0, 4)}, "may shrink to nobody"),
        ({"elastic_resize_monitor_interval_s": -1}, "must be non-negative"),
        ({"resources_per_worker": {"GPU": 1}}, "`use_gpu` is False but `GPU` was found"),
        ({"resources_per_worker": {"TPU": 1}}, "`use_tpu` is False but `TPU` was found"),
        ({"resources_per_worker": {"CPU": -1}}, "cannot be -1"),
        ({"use_gpu": True, "use_tpu": True}, "Cannot specify both"),
        ({"use_tpu": True, "num_workers": 2}, "topology and accelerator_type"),
        (
            {"use_tpu": True, "num_workers": 3, "topology": "4x4", "accelerator_type": "TPU-V4"},
            "multiple",
        ),
        ({"num_workers": 2, "label_selector": [{}]}, "must be the same length"),
    ],
)
def test_a_scaling_that_cannot_be_meant_is_refused(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        ScalingConfig(**arguments)


def test_zero_entries_are_dropped_and_gpu_counts_for_one() -> None:
    scaling = ScalingConfig(use_gpu=True, resources_per_worker={"GPU": 0})
    assert scaling.resources_per_worker == {}
    assert scaling.worker_resources == {"GPU": 1}


def test_resources_have_the_documented_defaults() -> None:
    assert ScalingConfig().worker_resources == {"CPU": 1}
    assert ScalingConfig(use_gpu=True).worker_resources == {"GPU": 1}
    both = ScalingConfig(use_gpu=True, resources_per_worker={"CPU": 2, "disk": 1})
    assert both.worker_resources == {"CPU": 2, "disk": 1, "GPU": 1}
    assert both.additional_resources_per_worker == {"disk": 1}
    assert (both.num_cpus_per_worker, both.num_gpus_per_worker) == (2, 1)
    typed = ScalingConfig(use_gpu=True, accelerator_type="L4")
    assert typed.worker_resources["accelerator_type:L4"] == 0.001


def test_a_total_is_for_the_greatest_number() -> None:
    assert ScalingConfig(num_workers=(2, 4)).total_resources == {"CPU": 4}


def test_a_range_is_elastic_even_when_it_holds_one_number() -> None:
    scaling = ScalingConfig(num_workers=(3, 3))
    assert scaling.elasticity_enabled
    assert (scaling.min_workers, scaling.max_workers) == (3, 3)
    assert not ScalingConfig(num_workers=3).elasticity_enabled


def test_equal_scalings_are_equal_and_tell_themselves() -> None:
    assert ScalingConfig(num_workers=2) == ScalingConfig(num_workers=2)
    assert repr(ScalingConfig(num_workers=2)).startswith("ScalingConfig(trainer_resources=None")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"num_to_keep": 0}, "num_to_keep"),
        ({"checkpoint_score_order": "best"}, "'max' or 'min'"),
    ],
)
def test_what_to_keep_is_checked(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        CheckpointConfig(**arguments)


def test_a_log_level_is_known_in_any_case() -> None:
    assert LoggingConfig("debug").log_level == "DEBUG"
    with pytest.raises(ValueError, match="Invalid log_level"):
        LoggingConfig("LOUD")


def test_a_run_has_defaults_for_everything() -> None:
    run = RunConfig("", Path("/data"))  # type: ignore[arg-type]  # a Path is taken, too
    assert run.name is None
    assert run.storage_path == "/data"
    assert RunConfig().storage_path == "~/spotfit_results"
    assert run.failure_config == FailureConfig(max_failures=0)
    assert run.checkpoint_config == CheckpointConfig()
    assert run.logging_config == LoggingConfig()
    assert run.callbacks == []
    assert run.worker_runtime_env == {}


@pytest.mark.parametrize("name", ["failure_config", "checkpoint_config", "logging_config"])
def test_a_config_of_another_kind_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"Invalid `{name}` type"):
        RunConfig(**{name: {"max_failures": 3}})  # type: ignore[arg-type]


def test_a_callback_must_be_one() -> None:
    mine = UserCallback()
    assert RunConfig(callbacks=[mine]).callbacks == [mine]
    with pytest.raises(ValueError, match=r"no instance of spotfit.UserCallback"):
        RunConfig(callbacks=[print])  # type: ignore[list-item]


def test_the_driver_s_environment_is_not_shared() -> None:
    mine = {"env_vars": {"A": "1"}}
    run = RunConfig(worker_runtime_env=mine)
    assert run.worker_runtime_env == mine
    assert run.worker_runtime_env is not mine
