"""Room for what an optimizer kept, before it has taken a step: nothing is computed to be lost."""

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

from spotfit.checkpoint.saved import Saved
from spotfit.checkpoint.snapshot import Key, Piece
from spotfit.core.errors import ConfigError
from spotfit.frameworks.torch.fitting import BY_OTHERS, OPTIMIZER
from spotfit.frameworks.torch.optimizers import Names, is_flattened, names_in
from spotfit.frameworks.torch.reading import kept_beside, options_in
from spotfit.frameworks.torch.state import Training, put

_Kept = Mapping[Key, Piece | None]
"""Where an optimizer kept what of one weight; None for what is no tensor."""

_Known = dict[torch.Tensor, Any]
"""What an optimizer knows, by weight."""

Room = Mapping[Optimizer, _Known]
"""Optimizers that have room for what was saved, and what they knew before."""


def give_room(training: Training, saved: Saved) -> Room:
    """Give optimizers a place for all that was saved of them, if what they know has another form.

    What lies there is to be overwritten, or the optimizer to be given back what it knew. Torch
    would find out what it keeps by a step of nothing, twice: that touches several times the memory
    of the weights. It is still asked, once, where only the optimizer can know. Where nothing was
    saved of one they know what they knew. Raises `ConfigError` for one that cannot tell.
    """
    if is_flattened(training.model) or OPTIMIZER not in kept_beside(saved):
        return {}
    given: dict[Optimizer, _Known] = {}
    try:
        _give_all(training, saved, given)
    except ConfigError:
        take_away(given)
        raise
    return given


def _give_all(training: Training, saved: Saved, given: dict[Optimizer, _Known]) -> None:
    """Notes in `given` what those knew that are given room."""
    kept, names = _kept(saved), names_in(training.model)
    options = BY_OTHERS.union(*options_in(saved).values())
    for optimizer in training.optimizers:
        ours = _of_its_weights(optimizer, names, kept)
        if {weight: _form(known) for weight, known in optimizer.state.items() if known} != {
            weight: _saved_form(one) for weight, one in ours.items()
        }:
            given[optimizer] = dict(optimizer.state)
            if any(group.keys() - options for group in optimizer.param_groups):
                _ask(training, optimizer, ours)  # it may be of another kind than was saved
            else:
                _give(training, optimizer, ours)


def take_away(room: Room) -> None:
    """Nothing of it was of use: they know what they knew."""
    for optimizer, known in room.items():
        optimizer.state.clear()
        optimizer.state.update(known)


def _kept(saved: Saved) -> Mapping[str, _Kept]:
    """By the name of the weight."""
    found: dict[str, dict[Key, Piece | None]] = defaultdict(dict)
    for key, piece in _said(saved):
        match key:
            case ("optimizer", "state", str(weight), *place):
                found[weight][tuple(place)] = piece
    return found


def _said(saved: Saved) -> Iterator[tuple[Key, Piece | None]]:
    for index in saved.indices:
        yield from ((piece.key, piece) for piece in index.pieces)
        yield from ((leaf, None) for leaf in index.leaves)


def _of_its_weights(
    optimizer: Optimizer, names: Names, kept: Mapping[str, _Kept]
) -> dict[torch.Tensor, _Kept]:
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    return {weight: kept[name] for weight in weights if (name := names.get(weight, "")) in kept}


def _form(known: Mapping[str, Any]) -> dict[Key, Any]:
    form: dict[Key, Any] = {}

    def note(place: Any, value: Any) -> None:
        form[place] = tuple(value.shape) if isinstance(value, torch.Tensor) else None

    traverse_state_dict(dict(known), note)
    return form


def _saved_form(kept: _Kept) -> dict[Key, Any]:
    return {place: piece and tuple(piece.shape) for place, piece in kept.items()}


def _give(training: Training, optimizer: Optimizer, kept: Mapping[torch.Tensor, _Kept]) -> None:
    """It knows what was kept, all of it still to be read."""
    optimizer.state.clear()
    for weight, one in kept.items():
        places = _places(weight, one)
        if places is None:
            _ask(training, optimizer, kept)
            return
        optimizer.state[weight] = places


def _places(weight: torch.Tensor, kept: _Kept) -> dict[str, Any] | None:
    """None where only the optimizer knows where something would lie."""
    found: dict[str, Any] = {}
    for key, piece in kept.items():
        place = None if piece is None else _place(weight, piece)
        if (piece is not None and place is None) or any(map(_may_be_a_number, key)):
            return None
        put(found, key, place)
    return found


def _may_be_a_number(part: str | int) -> bool:
    """Keys of dictionaries are saved as texts, whatever they were."""
    return isinstance(part, str) and part.lstrip("-").isdigit()


def _place(weight: torch.Tensor, piece: Piece) -> torch.Tensor | None:
    """Beside the weight if it has its shape; what has another is taken there when it is adopted."""
    kind, dtype = type(weight.detach()), getattr(torch, piece.dtype)
    if piece.shape and piece.shape == tuple(weight.shape) and kind in (torch.Tensor, DTensor):
        return torch.empty_like(weight, dtype=dtype, requires_grad=False)
    if kind is torch.Tensor or (kind is DTensor and not piece.shape and weight.dim()):
        return torch.empty(piece.shape, dtype=dtype)
    return None


def _ask(training: Training, optimizer: Optimizer, kept: Mapping[torch.Tensor, _Kept]) -> None:
    """Have it take a step of nothing: all that changes is overwritten when the state is read."""
    optimizer.state.clear()
    name = type(optimizer).__name__
    try:
        with _without_gradients(optimizer):
            get_optimizer_state_dict(training.model, optimizer)
    except Exception as error:  # the user's code, or of a library of the user's
        raise _no_telling(name, f"ended with {type(error).__name__}: {error}") from error
    for other in optimizer.state.keys() - kept.keys():
        del optimizer.state[other]  # it never learned
    if any(one.keys() - _form(optimizer.state[weight]).keys() for weight, one in kept.items()):
        raise _no_telling(name, "made no place for all of it")


@contextmanager
def _without_gradients(optimizer: Optimizer) -> Iterator[None]:
    """Where there are any torch would take no step."""
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    gradients = [weight.grad for weight in weights]
    for weight in weights:
        weight.grad = None
    try:
        yield
    finally:
        for weight, gradient in zip(weights, gradients, strict=True):
            weight.grad = gradient


def _no_telling(name: str, why: str) -> ConfigError:
    return ConfigError(
        f"There is no telling where {name} would keep what was saved of it: a step without "
        f"gradients, to find out, {why}.",
        do=f"Have {name} take a step before restore(), or train with another optimizer.",
    )
