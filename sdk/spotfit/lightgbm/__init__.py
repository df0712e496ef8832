"""Training with LightGBM: `from spotfit.lightgbm import LightGBMTrainer, RayTrainReportCallback`.

Importing this package must not import lightgbm; each name loads its module on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from spotfit.core.lazy_names import lazy_names

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

__getattr__, __dir__ = lazy_names(__name__, _MODULES)
