"""Training with Hugging Face Transformers and Accelerate: `prepare_trainer`, `export_pretrained`.

Importing this package must not import transformers; each name loads its module on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

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
