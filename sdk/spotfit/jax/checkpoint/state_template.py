"""StateTemplate: what a restore of the run returns, with which every step's state is compared.

A restart has only the initial state: a state that cannot be restored into it must fail at the first
step that passes it, not after the loss of a machine. The rules are in `why_not_restorable`.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from spotfit.checkpoint.format import dotted_name
from spotfit.core.errors import ConfigError
from spotfit.jax.checkpoint.array_tree import NUMBER_KINDS, ArraySpec, ArrayTree

_NUMBERS = (bool, int, float, complex)


class StateTemplate:
    """The leaves of the initial state. Compares at each step, quickly while nothing changes."""

    def __init__(self, state: Any) -> None:
        """Keep the description of `state`, not its arrays. Raises `ConfigError` as `ArrayTree`."""
        self.tree = ArrayTree(state).template()
        leaves, self._structure = jax.tree_util.tree_flatten(state)
        """That of the last state that was compared leaf by leaf."""
        self._leaf_types = list(map(_type_of, leaves))

    def check(self, state: Any) -> None:
        """Raise `ConfigError` if a restart could not restore `state`. Waits for no array."""
        leaves, structure = jax.tree_util.tree_flatten(state)
        leaf_types = list(map(_type_of, leaves))
        # JAX shares the types of a compiled update's results: mostly identities are compared.
        if structure == self._structure and leaf_types == self._leaf_types:
            return
        self._check_leaves(ArrayTree(state))
        self._structure, self._leaf_types = structure, leaf_types

    def _check_leaves(self, tree: ArrayTree) -> None:
        if tree.keys != self.tree.keys:
            differing = sorted(set(map(str, tree.keys)) ^ set(map(str, self.tree.keys)))
            raise ConfigError(
                "The state has other leaves than the one with which Checkpointer was created, for "
                f"example {differing[:1]}.",
                do="Pass pytrees of one structure to Checkpointer and step.",
            )
        for key in tree.keys:
            _check_leaf(dotted_name(key), self.tree.leaf(key), tree.leaf(key))


def _check_leaf(name: str, initial: Any, leaf: Any) -> None:
    if (
        why_not_restorable(initial, leaf)
        or is_converted(initial, leaf)
        or _key_implementation_of(initial) != _key_implementation_of(leaf)
    ):
        raise ConfigError(
            f"{name} is {_describe(leaf)}, but was {_describe(initial)} in the state with which "
            "Checkpointer was created, and into which a restart restores it.",
            do="Create Checkpointer with the types that the update returns, for example "
            "jax.numpy.asarray(value, dtype), or let the update return the initial types.",
        )


def why_not_restorable(initial: Any, saved: Any) -> str:
    """Return both leaves as "float32[3], was float32[2]"; "" if `saved` can be restored.

    Each is the `ArraySpec` of an array, or another leaf itself. Arrays need one shape, and take
    numbers of their own kind or a simpler one. A number and an array without dimensions stand for
    each other: `jit` makes an array of each number that it returns.
    """
    wanted, found = _spec_of(initial), _spec_of(saved)
    if not isinstance(initial, ArraySpec) and not isinstance(saved, ArraySpec):
        return ""
    if wanted is not None and found is not None and wanted.shape == found.shape:
        if not isinstance(initial, ArraySpec):
            return ""
        if _kind_of(found) <= _kind_of(wanted) and _fits(saved, wanted):
            return ""
    return f"{_describe(initial)}, was {_describe(saved)}"


def is_converted(initial: Any, saved: Any) -> bool:
    """Return whether JAX computes with a restored array in another dtype than the saved one's."""
    if not isinstance(initial, ArraySpec) or not isinstance(saved, ArraySpec):
        return False
    # JAX computes with arrays of numpy in its own precision: usually a float64 is a float32.
    is_same = saved.dtype == initial.dtype or (
        initial.sharding is None and saved.dtype == jax.dtypes.canonicalize_dtype(initial.dtype)
    )
    return not is_same


def _type_of(leaf: Any) -> Any:
    """Return what decides whether the leaf can be restored, in little time."""
    if (aval := getattr(leaf, "aval", None)) is not None:
        return aval
    return type(leaf), getattr(leaf, "shape", None), getattr(leaf, "dtype", None)


def _spec_of(leaf: Any) -> ArraySpec | None:
    """Return the description of an array, or of a number as an array; None of other leaves."""
    if isinstance(leaf, ArraySpec):
        return leaf
    if isinstance(leaf, bool | int | float | complex):
        return ArraySpec((), np.dtype(next(t for t in _NUMBERS if isinstance(leaf, t))))
    return None


def _key_implementation_of(leaf: Any) -> Any:
    return leaf.key_implementation if isinstance(leaf, ArraySpec) else None


def _kind_of(spec: ArraySpec) -> int:
    return next(n for n, kind in enumerate(NUMBER_KINDS) if jax.dtypes.issubdtype(spec.dtype, kind))


def _fits(saved: Any, spec: ArraySpec) -> bool:
    try:
        return isinstance(saved, ArraySpec) or np.asarray(saved, spec.dtype).shape == ()
    except OverflowError:
        return False


def _describe(leaf: Any) -> str:
    if not isinstance(leaf, ArraySpec):
        return f"a {type(leaf).__name__}"
    if leaf.key_implementation is not None:
        return f"a random key of {leaf.key_implementation}"
    return f"{leaf.dtype}[{','.join(map(str, leaf.shape))}]"
