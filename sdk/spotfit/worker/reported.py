"""Checkpoints as they are reported, and as they are told back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from spotfit.checkpoint.handle import Checkpoint
from spotfit.model.events import ValidationAsked
from spotfit.model.reporting import CheckpointUploadMode, ReportedCheckpointStatus

UploadFn = Callable[[Checkpoint, str], Checkpoint]
"""What a user may upload with: the checkpoint and its directory's name; gives where it lies now."""


class Luggage(NamedTuple):
    """A checkpoint that comes with a report, and how it travels."""

    checkpoint: Checkpoint
    mode: CheckpointUploadMode
    delete: bool
    """Whether the local copy goes once it is uploaded."""
    dir_name: str | None = None
    upload_fn: UploadFn | None = None
    validation: ValidationAsked | None = None


@dataclass
class ReportedCheckpoint:
    """A checkpoint of the run, with the metrics it was reported with."""

    checkpoint: Checkpoint
    metrics: dict[str, Any]
    status: ReportedCheckpointStatus
