"""ArrayTree: a pytree as arrays and plain values by key, with all that a restore needs of them.

Each leaf of the tree has a key, ("state", …), from its path. Arrays are those of JAX and numpy;
typed random keys are saved as their data. All other leaves are plain values.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from spotfit.checkpoint.format import StateKey, dotted_name
from spotfit.core.errors import ConfigError

NUMBER_KINDS = (np.bool_, np.integer, np.floating, np.complexfloating)
"""Kinds of dtypes; each has the numbers of those before it."""
STATE_SECTION = "state"
"""First part of the keys of all leaves."""

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and sizes of a part of an array, one of each per dimension."""


class ArraySpec(NamedTuple):
    """What an array is besides its values; enough to create it again."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    sharding: Any = None
    """A `jax.sharding.Sharding`; None for an array of numpy."""
    is_weakly_typed: bool = False
    is_committed: bool = True
    key_implementation: Any = None
    """Of a typed random key, whose data the other fields describe; else None."""
    is_numpy_scalar: bool = False

    @property
    def whole(self) -> Box:
        """The box of the complete array."""
        return (0,) * len(self.shape), self.shape

    @property
    def is_process_local(self) -> bool:
        """Whether every process has an array of its own, which is the same on all of them."""
        is_local = self.sharding is None or self.sharding.is_fully_addressable
        return is_local and (self.sharding is None or jax.process_count() > 1)

    def boxes(self) -> dict[Box, frozenset[int]]:
        """Return the parts in which the array is stored, and the processes that hold each.

        The same on all processes. Not for arrays of one process.
        """
        holders: dict[Box, set[int]] = {}
        for device, index in self.sharding.devices_indices_map(self.shape).items():
            holders.setdefault(box_of(index, self.shape), set()).add(device.process_index)
        return {box: frozenset(processes) for box, processes in holders.items()}

    def local_boxes(self) -> list[Box]:
        """Return the parts that this process holds, each once."""
        if self.is_process_local:
            return [self.whole]
        indices = self.sharding.addressable_devices_indices_map(self.shape).values()
        return list(dict.fromkeys(box_of(index, self.shape) for index in indices))


class ArrayTree:
    """A pytree by the keys of its leaves."""

    def __init__(self, tree: Any) -> None:
        """Split the tree; nothing is copied. Raises `ConfigError` for two leaves of one key."""
        leaves, self.structure = jax.tree_util.tree_flatten_with_path(tree)
        self.keys = [_key_of(path) for path, _ in leaves]
        if repeated := [key for key, count in Counter(self.keys).items() if count > 1]:
            raise ConfigError(
                f"The pytree has several leaves with the name {dotted_name(repeated[0])}.",
                do="Use different strings or integers as the keys of its dictionaries.",
            )
        self.arrays: dict[StateKey, Any] = {}
        """Arrays of JAX and numpy, and `jax.ShapeDtypeStruct`s; of random keys the data."""
        self.specs: dict[StateKey, ArraySpec] = {}
        """One per array."""
        self.values: dict[StateKey, Any] = {}
        """All other leaves."""
        for key, (_, leaf) in zip(self.keys, leaves, strict=True):
            if isinstance(leaf, jax.Array | np.ndarray | np.generic | jax.ShapeDtypeStruct):
                self.arrays[key], self.specs[key] = _describe(leaf, dotted_name(key))
            else:
                self.values[key] = leaf

    def template(self) -> ArrayTree:
        """Return this tree without its arrays, whose memory it does not keep."""
        tree = ArrayTree.__new__(ArrayTree)
        tree.structure, tree.keys = self.structure, self.keys
        tree.arrays, tree.specs, tree.values = {}, self.specs, self.values
        return tree

    def leaf(self, key: StateKey) -> ArraySpec | Any:
        """Return the description of an array, or another leaf itself."""
        return self.specs[key] if key in self.specs else self.values[key]

    def unflatten(self, leaves: Mapping[StateKey, Any]) -> Any:
        """Return a pytree of this structure with other leaves, one for each key."""
        return jax.tree_util.tree_unflatten(self.structure, [leaves[key] for key in self.keys])


def has_numbers(dtype: np.dtype[Any]) -> bool:
    """Return whether arrays of the dtype can be saved: of numpy's numbers, or those of JAX."""
    # Durations are integers of numpy.
    is_duration = dtype.kind == "m"
    return not is_duration and any(jax.dtypes.issubdtype(dtype, kind) for kind in NUMBER_KINDS)


def box_of(index: tuple[slice, ...], shape: tuple[int, ...]) -> Box:
    """Return the box of an index of JAX, which has one slice per dimension."""
    ranges = [part.indices(size) for part, size in zip(index, shape, strict=True)]
    return tuple(start for start, _, _ in ranges), tuple(stop - start for start, stop, _ in ranges)


def _key_of(path: tuple[Any, ...]) -> StateKey:
    return (STATE_SECTION, *(_part_of(entry) for entry in path))


def _part_of(entry: Any) -> str | int:
    match entry:
        case jax.tree_util.SequenceKey(idx=part) | jax.tree_util.FlattenedIndexKey(key=part):
            return int(part)
        case jax.tree_util.DictKey(key=part) if type(part) is int:
            return int(part)
        case jax.tree_util.DictKey(key=part) | jax.tree_util.GetAttrKey(name=part):
            return str(part)
    return str(entry)


def _describe(leaf: Any, name: str) -> tuple[Any, ArraySpec]:
    """Return the array to save, and its description."""
    if isinstance(leaf, jax.Array) and leaf.is_deleted():
        raise ConfigError(
            f"The array {name} was donated, or deleted, before it was saved.",
            do="Pass each new state to Checkpointer.step() before the next update, and use it in "
            "save() before it is donated.",
        )
    if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        if not isinstance(leaf, jax.Array):
            raise ConfigError(
                f"{name} describes a random key without its implementation.",
                do="Pass the key itself, jax.random.key(seed), in the pytree of Checkpointer.",
            )
        data, spec = _describe(jax.random.key_data(leaf), name)
        return data, spec._replace(key_implementation=jax.random.key_impl(leaf))
    shape, dtype = tuple(leaf.shape), np.dtype(leaf.dtype)
    if isinstance(leaf, jax.Array):
        return leaf, ArraySpec(
            shape,
            dtype,
            sharding=leaf.sharding,
            is_weakly_typed=leaf.weak_type,
            is_committed=leaf.committed,
        )
    if isinstance(leaf, jax.ShapeDtypeStruct):
        if leaf.sharding is None:
            raise ConfigError(
                f"{name} is a jax.ShapeDtypeStruct without a sharding: where its array would be "
                "restored to is unknown.",
                do="Pass jax.ShapeDtypeStruct(shape, dtype, sharding=...), or an array.",
            )
        return leaf, ArraySpec(shape, dtype, sharding=leaf.sharding)
    if not has_numbers(dtype):
        raise ConfigError(
            f"{name} is an array of numpy with dtype {dtype}, which has no numbers.",
            do="Leave it out of the pytree, or convert it to numbers.",
        )
    return np.asarray(leaf), ArraySpec(shape, dtype, is_numpy_scalar=isinstance(leaf, np.generic))
