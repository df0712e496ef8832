"""The compared modules of Ray Train and the corresponding modules of spotfit.

Datasets of Ray Data are not compared here: tests/unit/data does that.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

RAY_VERSION = "2.60.0"

RAY_MODULES: Mapping[str, tuple[str, ...]] = {
    "ray.train": (),
    "ray.train.backend": ("Backend", "BackendConfig"),
    "ray.train.collective": (),
    "ray.train.error": ("SessionMisuseError",),
    "ray.train.horovod": (),
    "ray.train.huggingface.transformers": (),
    "ray.train.lightgbm": (),
    "ray.train.lightning": (),
    "ray.train.tensorflow": (
        "TensorflowCheckpoint",
        "TensorflowConfig",
        "TensorflowTrainer",
        "prepare_dataset_shard",
    ),
    "ray.train.tensorflow.keras": ("ReportCheckpointCallback",),
    "ray.train.torch": (),
    "ray.train.torch.xla": (),
    "ray.train.v2.api.data_parallel_trainer": ("DataParallelTrainer",),
    "ray.train.v2.jax": ("JaxConfig", "JaxTrainer"),
    "ray.train.v2.torch.torchft_config": ("TorchftConfig",),
    "ray.train.v2._internal.execution.context": ("TrainRunContext",),
    "ray.train.xgboost": (),
    "ray.tune.integration.ray_train": ("TuneReportCallback",),
}
"""Modules of Ray and the compared names; without names, all of `__all__`."""

V1_VERSION = "2.6.3"
V1_MODULES: Mapping[str, tuple[str, ...]] = {
    "ray.air": (),
    "ray.air.session": (),
    "ray.train": (),
    "ray.train.base_trainer": ("BaseTrainer",),
    "ray.train.batch_predictor": ("BatchPredictor",),
    "ray.train.gbdt_trainer": ("GBDTTrainer",),
    "ray.train.huggingface": (),
    "ray.train.lightgbm": (),
    "ray.train.lightning": (),
    "ray.train.mosaic": (),
    "ray.train.predictor": ("Predictor",),
    "ray.train.rl": (),
    "ray.train.sklearn": (),
    "ray.train.tensorflow": (),
    "ray.train.torch": (),
    "ray.train.xgboost": (),
}
"""Modules of the last version of Ray with all V1 names. Names that Ray 2.60 has are omitted."""

SPOTFIT_MODULES: Mapping[str, str] = {
    "ray.train": "spotfit",
    "ray.train.backend": "spotfit.backend",
    "ray.train.collective": "spotfit.collective",
    "ray.train.error": "spotfit",
    "ray.train.horovod": "spotfit.horovod",
    "ray.train.huggingface.transformers": "spotfit.huggingface.transformers",
    "ray.train.lightgbm": "spotfit.lightgbm",
    "ray.train.lightning": "spotfit.lightning",
    "ray.train.tensorflow": "spotfit.tensorflow",
    "ray.train.tensorflow.keras": "spotfit.tensorflow.keras",
    "ray.train.torch": "spotfit.torch",
    "ray.train.torch.xla": "spotfit.torch.xla",
    "ray.train.v2.api.data_parallel_trainer": "spotfit",
    "ray.train.v2.jax": "spotfit.jax",
    "ray.train.v2.torch.torchft_config": "spotfit.torch",
    "ray.train.v2._internal.execution.context": "spotfit.model.user_callback",
    "ray.train.xgboost": "spotfit.xgboost",
    "ray.tune.integration.ray_train": "spotfit",
}
"""The corresponding modules of spotfit."""

NEEDED_PACKAGES: Mapping[str, str] = {
    "ray.train.huggingface.transformers": "transformers",
    "ray.train.lightgbm": "lightgbm",
    "ray.train.lightning": "lightning",
    "ray.train.tensorflow.keras": "tensorflow",
    "ray.train.xgboost": "xgboost",
}
"""Modules that are compared where this package is installed, as in `make frameworks`."""

ENVIRONMENT = "environment"
CONSTANTS = ("ray.train.constants", "ray.train.v2._internal.constants")
"""The modules in which Ray defines environment variables."""
VARIABLE = re.compile(r"(?:RAY_TRAIN|RAY_CHDIR|TORCH_PROCESS|JAX_DISTRIBUTED)_[A-Z0-9_]+")

EXAMPLES: Mapping[str, Callable[[Any], Any]] = {
    "Checkpoint": lambda kind: kind("/tmp"),  # noqa: S108 - a path that is only written down
    "ControllerError": lambda kind: kind(ValueError()),
    "NCCLHangError": lambda kind: kind("", {}),
    "PreemptionError": lambda kind: kind(SimpleNamespace(preempted_ranks=[], deadline_ms=0)),
    "ValidationConfig": lambda kind: kind(print),
    "WorkerGroupError": lambda kind: kind("", {}),
}
"""Examples of classes whose attributes are set by instances."""
