"""One file of a model, whatever boxes it was saved in, in words that others read."""

from __future__ import annotations

import errno
import itertools
import os
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from spotfit.checkpoint.export import export_safetensors
from spotfit.checkpoint.saved import InMemory, Saved
from spotfit.checkpoint.segment import Segment
from spotfit.checkpoint.snapshot import Index, Piece, chunks_of
from spotfit.core.errors import ConfigError

SHAPE = (4, 6, 5)
WHOLE = bytes(range(4 * 6 * 5))


def box(offsets: tuple[int, ...], sizes: tuple[int, ...]) -> bytes:
    """That box of WHOLE, cut item by item."""
    places = itertools.product(
        *(range(at, at + size) for at, size in zip(offsets, sizes, strict=True))
    )
    return bytes(WHOLE[(a * 6 + b) * 5 + c] for a, b, c in places)


def saved_in(
    folder: Path, boxes: list[tuple[tuple[int, ...], tuple[int, ...]]], **how: str
) -> Saved:
    """A rank for each box."""
    parts = []
    for rank, (offsets, sizes) in enumerate(boxes):
        body = box(offsets, sizes)
        dtype = how.get("dtype", "uint8")
        piece = Piece(("model", "a.w"), dtype, SHAPE, offsets, sizes, 0, len(body))
        segment = Segment.create(folder / f"{rank}", len(body))
        segment.bytes[: len(body)] = body
        segment.finish(Index(rank, len(boxes), 9, (piece,), chunks=chunks_of((piece,))))
        parts.append(InMemory(segment))
    return Saved(parts, "ck")


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
def test_boxes_of_any_cut_come_together(
    tmp_path: Path, boxes: list[tuple[tuple[int, ...], tuple[int, ...]]]
) -> None:
    export_safetensors(saved_in(tmp_path, boxes), tmp_path / "m.safetensors")
    header, body = read(tmp_path / "m.safetensors")
    assert header == {
        "__metadata__": {"format": "pt", "step": "9"},
        "a.w": {"dtype": "U8", "shape": list(SHAPE), "data_offsets": [0, 120]},
    }
    assert body == WHOLE


def test_a_type_it_has_no_word_for_is_refused_and_nothing_is_left(tmp_path: Path) -> None:
    saved = saved_in(tmp_path, [((0, 0, 0), SHAPE)], dtype="quint8")
    with pytest.raises(ConfigError, match="no word for quint8"):
        export_safetensors(saved, tmp_path / "m.safetensors")
    assert not list(tmp_path.glob("*.safetensors"))


def refusing(number: int) -> Callable[[int, int, int], None]:
    def refuse(_file: int, _at: int, size_bytes: int) -> None:
        assert size_bytes > len(WHOLE), "all of the file"
        raise OSError(number, os.strerror(number))

    return refuse


def test_a_disk_without_room_is_told_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Later it would be SIGBUS."""
    saved = saved_in(tmp_path, [((0, 0, 0), SHAPE)])
    there = sorted(tmp_path.iterdir())
    monkeypatch.setattr(os, "posix_fallocate", refusing(errno.ENOSPC))
    with pytest.raises(OSError, match="No space left"):
        export_safetensors(saved, tmp_path / "m.safetensors")
    assert sorted(tmp_path.iterdir()) == there


@pytest.mark.parametrize("number", [errno.EOPNOTSUPP, errno.EINVAL])
def test_a_file_system_that_sets_no_room_aside_takes_it_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    saved = saved_in(tmp_path, [((0, 0, 0), SHAPE)])
    monkeypatch.setattr(os, "posix_fallocate", refusing(number))
    export_safetensors(saved, tmp_path / "m.safetensors")
    assert read(tmp_path / "m.safetensors")[1] == WHOLE
