"""`JournalPoller`: decides when an agent reads the journal, and measures how long it could not."""

from __future__ import annotations

from spotfit.control.journal_writer import JournalWriter
from spotfit.core.errors import StoreError
from spotfit.host import log
from spotfit.model.spec import RunTiming
from spotfit.model.view import View

# Before the run is known and after the leader was lost: an election should take milliseconds.
FAST_POLL_S = 0.05
_FAST_POLL_DURATION_S = 3.0
# Lower bound on the leader's poll interval, whatever the run's timing.
_LEADER_POLL_S = 0.1


class JournalPoller:
    """The reads of one agent. `writer` performs them, together with the writes of a leader.

    `now` and returned times are event-loop seconds.
    """

    def __init__(self, writer: JournalWriter) -> None:
        self._writer = writer
        self.polled_at = float("-inf")
        """When the last read was requested."""
        self._fast_poll_until = 0.0
        self._started_at = float("inf")
        self._store_error: str | None = None
        """The last error of the store, until a read succeeds: each error is logged once."""

    @property
    def timing(self) -> RunTiming:
        """The timing of the run; the default before the journal was first read."""
        view = self._writer.ledger.journal_view
        return view.spec.timing if isinstance(view, View) else RunTiming()

    @property
    def last_contact_at(self) -> float:
        """Event-loop time in seconds of the last read of the journal, else of the first `poll`.

        Infinity before the first `poll`. The agent exits if it is too long ago.
        """
        # A machine may boot while the bucket is unavailable: count from its start at the earliest.
        return max(self._started_at, self._writer.last_read_at)

    def poll(self, now: float, *, is_leading: bool, is_connected: bool) -> None:
        """Request a read of the journal if one is due, and advance the writer; called at each tick.

        Does not block: reads and writes are background calls. Errors of the store are logged and
        never stop the agent; only `orphan_timeout_s` without any contact does. Raises
        `JournalError` if an entry cannot be decoded.
        """
        self._started_at = min(self._started_at, now)
        if now >= self.next_poll_at(now, is_leading=is_leading, is_connected=is_connected):
            self.polled_at = now
            self._writer.request_read()
        try:
            self._writer.advance(now)
            if self._writer.last_read_at == now:
                self._store_error = None
        except StoreError as error:
            if self._store_error != error.message:
                self._store_error = error.message
                log.warning("store.error", reason=error.message)

    def next_poll_at(self, now: float, *, is_leading: bool, is_connected: bool) -> float:
        """Event-loop time in seconds of the next read; in the past if one is overdue.

        Agents that receive entries from the leader (`is_connected`) read rarely, others often.
        """
        interval_s = self.timing.journal_poll_interval_s
        if not isinstance(self._writer.ledger.journal_view, View):
            return self.polled_at + FAST_POLL_S
        if now < self._fast_poll_until:
            # Scaled with the run's interval: the requests of 1,000 agents add up in the bucket.
            return self.polled_at + max(FAST_POLL_S, interval_s / 5)
        if is_leading:
            # Other processes write entries only to cancel the run or to elect another leader.
            return self.polled_at + max(_LEADER_POLL_S, interval_s)
        return self.polled_at + (self.timing.lease_timeout_s if is_connected else interval_s)

    def start_fast_polling(self, now: float) -> None:
        """Read the journal at the next `poll`, and often for 3 s, because a new entry is likely.

        Called when the leader was lost or has rejected this agent.
        """
        self._fast_poll_until = now + _FAST_POLL_DURATION_S
        self.polled_at = float("-inf")
