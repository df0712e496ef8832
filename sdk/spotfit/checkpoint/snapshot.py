"""A snapshot: what one rank keeps of the training at one step, as bytes and an index of them.

The bytes are pieces of tensors, one after the other. In memory they lie in a segment, in the bucket
in chunks named by their mark, which later snapshots may share. No framework is needed to read them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec
from msgspec.structs import replace

from spotfit.core.codec import UNREADABLE, decoder, encode
from spotfit.core.errors import ConfigError, IntegrityError

FORMAT = 2
"""Goes up when a reader of today could not read what is written then."""
CHUNK_BYTES = 32 * 2**20
"""No chunk is bigger."""
OWN_CHUNK_BYTES = 2**20
"""A piece this big shares its chunks with no other: while it stays the same, they do."""
ALIGNMENT = 64
CHUNKS = "chunks/"
"""What the names of files that hold chunks begin with."""

Key = tuple[str | int, ...]
"""Where something stands in the nested state: names of dictionaries, places in lists."""


class Piece(msgspec.Struct, frozen=True, omit_defaults=True):
    """A box cut out of a tensor, row by row from byte `start` on."""

    key: Key
    dtype: str
    """As torch calls it: 'float32'."""
    shape: tuple[int, ...]
    """Of the whole tensor."""
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    start: int
    size_bytes: int

    @property
    def name(self) -> str:
        """The key as one word."""
        return name_of(self.key)

    @property
    def end(self) -> int:
        return self.start + self.size_bytes


class Chunk(msgspec.Struct, frozen=True, omit_defaults=True):
    """Bytes from `start` on, and the file that holds them."""

    start: int
    size_bytes: int
    mark: str = ""
    """By which these bytes are known again (`store.marks`)."""
    at: str = ""
    """The checkpoint's folder that holds it, if not the snapshot's own."""
    sha256: str = ""
    """What chunks of format 1 have in place of the mark."""

    @property
    def file(self) -> str:
        """Its name below that folder."""
        return f"{CHUNKS}{self.mark or self.sha256}"

    @property
    def end(self) -> int:
        return self.start + self.size_bytes


class Index(msgspec.Struct, frozen=True, omit_defaults=True):
    """What one rank's part of a snapshot holds, and where."""

    rank: int
    world_size: int
    step: int
    pieces: tuple[Piece, ...]
    leaves: tuple[Key, ...] = ()
    """What is no tensor, in the order of `plain`."""
    plain: bytes = b""
    """The values of the leaves, as torch saves a list."""
    own: bytes = b""
    """What is this rank's alone, as torch saves it: dice, and where its loader stands."""
    epoch: int = 0
    consumed: int = 0
    """Samples taken in this epoch by all who read it together: all ranks, or this one alone."""
    chunks: tuple[Chunk, ...] = ()
    """All bytes, in order; their marks are known once they are in the bucket."""
    format: int = 1
    """The first did not say so."""
    save: int = 0
    """Which save of its round it is, by number, the same on all ranks: two may be of one step."""

    @property
    def size_bytes(self) -> int:
        """How many bytes the pieces take."""
        return max((piece.end for piece in self.pieces), default=0)


class _Written(msgspec.Struct):
    format: int = 1


_indices = decoder(Index)
_formats = decoder(_Written)


def name_of(key: Key) -> str:
    """The key as one word, as torch.distributed.checkpoint joins it."""
    return ".".join(str(part) for part in key)


def index_file(rank: int) -> str:
    """The file of that rank's index, in the checkpoint's folder."""
    return f"index-{rank}.json"


def read_index(body: bytes | memoryview) -> Index:
    """What that file says. Raises `IntegrityError`, and `ConfigError` for a later format."""
    try:
        written = _formats.decode(body).format
        if written <= FORMAT:
            return _indices.decode(body)
    except UNREADABLE as unreadable:
        raise IntegrityError(f"The index of a snapshot cannot be read: {unreadable}") from None
    raise ConfigError(
        f"The snapshot was written in format {written}; this spotfit reads up to {FORMAT}.",
        do="Install the version of spotfit that wrote it, or a later one.",
    )


def write_index(index: Index) -> bytes:
    """The file."""
    return encode(replace(index, format=FORMAT))


def starts(sizes_bytes: Iterable[int]) -> list[int]:
    """Where pieces of these sizes begin, one after the other."""
    found, at = [], 0
    for size_bytes in sizes_bytes:
        found.append(at)
        at += -(-size_bytes // ALIGNMENT) * ALIGNMENT
    return found


def chunks_of(pieces: Sequence[Piece]) -> tuple[Chunk, ...]:
    """All bytes cut into chunks: small pieces together, each big one for itself."""
    cuts: list[Chunk] = []
    begin = 0
    for piece in pieces:
        if piece.size_bytes >= OWN_CHUNK_BYTES or piece.end - begin > CHUNK_BYTES:
            cuts += _cut(begin, piece.start)
            begin = piece.start
        if piece.size_bytes >= OWN_CHUNK_BYTES:
            cuts += _cut(piece.start, piece.end)
            begin = piece.end
    end = max((piece.end for piece in pieces), default=0)
    return (*cuts, *_cut(begin, end))


def _cut(begin: int, end: int) -> list[Chunk]:
    return [Chunk(start, min(CHUNK_BYTES, end - start)) for start in range(begin, end, CHUNK_BYTES)]
