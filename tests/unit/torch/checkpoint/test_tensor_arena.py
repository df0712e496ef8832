"""An arena is reused while the layout stays the same, and falls back to the disk."""

from __future__ import annotations

import gc
import itertools
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from spotfit.checkpoint.base_checkpointer import RankSavePlan
from spotfit.checkpoint.format import SnapshotIndex, TensorPiece, split_into_chunks
from spotfit.checkpoint.shm_segment import ShmSegment
from spotfit.torch.checkpoint import tensor_arena
from spotfit.torch.checkpoint.load_plan import piece_as_tensor
from spotfit.torch.checkpoint.save_plan import SavePlanCache
from spotfit.torch.checkpoint.tensor_arena import TensorArena


def arena_in(*folders: Path) -> TensorArena:
    count = itertools.count(1)
    return TensorArena(folders, lambda folder: folder / f"0-{next(count)}")


def share_of(**tensors: torch.Tensor) -> RankSavePlan:
    return SavePlanCache(0, lambda value: [value]).plan(dict(tensors))


def save_and_read(arena: TensorArena, share: RankSavePlan) -> list[torch.Tensor]:
    """Return the tensors as another process reads them."""
    arena.reserve(share.pieces)
    arena.copy(share.tensors)
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
        "spotfit.torch.checkpoint.tensor_arena.gpu_in_use", lambda: True
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
    arena.copy(share.tensors)
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


# --- pinned memory --------------------------------------------------------------------------------


@pytest.fixture
def unpinned(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each call that unpins memory, whether the memory was still mapped then."""
    calls: list[bool] = []

    def pin(segment: ShmSegment) -> int:
        return int(torch.frombuffer(segment.payload, dtype=torch.uint8).data_ptr())

    def unpin(address: int) -> None:
        lines = Path("/proc/self/maps").read_text().splitlines()
        ranges = [line.split()[0].split("-") for line in lines]
        calls.append(any(int(low, 16) <= address < int(high, 16) for low, high in ranges))

    monkeypatch.setattr(tensor_arena, "_pin_memory", pin)
    monkeypatch.setattr(tensor_arena, "_unpin_memory", unpin)
    return calls


def test_memory_is_unpinned_once_before_it_is_unmapped(
    tmp_path: Path, unpinned: list[bool]
) -> None:
    arena, share = arena_in(tmp_path), share_of(a=torch.ones(10**5))
    save_and_read(arena, share)
    arena.close()
    arena.close()
    assert unpinned == [True]


def test_another_layout_unpins_the_old_segment(tmp_path: Path, unpinned: list[bool]) -> None:
    arena = arena_in(tmp_path)
    arena.reserve(share_of(a=torch.ones(10**5)).pieces)
    arena.reserve(share_of(a=torch.ones(3)).pieces)
    assert unpinned == [True]


def test_an_arena_that_is_collected_unpins_its_memory(tmp_path: Path, unpinned: list[bool]) -> None:
    """A program may call fit() with num_workers=0 several times."""
    arena = arena_in(tmp_path)
    arena.reserve(share_of(a=torch.ones(10**5)).pieces)
    del arena
    gc.collect()
    assert unpinned == [True]


def test_a_segment_that_was_not_pinned_is_not_unpinned(
    tmp_path: Path, unpinned: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensor_arena, "_pin_memory", lambda _: None)
    arena = arena_in(tmp_path)
    arena.reserve(share_of(a=torch.ones(10**5)).pieces)
    arena.close()
    assert unpinned == []


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
TENSORS = {
    "bfloat16": torch.ones(300, 70, dtype=torch.bfloat16) * 3,
    "float8": torch.arange(64.0).to(torch.float8_e4m3fn),
    "bool": torch.tensor([True, False]),
    "complex": torch.arange(6.0).to(torch.complex64),
    "scalar": torch.tensor(7),
    "empty": torch.empty(0, 4),
    "transposed": torch.arange(12.0).view(3, 4).t(),
    "channels_last": torch.rand(2, 3, 5, 7).to(memory_format=torch.channels_last),
    "slice": torch.arange(100.0)[10:90:3],
    "large": torch.rand(2**22),
}


@pytest.fixture
def shm_path() -> Iterator[Path]:
    """A directory in shared memory: the driver need not support the pages of files on a disk."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("is_pinned", [True, False])
def test_on_a_gpu_tensors_are_copied_exactly(
    shm_path: Path, monkeypatch: pytest.MonkeyPatch, is_pinned: bool
) -> None:
    if not is_pinned:
        monkeypatch.setattr(tensor_arena, "gpu_in_use", lambda: False)
    torch.ones(1, device="cuda")
    arena = arena_in(shm_path)
    share = share_of(**{name: one.cuda() for name, one in TENSORS.items()})
    found = save_and_read(arena, share)
    assert (arena._unpin is not None) == is_pinned
    for copy, tensor in zip(found, share.tensors, strict=True):
        assert (copy.dtype, copy.shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(bits(copy), bits(tensor))
    arena.close()


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.cpu().contiguous().reshape(-1).view(torch.uint8)


@pytest.mark.gpu
@needs_gpu
def test_on_a_gpu_a_copy_waits_for_the_current_stream_and_is_complete(shm_path: Path) -> None:
    weights = torch.zeros(2**22, device="cuda")
    arena, share = arena_in(shm_path), share_of(a=weights)
    with torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]
        torch.cuda._sleep(10**8)  # type: ignore[no-untyped-call]
        weights.fill_(1)
        (copy,) = save_and_read(arena, share)
        weights.fill_(2)
    torch.cuda.synchronize()
    assert bool((copy == 1).all())
    arena.close()


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_copies_from_a_gpu_that_is_not_current_are_complete(shm_path: Path) -> None:
    weights = torch.zeros(2**22, device="cuda:1")
    arena, share = arena_in(shm_path), share_of(a=weights)
    with torch.cuda.device(1):
        torch.cuda._sleep(10**8)  # type: ignore[no-untyped-call]
        weights.fill_(1)
    with torch.cuda.device(0):
        (copy,) = save_and_read(arena, share)
    assert bool((copy == 1).all())
    arena.close()


@pytest.mark.gpu
@needs_gpu
def test_on_a_gpu_a_failed_pinning_is_not_raised_by_the_next_kernel(shm_path: Path) -> None:
    torch.ones(1, device="cuda")
    segment = ShmSegment.create(shm_path / "segment", 2**20)
    address = tensor_arena._pin_memory(segment)
    assert address is not None
    assert tensor_arena._pin_memory(segment) is None, "it is registered already"
    torch.ones(3, device="cuda").add_(1)
    torch.cuda.synchronize()
    tensor_arena._unpin_memory(address)
    tensor_arena._unpin_memory(address)  # fails: it is not registered any more
    torch.ones(3, device="cuda").add_(1)
    segment.close()


@pytest.mark.gpu
@needs_gpu
def test_on_a_gpu_memory_can_be_pinned_again_after_an_arena_was_collected(shm_path: Path) -> None:
    torch.ones(1, device="cuda")
    pieces = share_of(a=torch.ones(10**6)).pieces
    for _ in range(20):
        arena = arena_in(shm_path)
        arena.reserve(pieces)
        assert arena._unpin is not None
        arena.path.unlink()
        del arena
        gc.collect()
