"""Allocation of optimizer state for a restore, before the optimizer has taken a step.

Optimizers create their state in the first step. Their state is allocated here from the layout of
the saved state instead, with memory for the saved tensors only. torch's own way is a step without
gradients, which needs several times the memory of the weights; it is used only where the saved
layout does not determine where a tensor belongs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.checkpoint._traverse import traverse_state_dict
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from spotfit.checkpoint.format import StateKey, TensorPiece
from spotfit.checkpoint.reader import SavedState
from spotfit.core.errors import ConfigError
from spotfit.torch.checkpoint.compatibility import OPTIMIZER_COMPONENT, SCHEDULER_OPTIONS
from spotfit.torch.checkpoint.load_plan import (
    saved_components,
    saved_entries,
    saved_group_options,
    torch_dtype,
)
from spotfit.torch.checkpoint.optimizer_state import has_flat_parameters, parameter_names
from spotfit.torch.checkpoint.training_state import TrainingState, set_by_key

_SavedLayout = Mapping[StateKey, TensorPiece | None]
"""The saved state of one weight: a piece per key, or None for a value that is not a tensor."""

_StateByWeight = dict[torch.Tensor, Any]
"""An optimizer's `state` attribute."""

PreviousOptimizerStates = Mapping[Optimizer, _StateByWeight]
"""The optimizers whose state was replaced by allocated tensors, with their previous state."""


def allocate_optimizer_states(
    training: TrainingState, saved: SavedState
) -> PreviousOptimizerStates:
    """Give optimizers uninitialized state in the saved layout if their current one differs.

    Returns the previous state of each optimizer that was changed. The caller must either load the
    saved state or pass the result to `restore_optimizer_states`. Optimizers keep their state if
    none was saved, and with FSDP1. Raises `ConfigError` if an optimizer does not support the
    layout; then nothing has changed.
    """
    if has_flat_parameters(training.model) or OPTIMIZER_COMPONENT not in saved_components(saved):
        return {}
    layouts_by_name, names = _saved_layouts(saved), parameter_names(training.model)
    known_options = SCHEDULER_OPTIONS.union(*saved_group_options(saved).values())
    previous: dict[Optimizer, _StateByWeight] = {}
    try:
        for optimizer in training.optimizers:
            # A weight without a name is not in the model; creating the state dict reports it later.
            layouts = {
                weight: layouts_by_name[name]
                for group in optimizer.param_groups
                for weight in group["params"]
                if (name := names.get(weight, "")) in layouts_by_name
            }
            current = {weight: _state_layout(one) for weight, one in optimizer.state.items() if one}
            wanted = {
                weight: {key: piece and tuple(piece.shape) for key, piece in layout.items()}
                for weight, layout in layouts.items()
            }
            if current == wanted:  # its tensors can be overwritten in place
                continue
            previous[optimizer] = dict(optimizer.state)
            # Options that were not saved may mean another class: then only the optimizer itself
            # determines the layout.
            if any(group.keys() - known_options for group in optimizer.param_groups):
                _allocate_by_dummy_step(training, optimizer, layouts)
            else:
                _allocate(training, optimizer, layouts)
    except ConfigError:
        restore_optimizer_states(previous)
        raise
    return previous


def restore_optimizer_states(previous: PreviousOptimizerStates) -> None:
    """Give the optimizers the state that they had before `allocate_optimizer_states`.

    `previous` is its result; optimizers that are not in it are not changed. Idempotent.
    """
    for optimizer, state in previous.items():
        # In place: the optimizer, a scheduler or a hook may hold a reference to the dictionary.
        optimizer.state.clear()
        optimizer.state.update(state)


