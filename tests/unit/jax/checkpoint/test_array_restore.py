"""A restore detects what is missing, and what another framework has saved."""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from typing import Any

import msgspec
import pytest

jax = pytest.importorskip("jax", reason="needs jax: make jax")

import numpy as np  # noqa: E402

from spotfit.checkpoint.format import SnapshotIndex, split_into_chunks  # noqa: E402
from spotfit.checkpoint.reader import MemoryShardReader, SavedState, read_chunks  # noqa: E402
from spotfit.checkpoint.shm_segment import ShmSegment  # noqa: E402
from spotfit.core.errors import ConfigError, IntegrityError  # noqa: E402
from spotfit.frameworks.host_rng import host_rng_state  # noqa: E402
from spotfit.jax.checkpoint.array_arena import ArrayArena  # noqa: E402
from spotfit.jax.checkpoint.array_restore import ArrayRestore  # noqa: E402
from spotfit.jax.checkpoint.array_save_plan import ArraySavePlanner  # noqa: E402
from spotfit.jax.checkpoint.array_tree import ArrayTree  # noqa: E402
from spotfit.jax.checkpoint.array_values import encode_values  # noqa: E402
from tests.unit.jax.checkpoint.trees import replicated_tree  # noqa: E402


def saved_by(world_size: int, folder: Path, state: Any) -> SavedState:
    """Return the snapshot of ranks that all hold the arrays of numpy in `state`, as replicas."""
    readers = []
    for rank in range(world_size):
        plan = ArraySavePlanner(rank, world_size).plan(replicated_tree(state, world_size))
        arena = ArrayArena([folder / str(rank)], lambda directory: directory / "0.segment")
        arena.reserve(plan.pieces)
        arena.copy(plan.tensors)
        arena.publish(
            SnapshotIndex(
                rank=rank,
                world_size=world_size,
                step=7,
                pieces=plan.pieces,
                value_keys=plan.value_keys,
                encoded_values=encode_values(plan.values, keys=plan.value_keys),
                encoded_rank_state=encode_values({"rng_state": host_rng_state(), "rank": rank}),
                chunks=split_into_chunks(plan.pieces),
                epoch=2,
            )
        )
        readers.append(MemoryShardReader(ShmSegment.open(arena.path)))
    return SavedState(readers, "checkpoint_000001")


def restore_of(state: Any, *, rank: int = 0, world_size: int = 1) -> ArrayRestore:
    return ArrayRestore(
        ArrayTree(state).template(),
        {},
        rank=rank,
        world_size=world_size,
        resume_datasets=lambda _: None,
    )


@pytest.mark.parametrize("world_size", [1, 3, 4])
def test_another_number_of_ranks_restores_all_values(tmp_path: Path, world_size: int) -> None:
    state: dict[str, Any] = {
        "large": np.arange(700_000.0).reshape(700, 1000),
        "small": np.arange(3),
        "n": 5,
    }
    saved = saved_by(3, tmp_path, state)
    zeros = {"large": np.zeros((700, 1000)), "small": np.zeros(3, int), "n": 0}
    restore = restore_of(zeros, rank=world_size - 1, world_size=world_size)
    read_chunks(restore.plan(saved).reads)
    assert restore.apply(saved) == 2
    assert np.array_equal(restore.state["large"], state["large"])
    assert restore.state["small"].tolist() == [0, 1, 2]
    assert restore.state["n"] == 5
    assert (restore.rng_state is not None) == (world_size == 3), "RNG states belong to the ranks"


def test_scalars_of_checkpoints_without_weak_types_have_that_of_the_template(
    tmp_path: Path,
) -> None:
    saved = saved_by(1, tmp_path, {"scale": np.float32(2.5), "w": np.ones(2, np.float32)})
    restore = restore_of({"scale": jax.numpy.asarray(1.0), "w": jax.numpy.full(2, 1.0)})
    read_chunks(restore.plan(saved).reads)
    restore.apply(saved)
    assert restore.state["scale"].weak_type
    assert restore.state["scale"] == 2.5
    assert not restore.state["w"].weak_type, "earlier versions restored weak scalars only"


def test_an_incomplete_array_is_rejected(tmp_path: Path) -> None:
    saved = saved_by(2, tmp_path, {"w": np.zeros((700, 1000))})
    reader: Any = saved.readers[1]
    reader.index = msgspec.structs.replace(reader.index, pieces=reader.index.pieces[1:])
    with pytest.raises(IntegrityError, match=r"The array state\.w is incomplete: "):
        restore_of({"w": np.zeros((700, 1000))}).plan(saved)


@pytest.mark.parametrize("offset", [0, 100])
def test_a_gap_of_the_size_of_a_repetition_is_rejected(tmp_path: Path, offset: int) -> None:
    saved = saved_by(1, tmp_path, {"w": np.zeros((700, 3))})
    reader: Any = saved.readers[0]
    (piece,) = reader.index.pieces
    parts = tuple(
        msgspec.structs.replace(piece, offsets=(first, 0), sizes=(350, 3), size_bytes=350 * 24)
        for first in (0, offset)
    )
    reader.index = msgspec.structs.replace(reader.index, pieces=parts)
    with pytest.raises(IntegrityError, match=r"2100 elements .* for 2100, some of them several"):
        restore_of({"w": np.zeros((700, 3))}).plan(saved)


