"""HorovodTrainer: the arguments, and what the package imports."""

from __future__ import annotations

import subprocess
import sys

import pytest

import spotfit
from spotfit.client.trainer import DataParallelTrainer
from spotfit.horovod import HorovodConfig, HorovodTrainer


def test_the_trainer_has_horovods_configuration() -> None:
    trainer = HorovodTrainer(print)
    assert isinstance(trainer, DataParallelTrainer)
    assert trainer.backend_config == HorovodConfig()


def test_another_configuration_is_rejected() -> None:
    with pytest.raises(spotfit.ConfigError, match="horovod_config"):
        HorovodTrainer(print, horovod_config="mpi")  # type: ignore[arg-type]  # the mistake


@pytest.mark.parametrize("argument", ["metadata", "resume_from_checkpoint"])
def test_removed_arguments_of_ray_are_rejected(argument: str) -> None:
    with pytest.raises(DeprecationWarning, match=argument):
        HorovodTrainer(print, **{argument: {"a": 1}})  # type: ignore[arg-type]  # any argument


def test_importing_the_package_does_not_import_torch() -> None:
    names = "h.HorovodTrainer, h.HorovodConfig"
    program = f"import sys, spotfit.horovod as h; {names}; print('torch' in sys.modules)"
    command = [sys.executable, "-c", program]
    assert subprocess.run(command, capture_output=True, text=True).stdout == "False\n"


@pytest.mark.parametrize(
    ("library", "do"),
    [
        ("tensorflow", "TensorflowTrainer"),
        ("keras", "TensorflowTrainer"),
        ("mxnet", "spotfit.horovod.torch"),
    ],
)
def test_other_libraries_are_rejected_on_import(library: str, do: str) -> None:
    with pytest.raises(ImportError, match=do):
        __import__(f"spotfit.horovod.{library}")


def test_the_function_trains_in_this_process_without_workers() -> None:
    trainer = HorovodTrainer(lambda: 5, scaling_config=spotfit.ScalingConfig(num_workers=0))
    assert trainer.fit().return_value == 5
