"""ShmArena: shared memory into which a rank copies its share of the state for its agent.

| state | event | next |
|---|---|---|
| closed | `reserve` creates a segment | reserved |
| reserved, published | `reserve` with the same pieces and enough space | unchanged |
| reserved, published | `reserve` with other pieces creates another segment | reserved |
| reserved, published | `copy` invalidates the index and copies | reserved |
| reserved | `publish` writes the index | published |
| any | `close` | closed |
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from spotfit.checkpoint.format import SnapshotIndex, TensorPiece
from spotfit.checkpoint.shm_segment import ShmSegment
from spotfit.host import log

SegmentPathFactory = Callable[[Path], Path]
"""Returns the path of a new segment in a directory."""

# Space for the index. It is generous, because a segment with too little space has to be replaced
# during a save.
_MIN_INDEX_BYTES = 2**18
_INDEX_BYTES_PER_PIECE = 1024
"""Upper bound of what one piece and its chunk take in an index."""


class ShmArena(ABC):
    """One shared-memory segment of a rank, reused while the layout of the pieces stays the same.

    A Checkpointer has one per snapshot slot. One thread at a time may call it. Subclasses copy the
    tensors of a framework.
    """

    def __init__(self, directories: Sequence[Path], make_path: SegmentPathFactory) -> None:
        """Allocate nothing yet. `directories` are tried in order; the last is the fallback on disk.

        `make_path` returns a new path in one of them for each segment.
        """
        self._directories = directories
        self._make_path = make_path
        self._segment: ShmSegment | None = None
        self._pieces: tuple[TensorPiece, ...] = ()

    @property
    def path(self) -> Path:
        """The file of the current segment. Call `reserve` first; a later one may change it."""
        assert self._segment is not None, "reserve() was not called"
        return self._segment.path

    def reserve(self, pieces: tuple[TensorPiece, ...], *, values_bytes: int = 0) -> None:
        """Provide space for these pieces and for `values_bytes` of values in their index.

        Keeps the segment if it has enough space for the same pieces, else deletes it and creates
        another. May block for seconds, while memory is allocated and pinned. Raises `OSError` if
        neither shared memory nor the disk has enough space.
        """
        # msgspec encodes bytes as base64, a third larger; twice the size leaves room to grow.
        index_bytes = _MIN_INDEX_BYTES + _INDEX_BYTES_PER_PIECE * len(pieces) + 2 * values_bytes
        if self._segment is not None and pieces == self._pieces:
            if self._segment.index_bytes >= index_bytes:
                return
            index_bytes *= 2  # values that grow in every save must not replace it every time
        self.close()
        capacity_bytes = max((piece.end for piece in pieces), default=0)
        self._segment = self._create_segment(capacity_bytes, index_bytes)
        self._pieces = pieces
        self._map_pieces(self._segment, pieces)

    def copy(self, tensors: Sequence[Any]) -> None:
        """Copy one tensor per reserved piece; the tensors may change when it returns.

        In the order of the pieces and from any device; each tensor has the shape and dtype of its
        piece. The earlier snapshot in this memory is lost, and the new one is invalid until
        `publish`.
        """
        assert self._segment is not None, "reserve() was not called"
        # A reader must never see an old index over new bytes.
        self._segment.invalidate()
        if tensors:
            self._copy(tensors)

    def publish(self, index: SnapshotIndex) -> None:
        """Write the index, which makes the snapshot valid for readers in other processes.

        Call it after `copy`. Raises `OSError` if the index does not fit; the snapshot then stays
        invalid.
        """
        assert self._segment is not None, "reserve() was not called"
        self._segment.publish(index)

    def close(self) -> None:
        """Release the memory and remove the file. Idempotent.

        `reserve` may be called again. Processes that have mapped the segment keep their memory.
        """
        if self._segment is None:
            return
        self._unmap_pieces()
        self._segment.close()
        self._segment.path.unlink(missing_ok=True)  # Windows refuses it while the file is mapped
        self._segment = None

    @abstractmethod
    def _map_pieces(self, segment: ShmSegment, pieces: Sequence[TensorPiece]) -> None:
        """Prepare a new segment, for example views of its payload for the copies."""

    @abstractmethod
    def _copy(self, tensors: Sequence[Any]) -> None:
        """Copy the tensors to the pieces, and wait until they are copied."""

    @abstractmethod
    def _unmap_pieces(self) -> None:
        """Release all views of the payload, which keep its memory mapped."""

    def _create_segment(self, capacity_bytes: int, index_bytes: int) -> ShmSegment:
        *preferred, fallback = self._directories
        for directory in preferred:
            try:
                return self._create_segment_in(directory, capacity_bytes, index_bytes)
            except OSError as error:
                log.warning(
                    "checkpoint.shared_memory_full",
                    folder=str(directory),
                    wanted_bytes=capacity_bytes,
                    reason=str(error),
                    fallback=str(fallback),
                )
        return self._create_segment_in(fallback, capacity_bytes, index_bytes)

    def _create_segment_in(
        self, directory: Path, capacity_bytes: int, index_bytes: int
    ) -> ShmSegment:
        # Snapshots contain the model: other users of the machine must not read them.
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        return ShmSegment.create(self._make_path(directory), capacity_bytes, index_bytes)
