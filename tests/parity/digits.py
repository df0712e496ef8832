"""Image files for torchvision's FashionMNIST, so that examples run offline.

The images are scikit-learn's digits, scaled to the size of FashionMNIST. An existing download is
kept.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

SIDE = 28
TRAINING, TESTING = 1024, 256
_IDX_UINT8 = 8  # the data type of an idx file


@contextmanager
def fashion_mnist_at(root: Path) -> Iterator[None]:
    """Create the four files below the root; remove created files afterwards."""
    created: list[Path] = []
    raw = root / "FashionMNIST" / "raw"
    folders = [one for one in (raw, *raw.parents) if not one.exists()]
    raw.mkdir(parents=True, exist_ok=True)
    for name, pixels in _files().items():
        if not (raw / name).exists():
            (raw / name).write_bytes(_idx(pixels))
            created.append(raw / name)
    try:
        yield
    finally:
        for path in created:
            path.unlink()
        for folder in folders:
            if not any(folder.iterdir()):
                folder.rmdir()


def _files() -> dict[str, Any]:
    images, labels = _digits()
    end = TRAINING + TESTING
    return {
        "train-images-idx3-ubyte": images[:TRAINING],
        "train-labels-idx1-ubyte": labels[:TRAINING],
        "t10k-images-idx3-ubyte": images[TRAINING:end],
        "t10k-labels-idx1-ubyte": labels[TRAINING:end],
    }


def _digits() -> tuple[Any, Any]:
    from sklearn.datasets import load_digits

    digits = load_digits()
    larger = np.kron(digits.images * (255 / 16), np.ones((1, 3, 3)))
    edge = (SIDE - larger.shape[1]) // 2
    framed = np.pad(larger, ((0, 0), (edge, edge), (edge, edge)))
    return framed.astype(np.uint8), digits.target.astype(np.uint8)


def _idx(values: Any) -> bytes:
    shape = values.shape
    head = struct.pack(f">HBB{len(shape)}I", 0, _IDX_UINT8, len(shape), *shape)
    return head + bytes(values.tobytes())
