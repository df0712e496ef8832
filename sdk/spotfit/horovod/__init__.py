"""Horovod's interface: `HorovodTrainer`, and `import spotfit.horovod.torch as hvd`.

Importing this package must not import torch; each name loads its module on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from spotfit.core.lazy_names import lazy_names

if TYPE_CHECKING:
    from spotfit.frameworks.torch.horovod_config import HorovodConfig as HorovodConfig
    from spotfit.horovod.horovod_trainer import HorovodTrainer as HorovodTrainer

_MODULES = {
    "HorovodConfig": "spotfit.frameworks.torch.horovod_config",
    "HorovodTrainer": "spotfit.horovod.horovod_trainer",
}

__all__ = ["HorovodConfig", "HorovodTrainer"]

__getattr__, __dir__ = lazy_names(__name__, _MODULES)
