"""State dicts of optimizers keyed by parameter names, created and loaded without a dummy step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    _get_fqns,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn import Module
from torch.optim import Optimizer

from spotfit.core.errors import ConfigError

ParameterNames = Mapping[torch.Tensor, str]
"""Parameters and their names in a saved state."""


def parameter_names(model: Module) -> ParameterNames:
    """Return the names of all parameters, without the prefixes of wrappers such as DDP.

    Not for models with flat parameters (`has_flat_parameters`). Parameters that are shared by
    several modules have one name.
    """
    # A parameter has several names only if FSDP1 has flattened it, which callers exclude.
    return {weight: next(iter(_get_fqns(model, name))) for name, weight in model.named_parameters()}


def has_flat_parameters(model: Module) -> bool:
    """Return whether FSDP1 has flattened parameters, so that only torch can map their names.

    That is, whether a module of `model` is a FullyShardedDataParallel; False for `fully_shard`.
    """
    return bool(FullyShardedDataParallel.fsdp_modules(model))


def optimizer_state_dict(optimizers: Sequence[Optimizer], model: Module) -> dict[str, Any]:
    """Return the merged state of all optimizers, in the form of torch's `get_optimizer_state_dict`.

    Tensors are those in use, not copies. Does not change the optimizers, unlike torch's function,
    which first takes a step with an optimizer that has no state; with plain SGD that would happen
    at every save. With FSDP1 a collective. Raises `ConfigError` for parameters that are not in the
    model, and for state that belongs to no parameter.
    """
    if has_flat_parameters(model):
        return _flat_state_dict(optimizers, model)
    names = parameter_names(model)
    merged: dict[str, Any] = {"state": {}, "param_groups": []}
    # Optimizers hold disjoint parameters (`CheckpointerArguments`), so no entry is replaced.
    for optimizer in optimizers:
        ordered, state_dict = _ordered_names(optimizer, names), optimizer.state_dict()
        _reject_unnamed_state(optimizer, state_dict)
        merged["state"] |= {ordered[n]: state for n, state in state_dict["state"].items()}
        merged["param_groups"] += [
            {**group, "params": [ordered[n] for n in group["params"]]}
            for group in state_dict["param_groups"]
        ]
    return merged


def load_optimizer_state_dict(
    saved: Mapping[str, Any], optimizers: Sequence[Optimizer], model: Module
) -> None:
    """Replace the state of all optimizers by the saved state of their parameters.

    `saved` has the form of `optimizer_state_dict`, with tensors for this rank. Options of
    param_groups that were not saved keep their values. With FSDP1 a collective. Raises
    `ConfigError` for parameters that are not in the model, and what `Optimizer.load_state_dict`
    raises.
    """
    if has_flat_parameters(model):
        _load_flat_state_dict(saved, optimizers, model)
        return
    names = parameter_names(model)
    groups_by_name = {name: group for group in saved["param_groups"] for name in group["params"]}
    remaining_groups = iter(saved["param_groups"])
    for optimizer in optimizers:
        ordered, state_dict = _ordered_names(optimizer, names), optimizer.state_dict()
        state_dict["state"] = {
            n: saved["state"][name] for n, name in enumerate(ordered) if name in saved["state"]
        }
        groups = []
        for group in state_dict["param_groups"]:
            positions: list[int] = group["params"]
            at_position: Mapping[str, Any] = next(remaining_groups, {})
            # The saved group of the first parameter, else the one at this group's position: with
            # pipeline parallelism saved groups contain the parameters of one stage only, so that
            # the parameter may be in none of them. An empty group keeps its options.
            options = groups_by_name.get(ordered[positions[0]], at_position) if positions else {}
            groups.append({**group, **options, "params": positions})
        optimizer.load_state_dict({**state_dict, "param_groups": groups})


def _ordered_names(optimizer: Optimizer, names: ParameterNames) -> list[str]:
    """Return the names of the optimizer's parameters in the order of its state dict's indices."""
    weights = list(chain.from_iterable(group["params"] for group in optimizer.param_groups))
    unknown = [weight for weight in weights if weight not in names]
    if unknown:
        raise ConfigError(
            f"{type(optimizer).__name__} holds {len(unknown)} parameters that are not in "
            f"model.parameters(); the first has shape {tuple(unknown[0].shape)}.",
            do="Pass Checkpointer a model that contains the parameters of all optimizers, such as "
            "a torch.nn.ModuleDict of several models, and create optimizers after prepare_model.",
        )
    return [names[weight] for weight in weights]


def _reject_unnamed_state(optimizer: Optimizer, state_dict: Mapping[str, Any]) -> None:
    unnamed = [key for key in state_dict if key not in ("state", "param_groups")]
    unnamed += [key for key in state_dict["state"] if not isinstance(key, int)]
    if unnamed:
        raise ConfigError(
            f"The state of {type(optimizer).__name__} contains {unnamed[0]!r}, which belongs to no "
            "parameter and cannot be saved.",
            do="Store it in a param_group, or in an object that is passed in extra={…}.",
        )


def _load_flat_state_dict(
    saved: Mapping[str, Any], optimizers: Sequence[Optimizer], model: Module
) -> None:
    # set_optimizer_state_dict replaces param_groups: put options that were not saved back.
    previous = [dict(group) for optimizer in optimizers for group in optimizer.param_groups]
    # Not strict: weights that never received a gradient have no saved state.
    options = StateDictOptions(strict=False)
    set_optimizer_state_dict(model, list(optimizers), optim_state_dict=dict(saved), options=options)
    groups = (group for optimizer in optimizers for group in optimizer.param_groups)
    for group, before in zip(groups, previous, strict=True):
        group.update({name: value for name, value in before.items() if name not in group})


def _flat_state_dict(optimizers: Sequence[Optimizer], model: Module) -> dict[str, Any]:
    for optimizer in optimizers:
        _reject_unnamed_state(optimizer, optimizer.state_dict())
    without_state = [optimizer for optimizer in optimizers if not optimizer.state]
    merged: dict[str, Any] = get_optimizer_state_dict(model, list(optimizers))
    # torch has taken a dummy step to create their state. It is undone, also in `merged`, which
    # shares the step counters.
    for optimizer in without_state:
        for state in optimizer.state.values():
            if isinstance(step := state.get("step"), torch.Tensor):
                step.zero_()
        optimizer.state.clear()
    return merged
