"""What optimizers keep, by the names of their weights: looked at and taken over without a step."""

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

Names = Mapping[torch.Tensor, str]
"""What a weight is called in a saved state."""


def names_in(model: Module) -> Names:
    """The names of all weights, whatever wraps the model."""
    return {weight: next(iter(_get_fqns(model, name))) for name, weight in model.named_parameters()}


def is_flattened(model: Module) -> bool:
    """Whether weights lie in rows of FSDP's first kind, where only torch finds them."""
    return bool(FullyShardedDataParallel.fsdp_modules(model))


def kept_by(optimizers: Sequence[Optimizer], model: Module) -> dict[str, Any]:
    """What all of them keep, in the form of torch's `get_optimizer_state_dict`.

    Torch's own has an optimizer that keeps nothing take a step first, which its hooks see, and with
    plain SGD that would be at every save. Raises `ConfigError` for weights of no model, and for
    what is kept of no weight.
    """
    if is_flattened(model):
        return _kept_of_flattened(optimizers, model)
    names = names_in(model)
    found: dict[str, Any] = {"state": {}, "param_groups": []}
    for optimizer in optimizers:
        ours, said = _in_order(optimizer, names), optimizer.state_dict()
        _refuse_unnamed(optimizer, said)
        found["state"] |= {ours[place]: known for place, known in said["state"].items()}
        found["param_groups"] += [
            {**group, "params": [ours[place] for place in group["params"]]}
            for group in said["param_groups"]
        ]
    return found


def go_on_from(kept: Mapping[str, Any], optimizers: Sequence[Optimizer], model: Module) -> None:
    """Have them know what was kept of their weights, and nothing else.

    Options of which nothing was kept stay as they are.
    """
    if is_flattened(model):
        _have_flattened(kept, optimizers, model)
        return
    names = names_in(model)
    groups = {name: group for group in kept["param_groups"] for name in group["params"]}
    in_order = iter(kept["param_groups"])
    for optimizer in optimizers:
        ours, said = _in_order(optimizer, names), optimizer.state_dict()
        said["state"] = {
            place: kept["state"][name] for place, name in enumerate(ours) if name in kept["state"]
        }
        said["param_groups"] = [
            {
                **group,
                **_options_of(group, ours, groups, next(in_order, {})),
                "params": group["params"],
            }
            for group in said["param_groups"]
        ]
        optimizer.load_state_dict(said)


def _options_of(
    group: Mapping[str, Any],
    names: Sequence[str],
    groups: Mapping[str, Mapping[str, Any]],
    at_its_place: Mapping[str, Any],
) -> Mapping[str, Any]:
    """What was kept of the group with its first weight, else of the one in its place.

    Of a model in stages groups are kept with the weights of one stage only.
    """
    places = group["params"]
    return groups.get(names[places[0]], at_its_place) if places else {}


def _in_order(optimizer: Optimizer, names: Names) -> list[str]:
    """The names of its weights, as it numbers them."""
    weights = list(chain.from_iterable(group["params"] for group in optimizer.param_groups))
    strange = [weight for weight in weights if weight not in names]
    if strange:
        raise ConfigError(
            f"{type(optimizer).__name__} has {len(strange)} parameters that the model has not; the "
            f"first is of shape {tuple(strange[0].shape)}.",
            do="Give Checkpointer a model that holds all its optimizers learn, such as a "
            "torch.nn.ModuleDict of several, and make optimizers once the model is prepared.",
        )
    return [names[weight] for weight in weights]


def _refuse_unnamed(optimizer: Optimizer, said: Mapping[str, Any]) -> None:
    unnamed = [key for key in said if key not in ("state", "param_groups")]
    unnamed += [key for key in said["state"] if not isinstance(key, int)]
    if unnamed:
        raise ConfigError(
            f"{type(optimizer).__name__} keeps {unnamed[0]!r} in its state, which is of no weight.",
            do="Keep it in a group of parameters, or in an object that is named in extra={…}.",
        )


def _have_flattened(
    kept: Mapping[str, Any], optimizers: Sequence[Optimizer], model: Module
) -> None:
    """Torch gives them groups of what was kept alone."""
    before = [dict(group) for optimizer in optimizers for group in optimizer.param_groups]
    options = StateDictOptions(strict=False)  # of a weight that never learned
    set_optimizer_state_dict(model, list(optimizers), optim_state_dict=dict(kept), options=options)
    groups = (group for optimizer in optimizers for group in optimizer.param_groups)
    for group, had in zip(groups, before, strict=True):
        group.update({name: value for name, value in had.items() if name not in group})


def _kept_of_flattened(optimizers: Sequence[Optimizer], model: Module) -> dict[str, Any]:
    for optimizer in optimizers:
        _refuse_unnamed(optimizer, optimizer.state_dict())
    blank = [one for one in optimizers if not one.state]
    found: dict[str, Any] = get_optimizer_state_dict(model, list(optimizers))
    for optimizer in blank:
        _forget_step(optimizer)
    return found


def _forget_step(optimizer: Optimizer) -> None:
    """To have a state to show torch has an optimizer take a step of nothing: it never took one."""
    for known in optimizer.state.values():
        if isinstance(step := known.get("step"), torch.Tensor):
            step.zero_()
    optimizer.state.clear()
