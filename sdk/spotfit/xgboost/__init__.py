"""Training with XGBoost: `from spotfit.xgboost import XGBoostTrainer, RayTrainReportCallback`.

Importing this package must not import xgboost; each name loads its module on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from spotfit.frameworks.xgboost.xgboost_config import XGBoostConfig as XGBoostConfig
    from spotfit.xgboost.segmented_xgboost import train as train
    from spotfit.xgboost.xgboost_callback import RayTrainReportCallback as RayTrainReportCallback
    from spotfit.xgboost.xgboost_checkpoint import XGBoostCheckpoint as XGBoostCheckpoint
    from spotfit.xgboost.xgboost_trainer import XGBoostTrainer as XGBoostTrainer

_MODULES = {
    "RayTrainReportCallback": "spotfit.xgboost.xgboost_callback",
    "XGBoostCheckpoint": "spotfit.xgboost.xgboost_checkpoint",
    "XGBoostConfig": "spotfit.frameworks.xgboost.xgboost_config",
    "XGBoostTrainer": "spotfit.xgboost.xgboost_trainer",
    "train": "spotfit.xgboost.segmented_xgboost",
}

__all__ = [
    "RayTrainReportCallback",
    "XGBoostCheckpoint",
    "XGBoostConfig",
    "XGBoostTrainer",
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
