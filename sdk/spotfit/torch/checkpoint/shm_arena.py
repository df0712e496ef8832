"""ShmArena: shared memory into which a rank copies its share of the state for its agent.

| state | event | next |
|---|---|---|
| closed | `reserve` creates a segment | reserved |
| reserved, published | `reserve` with the same pieces and enough space | unchanged |
| reserved, published | `reserve` with other pieces creates another segment | reserved |
| reserved, published | `copy_tensors` invalidates the index and copies | reserved |
| reserved | `publish` writes the index | published |
| any | `close` | closed |
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from spotfit.checkpoint.format import SnapshotIndex, TensorPiece
from spotfit.checkpoint.shm_segment import ShmSegment
from spotfit.host import log
from spotfit.torch.checkpoint.load_plan import piece_as_tensor
from spotfit.torch.checkpoint.training_state import gpu_in_use

SegmentPathFactory = Callable[[Path], Path]
"""Returns the path of a new segment in a directory."""

# Space for the index. It is generous, because a segment with too little space has to be replaced
# during a save.
_MIN_INDEX_BYTES = 2**18
_INDEX_BYTES_PER_PIECE = 1024
"""Upper bound of what one piece and its chunk take in an index."""
# Pinned for all GPUs: the thread that allocates may have another current device.
_CUDA_HOST_REGISTER_PORTABLE = 1


class ShmArena:
    """One shared-memory segment of a rank, reused while the layout of the pieces stays the same.

    A Checkpointer has one per snapshot slot. One thread at a time may call it.
    """

    def __init__(self, directories: Sequence[Path], make_path: SegmentPathFactory) -> None:
        """Allocate nothing yet. `directories` are tried in order; the last is the fallback on disk.

        `make_path` returns a new path in one of them for each segment.
        """
        self._directories = directories
        self._make_path = make_path
        self._segment: ShmSegment | None = None
        self._pieces: tuple[TensorPiece, ...] = ()
        self._views: list[torch.Tensor] = []
        self._unpin: weakref.finalize[[int], ShmArena] | None = None
        """Set while the payload is pinned."""

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
        if (address := _pin_memory(self._segment)) is not None:
            # Also for an arena that is collected without `close`: memory that is unmapped while it
            # is registered cannot be registered again at this address.
            self._unpin = weakref.finalize(self, _unpin_memory, address)
            self._unpin.atexit = False  # the driver unpins it when the process ends
        payload = self._segment.payload
        self._views = [piece_as_tensor(one, payload[one.start : one.end]) for one in pieces]
        self._pieces = pieces

    def copy_tensors(self, tensors: Sequence[torch.Tensor]) -> None:
        """Copy one tensor per reserved piece; the tensors may change when it returns.

        In the order of the pieces and from any device; each tensor has the shape and dtype of its
        piece. The earlier snapshot in this memory is lost, and the new one is invalid until
        `publish`.
        """
        assert self._segment is not None, "reserve() was not called"
        # A reader must never see an old index over new bytes.
        self._segment.invalidate()
        if not tensors:
            return
        is_pinned = self._unpin is not None
        try:
            # One call for all tensors saves Python's overhead per tensor.
            torch._foreach_copy_(self._views, list(tensors), non_blocking=is_pinned)
        finally:
            # The training changes the tensors as soon as this function returns. Each copy runs on
            # the current stream of its tensor's GPU, which may not be the current GPU.
            for device in {one.device for one in tensors if one.is_cuda} if is_pinned else ():
                torch.cuda.current_stream(device).synchronize()

    def publish(self, index: SnapshotIndex) -> None:
        """Write the index, which makes the snapshot valid for readers in other processes.

        Call it after `copy_tensors`. Raises `OSError` if the index does not fit; the snapshot then
        stays invalid.
        """
        assert self._segment is not None, "reserve() was not called"
        self._segment.publish(index)

    def close(self) -> None:
        """Release the memory and remove the file. Idempotent.

        `reserve` may be called again. Processes that have mapped the segment keep their memory.
        """
        if self._segment is None:
            return
        self._views = []  # they hold references to the mapped memory
        # Before the memory is unmapped: CUDA releases pages by their address.
        if self._unpin is not None:
            self._unpin()
            self._unpin = None
        self._segment.close()
        self._segment.path.unlink(missing_ok=True)  # Windows refuses it while the file is mapped
        self._segment = None

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


def _pin_memory(segment: ShmSegment) -> int | None:
    """Pin the payload so that a GPU can copy into it directly; return its address.

    None without a GPU, for an empty payload, or if the driver refuses.
    """
    if not segment.capacity_bytes or not gpu_in_use():
        return None
    address = torch.frombuffer(segment.payload, dtype=torch.uint8).data_ptr()
    status = _cudart().cudaHostRegister(
        address, segment.capacity_bytes, _CUDA_HOST_REGISTER_PORTABLE
    )
    if int(status) != 0:
        # Copies still work, but not asynchronously: they take longer.
        log.warning("checkpoint.pinning_failed", segment=str(segment.path), code=int(status))
        _clear_last_error()
        return None
    return address


def _unpin_memory(address: int) -> None:
    # A forked child, such as a worker of a DataLoader, has inherited the arena but not CUDA.
    if gpu_in_use() and int(_cudart().cudaHostUnregister(address)) != 0:
        _clear_last_error()


def _clear_last_error() -> None:
    """Keep a failed call of the CUDA runtime from being reported by the training's next kernel.

    The runtime keeps the error of a thread until it is read. torch reads it after each launch and
    raises it there, and has no function that only reads it (c10/cuda/CUDAException.h).
    """
    with suppress(RuntimeError):
        torch.ones(1, device="cuda")


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]
