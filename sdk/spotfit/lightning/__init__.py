"""Training with PyTorch Lightning: `from spotfit.lightning import RayDDPStrategy, prepare_trainer`.

The names of `ray.train.lightning`, for both packages `lightning.pytorch` and `pytorch_lightning`.
Importing this package imports neither; a class belongs to the one that the process has imported.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from spotfit.core.unsupported_names import missing_attribute_error

if TYPE_CHECKING:
    from spotfit.lightning.lightning_trainer import LightningTrainer as LightningTrainer
    from spotfit.lightning.strategies import prepare_trainer as prepare_trainer

    # Their base classes depend on the package of Lightning in use.
    CheckpointerCallback: Any
    RayDDPStrategy: Any
    RayDeepSpeedStrategy: Any
    RayFSDPStrategy: Any
    RayLightningEnvironment: Any
    RayTrainReportCallback: Any

_MODULES = {
    "LightningTrainer": "spotfit.lightning.lightning_trainer",
    "prepare_trainer": "spotfit.lightning.strategies",
}

__all__ = [
    "CheckpointerCallback",
    "LightningTrainer",
    "RayDDPStrategy",
    "RayDeepSpeedStrategy",
    "RayFSDPStrategy",
    "RayLightningEnvironment",
    "RayTrainReportCallback",
    "prepare_trainer",
]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(importlib.import_module(_MODULES[name]), name)
    if name not in __all__:
        raise missing_attribute_error(__name__, name)
    # Not stored: the script may import another package of Lightning later.
    from spotfit.lightning.lightning_classes import class_for
    from spotfit.lightning.lightning_package import imported_package

    return class_for(imported_package(), name)


def __dir__() -> list[str]:
    # Without the imports of this module, which would be offered as completions.
    special = (name for name in globals() if name.startswith("__"))
    return sorted({*special, *__all__})
