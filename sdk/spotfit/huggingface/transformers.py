"""Public module `spotfit.huggingface.transformers`: the names of Ray Train's module of that name.

Importing it imports transformers.
"""

from __future__ import annotations

from spotfit.huggingface.report_callback import RayTrainReportCallback
from spotfit.huggingface.trainer_preparation import prepare_trainer

__all__ = ["RayTrainReportCallback", "prepare_trainer"]
