"""Non-blocking access to the journal: reads and writes through background calls.

While the bucket hangs, the caller's event loop keeps running; it only makes no decisions until the
outcome of its last entry is known (docs/decisions/0023).

    state of an entry    | event                               | next
    ---------------------|-------------------------------------|--------------------------------------
    pending              | create started                      | in flight
    in flight            | created                             | appended, folded without a read
    in flight            | slot is taken (by it or another)    | reading
    in flight            | error or timeout                    | pending; offered again unchanged
    reading              | the slot's entry was read           | appended, or another entry won
    reading              | no entry was found at the slot      | pending; offered again unchanged
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from spotfit.control.background_calls import BackgroundCalls, BackgroundResult, retry_delay_s
from spotfit.control.journal_presence import JournalPresence
from spotfit.core.errors import AlreadyExistsError, StoreError
from spotfit.ledger.journal import JournalPage, Ledger
from spotfit.model.events import JournalEvent
from spotfit.model.view import View

_NEVER = float("inf")


@dataclass(slots=True)
class _PendingEntry:
    """An entry whose outcome is not known yet."""

    slot: int
    body: bytes
    in_flight: bool = False
    slot_taken: bool = False
    """Whether the store reported that the slot is taken; reading it shows by which entry."""


class JournalWriter:
    """Reads and writes the journal of one run for one process, through background calls.

    Owned by the event loop of an agent, or by a headless leader; `now` is that process's
    `Clock.now()` in seconds. An entry is offered again, byte for byte, until it is known which
    entry has its slot. A request that timed out may be executed late: it then finds the slot taken
    and has no effect.
    """

    def __init__(self, ledger: Ledger, background_calls: BackgroundCalls) -> None:
        self.ledger = ledger
        self._background_calls = background_calls
        self._presence = JournalPresence(ledger, background_calls)
        self._pending: _PendingEntry | None = None
        self._has_read_to_end = False
        self._read_requested = True
        self._read_in_flight = False
        self._highest_known_slot = -1
        """The highest slot of which an entry was received."""
        # Consecutive failed calls, of reads and writes together: both use the same store.
        self._failures = 0
        self._retry_at = -_NEVER
        self._store_error: StoreError | None = None
        self._fit_count = -1
        self._fit_started_at = 0.0
        """When the fit `_fit_count` has started at the latest, by this process's clock."""
        self.last_read_at = -_NEVER
        """When the journal was last read to its end."""
        self.last_failure_at = -_NEVER
        """When a request to the store last failed."""

    @property
    def view(self) -> View:
        """The state after the entries folded so far, which may be outdated unless `is_settled`.

        Raises `AssertionError` if no `FitStarted` entry was read yet; see `Ledger.journal_view`.
        """
        return self.ledger.view

    @property
    def is_settled(self) -> bool:
        """Whether decisions may be made from `view`, and `write` may be called.

        True if the journal was read to its end once and still exists, no entry of this process has
        an unknown outcome, and no later entry is known to exist.
        """
        return (
            self._has_read_to_end
            and self.missing_since is None
            and self._pending is None
            and self._highest_known_slot < self.ledger.journal_view.next_slot
        )

    @property
    def missing_since(self) -> float | None:
        """Since when the journal of the active run is missing in the store; None if it exists.

        In seconds of `Clock.now()`. It was deleted, or that of another run has its place: no entry
        may be written.
        """
        return self._presence.missing_since

    @property
    def missing_s(self) -> float:
        """For how many seconds the journal has been found missing; see `JournalPresence`."""
        return self._presence.missing_s

    @property
    def wake_at(self) -> float:
        """When `advance` must be called again, in seconds of `Clock.now()`.

        `math.inf` if nothing is due, or only calls in flight are awaited: `ThreadedCalls` wakes the
        event loop for these. A time in the past, also `-math.inf`, means at once.
        """
        must_offer = (
            self._pending is not None
            and not (self._pending.in_flight or self._pending.slot_taken)
            and self.missing_since is None
        )
        must_read = self._must_read and not self._read_in_flight
        return min(self._retry_at if must_offer or must_read else _NEVER, self._presence.wake_at)

    def elapsed_s(self, now: float) -> float:
        """Return how long the fit has lasted at least, in seconds by monotonic clocks.

        The time that an entry records, and the time since this process has received it: durations
        of several processes are added, and no clocks of two machines are compared
        (docs/decisions/0053). `now` must not decrease.
        """
        view = self.ledger.journal_view
        started_at = now - view.elapsed_s
        if view.fit_count != self._fit_count:
            self._fit_count, self._fit_started_at = view.fit_count, started_at
        self._fit_started_at = min(self._fit_started_at, started_at)
        return now - self._fit_started_at

    def request_read(self) -> None:
        """Request a read of the journal, which the next `advance` starts; does no I/O itself.

        A read that is in flight already does not count, because it may miss later entries. Repeated
        requests before `advance` cause one read.
        """
        self._read_requested = True

    def apply_entry(self, slot: int, body: bytes) -> None:
        """Fold the encoded entry `body` of `slot`, which the leader has sent to this process.

        Entries that are folded already are ignored. If entries before it are missing, it is not
        folded and `advance` reads them; `is_settled` is False until then. An entry that is not
        authentic is read from the bucket instead. Raises `JournalError` if the entry cannot be
        decoded or does not fit. Does no I/O.
        """
        # What such a copy says may differ from the bucket; a cancellation is not authentic either.
        if not self.ledger.is_authentic(slot, body):
            self.request_read()
            return
        self._highest_known_slot = max(self._highest_known_slot, slot)
        self.ledger.apply_entry(slot, body)

    def write(self, event: JournalEvent, now: float) -> None:
        """Offer an event that was decided from `view` for the next slot of the journal.

        Requires `is_settled` (`AssertionError` otherwise). With `ThreadedCalls` it only starts the
        write. The outcome is known once `is_settled` is True again: `view` then shows whether this
        entry or another one has the slot. The event may thus be dropped; decide again from the new
        view. Errors of the store are raised by `advance`, not here; `JournalError` may be raised.
        """
        assert self.is_settled, "the outcome of the previous entry is not known yet"
        # Encoded once: a repeated offer must be byte for byte the same entry.
        self._pending = _PendingEntry(
            self.ledger.journal_view.next_slot,
            self.ledger.encode_entry(event, round(self.elapsed_s(now), 1)),
        )
        self._advance(now)

    def advance(self, now: float) -> None:
        """Process the results of background calls, and start the reads and writes that are due.

        Called by the owner in every tick, and at `wake_at`. Raises the `StoreError` of a failed
        call once; the call is retried after 0.1 to 2 s, so the caller may log it and continue.
        Raises `JournalError` if an entry cannot be decoded or does not fit.
        """
        self._advance(now)
        self._presence.check_if_due(now)
        self.elapsed_s(now)  # at the time at which the entries were received
        error, self._store_error = self._store_error, None
        if error is not None:
            raise error

    def _advance(self, now: float) -> None:
        pending = self._pending
        if pending is not None and pending.slot < self.ledger.journal_view.next_slot:
            # The slot's entry was received from another process or by a read.
            self._pending = None
        elif pending is not None and (
            pending.in_flight
            or not (pending.slot_taken or now < self._retry_at or self.missing_since is not None)
        ):
            create = partial(self.ledger.create_entry, pending.slot, pending.body)
            result = self._background_calls.run(f"append {pending.slot}", create)
            pending.in_flight = result is None
            if result is not None:
                self._on_create_result(pending, result, now)
        # A page need not reach the end of the journal, so continue while results are available.
        while self._read_in_flight or (self._must_read and now >= self._retry_at):
            if not self._read_in_flight:
                # Cleared when the read starts: a request that follows needs a read of its own.
                self._read_in_flight, self._read_requested = True, False
            read = partial(self.ledger.read, self.ledger.journal_view.next_slot)
            result = self._background_calls.run("read", read)
            if result is None:
                return
            self._read_in_flight = False
            if result.error is not None:
                self._read_requested = True
                self._record_failure(result.error, now)
                return
            self._apply_page(result.value, now)

    def _on_create_result(
        self, pending: _PendingEntry, result: BackgroundResult, now: float
    ) -> None:
        match result.error:
            case None:
                # The slot holds exactly these bytes, so they are folded without reading them back.
                self._failures = 0
                self.ledger.apply_entry(pending.slot, pending.body)
                self._pending = None
            case AlreadyExistsError():
                # Possibly taken by this very entry, if the answer to an earlier request was lost.
                self._retry_at = now
                pending.slot_taken = True
            case error:
                self._record_failure(error, now)

    def _apply_page(self, page: JournalPage, now: float) -> None:
        if not self.ledger.apply_page(page):
            self._read_requested = True
            return
        self._has_read_to_end, self.last_read_at = True, now
        pending = self._pending
        if pending is not None and pending.slot < self.ledger.journal_view.next_slot:
            self._pending = pending = None
        is_slot_free = pending is not None and pending.slot_taken
        if pending is not None and is_slot_free:
            # The answer to the create was wrong, as object stores' answers to conflicts can be, or
            # the store does not return the entry yet. The same bytes may be offered in both cases.
            pending.slot_taken = False
        if is_slot_free or (self._must_read and not self._read_requested):
            # The store reported an entry but does not return it (yet).
            self._back_off(now)
        else:
            self._failures = 0

    def _record_failure(self, error: Exception, now: float) -> None:
        if not isinstance(error, StoreError):
            raise error
        # Kept for `advance`: this may have been called by `write`, which must not raise it.
        self._store_error = error
        self.last_failure_at = now
        self._back_off(now)

    def _back_off(self, now: float) -> None:
        self._retry_at = now + retry_delay_s(self._failures)
        self._failures += 1

    @property
    def _must_read(self) -> bool:
        is_behind = self._highest_known_slot >= self.ledger.journal_view.next_slot
        is_slot_taken = self._pending is not None and self._pending.slot_taken
        return self._read_requested or is_behind or is_slot_taken
