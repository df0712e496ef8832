"""TensorflowTrainer: the arguments."""

from __future__ import annotations

import subprocess
import sys

import pytest

import spotfit
from spotfit.client.trainer import DataParallelTrainer
from spotfit.tensorflow import TensorflowConfig, TensorflowTrainer


def test_the_trainer_selects_the_framework() -> None:
    trainer = TensorflowTrainer(print)
    assert isinstance(trainer, DataParallelTrainer)
    assert trainer.backend_config == TensorflowConfig()


def test_another_configuration_is_rejected() -> None:
    with pytest.raises(spotfit.ConfigError, match="tensorflow_config"):
        TensorflowTrainer(print, tensorflow_config="worker")  # type: ignore[arg-type]  # the mistake


def test_importing_the_package_does_not_import_tensorflow() -> None:
    program = (
        "import sys, spotfit.tensorflow as t; t.TensorflowTrainer, t.TensorflowConfig; "
        "print('tensorflow' in sys.modules)"
    )
    command = [sys.executable, "-c", program]
    assert subprocess.run(command, capture_output=True, text=True).stdout == "False\n"


@pytest.mark.parametrize("argument", ["metadata", "resume_from_checkpoint"])
def test_removed_arguments_raise_as_in_ray(argument: str) -> None:
    with pytest.raises(DeprecationWarning, match=argument):
        TensorflowTrainer(print, **{argument: {}})  # type: ignore[arg-type]  # both take a dict


def test_the_function_trains_in_this_process_without_workers() -> None:
    trainer = TensorflowTrainer(lambda: 5, scaling_config=spotfit.ScalingConfig(num_workers=0))
    assert trainer.fit().return_value == 5
