"""Training with XGBoost: `from spotfit.xgboost import XGBoostTrainer, RayTrainReportCallback`.

Importing this package must not import xgboost; each name loads its module on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from spotfit.core.lazy_names import lazy_names

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

__getattr__, __dir__ = lazy_names(__name__, _MODULES)
