"""Whether a saved state fits what is given now: decided by all ranks before any of it is read."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from spotfit.core.errors import ConfigError

MODEL = "model."
"""What the names of its weights begin with."""
KNOWN = "optimizer.state."
"""What the names of all that optimizers know begin with."""
GROUPS = "optimizer.param_groups."
OPTIMIZER = ("optimizer", "optimizer")
"""The part that all optimizers are together."""
_ALL_OPTIMIZERS = (
    "Give Checkpointer all optimizers of the run that saved it, with all their groups before "
    "restore(). Best give them all weights from the beginning: what is frozen until later has "
    "requires_grad_(False) until then, and no add_param_group. Without optimizer= the model goes "
    "on alone."
)

Part = tuple[str, str]
"""As which a thing beside the model is given, 'optimizer', 'extra' or 'own', and its name."""


class Fit(NamedTuple):
    """What one rank finds of a saved state."""

    left: frozenset[str]
    """The names of what was saved of a model and its optimizers, and it has no place for."""
    kept: frozenset[Part]
    """What was saved beside the model."""
    given: frozenset[Part]
    """What it is given beside the model."""


def unused(fits: Sequence[Fit]) -> list[str]:
    """What was saved, and no rank is given any more."""
    kept, given = _all(fit.kept for fit in fits), _all(fit.given for fit in fits)
    return sorted(name for _, name in kept - given)


def new(fits: Sequence[Fit]) -> list[str]:
    """What some rank is given, and nothing was saved of."""
    kept, given = _all(fit.kept for fit in fits), _all(fit.given for fit in fits)
    return sorted(name for _, name in given - kept)


def refuse_moved(kept: frozenset[Part], given: frozenset[Part]) -> None:
    """Raises `ConfigError` for what is given as something else now: it would begin anew."""
    was = {name: kind for kind, name in kept - given}
    moved = sorted((name, kind) for kind, name in given - kept if name in was)
    if moved:
        told = [f"{name!r} was kept in {was[name]}={{…}}, not {kind}={{…}}" for name, kind in moved]
        raise ConfigError(
            f"What was kept would be lost: {'; '.join(told)}.",
            do="Give it where it was given before; to begin it anew, name a new run.",
        )


def refuse_left(fits: Sequence[Fit]) -> None:
    """Raises `ConfigError` for weights that no rank has a place for, or no optimizer.

    Of a model in stages each rank has a part only. Without any optimizer nothing is to learn.
    """
    names = sorted(frozenset.intersection(*(fit.left for fit in fits)))
    if gone := [name for name in names if name.startswith(MODEL)]:
        raise ConfigError(
            f"The checkpoint is of another model: {_some(gone)} would be lost, for there is no "
            "such weight any more.",
            do="Build the same model as the run that saved it, or name a new run and load what "
            "export_checkpoint() writes.",
        )
    if OPTIMIZER in _all(fit.given for fit in fits):
        _refuse_unlearned(names)


def _refuse_unlearned(names: Sequence[str]) -> None:
    if weights := [name.removeprefix(KNOWN) for name in names if name.startswith(KNOWN)]:
        raise ConfigError(
            f"What an optimizer knew of {_some(weights)} would be lost: none learns it now.",
            do=_ALL_OPTIMIZERS,
        )
    if names:
        raise ConfigError(
            f"{len(names)} groups of weights would be lost, with their rates and other options: "
            "the optimizers have fewer now than they had.",
            do=_ALL_OPTIMIZERS,
        )


def _all(parts: Iterable[frozenset[Part]]) -> frozenset[Part]:
    return frozenset().union(*parts)


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return f"{', '.join(names[:5])}{more}"
