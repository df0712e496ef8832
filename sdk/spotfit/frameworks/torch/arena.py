"""Memory that this rank shares with its agent, into which its share of the state is copied."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from spotfit.checkpoint.segment import Segment
from spotfit.checkpoint.snapshot import Index, Piece
from spotfit.frameworks.torch.state import gpu_in_use
from spotfit.host import log

PathFor = Callable[[Path], Path]
"""Names a new segment in a folder."""


_LEAST_INDEX_BYTES = 2**18
_PORTABLE = 1
"""Pinned for every GPU, whichever is the thread's."""
_PIECE_BYTES = 1024
"""An index takes no more for each piece, the chunk that holds it included."""


class Arena:
    """One segment, made anew where what is to be saved has another form, and used again else."""

    def __init__(self, folders: Sequence[Path], path_for: PathFor) -> None:
        self._folders = folders
        self._path_for = path_for
        self._segment: Segment | None = None
        self._pieces: tuple[Piece, ...] = ()
        self._views: list[torch.Tensor] = []
        self._pinned: Any = None

    @property
    def path(self) -> Path:
        """Where the snapshot lies."""
        assert self._segment is not None, "nothing was ever put into it"
        return self._segment.path

    @property
    def size_bytes(self) -> int:
        """How much a snapshot takes."""
        return max((piece.end for piece in self._pieces), default=0)

    def fit(self, pieces: tuple[Piece, ...], *, plain_bytes: int = 0) -> None:
        """Have room for exactly these pieces, and so many bytes of values in their index.

        Raises `OSError` where no memory or disk has any.
        """
        index_bytes = _LEAST_INDEX_BYTES + _PIECE_BYTES * len(pieces) + 2 * plain_bytes
        if self._segment is not None and pieces == self._pieces:
            if self._segment.index_bytes >= index_bytes:
                return
            index_bytes *= 2
        self.close()
        capacity_bytes = max((piece.end for piece in pieces), default=0)
        self._segment = self._created(capacity_bytes, index_bytes)
        self._pinned = _pinned(self._segment)
        self._views = _views(self._segment, pieces)
        self._pieces = pieces

    def take(self, tensors: Sequence[torch.Tensor]) -> None:
        """Copy them into their places; when it returns they may change."""
        assert self._segment is not None, "it was not fitted"
        self._segment.begin()
        if not tensors:
            return
        torch._foreach_copy_(self._views, list(tensors), non_blocking=self._pinned is not None)
        if self._pinned is not None:
            torch.cuda.current_stream().synchronize()

    def finish(self, index: Index) -> None:
        """All is in its place. Raises `OSError` where the index has grown too big for it."""
        assert self._segment is not None, "it was not fitted"
        self._segment.finish(index)

    def close(self) -> None:
        """Let the memory go, and its name."""
        if self._segment is None:
            return
        self._views = []
        if self._pinned is not None:
            _driver().cudaHostUnregister(self._pinned)
        self._segment.path.unlink(missing_ok=True)
        self._segment.close()
        self._segment = None

    def _created(self, capacity_bytes: int, index_bytes: int) -> Segment:
        *best, last = self._folders
        for folder in best:
            try:
                return self._created_in(folder, capacity_bytes, index_bytes)
            except OSError as full:
                log.warning(
                    "checkpoint.no_shared_memory",
                    folder=str(folder),
                    wanted_bytes=capacity_bytes,
                    why=str(full),
                    instead=str(last),
                )
        return self._created_in(last, capacity_bytes, index_bytes)

    def _created_in(self, folder: Path, capacity_bytes: int, index_bytes: int) -> Segment:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return Segment.create(self._path_for(folder), capacity_bytes, index_bytes)


def _views(segment: Segment, pieces: Sequence[Piece]) -> list[torch.Tensor]:
    """A tensor for each piece, which lies in its place."""
    if not segment.capacity_bytes:  # of no bytes torch makes no tensor
        return [torch.empty(piece.sizes, dtype=getattr(torch, piece.dtype)) for piece in pieces]
    whole = torch.frombuffer(segment.bytes, dtype=torch.uint8)
    return [_view(whole, piece) for piece in pieces]


def _view(whole: torch.Tensor, piece: Piece) -> torch.Tensor:
    dtype = getattr(torch, piece.dtype)
    return whole[piece.start : piece.end].view(dtype).view(piece.sizes)


def _pinned(segment: Segment) -> int | None:
    """Where it begins, once a GPU may copy into it by itself; None without a GPU or any bytes."""
    if not segment.capacity_bytes or not gpu_in_use():
        return None
    address = torch.frombuffer(segment.bytes, dtype=torch.uint8).data_ptr()
    refused = _driver().cudaHostRegister(address, segment.capacity_bytes, _PORTABLE)
    if int(refused) != 0:
        log.warning("checkpoint.not_pinned", segment=str(segment.path), code=int(refused))
        return None
    return address


def _driver() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]
