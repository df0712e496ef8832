"""Prediction over many inputs: `from spotfit.prediction import predict, BatchPredictor`.

Importing this package must not import numpy or a framework; each name loads its module on first
use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from spotfit.prediction.batch_predictor import BatchPredictor as BatchPredictor
    from spotfit.prediction.framework_predictors import LightGBMPredictor as LightGBMPredictor
    from spotfit.prediction.framework_predictors import SklearnPredictor as SklearnPredictor
    from spotfit.prediction.framework_predictors import TensorflowPredictor as TensorflowPredictor
    from spotfit.prediction.framework_predictors import TorchPredictor as TorchPredictor
    from spotfit.prediction.framework_predictors import XGBoostPredictor as XGBoostPredictor
    from spotfit.prediction.predict_job import PredictionResult as PredictionResult
    from spotfit.prediction.predict_job import predict as predict
    from spotfit.prediction.predictor import Predictor as Predictor
    from spotfit.prediction.serving import export_for_serving as export_for_serving

_MODULES = {
    "BatchPredictor": "spotfit.prediction.batch_predictor",
    "LightGBMPredictor": "spotfit.prediction.framework_predictors",
    "PredictionResult": "spotfit.prediction.predict_job",
    "Predictor": "spotfit.prediction.predictor",
    "SklearnPredictor": "spotfit.prediction.framework_predictors",
    "TensorflowPredictor": "spotfit.prediction.framework_predictors",
    "TorchPredictor": "spotfit.prediction.framework_predictors",
    "XGBoostPredictor": "spotfit.prediction.framework_predictors",
    "export_for_serving": "spotfit.prediction.serving",
    "predict": "spotfit.prediction.predict_job",
}

__all__ = [
    "BatchPredictor",
    "LightGBMPredictor",
    "PredictionResult",
    "Predictor",
    "SklearnPredictor",
    "TensorflowPredictor",
    "TorchPredictor",
    "XGBoostPredictor",
    "export_for_serving",
    "predict",
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
