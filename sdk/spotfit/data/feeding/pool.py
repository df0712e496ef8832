"""`FeederPool`: hands the slices that a worker needs next to its feeders, and takes the results.

| state of a slice | event                                        | next                           |
|------------------|----------------------------------------------|--------------------------------|
| queued           | a feeder has credit                          | sent                           |
| sent             | reply                                        | finished                       |
| sent             | its connection breaks                        | queued, first                  |
| sent             | two feeders were lost while they executed it | executed by the waiting thread |
| sent             | late: awaited for more than 4 medians        | also queued, first, for others |
| queued or sent   | awaited, and no feeder can return it in time | executed by the waiting thread |
| any              | `cancel`                                     | dropped                        |

A feeder that has returned nothing for that long is silent: no thread waits for it until it returns
a slice. One that stays silent is disconnected, and its owner replaces or connects it again.

A slice is a pure function of its task, so the first result counts, from wherever it comes. An
exception in a feeder is not raised: the worker executes the task itself, and what that raises has
the traceback of the user's function.
"""

from __future__ import annotations

import statistics
import threading
from collections import deque
from collections.abc import Callable

import pyarrow as pa

from spotfit.core.clock import Clock
from spotfit.core.errors import IntegrityError
from spotfit.data.feeding.link import FeederLink
from spotfit.data.feeding.messages import FailureReply, SliceReply
from spotfit.data.loading.slice_tasks import PendingSlice, SliceTask
from spotfit.host import log

# A slice that takes four times the median is worth doing twice, as backup tasks of MapReduce.
_LATE_FACTOR = 4.0
# Pauses of a garbage collector or a scheduler are no reason.
_MIN_LATE_S = 0.5
# Until there is a median: feeders import the libraries of the user and open the data first.
_FIRST_LATE_S = 60.0
_MIN_DURATIONS = 5
_MEDIAN_OF = 31
_CREDIT = 4
"""Slices that one feeder has at a time by default, the one that it executes included."""
_REQUESTED_CREDITS = 2
"""How much is requested ahead, as a multiple of the credit of all feeders."""
_MAX_BYTES = 512 * 2**20
"""Results that are stored or expected at most, unless the training waits for one of them."""
_LOOKAHEAD = 64
"""How many of the queued slices a feeder looks through for one whose window it has read."""
_IDLE_CHECK_S = 1.0
"""Interval at which a connection without requests is checked for its end."""
_SILENT_MAX_S = 600.0
"""How long a feeder may return nothing of what it has; longer than the import of any library."""
_MAX_LOSSES = 2
"""Feeders that may be lost while they execute a slice, which may be what ends them."""
_MAX_FAILURES = 3
"""Exceptions in a row after which a feeder gets no further slice."""


class _Feeder:
    """One connected feeder, and what it has been given."""

    def __init__(self, link: FeederLink) -> None:
        self.link = link
        self.held: dict[int, PendingSlice] = {}
        self.is_leaving = False
        """Whether it gets no further slices."""
        self.failures = 0
        self.progress_at = 0.0
        """When it last returned a slice, or got one while it had none."""


