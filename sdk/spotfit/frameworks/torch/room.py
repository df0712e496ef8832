"""Room for what an optimizer kept, before it has taken a step: nothing is computed to be lost."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict import _get_fqns
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from spotfit.checkpoint.saved import Saved
from spotfit.checkpoint.snapshot import Key, Piece
from spotfit.frameworks.torch.state import Training

_Kept = Mapping[str, Piece | None]
"""By name, what an optimizer kept of one weight; None for what is no tensor."""


def give_room(training: Training, saved: Saved) -> list[Optimizer]:
    """Give blank optimizers a place for all that was saved of them; those that have it now.

    What lies there is to be overwritten, or the optimizer to be made blank again. Torch would find
    out what it keeps by a step of nothing, twice: that touches several times the memory of the
    weights. It still does so for optimizers and weights whose places only they know.
    """
    kept = _kept(saved)
    if kept is None or FullyShardedDataParallel.fsdp_modules(training.model):
        return []
    names = _names(training)
    return [one for one in training.optimizers if not one.state and _give(one, names, kept)]


def _kept(saved: Saved) -> Mapping[str, _Kept] | None:
    """By weight; None where it is nested, and who shall know how."""
    found: dict[str, dict[str, Piece | None]] = defaultdict(dict)
    for key, piece in _said(saved):
        match key:
            case ("optimizer", "state", str(weight), str(name)):
                found[weight][name] = piece
            case ("optimizer", "state", *_):
                return None
    return found


def _said(saved: Saved) -> Iterator[tuple[Key, Piece | None]]:
    for index in saved.indices:
        yield from ((piece.key, piece) for piece in index.pieces)
        yield from ((leaf, None) for leaf in index.leaves)


def _names(training: Training) -> Mapping[torch.Tensor, str]:
    """What a weight is called in a saved state."""
    return {
        weight: next(iter(_get_fqns(training.model, name)))
        for name, weight in training.model.named_parameters()
    }


def _give(
    optimizer: Optimizer, names: Mapping[torch.Tensor, str], kept: Mapping[str, _Kept]
) -> bool:
    """Whether all that was kept of its weights has a place now; else none has."""
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    for weight in weights:
        places = _places(weight, kept.get(names.get(weight, ""), {}))
        if places is None:
            optimizer.state.clear()
            return False
        if places:
            optimizer.state[weight] = places
    return bool(optimizer.state)


def _places(weight: torch.Tensor, kept: _Kept) -> dict[str, Any] | None:
    """None where only the optimizer knows where something would lie."""
    found: dict[str, Any] = {}
    for name, piece in kept.items():
        found[name] = None if piece is None else _place(weight, piece)
        if piece is not None and found[name] is None:
            return None
    return found


def _place(weight: torch.Tensor, piece: Piece) -> torch.Tensor | None:
    """Beside the weight if it has its shape; what has another is taken there when it is adopted."""
    kind, dtype = type(weight.detach()), getattr(torch, piece.dtype)
    if piece.shape and piece.shape == tuple(weight.shape) and kind in (torch.Tensor, DTensor):
        return torch.empty_like(weight, dtype=dtype, requires_grad=False)
    if kind is torch.Tensor or (kind is DTensor and not piece.shape and weight.dim()):
        return torch.empty(piece.shape, dtype=dtype)
    return None
