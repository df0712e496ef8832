"""Replicas of segments in the memory of a peer machine: send order and retention. No I/O threads.

A peer's replicas are useful once it has those of all ranks of the sending machine from one save,
and a segment is overwritten by the save after the next. So replicas are sent save by save, and a
peer keeps those of the last complete save until a later one is complete.

States of one save in a `ReplicationQueue`:

    state      event                                            next
    (none)     add() of its first replica                       waiting
    waiting    add() of a later save                            dropped
    waiting    pop(), and nothing is left to send               current
    current    pop() of its last replica                        sent
    current    mark_failed() of one replica                     failed
    current    add() of a later save, if it started late        abandoned

After a failure the next save was waiting for a while, so it *starts late*: its segments would
probably be overwritten before its end. It is sent, but a new save abandons it.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple


class ReplicaId(NamedTuple):
    """One rank's snapshot of one report of one round. Sorts from earlier to later."""

    round: int
    report: int
    rank: int

    @property
    def file_name(self) -> str:
        """Name of its file in `ReplicaStore.folder`: "<round>-<rank>-<report>.segment"."""
        return f"{self.round}-{self.rank}-{self.report}.segment"


class PendingReplica(NamedTuple):
    """A replica to send."""

    replica: ReplicaId
    segment: Path
    seal: tuple[object, ...]
    """Version stamp of the segment: another one means that it was overwritten."""
    local_ranks: tuple[int, ...]
    """All ranks of the sending machine."""
    target: str
    """Address of the peer store."""

    @property
    def batch(self) -> tuple[int, int, str]:
        """Round, report index and peer: equal for the replicas of one save to one peer."""
        return self.replica.round, self.replica.report, self.target


class ReplicationQueue:
    """Replicas to send: the rest of the current save, and of the waiting saves only the last.

    Not thread-safe: `PeerStore` guards it with a lock. It only orders; `PeerStore` sends.
    """

    def __init__(self) -> None:
        self._current_batch: tuple[int, int, str] | None = None
        self._current: dict[int, PendingReplica] = {}
        """Unsent replicas of the current batch, by rank."""
        self._waiting: dict[int, PendingReplica] = {}
        self._failed_batch: object = None
        """The last batch with a failed replica: the others of it are useless."""
        self._is_preemptible = False
        """Whether the current batch started late and is abandoned for a new one."""
        self._abandoned_batch: object = None

    def add(self, pending: PendingReplica) -> None:
        """Queue a replica; drops waiting replicas of earlier saves and those for another peer.

        Ignored if a later save for the same peer is queued or current, or a replica of the same
        save has just failed. May abandon the save that is being sent (`is_abandoned`).
        """
        batches = [self._current_batch, *(queued.batch for queued in self._waiting.values())]
        # A later save for the same peer is current or waiting: batches sort from early to late.
        is_outdated = pending.batch != self._current_batch and any(
            pending.batch < batch
            for batch in batches
            if batch is not None and batch[-1] == pending.target
        )
        if pending.batch == self._failed_batch or is_outdated:
            return
        # Replicas on a previous peer are not needed any more.
        self._current = {
            rank: queued
            for rank, queued in self._current.items()
            if queued.target == pending.target
        }
        if pending.batch == self._current_batch:
            self._current[pending.replica.rank] = pending
            return
        if self._is_preemptible:
            self._abandoned_batch = self._current_batch
            self._current_batch, self._current = None, {}
            self._is_preemptible = False
        self._waiting = {
            rank: queued for rank, queued in self._waiting.items() if queued.batch == pending.batch
        }
        self._waiting[pending.replica.rank] = pending

    def pop(self) -> PendingReplica | None:
        """Remove and return the next replica to send; None if nothing is queued.

        The rest of the save that is being sent comes first, the lowest rank first; then the waiting
        save, which is a later one. Does not block.
        """
        if not self._current and self._waiting:
            self._current, self._waiting = self._waiting, {}
            self._current_batch = next(iter(self._current.values())).batch
        return self._current.pop(min(self._current)) if self._current else None

    def is_abandoned(self, pending: PendingReplica) -> bool:
        """Whether the transfer of a popped replica should stop, in favor of a later save.

        The sender asks between the parts of a replica.
        """
        return pending.batch == self._abandoned_batch

    def mark_failed(self, pending: PendingReplica) -> None:
        """Record that a popped replica was not sent; drops the rest of its save.

        The sender calls it after an error. The replica is not sent again; the next save is.
        """
        if pending.batch == self._current_batch:
            # A peer without all ranks' replicas of a save cannot restore it: the rest is useless.
            self._current_batch, self._current = None, {}
            self._failed_batch = pending.batch
            self._is_preemptible = True


