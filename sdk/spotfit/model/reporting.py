"""The words of `report()`: how a checkpoint is taken along, and how far one has come."""

from __future__ import annotations

import enum


class CheckpointUploadMode(enum.Enum):
    """How `report` brings a checkpoint into the run's storage."""

    ASYNC = "ASYNC"
    """In a thread, in order, while training goes on. The local copy goes unless asked not to."""
    SYNC = "SYNC"
    """Before `report` returns. The local copy stays unless asked otherwise."""
    NO_UPLOAD = "NO_UPLOAD"
    """Not at all: it already lies inside the run's folder."""

    @property
    def deletes_local_copy(self) -> bool:
        """Whether the local copy goes after the upload when nobody said."""
        return self is CheckpointUploadMode.ASYNC


class CheckpointConsistencyMode(enum.Enum):
    """What `get_all_reported_checkpoints` waits for."""

    COMMITTED = "COMMITTED"
    """Until every report this worker made has been taken."""
    VALIDATED = "VALIDATED"
    """Until, besides, no validation is pending."""


class ReportedCheckpointStatus(enum.Enum):
    """How far a reported checkpoint has come."""

    COMMITTED = "COMMITTED"
    PENDING_VALIDATION = "PENDING_VALIDATION"
    VALIDATED = "VALIDATED"
    VALIDATION_FAILED = "VALIDATION_FAILED"
    VALIDATION_TIMEOUT = "VALIDATION_TIMEOUT"
