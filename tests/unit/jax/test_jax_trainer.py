"""JaxTrainer: the arguments."""

from __future__ import annotations

import subprocess
import sys

import pytest

import spotfit
from spotfit.client.trainer import DataParallelTrainer
from spotfit.jax import JaxConfig, JaxTrainer


def test_the_trainer_selects_the_framework() -> None:
    trainer = JaxTrainer(print)
    assert isinstance(trainer, DataParallelTrainer)
    assert trainer.backend_config == JaxConfig()


def test_another_configuration_is_rejected() -> None:
    with pytest.raises(spotfit.ConfigError, match="jax_config"):
        JaxTrainer(print, jax_config="gpu")  # type: ignore[arg-type]  # the mistake


def test_importing_the_package_does_not_import_jax() -> None:
    program = "import sys, spotfit.jax as j; j.JaxTrainer, j.JaxConfig; print('jax' in sys.modules)"
    command = [sys.executable, "-c", program]
    assert subprocess.run(command, capture_output=True, text=True).stdout == "False\n"


def test_the_function_trains_in_this_process_without_workers() -> None:
    trainer = JaxTrainer(lambda: 5, scaling_config=spotfit.ScalingConfig(num_workers=0))
    assert trainer.fit().return_value == 5
