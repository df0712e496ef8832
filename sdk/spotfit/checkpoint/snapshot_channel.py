"""The interface between a Checkpointer and the process it runs in, which uploads its snapshots.

`worker.agent_snapshots` implements it for workers of a run, `worker.local_session` for local
mode.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from spotfit.checkpoint.reader import SavedState, SavedStateDescriptor
from spotfit.model.failure_model import FailureModel

IN_MEMORY_NAME = "in memory"
"""Name of a state that is not a checkpoint yet."""

SnapshotStatus = Literal["submitted", "uploaded", "committed", "failed"]
"""Status of one rank's snapshot.

    state      event                                   next
    submitted  this rank's shard is in the bucket      uploaded
    submitted  the upload of any rank fails            failed
    uploaded   the journal has the checkpoint's entry  committed
    uploaded   the upload of another rank fails        failed
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupOutlook:
    """Notices and estimates about the future of the worker group, as of one moment."""

    allows_resize: bool = False
    """Whether the group may continue with another number of workers."""
    failure_model: FailureModel = field(default_factory=FailureModel)
    time_to_preemption_s: float | None = None
    """Seconds until the first machine of the group is preempted; None without a notice."""
    replacement_ready: bool = False
    """Whether the next round could start at once without the preempted machines."""
    rebalance_recommendation: tuple[float, str] | None = None
    """Time on the local monotonic clock and reason of the last rebalance recommendation."""
    peer_bytes_per_s: float = 0.0
    """Replication rate of one rank's snapshot; 0 where no peer that stays keeps replicas."""


class SnapshotChannel(Protocol):
    """Submission and lookup of one rank's snapshots."""

    @property
    def segment_dirs(self) -> Sequence[Path]:
        """Directories for segments, in order of preference: shared memory, then the disk."""
        ...

    def new_segment_path(self, directory: Path) -> Path:
        """Return an unused path for a segment in that directory."""
        ...

    def submit(self, metrics: dict[str, Any], segment: Path, reason: str = "") -> int:
        """Submit the snapshot in that segment as this rank's next report; returns the report index.

        `reason` says why it is saved now, for the run's log. Does not block. The caller must not
        change the segment while the status is "submitted".
        """
        ...

    def skip(self, metrics: dict[str, Any], reason: str) -> None:
        """Take part in the report without a snapshot: no checkpoint results from it."""
        ...

    def status_of(self, report_index: int) -> SnapshotStatus:
        """Return the latest status of a submitted snapshot that this rank has received."""
        ...

    def wait_for_upload(self, report_index: int) -> SnapshotStatus:
        """Wait until the status is not "submitted", and return it."""
        ...

    def roll_back(self) -> None:
        """Exclude all snapshots submitted so far from later restores: training restarts from a
        checkpoint. Does not block; the agent processes it even if this worker dies."""
        ...

    def broadcast_bytes(self, kind: str, value: bytes) -> bytes:
        """Return rank 0's value. A collective: all ranks must call it."""
        ...

    def outlook(self) -> GroupOutlook:
        """Return the current outlook of the group. Does not block."""
        ...

    @property
    def initial_checkpoint(self) -> str | None:
        """Name of the checkpoint that the round starts from; None for a new run."""
        ...

    @property
    def has_snapshots(self) -> bool:
        """Whether a committed checkpoint of a Checkpointer exists."""
        ...

    def open_in_memory(self) -> SavedState | None:
        """Open the state in memory that the round starts from; None if there is none.

        Contacts all machines that hold shards, so one rank should call it for all. Raises
        `IntegrityError`.
        """
        ...

    def open_checkpoint(self, name: str) -> SavedState | None:
        """Open that checkpoint; None if it holds no snapshot. Raises `IntegrityError`."""
        ...

    def mark_corrupt(self, name: str) -> None:
        """Report that the checkpoint cannot be read: no snapshot may reference its files."""
        ...

    def reopen(self, opened: SavedStateDescriptor) -> SavedState:
        """Open a state that another rank has opened. Raises `IntegrityError`."""
        ...

    def committed_checkpoints(self) -> Iterator[str]:
        """Yield the names of all checkpoints that are committed by now, the latest first."""
        ...

    def earlier_checkpoints(self) -> Iterator[str]:
        """Yield the names of checkpoints before `initial_checkpoint`, the latest first."""
        ...