def test_parts_with_many_edges_are_compared_in_little_memory(tmp_path: Path) -> None:
    shape = (41,) * 4
    saved = saved_by(1, tmp_path, {"w": np.zeros(shape, np.int8)})
    reader: Any = saved.readers[0]
    (piece,) = reader.index.pieces
    parts = tuple(
        msgspec.structs.replace(piece, offsets=(n,) * 4, sizes=(1,) * 4, size_bytes=1)
        for n in range(40)
    )
    reader.index = msgspec.structs.replace(reader.index, pieces=parts)
    tracemalloc.start()
    try:
        with pytest.raises(IntegrityError, match=f"40 elements were saved for {41**4}"):
            restore_of({"w": np.zeros(shape, np.int8)}).plan(saved)
        # The array itself has 2.8 MB.
        assert tracemalloc.get_traced_memory()[1] < 5e6
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("shift", [0, 1])
def test_tiles_of_an_array_are_complete_without_a_repetition(tmp_path: Path, shift: int) -> None:
    saved = saved_by(1, tmp_path, {"w": np.zeros((6, 8, 4))})
    reader: Any = saved.readers[0]
    (piece,) = reader.index.pieces
    tiles = [
        msgspec.structs.replace(piece, offsets=(row, column, 0), sizes=(3, 2, 4), size_bytes=192)
        for row in (0, 3)
        for column in (0, 2, 4, 6)
    ]
    tiles[2] = msgspec.structs.replace(tiles[2], offsets=(shift, 4, 0))
    reader.index = msgspec.structs.replace(reader.index, pieces=tuple(tiles))
    restore = restore_of({"w": np.zeros((6, 8, 4))})
    if not shift:
        assert restore.plan(saved).reads
        return
    with pytest.raises(IntegrityError, match="192 elements were saved for 192, some of them"):
        restore.plan(saved)


@pytest.mark.parametrize("dtype", ["nonsense", "f4,(", "O", "object", "S3", "V4", "m8[s]", "f4,f4"])
@pytest.mark.parametrize("initial", [1, np.int64(1)])
def test_a_dtype_without_numbers_is_rejected(tmp_path: Path, initial: Any, dtype: str) -> None:
    saved = saved_by(1, tmp_path, {"n": np.int64(1)})
    reader: Any = saved.readers[0]
    (piece,) = reader.index.pieces
    piece = msgspec.structs.replace(piece, dtype=dtype)
    reader.index = msgspec.structs.replace(reader.index, pieces=(piece,))
    with pytest.raises(IntegrityError, match=r"state\.n was saved with the dtype '.*no numbers"):
        restore_of({"n": initial}).plan(saved)


@pytest.mark.parametrize("dtype", ["bool", "int4", "uint32", "bfloat16", "float8_e4m3fn", "c8"])
def test_dtypes_with_numbers_are_restored(tmp_path: Path, dtype: str) -> None:
    values = np.ones(2, np.dtype(dtype))
    saved = saved_by(1, tmp_path, {"w": values})
    restore = restore_of({"w": 0 * values})
    read_chunks(restore.plan(saved).reads)
    restore.apply(saved)
    assert restore.state["w"].tolist() == values.tolist()


def test_parts_with_different_dtypes_are_rejected(tmp_path: Path) -> None:
    saved = saved_by(2, tmp_path, {"w": np.zeros((700, 1000))})
    reader: Any = saved.readers[1]
    pieces = tuple(msgspec.structs.replace(one, dtype="int64") for one in reader.index.pieces)
    reader.index = msgspec.structs.replace(reader.index, pieces=pieces)
    with pytest.raises(IntegrityError, match="was saved with several shapes or dtypes"):
        restore_of({"w": np.zeros((700, 1000))}).plan(saved)


def test_a_checkpoint_of_another_framework_is_rejected(tmp_path: Path) -> None:
    saved = saved_by(1, tmp_path, {"w": np.zeros(3)})
    reader: Any = saved.readers[0]
    piece = msgspec.structs.replace(reader.index.pieces[0], key=("model", "w"))
    reader.index = msgspec.structs.replace(reader.index, pieces=(piece,))
    with pytest.raises(ConfigError, match=r"was not saved by spotfit\.jax\.Checkpointer"):
        restore_of({"w": np.zeros(3)}).plan(saved)


def test_a_plan_that_is_rolled_back_can_be_repeated(tmp_path: Path) -> None:
    saved = saved_by(1, tmp_path, [np.ones(3)])
    restore = restore_of([np.zeros(3)])
    restore.plan(saved)
    restore.roll_back()
    read_chunks(restore.plan(saved).reads)
    restore.apply(saved)
    assert restore.state[0].tolist() == [1.0] * 3
