"""Compatibility of a saved state with the current objects, decided by all ranks before reading.

Each rank describes what it finds as a `StateCompatibility`. With a pipeline-parallel model a rank
has only a part of the state, so that names are unused only if they are unused on all ranks.

Collectives over the ranks of a run, by torch's default process group.

In a run of one rank they return at once and need no process group.
"""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from typing import Any, NamedTuple

from spotfit.core.errors import ConfigError

MODEL_PREFIX = "model."
"""Prefix of the names of the model's weights."""
OPTIMIZER_STATE_PREFIX = "optimizer.state."
"""Prefix of the names of optimizer state; the weight's name follows."""
PARAM_GROUPS_PREFIX = "optimizer.param_groups."
OPTIMIZER_COMPONENT = ("optimizer", "optimizer")
"""The component of all optimizers together."""
LOADER_COMPONENT = ("loader", "loader")
SCHEDULER_OPTIONS = frozenset(
    ("initial_lr", "max_lr", "min_lr", "max_momentum", "base_momentum", "swa_lr", "param_names")
)
"""Options in param_groups that torch's schedulers, or torch itself, add for any optimizer."""
_MISSING_OPTIMIZER_REMEDY = (
    "Give Checkpointer all optimizers of the run that saved the checkpoint, with all their "
    "param_groups, before restore(). Preferably create optimizers with all weights from the "
    "beginning, and freeze weights with requires_grad_(False) instead of adding them later with "
    "add_param_group. Without optimizer= only the model is restored."
)
_PARAM_GROUPS_REMEDY = (
    "Create the same param_groups before restore(): the state of a group that is added later "
    "(add_param_group), or of weights that are new in a group, is not restored. Preferably create "
    "the optimizer with all weights from the beginning, and freeze weights with "
    "requires_grad_(False). Without optimizer= only the model is restored."
)
_OPTIMIZER_TYPE_REMEDY = (
    "Use the optimizer class of the run that saved the checkpoint. To change the class, use a new "
    "run name and load the output of export_checkpoint(), or restore only the model, without "
    "optimizer=."
)

StateComponent = tuple[str, str]
"""The argument that holds an object, 'optimizer', 'loader', 'extra' or 'per_rank', and its name."""


class StateCompatibility(NamedTuple):
    """One rank's comparison of a saved state with its current objects."""

    unclaimed_names: frozenset[str]
    """Names in the saved state of model and optimizers that this rank does not have."""
    saved_components: frozenset[StateComponent]
    """The saved components besides the model."""
    current_components: frozenset[StateComponent]
    """The current components besides the model."""


def unused_components(ranks: Sequence[StateCompatibility]) -> list[str]:
    """Return the names of components that were saved and that no rank has now, sorted.

    For a warning at a restore, for example ["scheduler"]. `ranks` has one entry per current rank.
    """
    saved, current = _components(ranks)
    return sorted(name for _, name in saved - current)


def new_components(ranks: Sequence[StateCompatibility]) -> list[str]:
    """Return the names of components that some rank has now and that were not saved, sorted.

    For a warning at a restore: they keep their initial state. `ranks` has one entry per current
    rank.
    """
    saved, current = _components(ranks)
    return sorted(name for _, name in current - saved)


def reject_moved_components(
    saved: frozenset[StateComponent], current: frozenset[StateComponent]
) -> None:
    """Raise `ConfigError` if an object moved between `extra` and `per_rank`.

    Both sets are those of this rank and include all components besides the model. The object's
    state would not be found under the new argument and would silently be reset.
    """
    saved_kinds = {name: kind for kind, name in saved - current - {LOADER_COMPONENT}}
    moved = sorted(
        (name, kind) for kind, name in current - saved - {LOADER_COMPONENT} if name in saved_kinds
    )
    if moved:
        changes = [
            f"{name!r} was saved under {saved_kinds[name]}= but is passed as {kind}="
            for name, kind in moved
        ]
        raise ConfigError(
            f"The checkpoint cannot be restored into Checkpointer(...): {'; '.join(changes)}.",
            do="Pass these objects under the same arguments as before, or use a new "
            "RunConfig(name=...) "
            "to start without their saved state.",
        )


def reject_other_optimizer_type(
    saved_options: AbstractSet[str], current_options: AbstractSet[str]
) -> None:
    """Raise `ConfigError` if a param_group has lost options and also has new ones.

    The arguments are the names of the group's options, such as "lr", when it was saved and now.
    Only one of both is accepted: newer versions of torch add options, and those that schedulers
    write (`SCHEDULER_OPTIONS`) come and go with the scheduler.
    """
    removed = sorted(saved_options - current_options - SCHEDULER_OPTIONS)
    added = sorted(current_options - saved_options - SCHEDULER_OPTIONS)
    if removed and added:
        raise ConfigError(
            "The checkpoint was saved by a different optimizer class: its options include "
            f"{summarize_names(removed)}, but not {summarize_names(added)}.",
            do=_OPTIMIZER_TYPE_REMEDY,
        )