def _saved_layouts(saved: SavedState) -> Mapping[str, _SavedLayout]:
    """Return the saved layouts by the weight's name."""
    # Shards of one tensor have equal keys and full shapes, so any of them describes it.
    layouts: dict[str, dict[StateKey, TensorPiece | None]] = defaultdict(dict)
    for key, piece in saved_entries(saved):
        match key:
            case ("optimizer", "state", str(weight), *inner_key):
                layouts[weight][tuple(inner_key)] = piece
    return layouts


def _state_layout(state: Mapping[str, Any]) -> dict[StateKey, Any]:
    layout: dict[StateKey, Any] = {}

    def record(key: Any, value: Any) -> None:
        layout[key] = tuple(value.shape) if isinstance(value, torch.Tensor) else None

    traverse_state_dict(dict(state), record)
    return layout


def _allocate(
    training: TrainingState, optimizer: Optimizer, layouts: Mapping[torch.Tensor, _SavedLayout]
) -> None:
    """Give the optimizer uninitialized state; by a dummy step where the layout is ambiguous."""
    optimizer.state.clear()
    for weight, layout in layouts.items():
        state: dict[str, Any] = {}
        for key, piece in layout.items():
            tensor = None if piece is None else _allocate_tensor(weight, piece)
            # Keys of dictionaries are saved as strings: "0" may have been the number 0.
            is_ambiguous = any(isinstance(part, str) and part.lstrip("-").isdigit() for part in key)
            if is_ambiguous or (piece is not None and tensor is None):
                _allocate_by_dummy_step(training, optimizer, layouts)
                return
            set_by_key(state, key, tensor)
        optimizer.state[weight] = state


def _allocate_tensor(weight: torch.Tensor, piece: TensorPiece) -> torch.Tensor | None:
    """Return a tensor on the weight's device and with its sharding if the shapes are equal.

    Other tensors are created on the CPU; `Optimizer.load_state_dict` moves them if necessary. None
    for a shard of another shape, whose placement is unknown.
    """
    kind, dtype = type(weight.detach()), torch_dtype(piece)
    if piece.shape and piece.shape == tuple(weight.shape) and kind in (torch.Tensor, DTensor):
        return torch.empty_like(weight, dtype=dtype, requires_grad=False)
    # A scalar of a sharded weight, such as Adam's step, is the same on all ranks.
    if kind is torch.Tensor or (kind is DTensor and not piece.shape and weight.dim()):
        return torch.empty(piece.shape, dtype=dtype)
    return None


def _allocate_by_dummy_step(
    training: TrainingState, optimizer: Optimizer, layouts: Mapping[torch.Tensor, _SavedLayout]
) -> None:
    """Let torch take a step with zero gradients; everything it changes is overwritten later."""
    optimizer.state.clear()
    name = type(optimizer).__name__
    try:
        with _without_gradients(optimizer):
            get_optimizer_state_dict(training.model, optimizer)
    except Exception as error:  # user-defined optimizers may raise anything
        raise _unknown_layout_error(name, f"raised {type(error).__name__}: {error}") from error
    # A weight without saved state had never received a gradient; it must not get state now.
    for weight in optimizer.state.keys() - layouts.keys():
        del optimizer.state[weight]
    if any(
        layout.keys() - _state_layout(optimizer.state[weight]).keys()
        for weight, layout in layouts.items()
    ):
        raise _unknown_layout_error(name, "did not create all of the saved state")


@contextmanager
def _without_gradients(optimizer: Optimizer) -> Iterator[None]:
    """Remove the gradients in the block: torch takes its dummy step only if there are none."""
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    gradients = [weight.grad for weight in weights]
    for weight in weights:
        weight.grad = None
    try:
        yield
    finally:
        for weight, gradient in zip(weights, gradients, strict=True):
            weight.grad = gradient


def _unknown_layout_error(name: str, reason: str) -> ConfigError:
    return ConfigError(
        f"The saved state cannot be assigned to {name}: its state layout is unknown, and a step "
        f"without gradients, which should create it, {reason}.",
        do=f"Have {name} take a step before restore(), or use another optimizer.",
    )
