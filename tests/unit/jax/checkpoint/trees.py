"""Pytrees of arrays on several devices of one process."""

from __future__ import annotations

from typing import Any

import pytest

jax = pytest.importorskip("jax")

import numpy as np  # noqa: E402
from jax.sharding import NamedSharding, PartitionSpec  # noqa: E402

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
