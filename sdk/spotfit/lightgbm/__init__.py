"""Training with LightGBM: `from spotfit.lightgbm import LightGBMTrainer, RayTrainReportCallback`.

Importing this package must not import lightgbm; each name loads its module on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from spotfit.frameworks.lightgbm.lightgbm_config import LightGBMConfig as LightGBMConfig
    from spotfit.frameworks.lightgbm.lightgbm_config import get_network_params as get_network_params
    from spotfit.lightgbm.lightgbm_callback import RayTrainReportCallback as RayTrainReportCallback
    from spotfit.lightgbm.lightgbm_checkpoint import LightGBMCheckpoint as LightGBMCheckpoint
    from spotfit.lightgbm.lightgbm_trainer import LightGBMTrainer as LightGBMTrainer
    from spotfit.lightgbm.pandas_types import (
        normalize_pandas_for_lightgbm as normalize_pandas_for_lightgbm,
    )
    from spotfit.lightgbm.segmented_lightgbm import train as train

_MODULES = {
    "RayTrainReportCallback": "spotfit.lightgbm.lightgbm_callback",
    "LightGBMCheckpoint": "spotfit.lightgbm.lightgbm_checkpoint",
    "LightGBMConfig": "spotfit.frameworks.lightgbm.lightgbm_config",
    "LightGBMTrainer": "spotfit.lightgbm.lightgbm_trainer",
    "get_network_params": "spotfit.frameworks.lightgbm.lightgbm_config",
    "normalize_pandas_for_lightgbm": "spotfit.lightgbm.pandas_types",
    "train": "spotfit.lightgbm.segmented_lightgbm",
}

__all__ = [
    "LightGBMCheckpoint",
    "LightGBMConfig",
    "LightGBMTrainer",
    "RayTrainReportCallback",
    "get_network_params",
    "normalize_pandas_for_lightgbm",
    "train",
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