class ReplicaStore:
    """Replicas that this machine keeps for its peers, as files in `folder`. Thread-safe."""

    def __init__(self, folder: Path) -> None:
        """The folder is created with the first replica."""
        self.folder = folder
        self._rolled_back_before = ReplicaId(0, 0, 0)
        self._lock = threading.Lock()

    @property
    def replicas(self) -> dict[ReplicaId, Path]:
        """Files of the complete replicas, by replica id, the earliest first.

        Lists `folder` at each access; files may be deleted meanwhile. Empty if the folder is
        missing.
        """
        found = {}
        for path in self.folder.glob("*.segment"):
            round_number, rank, report = map(int, path.stem.split("-"))
            found[ReplicaId(round_number, report, rank)] = path
        return dict(sorted(found.items()))

    def reserve(self, replica: ReplicaId, local_ranks: Collection[int]) -> bool:
        """Delete what the replica makes superfluous; False if it is outdated or rolled back.

        Called when a peer offers `replica`: its transfer should begin only after True.
        `local_ranks` are the world ranks of all workers on the sending machine. Deletes before the
        transfer, because shared memory may not have room for both. Raises `OSError` if the folder
        cannot be created.
        """
        # Without parents: a parent that is missing means that this agent is shutting down.
        self.folder.mkdir(mode=0o700, exist_ok=True)
        with self._lock:
            stored = self.replicas
            if self._is_rejected(replica, stored):
                return False
            for superfluous in replicas_to_delete(replica, local_ranks, stored):
                stored[superfluous].unlink(missing_ok=True)
            return True

    def put(self, temp_path: Path, replica: ReplicaId) -> bool:
        """Move a completely received file to its place; False if it is rejected by now.

        `temp_path` must be in `folder`; after False it still exists, and the caller deletes it.
        Later replicas or a roll-back may have come since `reserve`.
        """
        # Checked again: a later replica or a roll-back may have come during the transfer.
        with self._lock:
            if self._is_rejected(replica, self.replicas):
                return False
            temp_path.replace(self.folder / replica.file_name)
            return True

    def roll_back(self, before: ReplicaId) -> None:
        """Delete replicas of snapshots before that one, and reject them from now on.

        Called when a worker reports that the training was rolled back to a checkpoint: a later
        round must not restart from what it discarded. `before` is the first report that may follow,
        with rank 0.
        """
        with self._lock:
            self._rolled_back_before = max(self._rolled_back_before, before)
            for replica, path in self.replicas.items():
                if replica < self._rolled_back_before:
                    path.unlink(missing_ok=True)

    def _is_rejected(self, replica: ReplicaId, stored: Iterable[ReplicaId]) -> bool:
        return replica < self._rolled_back_before or is_outdated(replica, stored)


def is_outdated(replica: ReplicaId, stored: Iterable[ReplicaId]) -> bool:
    """Whether `stored` has a later replica of that rank, or one of any rank of a later round."""
    return any(
        other.round > replica.round or (other.rank == replica.rank and other > replica)
        for other in stored
    )


def replicas_to_delete(
    replica: ReplicaId, local_ranks: Collection[int], stored: Collection[ReplicaId]
) -> Iterator[ReplicaId]:
    """Yield stored replicas that are superfluous once `replica` is received.

    These are all of earlier rounds, and those of earlier saves of the sending machine, whose
    workers have the world ranks `local_ranks`, except the last complete save. Deletes nothing
    itself.
    """
    ranks_by_report: dict[int, set[int]] = defaultdict(set)
    for other in stored:
        if other.round == replica.round and other.report < replica.report:
            ranks_by_report[other.report].add(other.rank)
    last_complete = max(
        (report for report, ranks in ranks_by_report.items() if ranks.issuperset(local_ranks)),
        default=None,
    )
    for other in stored:
        is_earlier = (
            other.rank in local_ranks
            and other.report < replica.report
            and other.report != last_complete
        )
        if other.round < replica.round or (other.round == replica.round and is_earlier):
            yield other
