"""Recognition of Hugging Face Accelerate's wrappers, without importing Accelerate."""

from __future__ import annotations

import sys
from typing import Any

_MODULE_OF_CLASS = {
    "AcceleratedOptimizer": "accelerate.optimizer",
    "BatchSamplerShard": "accelerate.data_loader",
    "DataLoaderDispatcher": "accelerate.data_loader",
    "DataLoaderShard": "accelerate.data_loader",
    "SeedableRandomSampler": "accelerate.data_loader",
}


def isinstance_of_accelerate(value: Any, name: str) -> bool:
    """Return whether `value` is an instance of Accelerate's class with that name.

    False if Accelerate was not imported: then no such object exists.
    """
    kind = getattr(sys.modules.get(_MODULE_OF_CLASS[name]), name, None)
    # By `type`: the `__class__` of Accelerate's loaders is that of the loader in them.
    return kind is not None and issubclass(type(value), kind)


def unwrap_optimizer(optimizer: Any) -> Any:
    """Return torch's optimizer from one that `Accelerator.prepare` returned; else `optimizer`.

    The wrapper has not called the constructor of torch's Optimizer: it lacks attributes that
    torch's functions for state dicts need.
    """
    while isinstance_of_accelerate(optimizer, "AcceleratedOptimizer"):
        optimizer = optimizer.optimizer
    return optimizer
