"""User-facing configuration objects: validation, defaults and error messages."""

from __future__ import annotations

import inspect
import math
from typing import Any

import pytest

from spotfit.core.errors import ConfigErrors
from spotfit.model.config import (
    CheckpointConfig,
    FailureConfig,
    LoggingConfig,
    ScalingConfig,
    SyncConfig,
)


def parameters(kind: type[Any]) -> list[str]:
    return list(inspect.signature(kind).parameters)


def test_positional_arguments_match_ray_train() -> None:
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


@pytest.mark.parametrize(
    "make",
    [
        lambda: ScalingConfig(trainer_resources={"CPU": 1}),
        lambda: CheckpointConfig(checkpoint_frequency=1),
        lambda: CheckpointConfig(checkpoint_at_end=True),
        lambda: FailureConfig(fail_fast=False),
        lambda: ScalingConfig().as_placement_group_factory(),
        lambda: ScalingConfig.from_placement_group_factory(None),
    ],
)
def test_a_deprecated_argument_raises(make: Any) -> None:
    with pytest.raises(DeprecationWarning, match=r"no longer supported|placement groups"):
        make()


@pytest.mark.parametrize(
    ("arguments", "expected_message"),
    [
        ({"num_workers": "4"}, "must be an int or a tuple of two ints"),
        ({"num_workers": [1, 2]}, "must be an int or a tuple of two ints"),
        ({"num_workers": (1, 2, 3)}, "must be an int or a tuple of two ints"),
        ({"num_workers": True}, "must be an int or a tuple of two ints"),
        ({"num_workers": (True, 2)}, "must be an int or a tuple of two ints"),
        ({"use_gpu": "yes"}, r"use_gpu='yes'\) must be True or False"),
        ({"use_tpu": 1}, r"use_tpu=1\) must be True or False"),
        ({"num_workers": -1}, "cannot be negative"),
        ({"num_workers": (4, 2)}, "must be <= max_workers"),
        ({"num_workers": (0, 4)}, "min workers must be >= 1"),
        ({"elastic_resize_monitor_interval_s": -1}, "must be non-negative"),
        ({"resources_per_worker": {"GPU": 1}}, "`use_gpu` is False but `GPU` was found"),
        ({"resources_per_worker": {"TPU": 1}}, "`use_tpu` is False but `TPU` was found"),
        ({"resources_per_worker": {"CPU": -1}}, r"-1}\): the amount must be a number >= 0"),
        ({"resources_per_worker": {"CPU": math.inf}}, r"inf}\): the amount must be a number >= 0"),
        ({"resources_per_worker": {"CPU": "two"}}, r"'two'}\): the amount must be a number >= 0"),
        ({"resources_per_worker": ["CPU"]}, "must be a dictionary"),
        ({"elastic_resize_monitor_interval_s": "60"}, "must be non-negative"),
        ({"placement_strategy": "SPRAED"}, "Did you mean 'SPREAD'"),
        (
            {"use_tpu": True, "topology": "4by4", "accelerator_type": "TPU-V4"},
            "is not a valid topology",
        ),
        (
            {
                "use_tpu": True,
                "topology": "2x2x2",
                "accelerator_type": "TPU-V4",
                "resources_per_worker": {"TPU": 3},
            },
            "cannot be divided among workers",
        ),
        ({"use_gpu": True, "use_tpu": True}, "Cannot specify both"),
        ({"use_tpu": True, "num_workers": 2}, "topology and accelerator_type"),
        (
            {"use_tpu": True, "num_workers": 3, "topology": "4x4", "accelerator_type": "TPU-V4"},
            "multiple",
        ),
        ({"num_workers": 2, "label_selector": [{}]}, "must be the same length"),
    ],
)
def test_an_invalid_scaling_config_raises(arguments: dict[str, Any], expected_message: str) -> None:
    with pytest.raises(ValueError, match=expected_message):
        ScalingConfig(**arguments)


def test_all_invalid_values_of_a_config_are_reported_together() -> None:
    with pytest.raises(ConfigErrors) as message:
        ScalingConfig(
            num_workers=-1,
            use_gpu=True,
            use_tpu=True,
            placement_strategy="NEAR",
            elastic_resize_monitor_interval_s=-1,
        )
    assert len(message.value.errors) == 4
    with pytest.raises(ConfigErrors) as message:
        ScalingConfig(num_workers=2, label_selector=[{}], resources_per_worker={"GPU": 1})
    assert len(message.value.errors) == 2
    with pytest.raises(ConfigErrors):
        ScalingConfig(resources_per_worker={"CPU": -1, "disk": "big"})  # type: ignore[dict-item]
    with pytest.raises(ConfigErrors):
        CheckpointConfig(0, checkpoint_score_order="best")
    with pytest.raises(ConfigErrors):
        FailureConfig(-2, preemption_grace_s=-1)


def test_all_deprecated_arguments_are_reported_together() -> None:
    with pytest.raises(DeprecationWarning, match=r"checkpoint_frequency.*checkpoint_at_end"):
        CheckpointConfig(checkpoint_frequency=0, checkpoint_at_end=None)


