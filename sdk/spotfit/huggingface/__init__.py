"""Training with Hugging Face Transformers and Accelerate: `prepare_trainer`, `export_pretrained`.

Importing this package must not import transformers; each name loads its module on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from spotfit.core.lazy_names import lazy_names

if TYPE_CHECKING:
    from spotfit.huggingface.pretrained import export_pretrained as export_pretrained
    from spotfit.huggingface.trainer_preparation import prepare_trainer as prepare_trainer
    from spotfit.huggingface.trainer_report_callback import (
        RayTrainReportCallback as RayTrainReportCallback,
    )
    from spotfit.huggingface.trainers import AccelerateTrainer as AccelerateTrainer
    from spotfit.huggingface.trainers import TransformersTrainer as TransformersTrainer

_MODULES = {
    "AccelerateTrainer": "spotfit.huggingface.trainers",
    "RayTrainReportCallback": "spotfit.huggingface.trainer_report_callback",
    "TransformersTrainer": "spotfit.huggingface.trainers",
    "export_pretrained": "spotfit.huggingface.pretrained",
    "prepare_trainer": "spotfit.huggingface.trainer_preparation",
}

__all__ = [
    "AccelerateTrainer",
    "RayTrainReportCallback",
    "TransformersTrainer",
    "export_pretrained",
    "prepare_trainer",
]

__getattr__, __dir__ = lazy_names(__name__, _MODULES)
