"""Prediction over many inputs: `from spotfit.prediction import predict, BatchPredictor`.

Importing this package must not import numpy or a framework; each name loads its module on first
use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from spotfit.core.lazy_names import lazy_names

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

__getattr__, __dir__ = lazy_names(__name__, _MODULES)
