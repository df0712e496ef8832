"""A snapshot as one file that others read: safetensors, put together from the shards of all ranks.

Needs no framework, and no more memory than a few chunks.
"""

from __future__ import annotations

import errno
import itertools
import math
import mmap
import os
from collections import defaultdict
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import msgspec

from spotfit.checkpoint.saved import Saved, Wanted, at_once
from spotfit.checkpoint.snapshot import Key, Piece, name_of
from spotfit.core.errors import ConfigError
from spotfit.store.parts import appearing

_TYPES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "complex64": "C64",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint64": "U64",
    "uint32": "U32",
    "uint16": "U16",
    "uint8": "U8",
    "bool": "BOOL",
}
_ALIGNMENT = 8
_CANNOT_ALLOCATE = (errno.EOPNOTSUPP, errno.EINVAL)
"""What file systems say that cannot set room aside."""


class Whole(msgspec.Struct, frozen=True):
    """A tensor that is to be put together, and where its first byte goes."""

    name: str
    pieces: tuple[tuple[int, Piece], ...]
    """With the rank of each."""
    start: int

    @property
    def first(self) -> Piece:
        """Any of its pieces knows the whole's form."""
        return self.pieces[0][1]

    @property
    def size_bytes(self) -> int:
        return math.prod(self.first.shape) * _item_bytes(self.first)


def tensors_of(saved: Saved, part: str = "model") -> dict[Key, list[tuple[int, Piece]]]:
    """The tensors below that part of the state, each with its pieces and their ranks."""
    found: dict[Key, dict[tuple[int, ...], tuple[int, Piece]]] = defaultdict(dict)
    for index in saved.indices:
        for piece in index.pieces:
            if piece.key[0] == part:
                found[piece.key].setdefault(piece.offsets, (index.rank, piece))
    return {key: list(boxes.values()) for key, boxes in found.items()}


def export_safetensors(saved: Saved, path: Path) -> None:
    """Write the model's tensors to one file, which appears whole or not at all.

    Raises `IntegrityError` where bytes are missing or are not what was saved, `ConfigError` for
    tensors of a type that safetensors has no word for, and `OSError` where there is no room.
    """
    wholes, header = _laid_out(tensors_of(saved), step=saved.indices[0].step)
    end = max((one.start + one.size_bytes for one in wholes), default=0)
    with appearing(path) as draft, draft.open("x+b") as file:
        _take_room(file.fileno(), 8 + len(header) + end)
        file.write(len(header).to_bytes(8, "little") + header)
        file.flush()
        with mmap.mmap(file.fileno(), 0) as memory, memoryview(memory) as body:
            saved.read(
                [
                    Wanted(rank, piece, at_once(piece, partial(_put, body, start, piece)))
                    for one in wholes
                    for start in (8 + len(header) + one.start,)
                    for rank, piece in one.pieces
                ]
            )


def _take_room(file: int, size_bytes: int) -> None:
    """At once: a map whose pages find no room on the disk later has the process killed for it."""
    try:
        os.posix_fallocate(file, 0, size_bytes)
    except OSError as error:
        if error.errno not in _CANNOT_ALLOCATE:
            raise
        os.truncate(file, size_bytes)


def _laid_out(
    tensors: dict[Key, list[tuple[int, Piece]]], *, step: int
) -> tuple[list[Whole], bytes]:
    wholes: list[Whole] = []
    told: dict[str, object] = {"__metadata__": {"format": "pt", "step": str(step)}}
    at = 0
    for key, pieces in tensors.items():
        whole = Whole(name_of(key[1:]), tuple(pieces), at)
        first = whole.first
        if first.dtype not in _TYPES:
            raise ConfigError(
                f"safetensors has no word for {first.dtype}, the type of {whole.name}.",
                do="Export to a file that ends with .pt.",
            )
        at += whole.size_bytes
        told[whole.name] = {
            "dtype": _TYPES[first.dtype],
            "shape": first.shape,
            "data_offsets": (whole.start, at),
        }
        wholes.append(whole)
    header = msgspec.json.encode(told)
    return wholes, header + b" " * (-len(header) % _ALIGNMENT)


def _put(body: memoryview, start: int, piece: Piece, part: memoryview) -> None:
    """A box to its place in the whole, run by run."""
    run_bytes = _run_items(piece) * _item_bytes(piece)
    for n, at in enumerate(_runs(piece)):
        begin = start + at * _item_bytes(piece)
        body[begin : begin + run_bytes] = part[n * run_bytes : (n + 1) * run_bytes]


def _runs(piece: Piece) -> Iterator[int]:
    """Where in the whole each run of items begins that follow each other in both."""
    inner = _inner(piece)
    strides = [math.prod(piece.shape[n + 1 :]) for n in range(len(piece.shape))]
    begin = sum(at * stride for at, stride in zip(piece.offsets, strides, strict=True))
    for place in itertools.product(*(range(size) for size in piece.sizes[:inner])):
        yield begin + sum(at * stride for at, stride in zip(place, strides, strict=False))


def _inner(piece: Piece) -> int:
    """The dimension from which on the box is one run: all further ones are whole."""
    inner = len(piece.shape)
    while inner > 0 and piece.sizes[inner:] == piece.shape[inner:]:
        inner -= 1
    return inner


def _run_items(piece: Piece) -> int:
    return math.prod(piece.sizes[_inner(piece) :])


def _item_bytes(piece: Piece) -> int:
    items = math.prod(piece.sizes)
    return piece.size_bytes // items if items else 1