class FeederPool:
    """The feeders of one worker process. All methods may be called from any thread.

    Args:
        execute: Executes a task in this process.
        prefetch: Begins to read what a task needs, in another thread. Only one of both functions is
            called at a time.
        credit: Slices that one feeder has at a time.
        max_bytes: Bound of the results that are stored or expected.
    """

    def __init__(
        self,
        execute: Callable[[SliceTask], pa.Table],
        clock: Clock,
        *,
        prefetch: Callable[[SliceTask], None] = lambda _task: None,
        credit: int = _CREDIT,
        max_bytes: int = _MAX_BYTES,
    ) -> None:
        self._execute = execute
        self._prefetch = prefetch
        self._clock = clock
        self._credit = credit
        self._max_bytes = max_bytes
        self._changed = threading.Condition()
        self._execution_lock = threading.Lock()
        self._queue: deque[PendingSlice] = deque()
        self._feeders: list[_Feeder] = []
        self._last_number = 0
        self._open_count = 0
        """Slices that were requested and neither taken nor cancelled."""
        self._stored_bytes = 0
        self._durations: deque[float] = deque(maxlen=_MEDIAN_OF)
        self._sizes: deque[int] = deque(maxlen=_MEDIAN_OF)
        self._lane_owners: dict[tuple[str, int], _Feeder] = {}
        """The feeder that has last got a slice of each lane, by dataset and lane."""
        self._is_closed = False
        self.own_count = 0
        """Number of slices that this process has executed itself."""

    # --- for the loader ------------------------------------------------------------------------

    def request(self, task: SliceTask) -> PendingSlice:
        """Queue a slice that will be needed after all that were requested before; returns at once.

        Each one is passed to `take` or `cancel`.
        """
        with self._changed:
            self._last_number += 1
            pending = PendingSlice(self._last_number, task)
            self._queue.append(pending)
            self._open_count += 1
            self._changed.notify_all()
            return pending

    @property
    def has_credit(self) -> bool:
        """Whether further slices should be requested: the feeders might have nothing to do next."""
        with self._changed:
            feeders = max(len(self._active_feeders()), 1)
            return self._open_count < _REQUESTED_CREDITS * self._credit * feeders

    def take(self, pending: PendingSlice) -> pa.Table:
        """Return the rows of a slice; waits for a feeder, or executes the task in this thread.

        Raises what the task raises in this process. Call it once for each slice.
        """
        with self._changed:
            pending.awaited_at = self._clock.now()
            self._remove_hung_feeders()
            self._changed.notify_all()
            self._wait(pending)
            table = pending.table
            self._open_count -= 1
            self._drop(pending)
            # Feeders read the next ones, if there are any.
            queued = [] if self._responsive_feeders() else list(self._queue)[: self._credit]
            self.own_count += table is None
        if table is not None:
            return table
        with self._execution_lock:
            for one in (pending, *queued):
                self._prefetch(one.task)
            return self._execute(pending.task)

    def cancel(self, pending: PendingSlice) -> None:
        """Drop a slice that is not needed any more; a feeder may still return it."""
        with self._changed:
            self._open_count -= 1
            self._drop(pending)

    def close(self) -> None:
        """Close the connections to all feeders. Slices that are taken later are executed here."""
        with self._changed:
            self._is_closed = True
            feeders, self._feeders = self._feeders, []
            self._changed.notify_all()
        for feeder in feeders:
            feeder.link.close()

    # --- for the owners of connections ---------------------------------------------------------

    def serve(self, link: FeederLink) -> int:
        """Give slices to the feeder at the other end of `link` until its connection ends.

        Blocks; call it in a thread of its own. Returns the number of slices that the feeder gave,
        after `retire`, after `close`, and when the connection breaks: then other feeders get the
        slices that it has not returned.
        """
        feeder = _Feeder(link)
        with self._changed:
            if self._is_closed:
                link.close()
                return 0
            self._feeders.append(feeder)
            self._changed.notify_all()
        reason, replies = "no further slices are needed of it", 0
        try:
            while (tasks := self._next_tasks(feeder)) is not None:
                for pending in tasks:
                    link.send(pending.number, pending.task)
                reply = link.receive()
                self._record(feeder, reply)
                replies += isinstance(reply, SliceReply)
        except (OSError, IntegrityError) as error:
            reason = str(error)
        finally:
            self._remove(feeder, reason)
            link.close()
        return replies

    def retire(self, link: FeederLink) -> None:
        """Let `serve` return once the feeder has returned the slices that it has."""
        with self._changed:
            for feeder in self._feeders:
                feeder.is_leaving |= feeder.link is link
            self._changed.notify_all()

    @property
    def feeder_count(self) -> int:
        """Number of connected feeders that get slices."""
        with self._changed:
            return sum(not feeder.is_leaving for feeder in self._feeders)

    # --- under the lock ------------------------------------------------------------------------

    def _wait(self, pending: PendingSlice) -> None:
        """Wait until the slice is finished, or this process is to execute it."""
        while not pending.is_done and not pending.has_failed and not self._is_closed:
            others = [one for one in self._responsive_feeders() if one not in pending.holders]
            if not pending.holders and not others:
                return
            late_in_s = self._due_since(pending) + self._late_s() - self._clock.now()
            if late_in_s > 0:
                self._changed.wait(late_in_s)
            elif pending in self._queue or not others:
                log.warning("feeder.late", feeders=_names(pending), task=str(pending.task))
                return
            else:
                pending.queued_again_at = self._clock.now()
                self._queue.appendleft(pending)
                self._changed.notify_all()

    def _due_since(self, pending: PendingSlice) -> float:
        if not pending.holders:
            assert pending.awaited_at is not None, "a thread waits for it"
            return pending.awaited_at
        return pending.queued_again_at if pending in self._queue else pending.sent_at

    def _late_s(self) -> float:
        if len(self._durations) < _MIN_DURATIONS:
            return _FIRST_LATE_S
        return max(_LATE_FACTOR * statistics.median(self._durations), _MIN_LATE_S)

    def _active_feeders(self) -> list[_Feeder]:
        return [feeder for feeder in self._feeders if not feeder.is_leaving]

    def _responsive_feeders(self) -> list[_Feeder]:
        late_s = self._late_s()
        return [one for one in self._active_feeders() if not self._is_silent(one, late_s)]

    def _is_silent(self, feeder: _Feeder, limit_s: float) -> bool:
        """Whether it has returned nothing of what it has for that long."""
        return bool(feeder.held) and self._clock.now() - feeder.progress_at >= limit_s

    def _remove_hung_feeders(self) -> None:
        limit_s = max(_SILENT_MAX_S, self._late_s())
        for feeder in [one for one in self._feeders if self._is_silent(one, limit_s)]:
            self._remove(feeder, f"it has returned nothing for {limit_s:.0f} s")
            feeder.link.close()

    def _drop(self, pending: PendingSlice) -> None:
        pending.is_done = True
        pending.table = None
        self._stored_bytes -= pending.size_bytes
        pending.size_bytes = 0
        if pending in self._queue:
            self._queue.remove(pending)
        self._changed.notify_all()

    def _next_tasks(self, feeder: _Feeder) -> list[PendingSlice] | None:
        """Wait for tasks that a feeder is to be sent now; None if it gets no further ones.

        [] if it has others that it has not returned.
        """
        with self._changed:
            while True:
                if self._is_closed or (feeder.is_leaving and not feeder.held):
                    return None
                tasks = [] if feeder.is_leaving else self._assign(feeder)
                if tasks or feeder.held:
                    return tasks
                if not self._changed.wait(_IDLE_CHECK_S):
                    feeder.link.check_idle()

    def _assign(self, feeder: _Feeder) -> list[PendingSlice]:
        tasks = []
        while len(feeder.held) < self._credit and (pending := self._choose(feeder)) is not None:
            self._queue.remove(pending)
            pending.sent_at = self._clock.now()
            if not feeder.held:
                feeder.progress_at = pending.sent_at
            feeder.held[pending.number] = pending
            pending.holders.append(feeder)
            self._lane_owners[_lane(pending.task)] = feeder
            tasks.append(pending)
        return tasks

    def _choose(self, feeder: _Feeder) -> PendingSlice | None:
        """Return the queued slice that this feeder is to execute next; None if there is none.

        The first one whose lane no other feeder reads: that one has the window in memory. A feeder
        without work takes the first one of any lane.
        """
        first = None
        for pending in list(self._queue)[:_LOOKAHEAD]:
            if feeder in pending.holders or pending.has_failed or not self._has_room(pending):
                continue
            first = first or pending
            owner = self._lane_owners.get(_lane(pending.task))
            if owner in (None, feeder) or owner not in self._feeders or pending.holders:
                return pending
        return None if feeder.held else first

    def _has_room(self, pending: PendingSlice) -> bool:
        """Whether the result may be expected within the bound of bytes."""
        if pending.awaited_at is not None:
            return True
        sent = sum(len(feeder.held) for feeder in self._feeders)
        size = statistics.fmean(self._sizes) if self._sizes else 0.0
        return self._stored_bytes + (sent + 1) * size <= self._max_bytes

    def _record(self, feeder: _Feeder, reply: SliceReply | FailureReply) -> None:
        with self._changed:
            pending = feeder.held.pop(reply.number, None)
            if pending is None:
                raise IntegrityError(f"A feeder answered the unknown request {reply.number}.")
            pending.holders.remove(feeder)
            feeder.progress_at = self._clock.now()
            if isinstance(reply, FailureReply):
                self._record_failure(feeder, pending, reply)
            else:
                feeder.failures = 0
                self._durations.append(self._clock.now() - pending.sent_at)
                self._sizes.append(reply.size_bytes)
                self._store(pending, reply)
            self._changed.notify_all()

    def _store(self, pending: PendingSlice, reply: SliceReply) -> None:
        if pending.is_done:
            return
        pending.is_done, pending.table = True, reply.table
        pending.size_bytes = reply.size_bytes
        self._stored_bytes += reply.size_bytes
        if pending in self._queue:
            self._queue.remove(pending)

    def _record_failure(self, feeder: _Feeder, pending: PendingSlice, reply: FailureReply) -> None:
        pending.has_failed = True
        feeder.failures += 1
        log.warning("feeder.task_failed", feeder=feeder.link.name, traceback=reply.traceback_text)
        if feeder.failures >= _MAX_FAILURES:
            feeder.is_leaving = True

    def _remove(self, feeder: _Feeder, reason: str) -> None:
        with self._changed:
            if feeder not in self._feeders:
                return  # closed, or removed by `_remove_hung_feeders`
            self._feeders.remove(feeder)
            lost = [pending for pending in feeder.held.values() if not pending.is_done]
            self._queue_lost(feeder)
            self._lane_owners = {
                lane: owner for lane, owner in self._lane_owners.items() if owner is not feeder
            }
            self._changed.notify_all()
            log.info("feeder.disconnected", feeder=feeder.link.name, reason=reason, tasks=len(lost))

    def _queue_lost(self, feeder: _Feeder) -> None:
        """Queue the slices of a lost feeder first, in their order."""
        held = list(feeder.held.values())
        feeder.held.clear()
        for pending in held:
            pending.holders.remove(feeder)
        for pending in held[:1]:  # which it has executed: it does so in the order of requests
            pending.losses += 1
            pending.has_failed |= pending.losses >= _MAX_LOSSES
        for pending in reversed(held):
            if not pending.is_done and not pending.has_failed and pending not in self._queue:
                self._queue.appendleft(pending)


def _lane(task: SliceTask) -> tuple[str, int]:
    return task.dataset, task.lane


def _names(pending: PendingSlice) -> str:
    return ", ".join(feeder.link.name for feeder in pending.holders)
