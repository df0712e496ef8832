"""`Collectives`: the incomplete collective operations of one round.

Ranks join a collective and wait for an answer. Every waiting rank is answered: when all ranks have
joined, when the timeout expires, or as soon as a missing rank cannot join any more. This module
only keeps the state; `round_coordinator` decides which ranks are required.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from spotfit.core.units import format_ranks
from spotfit.protocol.worker_agent import (
    LEAVE_GROUP,
    CollectiveWaiting,
    RankZeroBroadcastResult,
    ToWorker,
)

OutgoingFrame = tuple[int | None, ToWorker]
"""A frame for one rank, or for all ranks (None)."""

REPORT_KIND = "report"
"""The kind under which ranks wait for the name of a reported checkpoint."""


class CollectiveKey(NamedTuple):
    """The `seq`-th collective of a kind."""

    kind: str
    seq: int

    def __str__(self) -> str:
        return f"{self.kind} (number {self.seq + 1})"


FindMissingRanks = Callable[[CollectiveKey], set[int]]
"""Returns the required ranks that have not joined the collective."""


class Collectives:
    """The state of the collectives of one round that at least one rank has joined.

    A collective is aborted after `timeout_s` (None: never). Every `warn_s` the lowest waiting rank
    receives a `CollectiveWaiting`, so that only one rank logs the warning. `now` is event-loop time
    in seconds; ranks are global.
    """

    def __init__(self, world_size: int, *, timeout_s: float | None, warn_s: float) -> None:
        self._world_size = world_size
        self._timeout_s = timeout_s
        self._warn_s = warn_s
        self._pending: dict[CollectiveKey, _PendingCollective] = {}
        self._blocked_at: dict[int, CollectiveKey] = {}
        """Ranks whose training thread is blocked, with the collective that they wait for."""

    def join(
        self,
        rank: int,
        key: CollectiveKey,
        now: float,
        *,
        value: bytes = b"",
        is_blocking: bool = False,
    ) -> None:
        """Add a rank to the collective `key`, which is opened by its first rank.

        The timeout counts from the `now` of that rank. `value`: what the rank contributes.
        `is_blocking`: its training thread waits for the answer, which deadlock detection needs.
        """
        # The timeout starts with the first rank: the others may never arrive.
        waiting = self._pending.setdefault(key, _PendingCollective(now, now))
        waiting.values[rank] = value
        if is_blocking:
            self._blocked_at[rank] = key

    @property
    def pending(self) -> tuple[CollectiveKey, ...]:
        """The collectives that at least one rank has joined and that were not closed; a copy."""
        return tuple(self._pending)

    def joined_ranks(self, key: CollectiveKey) -> set[int]:
        """Return the ranks that have joined; empty for an unknown or closed collective."""
        waiting = self._pending.get(key)
        return set(waiting.values) if waiting else set()

    def close(self, key: CollectiveKey) -> Mapping[int, bytes]:
        """Remove a collective, for example because it is complete.

        Returns the value of each rank that had joined; empty for an unknown collective.
        """
        if key not in self._pending:
            return {}
        values = self._pending.pop(key).values
        for rank in values:
            # The rank may be blocked in another collective: not every join blocks.
            if self._blocked_at.get(rank) == key:
                del self._blocked_at[rank]
        return values

    def check_timeouts(self, now: float, find_missing: FindMissingRanks) -> list[OutgoingFrame]:
        """Abort collectives after the timeout; warn about those that have waited for long.

        Returns the frames for workers: an abort for each rank that waits in an aborted collective,
        and a warning for the lowest rank that waits in one of the others.
        """
        frames: list[OutgoingFrame] = []
        # A copy: `_abort` removes the collective.
        for key, waiting in list(self._pending.items()):
            # Ranks that leave the group wait for those that still train (decision 0071).
            timeout_s = None if key.kind == LEAVE_GROUP else self._timeout_s
            if timeout_s is not None and now - waiting.started_at >= timeout_s:
                frames += self._abort(key, find_missing)
            elif now - waiting.warned_at >= self._warn_s:
                waiting.warned_at = now
                missing_ranks = tuple(sorted(find_missing(key)))
                warning = CollectiveWaiting(
                    kind=key.kind, missing_ranks=missing_ranks, waited_s=now - waiting.started_at
                )
                frames.append((min(waiting.values), warning))
        return frames

    def next_timeout_check(self) -> float | None:
        """Event-loop time in seconds to call `check_timeouts`; None if no collective is pending."""
        if not self._pending:
            return None
        warn_at = min(waiting.warned_at for waiting in self._pending.values()) + self._warn_s
        started_at = [
            one.started_at for key, one in self._pending.items() if key.kind != LEAVE_GROUP
        ]
        if self._timeout_s is None or not started_at:
            return warn_at
        return min(warn_at, min(started_at) + self._timeout_s)

    def abort_deadlocked(
        self, returned_ranks: set[int], find_missing: FindMissingRanks
    ) -> list[OutgoingFrame]:
        """Abort collectives that cannot complete; return the aborts to send, each with its reason.

        One cannot if a required rank is in `returned_ranks`: its training function has returned. If
        all ranks that have not returned are blocked, they wait in different collectives, and all
        collectives are aborted.
        """
        # The usual case: called for every frame.
        if not self._pending:
            return []
        frames: list[OutgoingFrame] = []
        if returned_ranks:
            # A rank that has returned never joins again, so waiting for the timeout is useless.
            for key in list(self._pending):
                if returned := find_missing(key) & returned_ranks:
                    reason = (
                        f"{format_ranks(returned)} returned from the training function"
                        " without calling it"
                    )
                    frames += self._abort(key, find_missing, reason)
        # A complete collective is removed at once: if all ranks are still blocked, none can be.
        if self._blocked_at and len(self._blocked_at.keys() | returned_ranks) == self._world_size:
            ranks_by_key: dict[CollectiveKey, list[int]] = {}
            for rank, key in sorted(self._blocked_at.items()):
                ranks_by_key.setdefault(key, []).append(rank)
            places = [f"{format_ranks(ranks)} in {key}" for key, ranks in ranks_by_key.items()]
            reason = f"deadlock: ranks wait in different collectives: {', '.join(places)}"
            for key in list(self._pending):
                frames += self._abort(key, find_missing, reason)
        return frames

    def _abort(
        self, key: CollectiveKey, find_missing: FindMissingRanks, reason: str = ""
    ) -> list[OutgoingFrame]:
        result = RankZeroBroadcastResult(
            kind=key.kind,
            seq=key.seq,
            missing_ranks=tuple(sorted(find_missing(key))),
            reason=reason,
        )
        return [(rank, result) for rank in self.close(key)]


@dataclass
class _PendingCollective:
    started_at: float
    warned_at: float
    values: dict[int, bytes] = field(default_factory=dict)
