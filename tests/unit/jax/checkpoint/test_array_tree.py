"""Leaves have stable keys, and descriptions from which they can be created again."""

from __future__ import annotations

from typing import NamedTuple

import pytest

jax = pytest.importorskip("jax", reason="needs jax: make jax")

import numpy as np  # noqa: E402

from spotfit.core.errors import ConfigError  # noqa: E402
from spotfit.jax.checkpoint.array_tree import ArrayTree  # noqa: E402
from tests.unit.jax.checkpoint.trees import assert_equal, make_tree, sharding  # noqa: E402


class Moments(NamedTuple):
    mean: object
    steps: int


def test_keys_are_the_paths_of_the_leaves() -> None:
    tree = ArrayTree({"a": [np.ones(1), Moments(np.ones(2), 3)], "b": {7: 1}})
    assert tree.keys == [
        ("state", "a", 0),
        ("state", "a", 1, "mean"),
        ("state", "a", 1, "steps"),
        ("state", "b", 7),
    ]
    assert list(tree.arrays) == tree.keys[:2]
    assert tree.values == {tree.keys[2]: 3, tree.keys[3]: 1}


def test_the_leaves_of_a_tree_make_it_again() -> None:
    original = {"a": [np.ones(1), 2], "b": None}
    tree = ArrayTree(original)
    assert_equal(tree.unflatten(tree.arrays | tree.values), original)


def test_boxes_are_the_shards_of_the_sharding() -> None:
    specs = ArrayTree(make_tree(1.0)).specs
    boxes = specs["state", "both"].boxes()
    assert sorted(boxes) == [((row, column), (3, 2)) for row in (0, 3) for column in (0, 2)]
    assert specs["state", "whole"].local_boxes() == [((0,), (5,))]


def test_a_description_without_a_sharding_is_rejected() -> None:
    abstract = jax.ShapeDtypeStruct((2,), "float32")
    with pytest.raises(ConfigError, match=r"state\.w is a .*Struct without a sharding"):
        ArrayTree({"w": abstract})
    placed = jax.ShapeDtypeStruct((2,), "float32", sharding=sharding())
    assert ArrayTree({"w": placed}).specs["state", "w"].shape == (2,)


def test_a_description_of_a_random_key_is_rejected() -> None:
    key = jax.random.key(0)
    abstract = jax.ShapeDtypeStruct(key.shape, key.dtype, sharding=sharding())
    with pytest.raises(ConfigError, match=r"state\.key describes a random key"):
        ArrayTree({"key": abstract})


def test_donated_arrays_are_rejected() -> None:
    array = jax.numpy.ones(3)
    array.delete()
    with pytest.raises(ConfigError, match=r"state\.w was donated, or deleted"):
        ArrayTree({"w": array})


@pytest.mark.parametrize("dtype", ["U1", "O", "M8[Y]", "m8[s]", "V4", "f4,f4"])
def test_arrays_without_numbers_are_rejected(dtype: str) -> None:
    with pytest.raises(ConfigError, match="which has no numbers"):
        ArrayTree([np.zeros(1, dtype)])
