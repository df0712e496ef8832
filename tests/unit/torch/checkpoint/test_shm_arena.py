"""An arena is reused while the layout stays the same, and falls back to the disk."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch

from spotfit.checkpoint.format import SnapshotIndex, TensorPiece, split_into_chunks
from spotfit.checkpoint.shm_segment import ShmSegment
from spotfit.torch.checkpoint.load_plan import piece_as_tensor
from spotfit.torch.checkpoint.save_plan import RankSavePlan, SavePlanCache
from spotfit.torch.checkpoint.shm_arena import ShmArena


def arena_in(*folders: Path) -> ShmArena:
    count = itertools.count(1)
    return ShmArena(folders, lambda folder: folder / f"0-{next(count)}")


def share_of(**tensors: torch.Tensor) -> RankSavePlan:
    return SavePlanCache(0, lambda value: [value]).plan(dict(tensors))


def save_and_read(arena: ShmArena, share: RankSavePlan) -> list[torch.Tensor]:
    """Return the tensors as another process reads them."""
    arena.reserve(share.pieces)
    arena.copy_tensors(share.tensors)
    arena.publish(
        SnapshotIndex(
            rank=0,
            world_size=1,
            step=1,
            pieces=share.pieces,
            chunks=split_into_chunks(share.pieces),
        )
    )
    segment = ShmSegment.open(arena.path)
    return [piece_as_tensor(piece, _cut(segment, piece)) for piece in segment.index().pieces]


def _cut(segment: ShmSegment, piece: TensorPiece) -> memoryview:
    return segment.payload[piece.start : piece.end]


def test_tensors_of_all_dtypes_are_copied_exactly(tmp_path: Path) -> None:
    share = share_of(
        a=torch.arange(6.0).view(2, 3),
        b=torch.tensor(5, dtype=torch.int64),
        c=torch.ones(3, dtype=torch.bfloat16),
        d=torch.tensor([True, False]),
        e=torch.empty(0, 4),
        f=torch.arange(12).view(3, 4).t(),
    )
    for found, tensor in zip(save_and_read(arena_in(tmp_path), share), share.tensors, strict=True):
        assert found.dtype == tensor.dtype
        assert torch.equal(found, tensor)


@pytest.mark.parametrize("tensors", [{}, {"none": torch.empty(0, 4)}])
def test_a_rank_without_tensors_publishes_a_snapshot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tensors: dict[str, torch.Tensor]
) -> None:
    """With a tiny model some ranks have no tensor to write."""
    monkeypatch.setattr(
        "spotfit.torch.checkpoint.shm_arena.gpu_in_use", lambda: True
    )  # nothing to pin
    arena = arena_in(tmp_path)
    share = share_of(**tensors)
    assert [found.shape for found in save_and_read(arena, share)] == [
        one.shape for one in share.tensors
    ]
    assert [found.shape for found in save_and_read(arena, share)] == [
        one.shape for one in share.tensors
    ]


def test_a_segment_is_reused_for_the_same_layout_only(tmp_path: Path) -> None:
    arena = arena_in(tmp_path)
    share = share_of(a=torch.ones(5))
    save_and_read(arena, share)
    first = arena.path
    share.tensors[0].fill_(2)
    assert save_and_read(arena, share)[0].tolist() == [2.0] * 5
    assert arena.path == first
    save_and_read(arena, share_of(a=torch.ones(6)))
    assert [path.name for path in tmp_path.iterdir()] == ["0-2"]
    arena.close()
    assert not list(tmp_path.iterdir())


def test_a_growing_index_gets_more_space(tmp_path: Path) -> None:
    arena = arena_in(tmp_path)
    share = share_of(a=torch.ones(5))
    save_and_read(arena, share)
    own = bytes(10**6)
    arena.reserve(share.pieces, values_bytes=len(own))
    arena.copy_tensors(share.tensors)
    arena.publish(
        SnapshotIndex(
            rank=0,
            world_size=1,
            step=1,
            pieces=share.pieces,
            encoded_rank_state=own,
            chunks=split_into_chunks(share.pieces),
        )
    )
    assert ShmSegment.open(arena.path).index().encoded_rank_state == own


def test_with_full_shared_memory_the_disk_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    created = ShmSegment.create

    def full(path: Path, capacity_bytes: int, index_bytes: int = 0) -> ShmSegment:
        if path.parent.name == "shm":
            raise OSError("No space left on device")
        return created(path, capacity_bytes, index_bytes)

    monkeypatch.setattr(ShmSegment, "create", full)
    arena = arena_in(tmp_path / "shm", tmp_path / "disk")
    assert save_and_read(arena, share_of(a=torch.ones(2)))[0].tolist() == [1.0, 1.0]
    assert arena.path.parent.name == "disk"
    assert "checkpoint.shared_memory_full" in capsys.readouterr().err
