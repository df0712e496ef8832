"""EngineState: what one rank saves of DeepSpeed's engine, and the layout into which it is restored.

ZeRO keeps the optimizer's copies of the weights in flat tensors, of which each rank has a part. A
part has no meaning for another number of ranks, stage, optimizer or order of the parameters, so
that a restore compares the layouts before it reads.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from spotfit.core.errors import ConfigError
from spotfit.torch.checkpoint.compatibility import reject_mismatches, summarize_names
from spotfit.torch.checkpoint.training_state import StateDict, TrainingState

_COUNTERS = ("global_steps", "global_samples", "skipped_steps", "micro_steps")
_LOSS_SCALER = "loss_scaler"
# DeepSpeed's conversion to other numbers of workers needs them, and no restore.
_CONVERSION_KEYS = ("param_slice_mappings", "universal_checkpoint_info", "zero_stage")
_PLAIN_TYPES = (bool, int, float, str, type(None))
_WEIGHTS_STAGE = 3
"""The stage of ZeRO that partitions the weights as well."""
_NEW_NAME = "or use a new RunConfig(name=...)."


class EngineState:
    """This rank's part of an engine, with the methods of a stateful object.

    The optimizer with its partitions, the loss scaler, the counters, the module's buffers, and the
    rank's partitions of frozen weights.
    """

    def __init__(self, engine: Any) -> None:
        """`engine` is what `deepspeed.initialize` has returned. Raises `ConfigError`."""
        _reject_unsupported(engine)
        self._engine = engine
        self.stage = int(engine.zero_optimization_stage())
        # DeepSpeed has no public name for it.
        groups = engine._get_zero_param_shapes()  # noqa: SLF001
        trained = [[(name, tuple(shape)) for name, shape in group.items()] for group in groups]
        trained_names = {name for group in trained for name, _ in group}
        names: Mapping[Any, str] = engine.param_names
        self._frozen = {name: weight for weight, name in names.items() if name not in trained_names}
        weights = engine.module.named_parameters(remove_duplicate=False)
        self._weight_names = frozenset(name for name, _ in weights)
        """Also the further names of weights that several modules share."""
        self._parameters = {name: _shape_of(weight) for weight, name in names.items()}
        sizes = [list(tensor.shape) for tensor in _partitions(engine.optimizer.state_dict())]
        self._layout = hashlib.sha256(repr((trained, sizes)).encode()).hexdigest()

    def state_dict(self) -> StateDict:
        """Return the state; its tensors are those in use, except buffers. Does not communicate."""
        engine = self._engine
        optimizer = dict(engine.optimizer.state_dict())
        for key in _CONVERSION_KEYS:
            optimizer.pop(key, None)
        if _LOSS_SCALER in optimizer:
            optimizer[_LOSS_SCALER] = _plain_attributes(optimizer[_LOSS_SCALER])
        state: StateDict = {
            "optimizer": optimizer,
            "counters": {name: getattr(engine, name) for name in _COUNTERS},
            # DeepSpeed does not synchronize buffers: each rank has its own running means. Copies,
            # because a restore reads rank 0's, as part of the model, into those in use.
            "buffers": {
                name: value.clone() if isinstance(value, torch.Tensor) else value
                for name, value in engine.module.state_dict().items()
                if name not in self._weight_names
            },
        }
        if self.stage == _WEIGHTS_STAGE:
            state["frozen"] = {name: weight.ds_tensor for name, weight in self._frozen.items()}
        return state

    def load_state_dict(self, state: StateDict) -> None:
        """Load what `state_dict` returned on this rank. A collective with ZeRO 3."""
        engine, optimizer = self._engine, self._engine.optimizer
        is_partitioned = self.stage == _WEIGHTS_STAGE
        if is_partitioned:
            optimizer.checkpoint_event_prologue()  # frees the weights that are gathered
        for name, partition in state.get("frozen", {}).items():
            self._frozen[name].ds_tensor.data.copy_(partition)
        saved = dict(state["optimizer"])
        if _LOSS_SCALER in saved:
            vars(optimizer.loss_scaler).update(saved[_LOSS_SCALER])
            saved[_LOSS_SCALER] = optimizer.loss_scaler
        # The list has an entry per rank, of which the optimizer uses its own.
        optimizer.load_state_dict(
            [saved] * engine.seq_dp_world_size,
            load_optimizer_states=True,
            load_from_fp32_weights=True,
        )
        engine.module.load_state_dict(state["buffers"], strict=False)
        for name, count in state["counters"].items():
            setattr(engine, name, count)
        if is_partitioned:
            optimizer.checkpoint_event_epilogue()  # gathers small weights again

    def describe(self, *, with_parameters: bool) -> dict[str, Any]:
        """Return the layout of this rank, for `reject_other_layout` of a later attempt."""
        description: dict[str, Any] = {
            "stage": self.stage,
            "optimizer": type(self._engine.basic_optimizer).__name__,
            "layout": self._layout,
        }
        return description | ({"parameters": self._parameters} if with_parameters else {})

    def reject_other_layout(self, first: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
        """Raise `ConfigError` if this rank cannot load a state of another layout.

        `first` is what `describe` returned on rank 0, with parameters, and `saved` on this rank.
        """
        current = self.describe(with_parameters=False)
        if first["stage"] != current["stage"]:
            raise ConfigError(
                f"The checkpoint was saved with ZeRO {first['stage']}, but the engine has ZeRO "
                f"{current['stage']}.",
                do=f'Set "zero_optimization": {{"stage": {first["stage"]}}}, {_NEW_NAME}',
            )
        if first["optimizer"] != current["optimizer"]:
            raise ConfigError(
                f"The checkpoint was saved with the optimizer {first['optimizer']}, but the engine "
                f"has {current['optimizer']}.",
                do=f"Use {first['optimizer']}, {_NEW_NAME}",
            )
        parameters: Mapping[str, tuple[int, ...]] = first["parameters"]
        common = parameters.keys() & self._parameters.keys()
        reject_mismatches(
            missing=sorted(f"model.{name}" for name in self._parameters.keys() - parameters),
            mismatches=[
                *(f"{name} would be lost" for name in sorted(parameters.keys() - common)),
                *(
                    f"{name} is {self._parameters[name]}, was {tuple(parameters[name])}"
                    for name in sorted(common)
                    if self._parameters[name] != tuple(parameters[name])
                ),
            ],
        )
        if saved["layout"] != current["layout"]:
            raise ConfigError(
                "The checkpoint has the same parameters, but in other groups, in another order, or "
                "in partitions of other sizes.",
                do="Create the same param_groups with the same trainable parameters, and use the "
                'configuration "zero_optimization" of the run that saved it, ' + _NEW_NAME,
            )


class EngineTrainingState(TrainingState):
    """The state of a training with DeepSpeed, of which `EngineState` is a stateful object.

    Of ZeRO 1 and 2 the module's weights are saved as the model, by all ranks together, so that they
    can be exported. Those of ZeRO 3 follow from the optimizer's partitions.
    """

    @property
    def engine_state(self) -> EngineState:
        """This rank's part of the engine."""
        return next(one for one in self.stateful_objects.values() if isinstance(one, EngineState))

    def weights(self) -> StateDict:
        """Return the module's weights by name; none if ZeRO has partitioned them."""
        return {} if self.engine_state.stage == _WEIGHTS_STAGE else super().weights()