@pytest.mark.parametrize(
    "arguments",
    [
        {"max_failures": -2},
        {"max_failures": 1.5},
        {"max_failures": math.inf},
        {"max_failures": None},
        {"controller_failure_limit": "3"},
        {"max_preemption_failures": -3},
        {"preemption_grace_s": -0.5},
        {"preemption_grace_s": math.nan},
    ],
)
def test_a_failure_limit_must_be_an_integer_of_at_least_minus_one(
    arguments: dict[str, Any],
) -> None:
    with pytest.raises(ValueError, match=next(iter(arguments))):
        FailureConfig(**arguments)


def test_common_arguments_may_be_positional() -> None:
    assert FailureConfig(3).max_failures == 3
    assert CheckpointConfig(2, "loss", "min").checkpoint_score_order == "min"
    assert FailureConfig(-1, controller_failure_limit=-1) == FailureConfig(max_failures=-1)


def test_sync_config_can_be_constructed() -> None:
    assert SyncConfig() == SyncConfig(300, 1800, False, True)


def test_zero_amounts_are_dropped_and_use_gpu_defaults_to_one() -> None:
    scaling = ScalingConfig(use_gpu=True, resources_per_worker={"GPU": 0})
    assert scaling.worker_resources == {"GPU": 1}
    assert scaling.resources_per_worker == {"GPU": 0}, "the argument is not modified"


def test_a_worker_may_need_no_resources() -> None:
    assert ScalingConfig(resources_per_worker={}).worker_resources == {}
    assert ScalingConfig(resources_per_worker={"CPU": 0}).total_resources == {}


def test_resources_have_the_documented_defaults() -> None:
    assert ScalingConfig().worker_resources == {"CPU": 1}
    assert ScalingConfig(use_gpu=True).worker_resources == {"GPU": 1}
    both = ScalingConfig(use_gpu=True, resources_per_worker={"CPU": 2, "disk": 1})
    assert both.worker_resources == {"CPU": 2, "disk": 1, "GPU": 1}
    assert both.additional_resources_per_worker == {"disk": 1}
    assert (both.num_cpus_per_worker, both.num_gpus_per_worker) == (2, 1)
    typed = ScalingConfig(use_gpu=True, accelerator_type="L4")
    assert typed.worker_resources["accelerator_type:L4"] == 0.001


def test_explicit_resources_are_combined_with_use_gpu_and_use_tpu() -> None:
    tpu = ScalingConfig(use_tpu=True, resources_per_worker={"CPU": 2})
    assert tpu.worker_resources == {"CPU": 2, "TPU": 1}
    assert tpu.additional_resources_per_worker == {"TPU": 1}
    assert ScalingConfig(use_gpu=True, resources_per_worker={"GPU": 2}).num_gpus_per_worker == 2


@pytest.mark.parametrize(
    ("topology", "kind", "explicit", "workers"),
    [
        ("2x2x2", "TPU-V4", None, 2),
        ("4x4", "TPU-V6E", None, 4),
        ("2x4", "TPU-V6E", None, 1),
        ("2x2x2", "TPU-V4", {"TPU": 8}, 1),
    ],
)
def test_num_workers_must_be_a_multiple_of_the_tpu_slice(
    topology: str, kind: str, explicit: dict[str, float] | None, workers: int
) -> None:
    def request(count: int) -> ScalingConfig:
        return ScalingConfig(
            num_workers=count,
            use_tpu=True,
            topology=topology,
            accelerator_type=kind,
            resources_per_worker=explicit,
        )

    assert request(workers * 2).max_workers == workers * 2
    if workers > 1:
        with pytest.raises(ValueError, match=f"has {workers} workers"):
            request(workers + 1)


def test_total_resources_are_for_max_workers() -> None:
    assert ScalingConfig(num_workers=(2, 4)).total_resources == {"CPU": 4}


def test_a_tuple_is_elastic_even_with_equal_bounds() -> None:
    scaling = ScalingConfig(num_workers=(3, 3))
    assert scaling.elasticity_enabled
    assert (scaling.min_workers, scaling.max_workers) == (3, 3)
    assert not ScalingConfig(num_workers=3).elasticity_enabled


def test_equal_scaling_configs_are_equal_and_have_a_repr() -> None:
    assert ScalingConfig(num_workers=2) == ScalingConfig(num_workers=2)
    assert repr(ScalingConfig(num_workers=2)).startswith("ScalingConfig(trainer_resources=None")


@pytest.mark.parametrize(
    ("arguments", "expected_message"),
    [
        ({"num_to_keep": 0}, "num_to_keep"),
        ({"num_to_keep": "2"}, "num_to_keep"),
        ({"checkpoint_score_order": "best"}, "'max' or 'min'"),
    ],
)
def test_an_invalid_checkpoint_config_raises(
    arguments: dict[str, Any], expected_message: str
) -> None:
    with pytest.raises(ValueError, match=expected_message):
        CheckpointConfig(**arguments)


def test_a_log_level_is_case_insensitive() -> None:
    assert LoggingConfig("debug").log_level == "DEBUG"
    assert LoggingConfig("warn").log_level == "WARN"
    for invalid in ("LOUD", 20, None):
        with pytest.raises(ValueError, match="Invalid log_level"):
            LoggingConfig(invalid)  # type: ignore[arg-type]
