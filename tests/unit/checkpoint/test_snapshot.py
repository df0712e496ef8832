"""The format of a snapshot: how bytes are cut, and an index that can be read for ever."""

from __future__ import annotations

import msgspec
import pytest

from spotfit.checkpoint.snapshot import (
    CHUNK_BYTES,
    FORMAT,
    Index,
    chunks_of,
    read_index,
    write_index,
)
from spotfit.core.errors import ConfigError, IntegrityError
from tests.unit.checkpoint.snapshots import BIG, pieces_of


def cuts(*sizes_bytes: int) -> list[tuple[int, int]]:
    return [(chunk.start, chunk.end) for chunk in chunks_of(pieces_of(sizes_bytes))]


def test_small_pieces_lie_together_and_big_ones_alone() -> None:
    assert cuts(10, 20, BIG, 30) == [(0, 128), (128, 128 + BIG), (128 + BIG, 128 + BIG + 30)]


def test_a_piece_bigger_than_a_chunk_is_cut() -> None:
    assert cuts(CHUNK_BYTES + 5) == [(0, CHUNK_BYTES), (CHUNK_BYTES, CHUNK_BYTES + 5)]


def test_many_small_pieces_make_no_chunk_too_big() -> None:
    found = cuts(*[BIG - 64] * 40)
    assert max(end - start for start, end in found) <= CHUNK_BYTES
    assert [start for start, _ in found[1:]] == [end for _, end in found[:-1]]


def test_nothing_is_cut_into_nothing() -> None:
    assert cuts() == []


def test_what_a_later_format_says_is_not_guessed() -> None:
    index = write_index(Index(0, 1, 1, ()))
    assert msgspec.json.decode(index)["format"] == FORMAT, "the one before shall know"
    later = {**msgspec.json.decode(index), "format": FORMAT + 1}
    with pytest.raises(ConfigError, match=f"format {FORMAT + 1}"):
        read_index(msgspec.json.encode(later))


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'{"rank": "one"}', b"\xff"])
def test_what_is_no_index_is_told(body: bytes) -> None:
    with pytest.raises(IntegrityError, match="cannot be read"):
        read_index(body)
