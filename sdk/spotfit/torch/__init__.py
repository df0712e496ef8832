"""Training with PyTorch: `from spotfit.torch import TorchTrainer, Checkpointer, prepare_model`.

Importing this package must not import torch; each name loads its module on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from spotfit.core.lazy_names import lazy_names

if TYPE_CHECKING:
    from spotfit.client.trainer import TorchTrainer as TorchTrainer
    from spotfit.frameworks.torch.torch_checkpoint import TorchCheckpoint as TorchCheckpoint
    from spotfit.frameworks.torch.torch_config import TorchConfig as TorchConfig
    from spotfit.frameworks.torch.torchft_config import TorchftConfig as TorchftConfig
    from spotfit.torch.checkpoint.checkpointer import Checkpointer as Checkpointer
    from spotfit.torch.checkpoint.checkpointer import export_checkpoint as export_checkpoint
    from spotfit.torch.loop import accelerate as accelerate
    from spotfit.torch.loop import backward as backward
    from spotfit.torch.loop import enable_reproducibility as enable_reproducibility
    from spotfit.torch.loop import get_device as get_device
    from spotfit.torch.loop import get_devices as get_devices
    from spotfit.torch.loop import init_module as init_module
    from spotfit.torch.loop import prepare_data_loader as prepare_data_loader
    from spotfit.torch.loop import prepare_model as prepare_model
    from spotfit.torch.loop import prepare_optimizer as prepare_optimizer
    from spotfit.torch.model_export import export_model as export_model

_MODULES = {
    "Checkpointer": "spotfit.torch.checkpoint.checkpointer",
    "TorchCheckpoint": "spotfit.frameworks.torch.torch_checkpoint",
    "TorchConfig": "spotfit.frameworks.torch.torch_config",
    "TorchftConfig": "spotfit.frameworks.torch.torchft_config",
    "TorchTrainer": "spotfit.client.trainer",
    "accelerate": "spotfit.torch.loop",
    "backward": "spotfit.torch.loop",
    "enable_reproducibility": "spotfit.torch.loop",
    "export_checkpoint": "spotfit.torch.checkpoint.checkpointer",
    "export_model": "spotfit.torch.model_export",
    "get_device": "spotfit.torch.loop",
    "get_devices": "spotfit.torch.loop",
    "init_module": "spotfit.torch.loop",
    "prepare_data_loader": "spotfit.torch.loop",
    "prepare_model": "spotfit.torch.loop",
    "prepare_optimizer": "spotfit.torch.loop",
}

__all__ = [
    "Checkpointer",
    "TorchCheckpoint",
    "TorchConfig",
    "TorchTrainer",
    "TorchftConfig",
    "accelerate",
    "backward",
    "enable_reproducibility",
    "export_checkpoint",
    "export_model",
    "get_device",
    "get_devices",
    "init_module",
    "prepare_data_loader",
    "prepare_model",
    "prepare_optimizer",
]

__getattr__, __dir__ = lazy_names(__name__, _MODULES)
