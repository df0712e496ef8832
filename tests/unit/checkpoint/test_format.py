"""The snapshot format: chunking, and encoding of the index."""

from __future__ import annotations

import msgspec
import pytest

from spotfit.checkpoint.format import (
    FORMAT_VERSION,
    MAX_CHUNK_BYTES,
    SnapshotIndex,
    decode_index,
    encode_index,
    split_into_chunks,
)
from spotfit.core.errors import ConfigError, IntegrityError
from tests.unit.checkpoint.snapshots import LARGE_PIECE_BYTES, make_pieces


def cuts(*sizes_bytes: int) -> list[tuple[int, int]]:
    return [(chunk.start, chunk.end) for chunk in split_into_chunks(make_pieces(sizes_bytes))]


def test_small_pieces_share_a_chunk_and_large_ones_do_not() -> None:
    assert cuts(10, 20, LARGE_PIECE_BYTES, 30) == [
        (0, 128),
        (128, 128 + LARGE_PIECE_BYTES),
        (128 + LARGE_PIECE_BYTES, 128 + LARGE_PIECE_BYTES + 30),
    ]


def test_a_piece_larger_than_a_chunk_is_split() -> None:
    assert cuts(MAX_CHUNK_BYTES + 5) == [
        (0, MAX_CHUNK_BYTES),
        (MAX_CHUNK_BYTES, MAX_CHUNK_BYTES + 5),
    ]


def test_small_pieces_never_exceed_the_maximum_chunk_size() -> None:
    found = cuts(*[LARGE_PIECE_BYTES - 64] * 40)
    assert max(end - start for start, end in found) <= MAX_CHUNK_BYTES
    assert [start for start, _ in found[1:]] == [end for _, end in found[:-1]]


def test_no_pieces_give_no_chunks() -> None:
    assert cuts() == []


def test_a_later_format_is_rejected() -> None:
    index = encode_index(SnapshotIndex(rank=0, world_size=1, step=1, pieces=()))
    assert msgspec.json.decode(index)["format"] == FORMAT_VERSION, (
        "earlier releases reject later versions by this field"
    )
    later = {**msgspec.json.decode(index), "format": FORMAT_VERSION + 1}
    with pytest.raises(ConfigError, match=f"format {FORMAT_VERSION + 1}"):
        decode_index(msgspec.json.encode(later), source="a")


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'{"rank": "one"}', b"\xff"])
def test_a_corrupt_index_is_rejected(body: bytes) -> None:
    with pytest.raises(IntegrityError, match="is corrupt"):
        decode_index(body, source="a")
