"""spotfit: `trainer.fit()` trains on spot machines, and survives every reclaim.

The names follow Ray Train's. Each is imported when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from spotfit import backend as backend
    from spotfit import collective as collective
    from spotfit import torch as torch
    from spotfit.checkpoint.handle import Checkpoint as Checkpoint
    from spotfit.client.config import RunConfig as RunConfig
    from spotfit.client.handle import RunHandle as RunHandle
    from spotfit.client.handle import attach as attach
    from spotfit.client.result import Result as Result
    from spotfit.client.trainer import DataParallelTrainer as DataParallelTrainer
    from spotfit.core.errors import ConfigError as ConfigError
    from spotfit.core.errors import ControllerError as ControllerError
    from spotfit.core.errors import HangError as HangError
    from spotfit.core.errors import NCCLHangError as NCCLHangError
    from spotfit.core.errors import PreemptionError as PreemptionError
    from spotfit.core.errors import RunCancelledError as RunCancelledError
    from spotfit.core.errors import SessionMisuseError as SessionMisuseError
    from spotfit.core.errors import SpotfitError as SpotfitError
    from spotfit.core.errors import TrainingFailedError as TrainingFailedError
    from spotfit.core.errors import WorkerGroupError as WorkerGroupError
    from spotfit.frameworks.config import BackendConfig as BackendConfig
    from spotfit.model.callbacks import UserCallback as UserCallback
    from spotfit.model.config import CheckpointConfig as CheckpointConfig
    from spotfit.model.config import FailureConfig as FailureConfig
    from spotfit.model.config import LoggingConfig as LoggingConfig
    from spotfit.model.config import ScalingConfig as ScalingConfig
    from spotfit.model.config import SyncConfig as SyncConfig
    from spotfit.model.data import TRAIN_DATASET_KEY as TRAIN_DATASET_KEY
    from spotfit.model.data import DataConfig as DataConfig
    from spotfit.model.preemption import PreemptionInfo as PreemptionInfo
    from spotfit.model.reporting import CheckpointConsistencyMode as CheckpointConsistencyMode
    from spotfit.model.reporting import CheckpointUploadMode as CheckpointUploadMode
    from spotfit.model.reporting import ReportedCheckpointStatus as ReportedCheckpointStatus
    from spotfit.model.validation import ValidationConfig as ValidationConfig
    from spotfit.model.validation import ValidationFn as ValidationFn
    from spotfit.model.validation import ValidationTaskConfig as ValidationTaskConfig
    from spotfit.worker.context import TrainContext as TrainContext
    from spotfit.worker.report import get_all_reported_checkpoints as get_all_reported_checkpoints
    from spotfit.worker.report import get_checkpoint as get_checkpoint
    from spotfit.worker.report import get_context as get_context
    from spotfit.worker.report import get_dataset_shard as get_dataset_shard
    from spotfit.worker.report import get_preemption_info as get_preemption_info
    from spotfit.worker.report import report as report
    from spotfit.worker.reported import ReportedCheckpoint as ReportedCheckpoint

_HOMES = {
    "BackendConfig": "frameworks.config",
    "Checkpoint": "checkpoint.handle",
    "CheckpointConfig": "model.config",
    "CheckpointConsistencyMode": "model.reporting",
    "CheckpointUploadMode": "model.reporting",
    "ConfigError": "core.errors",
    "ControllerError": "core.errors",
    "DataConfig": "model.data",
    "DataParallelTrainer": "client.trainer",
    "FailureConfig": "model.config",
    "HangError": "core.errors",
    "LoggingConfig": "model.config",
    "NCCLHangError": "core.errors",
    "PreemptionError": "core.errors",
    "PreemptionInfo": "model.preemption",
    "ReportedCheckpoint": "worker.reported",
    "ReportedCheckpointStatus": "model.reporting",
    "Result": "client.result",
    "RunCancelledError": "core.errors",
    "RunConfig": "client.config",
    "RunHandle": "client.handle",
    "ScalingConfig": "model.config",
    "SessionMisuseError": "core.errors",
    "SpotfitError": "core.errors",
    "SyncConfig": "model.config",
    "TRAIN_DATASET_KEY": "model.data",
    "TrainContext": "worker.context",
    "TrainingFailedError": "core.errors",
    "UserCallback": "model.callbacks",
    "ValidationConfig": "model.validation",
    "ValidationFn": "model.validation",
    "ValidationTaskConfig": "model.validation",
    "WorkerGroupError": "core.errors",
    "attach": "client.handle",
    "get_all_reported_checkpoints": "worker.report",
    "get_checkpoint": "worker.report",
    "get_context": "worker.report",
    "get_dataset_shard": "worker.report",
    "get_preemption_info": "worker.report",
    "report": "worker.report",
}

_MODULES = (
    "backend",
    "collective",
    "torch",
)  # `import spotfit` is enough to write spotfit.torch.get_device()

__all__ = sorted([*_HOMES, "collective"])  # pyright: ignore[reportUnsupportedDunderAll] # pinned by a test


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"{__name__}.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = found  # asked for once
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