def reject_mismatches(missing: Sequence[str], mismatches: Sequence[str]) -> None:
    """Raise `ConfigError` if the current state needs names that were not saved.

    `missing` are such dotted names of model and optimizers ("model.head.weight"), `mismatches`
    descriptions of other differences, such as shapes. Does nothing if both are empty.
    """
    missing_weights = [
        name
        for name in missing
        if not name.startswith((PARAM_GROUPS_PREFIX, OPTIMIZER_STATE_PREFIX))
    ]
    # Weights first: with another model the optimizer's differences are only a consequence.
    if differences := [*(f"{name} was not saved" for name in missing_weights), *mismatches]:
        raise ConfigError(
            "The checkpoint does not match the model and optimizer of the Checkpointer: "
            f"{summarize_names(differences, '; ')}.",
            do="Build the same model and optimizer as the run that saved the checkpoint, or use a "
            "new RunConfig(name=...).",
        )
    if groups := {name.split(".")[2] for name in missing if name.startswith(PARAM_GROUPS_PREFIX)}:
        raise ConfigError(
            f"The optimizer has {len(groups)} more param_groups than the checkpoint; their lr and "
            "other options cannot be restored.",
            do=_PARAM_GROUPS_REMEDY,
        )
    if missing:
        names = [name.removeprefix(OPTIMIZER_STATE_PREFIX) for name in missing]
        raise ConfigError(
            f"Optimizer state {summarize_names(names)} is missing from the checkpoint: it was "
            "saved by a different optimizer class or without these parameters.",
            do=_OPTIMIZER_TYPE_REMEDY,
        )


def reject_unclaimed_state(ranks: Sequence[StateCompatibility]) -> None:
    """Raise `ConfigError` for saved weights or optimizer state that no rank has a place for.

    Called on every rank with the entries of all ranks, so that all raise or none. Optimizer state
    may be left out only if there is no optimizer at all, as for inference.
    """
    # The intersection: with pipeline stages every rank lacks the names of the other stages.
    names = sorted(frozenset.intersection(*(rank.unclaimed_names for rank in ranks)))
    if weights := [name for name in names if name.startswith(MODEL_PREFIX)]:
        raise ConfigError(
            "The checkpoint does not match the model of the Checkpointer: "
            f"{summarize_names(weights)} "
            "would be lost, because the model has no such weights.",
            do="Build the same model as the run that saved the checkpoint, or use a new "
            "RunConfig(name=...) and load the output of export_checkpoint().",
        )
    if OPTIMIZER_COMPONENT not in _components(ranks)[1]:
        return
    if weights := [
        name.removeprefix(OPTIMIZER_STATE_PREFIX)
        for name in names
        if name.startswith(OPTIMIZER_STATE_PREFIX)
    ]:
        raise ConfigError(
            f"The saved optimizer state of {summarize_names(weights)} would be lost: no optimizer "
            "holds these parameters now.",
            do=_MISSING_OPTIMIZER_REMEDY,
        )
    if names:
        raise ConfigError(
            f"{len(names)} saved param_groups would be lost with their lr and other options: the "
            "optimizers have fewer groups now.",
            do=_MISSING_OPTIMIZER_REMEDY,
        )


def _components(
    ranks: Sequence[StateCompatibility],
) -> tuple[frozenset[StateComponent], frozenset[StateComponent]]:
    """Return the saved and the current components of all ranks together."""
    return (
        frozenset[StateComponent]().union(*(rank.saved_components for rank in ranks)),
        frozenset[StateComponent]().union(*(rank.current_components for rank in ranks)),
    )


def summarize_names(names: Sequence[str], separator: str = ", ") -> str:
    """Join the first five names by `separator`, for a message; further ones are only counted.

    The result is for example "a, b", or ends with " and 3 more".
    """
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return f"{separator.join(names[:5])}{more}"


# --- Collectives over the ranks of a run, by torch's default process group ------------------------


def all_gather(value: Any) -> list[Any]:
    """Return the values of all ranks, in rank order.

    A collective of torch's default process group that blocks until all ranks call it; without a
    group of several ranks it returns at once. Values are pickled: keep them small.
    """
    import torch.distributed as dist

    world_size = _group_size()
    if world_size == 1:
        return [value]
    # Values are pickled and padded to the largest one: callers keep them small.
    values: list[Any] = [None] * world_size
    dist.all_gather_object(values, value)
    return values


def broadcast(value: Any) -> Any:
    """Return rank 0's value on every rank; the values of other ranks are ignored.

    A collective of torch's default process group that blocks until all ranks call it; without a
    group of several ranks it returns `value` at once. Values are pickled.
    """
    import torch.distributed as dist

    if _group_size() == 1:
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def check_process_group(world_size: int) -> None:
    """Raise `ConfigError` unless torch's default process group contains all workers.

    `world_size` is the number of workers of the run. Without a group the size is 1. Ranks divide
    the state among themselves, which requires collectives over all of them. No communication.
    """
    group_size = _group_size()
    if group_size != world_size:
        raise ConfigError(
            f"Checkpointer needs a torch process group of all {world_size} workers, but the group "
            f"has {group_size} members.",
            do="Use TorchTrainer, which forms the group before it calls your function.",
        )


def _group_size() -> int:
    import torch.distributed as dist

    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
