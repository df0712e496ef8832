"""The layout of an engine decides what can be restored into it; no real engine is needed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from spotfit.core.errors import ConfigError
from spotfit.deepspeed.engine_state import EngineState, EngineTrainingState


class ZeroOptimizer:
    """A partition of an optimizer, as those of ZeRO 1 and 2 present it."""

    def __init__(self, size: int) -> None:
        self.partition = torch.zeros(size)
        self.loss_scaler = SimpleNamespace(cur_scale=8.0, dtype=torch.float16)

    def state_dict(self) -> dict[str, Any]:
        return {
            "loss_scaler": self.loss_scaler,
            "param_slice_mappings": [object()],
            "single_partition_of_fp32_groups": [self.partition],
        }

    def load_state_dict(self, states: list[dict[str, Any]], **options: bool) -> None:
        assert options == {"load_optimizer_states": True, "load_from_fp32_weights": True}
        self.partition = states[0]["single_partition_of_fp32_groups"][0]
        self.loss_scaler = states[0]["loss_scaler"]


class Engine:
    """What an engine answers about itself; tests/unit has real ones for `make deepspeed`."""

    def __init__(
        self,
        *,
        stage: int = 2,
        optimizer: Any = nn.Module,
        names: tuple[str, ...] = ("weight", "bias"),
        partition: int = 8,
        **features: Any,
    ) -> None:
        self.module = nn.Linear(3, 2)
        self.param_names = {getattr(self.module, name): name for name in names}
        self.basic_optimizer = optimizer()
        self.optimizer: Any = ZeroOptimizer(partition)
        self.global_steps = self.global_samples = self.skipped_steps = self.micro_steps = 0
        self.seq_dp_world_size = 2
        self._stage = stage
        self.pipeline_parallelism = self.has_moe_layers = self.zenflow = False
        self.mp_world_size = 1
        self._is_elastic, self._is_on_nvme, self._parameters_on = False, False, "cpu"
        self._drops_tokens = self._has_curriculum = self._is_in_other_process = False
        self._offload_ratio = 1.0
        vars(self).update(features)

    def zero_optimization_stage(self) -> int:
        return self._stage

    def zero_nvme_offload_optimizer(self) -> bool:
        return self._is_on_nvme

    def zero_offload_param(self) -> Any:
        return SimpleNamespace(device=self._parameters_on)

    def zero_elastic_checkpoint(self) -> bool:
        return self._is_elastic

    def random_ltd_enabled(self) -> bool:
        return self._drops_tokens

    def curriculum_learning_enabled(self) -> bool:
        return self._has_curriculum

    def super_offload(self) -> bool:
        return self._is_in_other_process

    def zero_partial_offload(self) -> float:
        return self._offload_ratio

    def _get_zero_param_shapes(self) -> list[dict[str, torch.Size]]:
        return [{name: weight.shape for weight, name in self.param_names.items()}]


@pytest.mark.parametrize(
    ("features", "message"),
    [
        ({"stage": 0}, "with ZeRO, which this engine does not use"),
        ({"optimizer": None}, "has no optimizer"),
        ({"pipeline_parallelism": True}, "does not support pipeline parallelism"),
        ({"mp_world_size": 2, "zenflow": True}, 'support tensor parallelism, "zenflow" of'),
        ({"has_moe_layers": True}, "mixtures of experts"),
        ({"_is_on_nvme": True}, "offloading to NVMe"),
        ({"_parameters_on": "nvme"}, "offloading to NVMe"),
        ({"_is_elastic": True}, "elastic_checkpoint"),
        ({"_drops_tokens": True}, "random_ltd"),
        ({"_has_curriculum": True}, "curriculum_learning"),
        ({"_is_in_other_process": True}, '"super_offload": .* does not contain all moments'),
        ({"_offload_ratio": 0.5}, '"ratio" of "offload_optimizer": .* does not contain all'),
    ],
)
def test_an_unsupported_engine_is_rejected(features: dict[str, Any], message: str) -> None:
    engine = Engine(**{name: one for name, one in features.items() if name != "optimizer"})
    if "optimizer" in features:
        engine.optimizer = None
    with pytest.raises(ConfigError, match=message):
        EngineState(engine)


def test_the_same_layout_is_accepted() -> None:
    first = EngineState(Engine()).describe(with_parameters=True)
    own = EngineState(Engine()).describe(with_parameters=False)
    assert "parameters" not in own
    EngineState(Engine()).reject_other_layout(first, own)


@pytest.mark.parametrize(
    ("current", "message"),
    [
        ({"stage": 1}, "saved with ZeRO 2, but the engine has ZeRO 1"),
        ({"optimizer": nn.Identity}, "the optimizer Module, but the engine has Identity"),
        ({"names": ("weight",)}, "bias would be lost"),
        ({"names": ("bias", "weight")}, "the same parameters, but in other groups"),
        ({"partition": 6}, "in partitions of other sizes"),
    ],
)
def test_another_layout_is_named(current: dict[str, Any], message: str) -> None:
    first = EngineState(Engine()).describe(with_parameters=True)
    with pytest.raises(ConfigError, match=message):
        EngineState(Engine(**current)).reject_other_layout(first, first)


def test_a_loss_scaler_is_saved_as_plain_values_and_restored_in_place() -> None:
    saved = EngineState(Engine(global_steps=7)).state_dict()
    assert saved["optimizer"].keys() == {"loss_scaler", "single_partition_of_fp32_groups"}
    assert saved["optimizer"]["loss_scaler"] == {"cur_scale": 8.0}
    engine = Engine()
    scaler = engine.optimizer.loss_scaler
    scaler.cur_scale = 1.0
    EngineState(engine).load_state_dict(saved)
    assert engine.optimizer.loss_scaler is scaler
    assert (scaler.cur_scale, scaler.dtype, engine.global_steps) == (8.0, torch.float16, 7)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_weights_are_saved_as_the_model_unless_they_are_partitioned(stage: int) -> None:
    engine = Engine(stage=stage)
    state = EngineTrainingState(engine.module, (), {"engine": EngineState(engine)})
    assert set(state.weights()) == (set() if stage == 3 else {"weight", "bias"})
