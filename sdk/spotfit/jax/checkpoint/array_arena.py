"""ArrayArena: the shared memory of a rank's snapshot, with copies of JAX's and numpy's arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from spotfit.checkpoint.format import TensorPiece
from spotfit.checkpoint.shm_arena import ShmArena
from spotfit.checkpoint.shm_segment import ShmSegment
from spotfit.jax.checkpoint.array_save_plan import ArrayBlock, start_copies
from spotfit.jax.checkpoint.array_values import dtype_of


class ArrayArena(ShmArena):
    """The segment of a rank, into which blocks of arrays are copied."""

    _views: Sequence[np.ndarray[Any, Any]] = ()

    def _map_pieces(self, segment: ShmSegment, pieces: Sequence[TensorPiece]) -> None:
        payload = segment.payload
        self._views = [piece_as_array(piece, payload[piece.start : piece.end]) for piece in pieces]

    def _copy(self, tensors: Sequence[ArrayBlock]) -> None:
        start_copies(tensors)
        for view, block in zip(self._views, tensors, strict=True):
            np.copyto(view, block.to_numpy())

    def _unmap_pieces(self) -> None:
        self._views = ()


def piece_as_array(piece: TensorPiece, body: memoryview) -> np.ndarray[Any, Any]:
    """Return all bytes of a piece as an array that shares their memory."""
    if not piece.size_bytes:
        return np.empty(piece.sizes, dtype_of(piece.dtype))
    return np.frombuffer(body, np.uint8).view(dtype_of(piece.dtype)).reshape(piece.sizes)
