"""Whether a saved state fits what is given now: decided by all ranks before any of it is read."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from typing import NamedTuple

from spotfit.core.errors import ConfigError

MODEL = "model."
"""What the names of its weights begin with."""
KNOWN = "optimizer.state."
"""What the names of all that optimizers know begin with."""
GROUPS = "optimizer.param_groups."
OPTIMIZER = ("optimizer", "optimizer")
"""The part that all optimizers are together."""
LOADER = ("loader", "loader")
BY_OTHERS = frozenset(
    ("initial_lr", "max_lr", "min_lr", "max_momentum", "base_momentum", "swa_lr", "param_names")
)
"""Options of groups that are no optimizer's own: torch's schedulers write them, and torch."""
_ALL_OPTIMIZERS = (
    "Give Checkpointer all optimizers of the run that saved it, with all their groups before "
    "restore(). Best give them all weights from the beginning: what is frozen until later has "
    "requires_grad_(False) until then, and no add_param_group. Without optimizer= the model goes "
    "on alone."
)
_THEIR_GROUPS = (
    "Before restore() build the groups that there were: what is added after it (add_param_group) "
    "begins anew, and so do weights in a group that was there. Best give the optimizer all weights "
    "from the beginning: what is frozen until later has requires_grad_(False) until then. Without "
    "optimizer= the model goes on alone."
)
_THE_SAME_KIND = (
    "Build the kind of optimizer of the run that saved it. For another one name a new run and load "
    "what export_checkpoint() writes, or have the model go on alone, without optimizer=."
)

Part = tuple[str, str]
"""As which a thing beside the model is given, 'optimizer', 'loader', 'extra' or 'own', and its
name."""


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
    was = {name: kind for kind, name in kept - given - {LOADER}}
    moved = sorted((name, kind) for kind, name in given - kept - {LOADER} if name in was)
    if moved:
        told = [f"{name!r} was kept in {was[name]}={{…}}, not {kind}={{…}}" for name, kind in moved]
        raise ConfigError(
            f"What was kept would be lost: {'; '.join(told)}.",
            do="Give it where it was given before; to begin it anew, name a new run.",
        )


def refuse_other_kind(had: AbstractSet[str], has: AbstractSet[str]) -> None:
    """Raises `ConfigError` where a group of weights had other options, not only fewer or more.

    A later torch adds some, and what schedulers write comes and goes with them.
    """
    gone, new = sorted(had - has - BY_OTHERS), sorted(has - had - BY_OTHERS)
    if gone and new:
        raise ConfigError(
            f"The checkpoint is of another kind of optimizer: that had {some(gone)}, and no "
            f"{some(new)}.",
            do=_THE_SAME_KIND,
        )


def refuse_others(missing: Sequence[str], wrong: Sequence[str]) -> None:
    """Raises `ConfigError` for what was not saved of a model and its optimizers, by name, and for
    what is `wrong`, in words."""
    others = [name for name in missing if not name.startswith((GROUPS, KNOWN))]
    if told := [*(f"{name} was not saved" for name in others), *wrong]:
        raise ConfigError(
            f"The checkpoint is of another training: {some(told, '; ')}.",
            do="Build the same model and optimizer as the run that saved it, or name a new run.",
        )
    if groups := {name.split(".")[2] for name in missing if name.startswith(GROUPS)}:
        raise ConfigError(
            f"The optimizers have more groups of weights than were saved, by {len(groups)}: there "
            "are no rates and other options for them.",
            do=_THEIR_GROUPS,
        )
    if missing:
        known = [name.removeprefix(KNOWN) for name in missing]
        raise ConfigError(
            f"Of what the optimizer knows {some(known)} was not saved: it was of another kind, or "
            "did not learn these weights.",
            do=_THE_SAME_KIND,
        )


def refuse_left(fits: Sequence[Fit]) -> None:
    """Raises `ConfigError` for weights that no rank has a place for, or no optimizer.

    Of a model in stages each rank has a part only. Without any optimizer nothing is to learn.
    """
    names = sorted(frozenset.intersection(*(fit.left for fit in fits)))
    if gone := [name for name in names if name.startswith(MODEL)]:
        raise ConfigError(
            f"The checkpoint is of another model: {some(gone)} would be lost, for there is no "
            "such weight any more.",
            do="Build the same model as the run that saved it, or name a new run and load what "
            "export_checkpoint() writes.",
        )
    if OPTIMIZER in _all(fit.given for fit in fits):
        _refuse_unlearned(names)


def _refuse_unlearned(names: Sequence[str]) -> None:
    if weights := [name.removeprefix(KNOWN) for name in names if name.startswith(KNOWN)]:
        raise ConfigError(
            f"What an optimizer knew of {some(weights)} would be lost: none learns it now.",
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


def some(names: Sequence[str], between: str = ", ") -> str:
    """The first of them, and how many more there are."""
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return f"{between.join(names[:5])}{more}"
