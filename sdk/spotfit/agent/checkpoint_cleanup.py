"""Deletion of dropped and abandoned checkpoints by the leader.

The state is not persisted: a new leader finds in the bucket what was not deleted. `advance` starts
and finishes background calls; deletions run one after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial

from spotfit.checkpoint.gc import (
    delete_checkpoint,
    delete_uncommitted,
    find_abandoned,
    partially_deleted,
    write_name_marker,
)
from spotfit.control.background_calls import BackgroundCalls, RetryingCalls
from spotfit.core.errors import StoreError, TransientStoreError
from spotfit.host import log
from spotfit.model.view import View
from spotfit.store.api import Store


class CheckpointGarbageCollector:
    """Deletes checkpoints, and writes a marker for every name that is assigned to an upload.

    For one term of leadership. Only `advance` starts work, as background calls; no method blocks.
    Deletions stop when `is_leader` returns False: the next leader may use the name again.
    """

    def __init__(
        self,
        store: Store,
        background_calls: BackgroundCalls,
        is_leader: Callable[[], bool] = lambda: True,
    ) -> None:
        self._store = store
        self._is_leader = is_leader
        self._retrying_calls = RetryingCalls(background_calls)
        self._pending_deletions: dict[str, Callable[[], None]] = {}
        """Deletions by checkpoint name, in order."""
        self._current_deletion: str | None = None
        self._parent_checkpoints: set[str] = set()
        """Checkpoints whose files are shared by uploads in progress. They are deleted later, by the
        next fit if this one ends before."""
        self._pending_scan: tuple[str, Callable[[], tuple[str, ...]]] | None = None
        self._needs_initial_scan = True
        """Whether this leader has not yet searched for remains of earlier rounds."""
        self._pending_name_markers: dict[str, Callable[[], None]] = {}

    @property
    def is_busy(self) -> bool:
        """Whether a deletion or a search of the bucket is pending, which delays the leader's exit.

        Deletions that wait for uploads sharing the files do not count, nor do markers.
        """
        return (
            not self._pending_deletions.keys() <= self._parent_checkpoints
            or self._pending_scan is not None
        )

    def schedule_deletion(self, name: str) -> None:
        """Queue the deletion of a checkpoint that the journal has dropped. Idempotent.

        It is not performed if the name is committed or uploaded again before.
        """
        self._pending_deletions[name] = partial(
            delete_checkpoint, self._store, name, delete=self._delete_key
        )

    def record_name(self, name: str, round_number: int, *, is_generated: bool) -> None:
        """Queue the write of a marker object for a name that workers of that round will upload to.

        `is_generated`: spotfit generated the name, the user did not request it. The marker lets a
        later leader find files that were uploaded without a manifest.
        """
        write = partial(write_name_marker, self._store, name, round_number, generated=is_generated)
        self._pending_name_markers[f"note {round_number} {name}"] = write

    def scan_for_debris(self, view: View, *, before_round: int) -> None:
        """Queue a search for checkpoints to delete: names last used before `before_round`.

        It finds names that were never committed, and dropped ones with remaining files. Called when
        the leader has opened a round. Replaces a search that is pending.
        """
        scan = partial(
            find_abandoned,
            self._store,
            retained={checkpoint.name for checkpoint in view.checkpoints},
            before_round=before_round,
            dropped=view.dropped_checkpoints,
        )
        # The slot makes the name unique: the answer of an earlier scan must not be taken for this.
        self._pending_scan = (f"debris {view.next_slot}", scan)
        self._needs_initial_scan = False

    def scan_for_undeleted(self, view: View) -> None:
        """Queue a search for dropped checkpoints that earlier leaders have not deleted.

        Called at each tick after training has ended, when no further round will call
        `scan_for_debris`; no effect after an earlier call of either.
        """
        if self._needs_initial_scan and view.dropped_checkpoints:
            self._pending_scan = (
                f"dropped {view.next_slot}",
                partial(partially_deleted, self._store, view.dropped_checkpoints),
            )
        self._needs_initial_scan = False

    def advance(
        self,
        view: View,
        uploading_names: Collection[str],
        now: float,
        parent_checkpoints: Collection[str] = (),
    ) -> None:
        """Start the next background call and record finished ones; called at each tick.

        Names of committed checkpoints and `uploading_names` are not deleted. `parent_checkpoints`
        are deleted later, because uploads in progress share their files. Transient errors are
        retried; a denied deletion is logged and skipped. `now` is event-loop time in seconds.
        """
        # Kept for `is_busy`, which does not wait for the uploads that share these files.
        self._parent_checkpoints = set(parent_checkpoints)
        # Markers first: without them a later leader does not find the files of a lost upload.
        for name, job in list(self._pending_name_markers.items()):
            if self._retrying_calls.run(name, job, now) is not None:
                del self._pending_name_markers[name]
        self._advance_scan(view, now)
        in_use = {checkpoint.name for checkpoint in view.checkpoints} | set(uploading_names)
        for name in [name for name in self._pending_deletions if name not in parent_checkpoints]:
            # One at a time: it is many requests, and the threads serve other calls, too.
            if self._current_deletion is not None:
                break
            # Committed or requested again after the scan or the drop: its files are needed.
            if name in in_use:
                del self._pending_deletions[name]
            else:
                self._current_deletion = name
        if self._current_deletion is not None:
            current = self._current_deletion
            deletion = partial(_delete_unless_denied, current, self._pending_deletions[current])
            if self._retrying_calls.run(f"delete {current}", deletion, now) is not None:
                self._current_deletion = None
                del self._pending_deletions[current]

    def _advance_scan(self, view: View, now: float) -> None:
        if self._pending_scan is None:
            return
        call_name, scan = self._pending_scan
        result = self._retrying_calls.run(call_name, scan, now)
        if result is None:
            return
        self._pending_scan = None
        for name in result.value:
            is_dropped = name in view.dropped_checkpoints
            delete = delete_checkpoint if is_dropped else delete_uncommitted
            # A deletion that is queued already may be in progress: do not replace it.
            self._pending_deletions.setdefault(
                name, partial(delete, self._store, name, delete=self._delete_key)
            )

    def _delete_key(self, key: str) -> None:
        # Checked per key: a deletion runs in a thread that outlives the end of the term.
        if self._is_leader():
            self._store.delete(key)


def _delete_unless_denied(name: str, deletion: Callable[[], None]) -> None:
    """Let the caller retry transient errors; only log others, so that the run can end."""
    try:
        deletion()
    except TransientStoreError:
        raise
    except StoreError as error:
        log.warning("checkpoint.delete_denied", name=name, reason=error.message)
