"""Whether the journal of a run still exists: its storage may be deleted while the run is active.

A reader takes a deleted journal for one without new entries, and a store creates entries of any
slot. A process that did not check would train, wait or request machines without end.
"""

from __future__ import annotations

from functools import partial

from spotfit.control.background_calls import BackgroundCalls
from spotfit.core.errors import BucketNotFoundError, NotFoundError
from spotfit.host import log
from spotfit.ledger.journal import Ledger
from spotfit.model.view import View

# A request a minute costs 0.02 USD a month. Often while it is missing: a directory may have been
# unmounted for a moment.
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
        self._found_missing_at = 0.0

    def check_if_due(self, now: float) -> None:
        """Start a check that is due, and collect the result of the one in progress.

        Nothing is checked before the first entry was read, and after the end of the fit. Of errors
        only a deleted bucket means that it is missing: outages and denied requests show nothing.
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
        if result.error is None and result.value:
            self.missing_since, self._last_slot = None, view.next_slot - 1
        elif result.error is None or isinstance(result.error, (NotFoundError, BucketNotFoundError)):
            self._record_missing(now, result.error)
        is_missing = self.missing_since is not None
        self._check_at = now + (_RECHECK_INTERVAL_S if is_missing else _CHECK_INTERVAL_S)

    def _record_missing(self, now: float, error: BaseException | None) -> None:
        self._found_missing_at = now
        if self.missing_since is not None:
            return
        self.missing_since = now
        log.error(
            "journal.missing",
            url=self._ledger.store.url,
            reason=str(error or "that of the active run was deleted or replaced"),
            do="restore the directory, or cancel a run before its directory is deleted",
        )

    @property
    def missing_s(self) -> float:
        """For how many seconds the journal was missing when it was last found missing; else 0.

        It does not grow while no check has a result: an outage must not end a run.
        """
        return 0.0 if self.missing_since is None else self._found_missing_at - self.missing_since

    @property
    def wake_at(self) -> float:
        """When a missing journal is checked again; infinity while it is present.

        Then an owner that calls `check_if_due` every few seconds is early enough.
        """
        is_due = self.missing_since is not None and not self._is_checking
        return self._check_at if is_due and self._check_at is not None else float("inf")
