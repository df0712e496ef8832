"""Training with TensorFlow: `from spotfit.tensorflow import TensorflowTrainer`.

Importing this package must not import tensorflow; each name loads its module on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from spotfit.core.lazy_names import lazy_names

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

__getattr__, __dir__ = lazy_names(__name__, _MODULES)
