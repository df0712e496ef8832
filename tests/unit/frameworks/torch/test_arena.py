"""An arena is fitted once, used again, and falls back to the disk where memory has no room."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch

from spotfit.checkpoint.segment import Segment
from spotfit.checkpoint.snapshot import Index, Piece, chunks_of
from spotfit.frameworks.torch.arena import Arena
from spotfit.frameworks.torch.reading import as_tensor
from spotfit.frameworks.torch.shares import Share, Shares


def arena_in(*folders: Path) -> Arena:
    count = itertools.count(1)
    return Arena(folders, lambda folder: folder / f"0-{next(count)}")


def share_of(**tensors: torch.Tensor) -> Share:
    return Shares(0, lambda mine: [mine]).of(dict(tensors))


def taken(arena: Arena, share: Share) -> list[torch.Tensor]:
    """What another process finds."""
    arena.fit(share.pieces)
    arena.take(share.tensors)
    arena.finish(Index(0, 1, 1, share.pieces, chunks=chunks_of(share.pieces)))
    segment = Segment.open(arena.path)
    return [as_tensor(piece, _cut(segment, piece)) for piece in segment.index().pieces]


def _cut(segment: Segment, piece: Piece) -> memoryview:
    return segment.bytes[piece.start : piece.end]


def test_tensors_of_any_kind_are_found_as_they_were(tmp_path: Path) -> None:
    share = share_of(
        a=torch.arange(6.0).view(2, 3),
        b=torch.tensor(5, dtype=torch.int64),
        c=torch.ones(3, dtype=torch.bfloat16),
        d=torch.tensor([True, False]),
        e=torch.empty(0, 4),
        f=torch.arange(12).view(3, 4).t(),
    )
    for found, tensor in zip(taken(arena_in(tmp_path), share), share.tensors, strict=True):
        assert found.dtype == tensor.dtype
        assert torch.equal(found, tensor)


@pytest.mark.parametrize("tensors", [{}, {"none": torch.empty(0, 4)}])
def test_a_rank_with_nothing_to_write_writes_a_snapshot_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tensors: dict[str, torch.Tensor]
) -> None:
    """Of a tiny model with plain SGD not every one of four workers has a part."""
    monkeypatch.setattr("spotfit.frameworks.torch.arena.gpu_in_use", lambda: True)  # nothing to pin
    arena = arena_in(tmp_path)
    share = share_of(**tensors)
    assert [found.shape for found in taken(arena, share)] == [one.shape for one in share.tensors]
    assert [found.shape for found in taken(arena, share)] == [one.shape for one in share.tensors]


def test_the_same_memory_is_used_again_and_another_form_gets_another(tmp_path: Path) -> None:
    arena = arena_in(tmp_path)
    share = share_of(a=torch.ones(5))
    taken(arena, share)
    first = arena.path
    share.tensors[0].fill_(2)
    assert taken(arena, share)[0].tolist() == [2.0] * 5
    assert arena.path == first
    taken(arena, share_of(a=torch.ones(6)))
    assert [path.name for path in tmp_path.iterdir()] == ["0-2"]
    arena.close()
    assert not list(tmp_path.iterdir())


def test_an_index_that_grows_gets_room(tmp_path: Path) -> None:
    arena = arena_in(tmp_path)
    share = share_of(a=torch.ones(5))
    taken(arena, share)
    own = bytes(10**6)
    arena.fit(share.pieces, plain_bytes=len(own))
    arena.take(share.tensors)
    arena.finish(Index(0, 1, 1, share.pieces, own=own, chunks=chunks_of(share.pieces)))
    assert Segment.open(arena.path).index().own == own


def test_where_memory_is_full_the_disk_serves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    created = Segment.create

    def full(path: Path, capacity_bytes: int, index_bytes: int = 0) -> Segment:
        if path.parent.name == "shm":
            raise OSError("No space left on device")
        return created(path, capacity_bytes, index_bytes)

    monkeypatch.setattr(Segment, "create", full)
    arena = arena_in(tmp_path / "shm", tmp_path / "disk")
    assert taken(arena, share_of(a=torch.ones(2)))[0].tolist() == [1.0, 1.0]
    assert arena.path.parent.name == "disk"
    assert "checkpoint.no_shared_memory" in capsys.readouterr().err
