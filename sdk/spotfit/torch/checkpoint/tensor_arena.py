"""TensorArena: the shared memory of a rank's snapshot, with copies of torch's tensors.

On a machine with a GPU the memory is pinned, so that the GPU copies into it directly.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from spotfit.checkpoint.format import TensorPiece
from spotfit.checkpoint.shm_arena import SegmentPathFactory, ShmArena
from spotfit.checkpoint.shm_segment import ShmSegment
from spotfit.host import log
from spotfit.torch.checkpoint.load_plan import piece_as_tensor
from spotfit.torch.checkpoint.training_state import gpu_in_use

# Pinned for all GPUs: the thread that allocates may have another current device.
_CUDA_HOST_REGISTER_PORTABLE = 1


class TensorArena(ShmArena):
    """The segment of a rank, into which torch's tensors are copied."""

    def __init__(self, directories: Sequence[Path], make_path: SegmentPathFactory) -> None:
        """Allocate nothing yet; see `ShmArena`."""
        super().__init__(directories, make_path)
        self._views: list[torch.Tensor] = []
        self._unpin: weakref.finalize[[int], TensorArena] | None = None
        """Set while the payload is pinned."""

    def _map_pieces(self, segment: ShmSegment, pieces: Sequence[TensorPiece]) -> None:
        if (address := _pin_memory(segment)) is not None:
            # Also for an arena that is collected without `close`: memory that is unmapped while it
            # is registered cannot be registered again at this address.
            self._unpin = weakref.finalize(self, _unpin_memory, address)
            self._unpin.atexit = False  # the driver unpins it when the process ends
        payload = segment.payload
        self._views = [piece_as_tensor(one, payload[one.start : one.end]) for one in pieces]

    def _copy(self, tensors: Sequence[torch.Tensor]) -> None:
        is_pinned = self._unpin is not None
        try:
            # One call for all tensors saves Python's overhead per tensor.
            torch._foreach_copy_(self._views, list(tensors), non_blocking=is_pinned)
        finally:
            # The training changes the tensors as soon as this function returns. Each copy runs on
            # the current stream of its tensor's GPU, which may not be the current GPU.
            for device in {one.device for one in tensors if one.is_cuda} if is_pinned else ():
                torch.cuda.current_stream(device).synchronize()

    def _unmap_pieces(self) -> None:
        self._views = []  # they hold references to the mapped memory
        # Before the memory is unmapped: CUDA releases pages by their address.
        if self._unpin is not None:
            self._unpin()
            self._unpin = None


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
