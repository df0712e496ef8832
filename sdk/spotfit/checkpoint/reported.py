"""Checkpoints as a training function reports them, and as the run returns them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from spotfit.checkpoint.checkpoint_dir import Checkpoint
from spotfit.model.events import ValidationRequest
from spotfit.model.reporting import CheckpointUploadMode, ReportedCheckpointStatus

UploadFn = Callable[[Checkpoint, str], Checkpoint]
"""User-defined upload: takes the checkpoint and its directory name, returns the uploaded one."""


class CheckpointReport(NamedTuple):
    """The checkpoint of one `report()` call, and how to upload it."""

    checkpoint: Checkpoint
    upload_mode: CheckpointUploadMode
    delete_after_upload: bool
    """Whether to delete the local copy after the upload."""
    dir_name: str | None = None
    upload_fn: UploadFn | None = None
    validation: ValidationRequest | None = None


@dataclass
class ReportedCheckpoint:
    """A checkpoint of the run, with the metrics it was reported with."""

    checkpoint: Checkpoint
    metrics: dict[str, Any]
    status: ReportedCheckpointStatus
