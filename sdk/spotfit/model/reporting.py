"""Enums of `report()` and `get_all_reported_checkpoints()`. Names and values follow Ray Train."""

from __future__ import annotations

import enum


class CheckpointUploadMode(enum.Enum):
    """How `report` uploads a checkpoint to the run's storage."""

    ASYNC = "ASYNC"
    """In a background thread, in the order of the reports. By default deletes the local copy."""
    SYNC = "SYNC"
    """Before `report` returns. By default keeps the local copy."""
    NO_UPLOAD = "NO_UPLOAD"
    """No upload: user code has already written the files below the run's root."""

    @property
    def deletes_local_copy(self) -> bool:
        """The default of `delete_local_checkpoint_after_upload`."""
        return self is CheckpointUploadMode.ASYNC


class CheckpointConsistencyMode(enum.Enum):
    """What `get_all_reported_checkpoints` waits for."""

    COMMITTED = "COMMITTED"
    """Until every report of this worker is committed."""
    VALIDATED = "VALIDATED"
    """Until, in addition, no validation is pending."""


class ReportedCheckpointStatus(enum.Enum):
    """The state of a reported checkpoint.

    COMMITTED without validation; otherwise PENDING_VALIDATION, then one of the other three.
    """

    COMMITTED = "COMMITTED"
    PENDING_VALIDATION = "PENDING_VALIDATION"
    VALIDATED = "VALIDATED"
    VALIDATION_FAILED = "VALIDATION_FAILED"
    VALIDATION_TIMEOUT = "VALIDATION_TIMEOUT"
