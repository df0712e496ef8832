"""Export of a snapshot's model to one safetensors file, assembled from the shards of all ranks.

Needs no training framework, and only the memory of a few chunks.
"""

from __future__ import annotations

import errno
import itertools
import math
import mmap
import os
from collections import defaultdict
from functools import partial
from pathlib import Path

import msgspec

from spotfit.checkpoint.format import StateKey, TensorPiece, dotted_name
from spotfit.checkpoint.reader import ReadRequest, SavedState, whole_piece_sink
from spotfit.checkpoint.shm_segment import reserve_space
from spotfit.core.errors import ConfigError
from spotfit.store.local import atomic_write

_SAFETENSORS_DTYPES = {
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
_ALIGNMENT = 8  # safetensors: readers expect the data to start at a multiple of 8
# Errors of file systems that cannot reserve space, such as some FUSE and network ones.
_FALLOCATE_UNSUPPORTED = (errno.EOPNOTSUPP, errno.EINVAL)


TensorPieces = dict[StateKey, list[tuple[int, TensorPiece]]]
"""Tensors by key: pairs of a rank and a piece that the rank saved."""


def tensor_pieces(saved: SavedState, section: str = "model") -> TensorPieces:
    """Return the pieces, with their ranks, of each tensor in that section of the state.

    `section` is the first part of the key: "model", "optimizer" or "stateful_objects", or "state"
    of a pytree. Reads nothing. Of pieces that several ranks saved alike only the first is returned.
    """
    found: dict[StateKey, dict[tuple[int, ...], tuple[int, TensorPiece]]] = defaultdict(dict)
    for index in saved.indices:
        for piece in index.pieces:
            if piece.key[0] == section:
                found[piece.key].setdefault(piece.offsets, (index.rank, piece))
    return {key: list(boxes.values()) for key, boxes in found.items()}


def model_pieces(saved: SavedState) -> TensorPieces:
    """Return the pieces of the model's tensors, or of all arrays where no section is the model.

    JAX's Checkpointer saves one pytree, in which nothing says what the model is.
    """
    return tensor_pieces(saved) or tensor_pieces(saved, "state")


def reject_missing_weights(saved: SavedState) -> None:
    """Raise `ConfigError` if the snapshot has no weights that could be exported by their names."""
    sections = {key[0] for index in saved.indices for key in index.value_keys}
    sections |= {piece.key[0] for index in saved.indices for piece in index.pieces}
    if not sections & {"model", "state"}:
        raise ConfigError(
            f"The checkpoint {saved.name} has no weights of a model: those of ZeRO 3 are parts of "
            "the optimizer, without names.",
            do="Report a checkpoint for the export by spotfit.deepspeed.report_checkpoint, and "
            "convert its files by DeepSpeed's zero_to_fp32.",
        )


def export_safetensors(saved: SavedState, path: Path) -> None:
    """Write the tensors of `model_pieces` to one safetensors file, atomically.

    Blocks while the chunks of all ranks are read. The names are those of the model's
    `state_dict()`, or of the pytree's leaves; values that are not tensors, optimizers and other
    state are left out. Raises `IntegrityError` if bytes are missing or corrupt, `ConfigError` for a
    dtype that safetensors does not support, and `OSError` if the disk is full; `path` then stays as
    it was.
    """
    tensors = model_pieces(saved)
    header, offsets = _plan_layout(tensors, step=saved.indices[0].step)
    data_start = 8 + len(header)
    size_bytes = data_start + offsets[-1]
    # "+": a file can be mapped for writing only if it is open for reading as well.
    with atomic_write(path) as draft, draft.open("x+b") as file:
        # Reserve the space before the file is mapped: a mapped page that finds the disk full raises
        # SIGBUS, which kills the process.
        try:
            reserve_space(file.fileno(), size_bytes)
        except OSError as error:
            if error.errno not in _FALLOCATE_UNSUPPORTED:
                raise
            os.truncate(file.fileno(), size_bytes)
        # The format begins with the length of the header, as a little-endian u64.
        file.write(len(header).to_bytes(8, "little") + header)
        file.flush()  # the map below must not be overwritten by the file object's buffer
        with mmap.mmap(file.fileno(), 0) as memory, memoryview(memory) as body:
            saved.read(
                [
                    ReadRequest(
                        rank,
                        piece,
                        whole_piece_sink(
                            piece, partial(_copy_piece, body, data_start + offset, piece)
                        ),
                    )
                    for pieces, offset in zip(tensors.values(), offsets, strict=False)
                    for rank, piece in pieces
                ]
            )


def _plan_layout(tensors: TensorPieces, *, step: int) -> tuple[bytes, list[int]]:
    """Return the padded header of the file, and each tensor's offset in the data section.

    The last offset is the end of the data.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt", "step": str(step)}}
    offsets = [0]
    for key, pieces in tensors.items():
        # Names without "model." are those of the module's own state_dict().
        name, first = dotted_name(key[1:]), pieces[0][1]
        if first.dtype not in _SAFETENSORS_DTYPES:
            raise ConfigError(
                f"The tensor {name} has dtype {first.dtype}, which safetensors lacks.",
                do="Export to a file that ends with .pt.",
            )
        # Dtype and full shape are equal in all pieces of a tensor.
        offsets.append(offsets[-1] + math.prod(first.shape) * _itemsize_bytes(first))
        header[name] = {
            "dtype": _SAFETENSORS_DTYPES[first.dtype],
            "shape": first.shape,
            "data_offsets": offsets[-2:],
        }
    # Padded with spaces, as the format allows: JSON parsers skip them.
    body = msgspec.json.encode(header)
    return body + b" " * (-len(body) % _ALIGNMENT), offsets


def _copy_piece(body: memoryview, start: int, piece: TensorPiece, data_view: memoryview) -> None:
    """Copy the bytes of a piece into the tensor that starts at `start`, one contiguous run each."""
    # The dimensions from `inner` on form one run that is contiguous in piece and tensor: the first
    # of them may be cut, because all dimensions after it are complete.
    inner = len(piece.shape)
    while inner > 0 and piece.sizes[inner:] == piece.shape[inner:]:
        inner -= 1
    item_bytes = _itemsize_bytes(piece)
    run_bytes = math.prod(piece.sizes[inner:]) * item_bytes
    strides = [math.prod(piece.shape[n + 1 :]) for n in range(len(piece.shape))]
    first = sum(offset * stride for offset, stride in zip(piece.offsets, strides, strict=True))
    for n, indices in enumerate(itertools.product(*map(range, piece.sizes[:inner]))):
        item = first + sum(i * stride for i, stride in zip(indices, strides, strict=False))
        target = start + item * item_bytes
        body[target : target + run_bytes] = data_view[n * run_bytes : (n + 1) * run_bytes]


def _itemsize_bytes(piece: TensorPiece) -> int:
    items = math.prod(piece.sizes)
    return piece.size_bytes // items if items else 1
