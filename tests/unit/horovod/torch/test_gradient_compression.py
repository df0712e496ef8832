"""Compression of tensors for the transfer."""

import torch

from spotfit.horovod.torch.gradient_compression import Compression


def test_without_compression_the_tensor_is_the_same() -> None:
    tensor = torch.ones(2)
    compressed, context = Compression.none.compress(tensor)
    assert compressed is tensor
    assert Compression.none.decompress(compressed, context) is tensor


def test_floating_point_tensors_have_16_bits_in_the_transfer() -> None:
    tensor = torch.tensor([1.5, -2.0], dtype=torch.float64)
    compressed, context = Compression.fp16.compress(tensor)
    assert compressed.dtype == torch.float16
    assert Compression.fp16.decompress(compressed, context).equal(tensor)


def test_integers_are_not_compressed() -> None:
    tensor = torch.tensor([2**40])
    compressed, context = Compression.fp16.compress(tensor)
    assert Compression.fp16.decompress(compressed, context).equal(tensor)
