"""Compression of tensors for the transfer between ranks."""

from __future__ import annotations

from typing import Any

from torch import Tensor, dtype, float16


class Compressor:
    """Transforms tensors before and after their reduction; subclasses may be passed to Horovod."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        """Return the tensor to transfer, and what `decompress` needs: here no change."""
        return tensor, None

    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:
        """Return the reduced tensor in its original form; `ctx` is what `compress` has returned."""
        return tensor


class Float16Compressor(Compressor):
    """Transfers floating-point tensors with 16 bits, in which they are also added."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, dtype]:
        """Return the tensor as float16, and its dtype. Other than floating-point is kept."""
        is_floating = tensor.dtype.is_floating_point
        return (tensor.to(float16) if is_floating else tensor), tensor.dtype

    @staticmethod
    def decompress(tensor: Tensor, ctx: dtype) -> Tensor:
        """Return the tensor with its original dtype, `ctx`."""
        return tensor.to(ctx)


class Compression:
    """The compressors for the argument `compression`."""

    none = Compressor
    fp16 = Float16Compressor
