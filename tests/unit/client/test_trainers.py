"""Trainers that know their framework."""

from __future__ import annotations

import subprocess
import sys

import pytest

from spotfit.client.trainers import TorchTrainer
from spotfit.core.errors import ConfigError
from spotfit.frameworks.torch.config import TorchConfig
from spotfit.model.config import ScalingConfig
from spotfit.model.events import FitEnded
from tests.unit.client.door import Door, train


def test_torch_brings_its_own_config_unless_one_is_given() -> None:
    assert TorchTrainer(train).backend_config == TorchConfig("gloo")
    given = TorchConfig(backend="gloo", timeout_s=60)
    assert TorchTrainer(train, torch_config=given).backend_config is given


@pytest.mark.parametrize(
    ("scaling", "backend"),
    [
        (None, "gloo"),
        (ScalingConfig(use_gpu=True), "nccl"),
        (ScalingConfig(use_tpu=True), "tpu_dist"),
    ],
)
def test_the_chosen_backend_is_written_into_the_config(
    scaling: ScalingConfig | None, backend: str
) -> None:
    given = TorchConfig()
    TorchTrainer(train, torch_config=given, scaling_config=scaling)
    assert given.backend == backend


def test_a_wrong_init_method_is_told_before_anything_is_rented(door: Door) -> None:
    trainer = TorchTrainer(
        train, torch_config=TorchConfig(init_method="file"), run_config=door.request().run
    )
    with pytest.raises(ValueError, match="init_method must be"):
        trainer.fit()


def test_everything_else_goes_where_it_goes_for_any_trainer(door: Door) -> None:
    door.clock.coming = iter([lambda: door.agents_end_it(FitEnded("finished", metrics={"a": 1}))])
    trainer = TorchTrainer(
        train,
        train_loop_config=None,
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(num_workers=3),
        run_config=door.request().run,
        provisioner="local?nodes=3",
    )
    assert trainer.fit().metrics == {"a": 1}
    spec = door.view.spec
    assert spec is not None
    assert (spec.framework, spec.workers_max) == ("torch", 3)
    assert spec.framework_options["backend"] == "gloo"
    assert (spec.provisioner, spec.provisioner_options) == ("local", {"nodes": 3})


def test_a_config_of_another_kind_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"be a spotfit.torch.TorchConfig, not dict"):
        TorchTrainer(train, torch_config={"backend": "gloo"})  # type: ignore[arg-type]


def test_without_workers_and_without_a_launcher_torch_is_not_even_imported() -> None:
    script = """
import sys
from spotfit.torch import TorchTrainer
from spotfit import ScalingConfig, get_context
scaling = ScalingConfig(num_workers=0)
here = TorchTrainer(lambda: get_context().get_world_size(), scaling_config=scaling)
assert here.fit().return_value == 1
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
