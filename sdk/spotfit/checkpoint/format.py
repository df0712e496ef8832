"""The format of a snapshot: what one rank saved at one step, as bytes and an index of the bytes.

The bytes are pieces of tensors, one after the other. A shared memory segment holds them in one
block; the bucket holds them as chunks, which are named by their content hash so that later
snapshots can reference unchanged ones. Reading a snapshot needs no training framework.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec
from msgspec.structs import replace

from spotfit.core.codec import DECODE_ERRORS, decoder, encode
from spotfit.core.errors import ConfigError, IntegrityError

FORMAT_VERSION = 2
"""Increased when a change would make earlier readers fail or misread.

1: values were written by `torch.save`. 2: by `value_codec`.
"""
# A chunk is also the buffer of a reader thread and the slot of a shared ring. 32 MiB keeps those
# small, and makes the time per request negligible beside the transfer.
MAX_CHUNK_BYTES = 32 * 2**20
# Chunks of a frozen tensor are only shared by later snapshots if nothing else is in them. Below
# 1 MiB a request of its own would cost more than sending the bytes again.
DEDICATED_CHUNK_MIN_BYTES = 2**20
"""Pieces of at least this size share their chunks with no other piece."""
ALIGNMENT_BYTES = 64  # one cache line, and enough for every dtype and vector instruction
CHUNK_PREFIX = "chunks/"
"""Prefix of the file names of chunks."""

StateKey = tuple[str | int, ...]
"""Path of a value in the nested state: dictionary keys and list indices."""


class TensorPiece(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A box cut out of a tensor, in row-major order, stored from byte `start` on."""

    key: StateKey
    dtype: str
    """torch's name without the prefix, such as 'float32'."""
    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    start: int
    size_bytes: int

    @property
    def name(self) -> str:
        """Name of the tensor in the state: the parts of `key`, as "model.layer.weight"."""
        return dotted_name(self.key)

    @property
    def end(self) -> int:
        """Offset in the rank's snapshot bytes behind the last byte of the piece."""
        return self.start + self.size_bytes


class Chunk(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A range of the snapshot's bytes, and the file that stores it."""

    start: int
    size_bytes: int
    content_hash: str = ""
    """From `store.transfer`; '' before the upload."""
    source_prefix: str = ""
    """Folder of the checkpoint that stores the file; '' for the snapshot's own."""

    @property
    def file(self) -> str:
        """Name of the chunk's file in the folder of its checkpoint: "chunks/<content hash>".

        Valid only once `content_hash` is set, which the upload does.
        """
        return f"{CHUNK_PREFIX}{self.content_hash}"

    @property
    def end(self) -> int:
        """Offset in the rank's snapshot bytes behind the last byte of the chunk."""
        return self.start + self.size_bytes


# Default values are omitted from the JSON: an index has thousands of pieces and chunks.
class SnapshotIndex(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Contents of one rank's shard of a snapshot."""

    rank: int
    world_size: int
    step: int
    pieces: tuple[TensorPiece, ...]
    value_keys: tuple[StateKey, ...] = ()
    """Keys of the values that are not tensors, in the order of `encoded_values`."""
    encoded_values: bytes = b""
    """List of those values, written by `value_codec`."""
    encoded_rank_state: bytes = b""
    """State of this rank only, such as RNG states and the loader's, written by `value_codec`."""
    epoch: int = 0
    consumed: int = 0
    """Samples consumed in this epoch by the ranks that share a loader, or by this rank alone."""
    chunks: tuple[Chunk, ...] = ()
    """All bytes, in order."""
    format: int = 0
    """Set to `FORMAT_VERSION` by `encode_index`."""
    save_number: int = 0
    """Number of the save in its round, equal on all ranks. Two saves may be of one step."""

    @property
    def size_bytes(self) -> int:
        """Size of all pieces of this rank with the gaps between them; 0 without tensors."""
        return max((piece.end for piece in self.pieces), default=0)


class _FormatProbe(msgspec.Struct, kw_only=True):
    format: int


_index_decoder = decoder(SnapshotIndex)
_format_decoder = decoder(_FormatProbe)


def dotted_name(key: StateKey) -> str:
    """Return the key joined by dots, as in torch.distributed.checkpoint: "model.layer.weight"."""
    return ".".join(str(part) for part in key)


def index_filename(rank: int) -> str:
    """Return the name of that rank's index file in the checkpoint's folder, such as "index-0.json".

    `rank` is the world rank that has saved the shard.
    """
    return f"index-{rank}.json"


def decode_index(body: bytes | memoryview, *, source: str) -> SnapshotIndex:
    """Decode an index, from a file in the bucket, a segment or a peer.

    Raises `IntegrityError` if it is corrupt, and `ConfigError` if its format is a later one.
    """
    try:
        # The format is decoded first: a later one may have other fields.
        written_format = _format_decoder.decode(body).format
        if written_format <= FORMAT_VERSION:
            return _index_decoder.decode(body)
    except DECODE_ERRORS as error:
        raise IntegrityError(
            f"The index of the snapshot {source} is corrupt: {error}",
            do="Use another checkpoint, or restore this one from a backup.",
        ) from None
    raise ConfigError(
        f"The snapshot {source} has format {written_format}, but the installed version of spotfit "
        f"reads only formats up to {FORMAT_VERSION}.",
        do="Install the version of spotfit that wrote the snapshot, or a later one.",
    )


def encode_index(index: SnapshotIndex) -> bytes:
    """Encode an index as JSON, with the current format version, for a file or a segment."""
    return encode(replace(index, format=FORMAT_VERSION))


def aligned_offsets(sizes_bytes: Iterable[int]) -> list[int]:
    """Return the start offset of each piece if pieces of these sizes are stored in this order.

    Offsets are multiples of 64 bytes, beginning with 0.
    """
    offsets, end = [], 0
    for size_bytes in sizes_bytes:
        offsets.append(end)
        end += -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    return offsets


def split_into_chunks(pieces: Sequence[TensorPiece]) -> tuple[Chunk, ...]:
    """Split all bytes of a rank into chunks: small pieces together, each large piece separately.

    `pieces` are sorted by `start`. Pieces of 1 MiB and more share their chunks with no other piece,
    so that later snapshots can reference them; no chunk exceeds 32 MiB. The chunks are contiguous,
    include the gaps between pieces and have no hash yet.
    """
    chunks: list[Chunk] = []
    start = 0
    for piece in pieces:
        # Small pieces are not split: the chunk ends before a piece that would exceed its size.
        if piece.size_bytes >= DEDICATED_CHUNK_MIN_BYTES or piece.end - start > MAX_CHUNK_BYTES:
            chunks += _chunks_between(start, piece.start)
            start = piece.start
        if piece.size_bytes >= DEDICATED_CHUNK_MIN_BYTES:
            chunks += _chunks_between(piece.start, piece.end)
            start = piece.end
    end = max((piece.end for piece in pieces), default=0)
    return (*chunks, *_chunks_between(start, end))


def _chunks_between(start: int, end: int) -> list[Chunk]:
    return [
        Chunk(start=offset, size_bytes=min(MAX_CHUNK_BYTES, end - offset))
        for offset in range(start, end, MAX_CHUNK_BYTES)
    ]
