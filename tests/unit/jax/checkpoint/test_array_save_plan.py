"""The ranks together write every element once, about equally many bytes each."""

from __future__ import annotations

from typing import Any

import pytest

jax = pytest.importorskip("jax", reason="needs jax: make jax")

import numpy as np  # noqa: E402

from spotfit.checkpoint.base_checkpointer import RankSavePlan  # noqa: E402
from spotfit.checkpoint.format import StateKey  # noqa: E402
from spotfit.core.errors import ConfigError  # noqa: E402
from spotfit.jax.checkpoint.array_save_plan import ArraySavePlanner  # noqa: E402
from spotfit.jax.checkpoint.array_tree import ArrayTree  # noqa: E402
from tests.unit.jax.checkpoint.trees import make_tree, replicated_tree, sharding  # noqa: E402


def plans_of(tree: Any, world_size: int) -> list[RankSavePlan]:
    """Return the plans of all ranks for arrays of numpy, of which all of them have replicas."""
    replicas = replicated_tree(tree, world_size)
    return [ArraySavePlanner(rank, world_size).plan(replicas) for rank in range(world_size)]


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_every_element_of_replicated_arrays_is_written_once(world_size: int) -> None:
    tree: dict[str, Any] = {
        "large": np.arange(3_000_000.0).reshape(3000, 1000),
        "small": np.ones((2, 2)),
        "n": 1,
    }
    plans = plans_of(tree, world_size)
    seen = {name: np.zeros(tree[name].shape, np.int64) for name in ("large", "small")}
    for plan in plans:
        for piece, block in zip(plan.pieces, plan.tensors, strict=True):
            name = str(piece.key[1])
            box = tuple(
                slice(start, start + size)
                for start, size in zip(piece.offsets, piece.sizes, strict=True)
            )
            seen[name][box] += 1
            assert np.array_equal(block.to_numpy(), tree[name][box])
    assert all((counts == 1).all() for counts in seen.values())
    sizes = [plan.size_bytes for plan in plans]
    assert max(sizes) < 1.3 * sum(sizes) / world_size
    assert [plan.values for plan in plans] == [[1]] + [[]] * (world_size - 1)


def test_the_largest_share_is_known_without_communication() -> None:
    tree = {"a": np.ones(300), "b": np.ones(100)}
    planner = ArraySavePlanner(1, 2)
    assert planner.plan(ArrayTree(tree)).size_bytes == 800
    assert planner.largest_rank_bytes == 2400


def test_blocks_share_the_memory_of_the_arrays() -> None:
    tree = make_tree(1.0)
    plan = ArraySavePlanner(0, 1).plan(ArrayTree(tree))
    blocks = dict(zip(plan.pieces, plan.tensors, strict=True))
    shards = {shard.data.unsafe_buffer_pointer() for shard in tree["both"].addressable_shards}
    written = {
        block.to_numpy().ctypes.data for piece, block in blocks.items() if piece.key[1] == "both"
    }
    assert written == shards
    whole = [piece for piece in blocks if piece.key[1] == "whole"]
    assert len(whole) == 1, "the copies of four devices are one piece"


def test_the_plan_follows_a_state_with_other_shapes() -> None:
    planner = ArraySavePlanner(0, 1)
    planner.plan(ArrayTree([np.ones(3)]))
    assert [piece.shape for piece in planner.plan(ArrayTree([np.ones((2, 2))])).pieces] == [(2, 2)]


def test_descriptions_of_arrays_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    tree = ArrayTree({"w": jax.ShapeDtypeStruct((2,), "float32", sharding=sharding())})
    for call in (ArraySavePlanner(0, 1).plan, ArraySavePlanner(0, 1).fingerprints):
        with pytest.raises(ConfigError, match="which has no values to save"):
            call(tree)


def test_one_rank_writes_all_of_an_array_that_each_process_has_for_itself() -> None:
    trees = [ArrayTree({"w": np.full((3000, 1000), rank), "v": np.ones(3)}) for rank in range(3)]
    plans = [ArraySavePlanner(rank, 3).plan(tree) for rank, tree in enumerate(trees)]
    assert sorted(piece.sizes for plan in plans for piece in plan.pieces) == [(3,), (3000, 1000)]


@pytest.mark.parametrize("make_array", [np.array, jax.numpy.asarray])
def test_digests_differ_where_values_of_processes_do(
    make_array: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jax, "process_count", lambda: 2)

    def digest(values: Any, step: int = 1) -> str:
        return ArraySavePlanner(0, 2).digest(ArrayTree({"w": make_array(values), "step": step}))

    assert digest([1.0, 2.0]) == digest([1.0, 2.0])
    assert digest([1.0, 2.0]) != digest([1.0, 3.0])
    assert digest([1.0, 2.0]) != digest([1.0, 2.0], step=2)


def test_fingerprints_name_the_leaves_that_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    tree = {"a": jax.numpy.ones(2, "bfloat16"), "b": np.zeros((0, 2)), "n": 1, "s": np.float32(1)}
    changes: dict[str, Any] = {"a": 2 * tree["a"], "n": 2, "s": np.float32(2)}

    def fingerprints(tree: Any) -> dict[StateKey, bytes]:
        return ArraySavePlanner(0, 2).fingerprints(ArrayTree(tree))

    found = fingerprints(tree)
    assert list(found) == [("state", name) for name in "absn"]
    for name, value in changes.items():
        changed = fingerprints(tree | {name: value})
        assert [one for one in found if found[one] != changed[one]] == [("state", name)]


def test_leaves_with_one_dotted_name_have_fingerprints_of_their_own() -> None:
    tree = ArrayTree({"a": {"b": np.ones(1)}, "a.b": np.zeros(1), "c": {"d": 1}, "c.d": 2})
    assert len(set(ArraySavePlanner(0, 2).fingerprints(tree).values())) == 4
