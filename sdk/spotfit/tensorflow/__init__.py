"""Training with TensorFlow: `from spotfit.tensorflow import TensorflowTrainer`.

Importing this package must not import tensorflow; each name loads its module on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from spotfit.frameworks.tensorflow.tensorflow_config import TensorflowConfig as TensorflowConfig
    from spotfit.tensorflow.dataset_shards import prepare_dataset_shard as prepare_dataset_shard
    from spotfit.tensorflow.tensorflow_checkpoint import (
        TensorflowCheckpoint as TensorflowCheckpoint,
    )
    from spotfit.tensorflow.tensorflow_trainer import TensorflowTrainer as TensorflowTrainer

_MODULES = {
    "TensorflowCheckpoint": "spotfit.tensorflow.tensorflow_checkpoint",
    "TensorflowConfig": "spotfit.frameworks.tensorflow.tensorflow_config",
    "TensorflowTrainer": "spotfit.tensorflow.tensorflow_trainer",
    "prepare_dataset_shard": "spotfit.tensorflow.dataset_shards",
}

__all__ = [
    "TensorflowCheckpoint",
    "TensorflowConfig",
    "TensorflowTrainer",
    "prepare_dataset_shard",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_MODULES[name]), name)
    globals()[name] = value  # later accesses do not call __getattr__
    return value


def __dir__() -> list[str]:
    # Without the imports of this module, which would be offered as completions.
    special = (name for name in globals() if name.startswith("__"))
    return sorted({*special, *__all__})
