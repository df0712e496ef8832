"""Whether the journal of a run still exists: its storage may be deleted while the run is active.

A reader takes a deleted journal for one without new entries, and a store creates entries of any
slot. A process that did not check would train, wait or request machines without end.
"""

from __future__ import annotations

from functools import partial

from spotfit.control.background_calls import BackgroundCalls
from spotfit.core.errors import StorePermissionError, TransientStoreError
from spotfit.host import log
from spotfit.ledger.journal import Ledger
from spotfit.model.view import View

# A request a minute costs 0.02 USD a month. Often while it is missing: a directory may have been
# unmounted or moved for a moment.
_CHECK_INTERVAL_S, _RECHECK_INTERVAL_S = 60.0, 5.0


class JournalPresence:
    """The checks of one process, by background calls; `now` is its `Clock.now()` in seconds."""

    def __init__(self, ledger: Ledger, background_calls: BackgroundCalls) -> None:
        self._ledger = ledger
        self._background_calls = background_calls
        self._is_checking = False
        self._check_at: float | None = None
        """When the next check is due; None before the run was read."""
        self._last_slot = 0
        """The last entry of which this process knew when the journal was last present."""
        self.missing_since: float | None = None
        """When the journal was first found missing, None while it is present."""

    def check_if_due(self, now: float) -> None:
        """Start a check that is due, and collect the result of the one in progress.

        Nothing is checked before the first entry was read, and after the end of the fit. An error
        that may end by itself shows nothing; others, such as a deleted bucket, mean that it is
        missing.
        """
        view = self._ledger.journal_view
        if not isinstance(view, View) or view.fit_end is not None:
            self._check_at, self.missing_since = None, None
            return
        if self._check_at is None:
            self._check_at, self._last_slot = now + _CHECK_INTERVAL_S, view.next_slot - 1
        if not self._is_checking and now < self._check_at:
            return
        has_journal = partial(self._ledger.has_journal, self._last_slot)
        result = self._background_calls.run("journal presence", has_journal)
        self._is_checking = result is None
        if result is None:
            return
        may_be_present = isinstance(result.error, (TransientStoreError, StorePermissionError))
        if result.error is None and result.value:
            self.missing_since, self._last_slot = None, view.next_slot - 1
        elif not may_be_present and self.missing_since is None:
            self.missing_since = now
            log.error(
                "journal.missing",
                url=self._ledger.store.url,
                reason=str(result.error or "that of the active run was deleted or replaced"),
                do="restore the directory, or cancel a run before its directory is deleted",
            )
        is_missing = self.missing_since is not None
        self._check_at = now + (_RECHECK_INTERVAL_S if is_missing else _CHECK_INTERVAL_S)

    @property
    def wake_at(self) -> float:
        """When a missing journal is checked again; infinity while it is present.

        Then an owner that calls `check_if_due` every few seconds is early enough.
        """
        is_due = self.missing_since is not None and not self._is_checking
        return self._check_at if is_due and self._check_at is not None else float("inf")
