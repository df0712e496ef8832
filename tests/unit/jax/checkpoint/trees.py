"""Pytrees of arrays on several devices of one process."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

jax = pytest.importorskip("jax", reason="needs jax: make jax")

import numpy as np  # noqa: E402
from jax.sharding import NamedSharding, PartitionSpec  # noqa: E402

from spotfit.jax.checkpoint.array_tree import ArrayTree  # noqa: E402

# Before a test has used a device: JAX rejects it afterwards.
jax.config.update("jax_num_cpu_devices", 4)


def sharding(*axes: str | None) -> NamedSharding:
    """Return a sharding over two rows and two columns of devices: "a" and "b"."""
    return NamedSharding(jax.make_mesh((2, 2), ("a", "b")), PartitionSpec(*axes))


def make_tree(factor: float) -> Any:
    """Return a tree with all kinds of leaves; other factors give other values."""
    keys = jax.random.split(jax.random.key(int(factor)), 4)
    return {
        "both": jax.device_put(factor * np.arange(24.0).reshape(6, 4), sharding("a", "b")),
        "rows": [jax.device_put(factor * np.ones((4, 3), "float16"), sharding("a"))],
        "whole": jax.device_put(factor * np.ones(5, "int32"), sharding()),
        "keys": jax.device_put(keys, sharding("a")),
        "weak": factor * jax.numpy.asarray(0.1),
        "weak_whole": jax.device_put(factor * jax.numpy.asarray(0.1), sharding()),
        "uncommitted": jax.numpy.full(3, factor, "bfloat16"),
        "empty": jax.numpy.zeros((0, 2)),
        "numpy": (factor * np.arange(3), np.float32(factor)),
        "plain": {"step": int(factor), "name": f"n{factor}", "rate": factor, "none": None},
    }


class Device(NamedTuple):
    process_index: int


class ReplicatedSharding(NamedTuple):
    """A sharding by which each of several processes has a copy of the array on its device."""

    processes: int
    is_fully_addressable: bool = False

    def devices_indices_map(self, shape: tuple[int, ...]) -> dict[Device, tuple[slice, ...]]:
        return {Device(n): tuple(slice(None) for _ in shape) for n in range(self.processes)}


def replicated_tree(state: Any, processes: int) -> ArrayTree:
    """Return the tree as if its arrays of numpy were arrays of JAX, replicated over processes."""
    tree = ArrayTree(state)
    for key, array in tree.arrays.items():
        shard = SimpleNamespace(index=tuple(slice(None) for _ in array.shape), data=array)
        tree.arrays[key] = SimpleNamespace(addressable_shards=[shard])
        tree.specs[key] = tree.specs[key]._replace(sharding=ReplicatedSharding(processes))
    return tree


def assert_equal(one: Any, other: Any) -> None:
    """Compare values, and all that decides about later computations."""
    jax.tree.map(_assert_equal_leaves, one, other)


def _assert_equal_leaves(one: Any, other: Any) -> None:
    assert type(one) is type(other)
    if isinstance(one, jax.Array):
        assert (one.sharding, one.dtype) == (other.sharding, other.dtype)
        if jax.dtypes.issubdtype(one.dtype, jax.dtypes.prng_key):
            one, other = jax.random.key_data(one), jax.random.key_data(other)
        assert (one.committed, one.weak_type) == (other.committed, other.weak_type)
    assert np.array_equal(one, other)
    assert np.asarray(one).dtype == np.asarray(other).dtype
