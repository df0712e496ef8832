"""Fault-tolerant distributed training on spot machines, with the API names of Ray Train.

`import spotfit` must stay cheap and must not import torch: every public name is imported on first
access.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from spotfit import backend as backend
    from spotfit import collective as collective
    from spotfit import data as data
    from spotfit import prediction as prediction
    from spotfit import torch as torch
    from spotfit.checkpoint.checkpoint_dir import Checkpoint as Checkpoint
    from spotfit.checkpoint.committed import ReportedCheckpoint as ReportedCheckpoint
    from spotfit.client.result import Result as Result
    from spotfit.client.run_config import RunConfig as RunConfig
    from spotfit.client.run_handle import RunHandle as RunHandle
    from spotfit.client.run_handle import attach as attach
    from spotfit.client.trainer import DataParallelTrainer as DataParallelTrainer
    from spotfit.core.errors import BudgetExhaustedError as BudgetExhaustedError
    from spotfit.core.errors import ConfigError as ConfigError
    from spotfit.core.errors import ControllerError as ControllerError
    from spotfit.core.errors import HangError as HangError
    from spotfit.core.errors import NCCLHangError as NCCLHangError
    from spotfit.core.errors import PreemptionError as PreemptionError
    from spotfit.core.errors import RunCancelledError as RunCancelledError
    from spotfit.core.errors import SessionMisuseError as SessionMisuseError
    from spotfit.core.errors import SpotfitError as SpotfitError
    from spotfit.core.errors import TimeBudgetExceededError as TimeBudgetExceededError
    from spotfit.core.errors import TrainingFailedError as TrainingFailedError
    from spotfit.core.errors import WorkerGroupError as WorkerGroupError
    from spotfit.data.data_config import DataConfig as DataConfig
    from spotfit.frameworks.backend_config import BackendConfig as BackendConfig
    from spotfit.model.bill import Bill as Bill
    from spotfit.model.config import TRAIN_DATASET_KEY as TRAIN_DATASET_KEY
    from spotfit.model.config import CheckpointConfig as CheckpointConfig
    from spotfit.model.config import FailureConfig as FailureConfig
    from spotfit.model.config import LoggingConfig as LoggingConfig
    from spotfit.model.config import ScalingConfig as ScalingConfig
    from spotfit.model.config import SyncConfig as SyncConfig
    from spotfit.model.reporting import CheckpointConsistencyMode as CheckpointConsistencyMode
    from spotfit.model.reporting import CheckpointUploadMode as CheckpointUploadMode
    from spotfit.model.reporting import ReportedCheckpointStatus as ReportedCheckpointStatus
    from spotfit.model.topology import PreemptionInfo as PreemptionInfo
    from spotfit.model.user_callback import UserCallback as UserCallback
    from spotfit.model.validation_config import ValidationConfig as ValidationConfig
    from spotfit.model.validation_config import ValidationFn as ValidationFn
    from spotfit.model.validation_config import ValidationTaskConfig as ValidationTaskConfig
    from spotfit.prediction.predict_job import predict as predict
    from spotfit.worker.training_api import TrainContext as TrainContext
    from spotfit.worker.training_api import (
        get_all_reported_checkpoints as get_all_reported_checkpoints,
    )
    from spotfit.worker.training_api import get_checkpoint as get_checkpoint
    from spotfit.worker.training_api import get_context as get_context
    from spotfit.worker.training_api import get_dataset_shard as get_dataset_shard
    from spotfit.worker.training_api import get_preemption_info as get_preemption_info
    from spotfit.worker.training_api import report as report

_PUBLIC_NAME_MODULES = {
    "BackendConfig": "frameworks.backend_config",
    "Bill": "model.bill",
    "Checkpoint": "checkpoint.checkpoint_dir",
    "CheckpointConfig": "model.config",
    "CheckpointConsistencyMode": "model.reporting",
    "CheckpointUploadMode": "model.reporting",
    "ConfigError": "core.errors",
    "ControllerError": "core.errors",
    "DataConfig": "data.data_config",
    "DataParallelTrainer": "client.trainer",
    "FailureConfig": "model.config",
    "HangError": "core.errors",
    "LoggingConfig": "model.config",
    "NCCLHangError": "core.errors",
    "PreemptionError": "core.errors",
    "PreemptionInfo": "model.topology",
    "ReportedCheckpoint": "checkpoint.committed",
    "ReportedCheckpointStatus": "model.reporting",
    "Result": "client.result",
    "RunCancelledError": "core.errors",
    "RunConfig": "client.run_config",
    "RunHandle": "client.run_handle",
    "ScalingConfig": "model.config",
    "SessionMisuseError": "core.errors",
    "SpotfitError": "core.errors",
    "SyncConfig": "model.config",
    "TRAIN_DATASET_KEY": "model.config",
    "BudgetExhaustedError": "core.errors",
    "TimeBudgetExceededError": "core.errors",
    "TrainContext": "worker.training_api",
    "TrainingFailedError": "core.errors",
    "UserCallback": "model.user_callback",
    "ValidationConfig": "model.validation_config",
    "ValidationFn": "model.validation_config",
    "ValidationTaskConfig": "model.validation_config",
    "WorkerGroupError": "core.errors",
    "attach": "client.run_handle",
    "get_all_reported_checkpoints": "worker.training_api",
    "get_checkpoint": "worker.training_api",
    "get_context": "worker.training_api",
    "get_dataset_shard": "worker.training_api",
    "get_preemption_info": "worker.training_api",
    "predict": "prediction.predict_job",
    "report": "worker.training_api",
}

# Reachable as attributes, so that `import spotfit` is enough for `spotfit.torch.get_device()`.
_PUBLIC_SUBMODULES = (
    "backend",
    "collective",
    "data",
    "horovod",
    "huggingface",
    "jax",
    "lightgbm",
    "lightning",
    "prediction",
    "sklearn",
    "tensorflow",
    "torch",
    "xgboost",
)

__all__ = sorted([*_PUBLIC_NAME_MODULES, "collective"])  # pyright: ignore[reportUnsupportedDunderAll] # pinned by a test


def __getattr__(name: str) -> Any:
    if name in _PUBLIC_SUBMODULES:
        return importlib.import_module(f"{__name__}.{name}")
    if name == "__version__":
        from importlib.metadata import version

        return version("spotfit")
    if name not in _PUBLIC_NAME_MODULES:
        from spotfit.core.unsupported_names import missing_attribute_error

        raise missing_attribute_error(__name__, name)
    value = getattr(importlib.import_module(f"{__name__}.{_PUBLIC_NAME_MODULES[name]}"), name)
    globals()[name] = value  # later accesses bypass __getattr__
    return value


def __dir__() -> list[str]:
    # Without the imports of this module, which would be offered as completions.
    special = (name for name in globals() if name.startswith("__"))
    return sorted({*special, *__all__, *_PUBLIC_SUBMODULES, "__version__"} - {"__getattr__"})
