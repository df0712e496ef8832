"""Broadcast of the state of models and optimizers from one rank to all."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from spotfit.core.errors import ConfigError
from spotfit.horovod.torch.exchanges import broadcast_async_, broadcast_object
from spotfit.horovod.torch.process_sets import rank, size


def broadcast_parameters(
    params: Mapping[str, Any] | Iterable[Tensor | tuple[str, Tensor]], root_rank: int
) -> None:
    """Set tensors to those of `root_rank`, in place.

    `params` is a state dict, `model.named_parameters()`, or `model.parameters()`; the same on all
    ranks. Values of a state dict that are not tensors are set to those of `root_rank`, too. Raises
    `ConfigError` for another type.
    """
    if isinstance(params, Tensor | str) or not isinstance(params, Iterable):
        raise ConfigError(
            f"hvd.broadcast_parameters() takes parameters, not {type(params).__name__}.",
            do="Pass model.state_dict() or model.named_parameters().",
        )
    if isinstance(params, Mapping):
        others = {key: value for key, value in params.items() if not isinstance(value, Tensor)}
        if others and isinstance(params, dict):
            params.update(broadcast_object(others, root_rank))
        values: list[Any] = [params[key] for key in sorted(params.keys() - others.keys())]
    else:
        values = [one[1] if isinstance(one, tuple) else one for one in params]
    handles = [broadcast_async_(value, root_rank) for value in values]
    for handle in handles:
        handle.wait()


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer, root_rank: int, model: torch.nn.Module | None = None
) -> None:
    """Load the state of the optimizer of `root_rank` on all ranks, with its options.

    Also if the others have no state yet, as their optimizers have not made a step. `model` has no
    effect.
    """
    if size() == 1:
        return
    tensors: list[Tensor] = []
    state = _replace_tensors(optimizer.state_dict(), tensors)
    specs = [_TensorSpec(one.shape, one.dtype, one.device.type) for one in tensors]
    state, specs = broadcast_object((state, specs), root_rank)
    if rank() != root_rank:
        tensors = [torch.empty(one.shape, dtype=one.dtype, device=one.device) for one in specs]
    broadcast_parameters(tensors, root_rank)
    if rank() != root_rank:
        optimizer.load_state_dict(_insert_tensors(state, tensors))


class _TensorSpec(NamedTuple):
    shape: torch.Size
    dtype: torch.dtype
    device: str


class _TensorPlace(NamedTuple):
    """Stands for a tensor in a state dict."""

    number: int


def _replace_tensors(value: Any, tensors: list[Tensor]) -> Any:
    """Return `value` with places instead of its tensors, which are appended to `tensors`."""
    if isinstance(value, Tensor):
        tensors.append(value)
        return _TensorPlace(len(tensors) - 1)
    if isinstance(value, dict):
        return {key: _replace_tensors(one, tensors) for key, one in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_replace_tensors(one, tensors) for one in value)
    return value


def _insert_tensors(value: Any, tensors: list[Tensor]) -> Any:
    if isinstance(value, _TensorPlace):
        return tensors[value.number]
    if isinstance(value, dict):
        return {key: _insert_tensors(one, tensors) for key, one in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_insert_tensors(one, tensors) for one in value)
    return value