def _partitions(state: Mapping[str, Any]) -> Iterator[Any]:
    """Yield the flat parts of the weights in an optimizer's state dict."""
    for key in ("single_partition_of_fp32_groups", "fp32_flat_groups"):
        yield from state.get(key, ())


def _shape_of(weight: Any) -> tuple[int, ...]:
    return tuple(getattr(weight, "ds_shape", weight.shape))


def _plain_attributes(loss_scaler: Any) -> dict[str, Any]:
    return {
        name: value for name, value in vars(loss_scaler).items() if isinstance(value, _PLAIN_TYPES)
    }


def _reject_unsupported(engine: Any) -> None:
    if not engine.zero_optimization_stage():
        raise ConfigError(
            "Checkpointer saves engines with ZeRO, which this engine does not use.",
            do='Set "zero_optimization": {"stage": 1} in the configuration, which partitions the '
            "optimizer, or use spotfit.deepspeed.report_checkpoint.",
        )
    if not hasattr(engine.optimizer, "load_state_dict"):
        raise ConfigError(
            "Checkpointer saves engines that train, but this one has no optimizer.",
            do='Set "optimizer" in the configuration, or pass optimizer= to initialize.',
        )
    unsupported = {
        "pipeline parallelism": engine.pipeline_parallelism,
        "tensor parallelism": engine.mp_world_size > 1,
        "mixtures of experts": engine.has_moe_layers,
        "offloading to NVMe": engine.zero_nvme_offload_optimizer()
        or str(getattr(engine.zero_offload_param(), "device", "")).endswith("nvme"),
        '"elastic_checkpoint"': engine.zero_elastic_checkpoint(),
        '"zenflow"': engine.zenflow,
        '"random_ltd"': engine.random_ltd_enabled(),
        '"curriculum_learning"': engine.curriculum_learning_enabled(),
    }
    if names := [name for name, is_used in unsupported.items() if is_used]:
        raise ConfigError(
            f"Checkpointer does not support {summarize_names(names)} of DeepSpeed.",
            do="Use spotfit.deepspeed.report_checkpoint, which saves by the engine's own methods.",
        )
    # Parts of the optimizer's state are in another process, or in a second optimizer.
    unsaved = {
        '"super_offload"': engine.super_offload(),
        'a "ratio" of "offload_optimizer"': engine.zero_partial_offload() != 1,
    }
    if names := [name for name, is_used in unsaved.items() if is_used]:
        raise ConfigError(
            f"Checkpointer does not support {summarize_names(names)}: DeepSpeed's state of the "
            "optimizer does not contain all moments, in its own checkpoints, too.",
            do=f"Remove {summarize_names(names)} from the configuration.",
        )
