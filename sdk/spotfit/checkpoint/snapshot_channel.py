"""The interface between a Checkpointer and the process it runs in, which uploads its snapshots.

`worker.agent_snapshots` implements it for workers of a run, `worker.local_session` for local
mode.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from spotfit.checkpoint.reader import SavedState, SavedStateDescriptor
from spotfit.model.failure_model import FailureModel
from spotfit.model.reporting import SaveAtEnd

IN_MEMORY_NAME = "in memory"
"""Name of a state that is not a checkpoint yet."""

CHECKPOINTER_KIND = "Checkpointer"
"""Kind of the broadcast with which all ranks create their Checkpointer."""

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
    final_save_request: tuple[float, str] | None = None
    """Time on the local monotonic clock and reason of a request to save before the run ends."""
    peer_bytes_per_s: float = 0.0
    """Replication rate of one rank's snapshot; 0 where no peer that stays keeps replicas."""


def run_save_at_end(channel: SnapshotChannel) -> SaveAtEnd | None:
    """Save the steps since the last save, if the Checkpointer of this process shall do so.

    Called once, when the training function has returned and all uploads are complete. Waits for no
    other rank and does not raise. Returns None without a Checkpointer that saves at the end.
    """
    save_at_end, channel.save_at_end = channel.save_at_end, None
    return None if save_at_end is None else save_at_end()


class SnapshotChannel(Protocol):
    """Submission and lookup of one rank's snapshots, during one round.

    A report index counts the reports of this rank in the round from 0, snapshots and `report()`
    calls together.
    """

    save_at_end: Callable[[], SaveAtEnd] | None
    """Saves the last steps, set by a Checkpointer; see `run_save_at_end`.

    It refers to the Checkpointer, which the function's return would otherwise release.
    """

    @property
    def files_report_count(self) -> int:
        """How many checkpoints with files this rank has reported, those of a Checkpointer excluded.

        It only grows.
        """
        ...

    @property
    def segment_dirs(self) -> Sequence[Path]:
        """Directories of this node for segments, the preferred first: shared memory, then the disk.

        The last one is the fallback. They may not exist yet.
        """
        ...

    def record_progress(self, progress: float) -> None:
        """Report the share of the training that is done, from 0 to 1, with the next snapshots."""
        ...

    def new_segment_path(self, directory: Path) -> Path:
        """Return an unused path for a segment in that directory, for example `3-0-1.segment`.

        Creates nothing. Every call returns another path, also across the ranks and rounds of a
        node.
        """
        ...

    def submit(
        self, metrics: dict[str, Any], segment: Path, reason: str = "", *, step: int | None = None
    ) -> int:
        """Submit the snapshot in that segment as this rank's next report; returns the report index.

        All ranks must submit or skip the same reports. `metrics` of rank 0 are stored with the
        checkpoint. `reason` says why it is saved now, for the run's log; `step` is the number of
        training steps that the snapshot contains. In a run the agent uploads
        the segment after this call has returned, and the caller must not change it while the status
        is "submitted"; in local mode the files are written during the call. A failed upload is a
        status, not an exception.
        """
        ...

    def submit_at_end(self, metrics: bytes, segment: Path, *, step: int) -> None:
        """Submit the snapshot in that segment after the training function has returned.

        Not a report: it becomes a checkpoint if all ranks return after the same step. `metrics` are
        encoded as JSON. In a run it returns at once, in local mode when the files are written.
        """
        ...

    def skip(self, metrics: dict[str, Any], reason: str) -> None:
        """Take part in the next report without a snapshot: no checkpoint results from it.

        Called by a rank that cannot save, because the others wait for its part. `reason` is logged.
        Does not block.
        """
        ...

    def status_of(self, report_index: int) -> SnapshotStatus:
        """Return the status of a submitted snapshot, as far as this rank has been informed.

        `report_index` is from `submit`. Does not block.
        """
        ...

    def wait_for_upload(self, report_index: int) -> SnapshotStatus:
        """Block until the status is not "submitted", and return it; the segment is then free.

        `report_index` is from `submit`. There is no timeout; a failed upload returns "failed".
        """
        ...

    def roll_back(self) -> None:
        """Exclude the copies in memory of all snapshots submitted so far from later restores.

        Called on every rank by a `Checkpointer.restore` after saves, which goes back to a committed
        checkpoint; those are not excluded. Does not block; the agent processes it even if this
        worker dies.
        """
        ...

    def broadcast_bytes(self, kind: str, value: bytes) -> bytes:
        """Return rank 0's `value`; those of the other ranks are ignored.

        A collective: blocks until all ranks have called it with the same `kind`, a label such as
        "Checkpointer.step" that pairs the calls and names them in errors. In a run raises
        `CollectiveTimeoutError` if a rank does not arrive, and `SessionMisuseError` if one has
        already returned.
        """
        ...

    def outlook(self) -> GroupOutlook:
        """Return notices and estimates for the worker group, as of this call. Does not block.

        In local mode there are none: all fields have their defaults.
        """
        ...

    @property
    def initial_checkpoint(self) -> str | None:
        """Name of the committed checkpoint that the round starts from; None for a new run.

        For example "checkpoint_000003". It may hold user-defined files instead of a snapshot. In
        local mode the latest one that this process has saved.
        """
        ...

    @property
    def initial_step(self) -> int:
        """The number of training steps in `initial_checkpoint`; 0 if it is no snapshot."""
        ...

    @property
    def has_snapshots(self) -> bool:
        """Whether a committed checkpoint of a Checkpointer existed when the round started.

        In local mode: whether this process has saved one.
        """
        ...

    def open_in_memory(self) -> SavedState | None:
        """Open the state in the machines' memory that the round starts from; None if there is none.

        Its tensors are read later, chunk by chunk. Contacts all machines that hold shards, so one
        rank should call it for all. Raises `IntegrityError` if a shard is missing or incomplete.
        """
        ...

    def open_checkpoint(self, name: str) -> SavedState | None:
        """Open that committed checkpoint of the run; None if it holds no snapshot.

        Reads its manifests and indices; tensors are read later, chunk by chunk. `name` is for
        example "checkpoint_000003". Raises `IntegrityError` if it is incomplete or an index is
        corrupt.
        """
        ...

    def mark_corrupt(self, name: str) -> None:
        """Report that the checkpoint cannot be read: later snapshots must share no files with it.

        Called on every rank when a restore has found it corrupt. Does not block, and deletes
        nothing.
        """
        ...

    def reopen(self, opened: SavedStateDescriptor) -> SavedState:
        """Open on this rank a state that another rank has opened, without reading its indices.

        `opened` is the `describe_saved_state` of that rank. Raises `IntegrityError` if a segment on
        this node is missing.
        """
        ...

    def committed_checkpoints(self) -> Iterator[str]:
        """Yield the names of all checkpoints that are committed by now, the latest first.

        Reads the journal when the first name is requested. Checkpoints of user-defined files are
        included. In local mode those that this process has saved.
        """
        ...

    def earlier_checkpoints(self) -> Iterator[str]:
        """Yield the names of checkpoints that were committed before `initial_checkpoint`.

        The latest first, each once; read from the journal when the first name is requested.
        Checkpoints of user-defined files are included. Empty in local mode.
        """
        ...
