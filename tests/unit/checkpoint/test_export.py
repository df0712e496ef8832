"""Export of snapshots to safetensors."""

from __future__ import annotations

import errno
import itertools
import os
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from spotfit.checkpoint.export import export_safetensors, reject_missing_weights
from spotfit.checkpoint.format import SnapshotIndex, TensorPiece, split_into_chunks
from spotfit.checkpoint.reader import MemoryShardReader, SavedState
from spotfit.checkpoint.shm_segment import ShmSegment
from spotfit.core.errors import ConfigError

SHAPE = (4, 6, 5)
WHOLE = bytes(range(4 * 6 * 5))


def box(offsets: tuple[int, ...], sizes: tuple[int, ...]) -> bytes:
    """Return that box of WHOLE, copied item by item."""
    places = itertools.product(
        *(range(at, at + size) for at, size in zip(offsets, sizes, strict=True))
    )
    return bytes(WHOLE[(a * 6 + b) * 5 + c] for a, b, c in places)


def saved_in(
    folder: Path, boxes: list[tuple[tuple[int, ...], tuple[int, ...]]], **how: str
) -> SavedState:
    """Return a saved state in which each rank has one box."""
    parts = []
    for rank, (offsets, sizes) in enumerate(boxes):
        body = box(offsets, sizes)
        dtype = how.get("dtype", "uint8")
        piece = TensorPiece(
            key=(how.get("section", "model"), "a.w"),
            dtype=dtype,
            shape=SHAPE,
            offsets=offsets,
            sizes=sizes,
            start=0,
            size_bytes=len(body),
        )
        segment = ShmSegment.create(folder / f"{rank}", len(body))
        segment.payload[: len(body)] = body
        segment.publish(
            SnapshotIndex(
                rank=rank,
                world_size=len(boxes),
                step=9,
                pieces=(piece,),
                chunks=split_into_chunks((piece,)),
            )
        )
        parts.append(MemoryShardReader(segment))
    return SavedState(parts, "ck")


def read(path: Path) -> tuple[dict[str, object], bytes]:
    body = path.read_bytes()
    end = 8 + int.from_bytes(body[:8], "little")
    return msgspec.json.decode(body[8:end]), body[end:]


@pytest.mark.parametrize(
    "boxes",
    [
        [((0, 0, 0), SHAPE)],
        [((0, 0, 0), (3, 6, 5)), ((3, 0, 0), (1, 6, 5))],
        [((0, 0, 0), (4, 2, 5)), ((0, 2, 0), (4, 4, 5))],
        [((0, 0, 0), (4, 6, 1)), ((0, 0, 1), (4, 6, 4))],
        [((0, 0, 0), (2, 6, 3)), ((2, 0, 0), (2, 6, 3)), ((0, 0, 3), (4, 6, 2))],
    ],
)
def test_pieces_of_any_cut_are_assembled(
    tmp_path: Path, boxes: list[tuple[tuple[int, ...], tuple[int, ...]]]
) -> None:
    export_safetensors(saved_in(tmp_path, boxes), tmp_path / "m.safetensors")
    header, body = read(tmp_path / "m.safetensors")
    assert header == {
        "__metadata__": {"format": "pt", "step": "9"},
        "a.w": {"dtype": "U8", "shape": list(SHAPE), "data_offsets": [0, 120]},
    }
    assert body == WHOLE


def test_an_unsupported_dtype_is_rejected_and_leaves_no_file(tmp_path: Path) -> None:
    saved = saved_in(tmp_path, [((0, 0, 0), SHAPE)], dtype="quint8")
    with pytest.raises(ConfigError, match="quint8, which safetensors lacks"):
        export_safetensors(saved, tmp_path / "m.safetensors")
    assert not list(tmp_path.glob("*.safetensors"))


def test_a_snapshot_without_weights_is_rejected(tmp_path: Path) -> None:
    for section in ("model", "state"):
        (tmp_path / section).mkdir()
        reject_missing_weights(saved_in(tmp_path / section, [((0, 0, 0), SHAPE)], section=section))
    saved = saved_in(tmp_path, [((0, 0, 0), SHAPE)], section="stateful_objects")
    with pytest.raises(ConfigError, match="The checkpoint ck has no weights of a model"):
        reject_missing_weights(saved)


def refusing(number: int) -> Callable[[int, int, int], None]:
    def refuse(_file: int, _at: int, size_bytes: int) -> None:
        assert size_bytes > len(WHOLE), "all of the file"
        raise OSError(number, os.strerror(number))

    return refuse


def test_a_full_disk_raises_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A write to a mapped page without disk space would raise SIGBUS."""
    saved = saved_in(tmp_path, [((0, 0, 0), SHAPE)])
    there = sorted(tmp_path.iterdir())
    monkeypatch.setattr(os, "posix_fallocate", refusing(errno.ENOSPC))
    with pytest.raises(OSError, match="No space left"):
        export_safetensors(saved, tmp_path / "m.safetensors")
    assert sorted(tmp_path.iterdir()) == there


@pytest.mark.parametrize("number", [errno.EOPNOTSUPP, errno.EINVAL])
def test_a_file_system_without_fallocate_is_supported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    saved = saved_in(tmp_path, [((0, 0, 0), SHAPE)])
    monkeypatch.setattr(os, "posix_fallocate", refusing(number))
    export_safetensors(saved, tmp_path / "m.safetensors")
    assert read(tmp_path / "m.safetensors")[1] == WHOLE
