"""`CallbackDelivery`: passes reports to the user's callbacks, at least once each.

Each leader stores how far its callbacks have come. After a change of the leader, the next one calls
them again for the stored reports after that one: those whose calls were lost with the process, and
those of the last second, whose progress was not stored yet.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from itertools import groupby
from operator import itemgetter

import msgspec
from msgspec.structs import replace

from spotfit.agent.ports import CallbackRunner
from spotfit.agent.report_matching import MatchedReport
from spotfit.control.background_calls import BackgroundCalls, RetryingCalls
from spotfit.core.codec import DECODE_ERRORS, decoder, encode
from spotfit.core.errors import ConfigError, IntegrityError, NotFoundError
from spotfit.host import log
from spotfit.ledger import keys
from spotfit.ledger.journal import Ledger
from spotfit.model.view import View
from spotfit.security.object_mac import strip_mac
from spotfit.store.api import Store
from spotfit.store.retry import repeat_read

# One request a second per run, however often the training function reports.
_WRITE_INTERVAL_S = 1.0

ReportPosition = tuple[int, int]
"""The round of a report, and its number in the round."""


class _Progress(msgspec.Struct, frozen=True, kw_only=True):
    """The object `.spotfit/callbacks/<agent>.json`: the last report whose callbacks returned."""

    round: int
    report_index: int


class _StoredReport(msgspec.Struct, frozen=True, kw_only=True):
    """A line of `ReportSink`."""

    round: int
    report_index: int
    checkpoint: str | None
    metrics: msgspec.Raw
    other_ranks: tuple[msgspec.Raw, ...] = ()

    @property
    def position(self) -> ReportPosition:
        return self.round, self.report_index


_progress_decoder, _report_decoder = decoder(_Progress), decoder(_StoredReport)
# ConfigError: anyone may write an object whose key spotfit would not. Repeating these reads would
# delay the callbacks, and thereby the end of the run, forever.
_UNREADABLE = (NotFoundError, ConfigError, IntegrityError, *DECODE_ERRORS)


class CallbackDelivery:
    """The callbacks of one term of leadership. No method blocks; `now` is event-loop seconds."""

    def __init__(
        self, runner: CallbackRunner, ledger: Ledger, background_calls: BackgroundCalls
    ) -> None:
        self._runner = runner
        self._ledger = ledger
        self._retrying_calls = RetryingCalls(background_calls)
        self._held: list[Callable[[], None]] | None = []
        """Calls that wait until those of earlier leaders are repeated; None afterwards."""
        self._lost_reports: list[_StoredReport] | None = None
        """Reports whose calls are repeated; None until they were looked for."""
        self._adopted: dict[ReportPosition, MatchedReport] = {}
        """Reports of a lost leader that it may not have stored, whose checkpoints are committed."""
        view = ledger.view
        self._last_round = view.last_round.number if view.last_round else 0
        self._first_round = view.first_round or self._last_round
        self._lost_calls = _LostCalls(ledger.store, self._first_round, self._last_round)
        self._call_name = f"lost callbacks {view.epoch}"
        # The first leader of a fit: the callbacks of earlier fits have returned.
        if view.round is None and view.last_round_closed is None:
            self._lost_reports = []
        self._running: deque[ReportPosition | None] = deque()
        """Calls that have not returned, in order; None for a failure."""
        self._finished_count = runner.finished_count
        self._finished: ReportPosition | None = None
        self._written: ReportPosition | None = None
        self._next_write_at = 0.0

    @property
    def is_idle(self) -> bool:
        """Whether no call waits or runs, also none of an earlier leader."""
        return self._held is None and self._runner.is_idle

    @property
    def has_unwritten(self) -> bool:
        """Whether the progress of the callbacks is not in the bucket yet."""
        return self._finished != self._written

    def send_report(self, round_number: int, report: MatchedReport) -> None:
        """Queue the `after_report` callbacks for a report; its checkpoint must be committed."""
        commits = reversed(self._ledger.view.checkpoints)
        digests = (one.manifests_digest for one in commits if one.name == report.checkpoint)
        send = partial(
            self._runner.send_report,
            report.metrics_by_rank,
            report.checkpoint,
            digest=next(digests, ""),
        )
        self._send((round_number, report.report_index), send)

    def send_failure(self, pickle_keys: dict[int, str], traceback_texts: dict[int, str]) -> None:
        """Queue the `after_exception` callbacks, as `CallbackRunner.send_failure`."""
        self._send(None, partial(self._runner.send_failure, pickle_keys, traceback_texts))

    def adopt_report(self, round_number: int, report: MatchedReport) -> None:
        """Add a report of a lost leader whose checkpoint was not committed: it was not delivered.

        Ignored once the lost calls are repeated, and if the report is stored.
        """
        self._adopted[round_number, report.report_index] = report

    def _send(self, position: ReportPosition | None, send: Callable[[], None]) -> None:
        if self._held is not None:
            self._held.append(partial(self._send, position, send))
            return
        self._running.append(position)
        send()

    def advance(self, view: View, now: float, *, are_commits_known: bool) -> None:
        """Repeat lost calls and store the progress; called at each tick.

        `are_commits_known`: whether no checkpoint of the rounds of earlier leaders will be
        committed any more. Errors of the store are retried.
        """
        if self._lost_reports is None:
            result = self._retrying_calls.run(self._call_name, self._lost_calls.load, now)
            self._lost_reports = None if result is None else result.value
        if self._held is not None and self._lost_reports is not None:
            if not are_commits_known:
                return
            self._release_held(self._lost_reports, {one.name for one in view.checkpoints})
        self._record_finished()
        self._write_progress(now)

    def _release_held(self, lost: list[_StoredReport], committed: set[str]) -> None:
        held, self._held = self._held or [], None
        stored = {
            one.position: MatchedReport(
                one.report_index, (one.metrics, *one.other_ranks), one.checkpoint
            )
            for one in lost
        }
        reports = sorted({**self._adopted, **stored}.items(), key=itemgetter(0))
        if reports:
            log.info("callbacks.repeated", reports=len(reports), first=reports[0][0])
        for (round_number, _), report in reports:
            checkpoint = report.checkpoint if report.checkpoint in committed else None
            self.send_report(round_number, replace(report, checkpoint=checkpoint))
        for send in held:
            send()

    def _record_finished(self) -> None:
        while self._finished_count < self._runner.finished_count and self._running:
            self._finished_count += 1
            self._finished = self._running.popleft() or self._finished

    def _write_progress(self, now: float) -> None:
        if not self.has_unwritten or now < self._next_write_at:
            return
        finished = self._finished
        assert finished is not None
        body = encode(_Progress(round=finished[0], report_index=finished[1]))
        key = keys.callback_progress(self._ledger.agent_id)
        write = partial(_put_progress, self._ledger.store, key, body, finished)
        result = self._retrying_calls.run(key, write, now)
        if result is not None:
            # The result may be of a write that was started for an earlier report.
            self._written, self._next_write_at = result.value, now + _WRITE_INTERVAL_S


def _put_progress(store: Store, key: str, body: bytes, position: ReportPosition) -> ReportPosition:
    store.put(key, body)
    return position


class _LostCalls:
    """Reads the stored reports whose callbacks may not have returned.

    Those of the rounds from the first to the last one. Without any progress, all of them: several
    leaders may have been lost before they stored any.
    """

    def __init__(self, store: Store, first_round: int, last_round: int) -> None:
        self._store = store
        self._first_round = first_round
        self._last_round = last_round
        # A run of many leaders has many objects: after an error only the others are read again.
        self._progress_by_key: dict[str, ReportPosition] = {}
        self._reports_by_key: dict[str, list[_StoredReport]] = {}

    def load(self) -> list[_StoredReport]:
        """Return the reports in order; after an error of the store, call it again."""
        progress = max([(self._first_round, -1), *self._read_progress()])
        lost: dict[ReportPosition, _StoredReport] = {}
        listed = [info.key for info in self._store.list(keys.REPORTS.rstrip("/"))]
        for _, chunks in groupby(listed, lambda key: key.rpartition("/")[0]):
            # The reports of one agent are in order: its last chunks suffice.
            for key in reversed(list(chunks)):
                reports = self._read_reports(key)
                later = [one for one in reports if progress < one.position]
                # The report of a surveyed checkpoint has no metrics of other ranks: keep the first.
                for one in later:
                    known = lost.get(one.position)
                    if one.round <= self._last_round and (known is None or not known.other_ranks):
                        lost[one.position] = one
                if len(later) < len(reports):
                    break
        return [lost[position] for position in sorted(lost)]

    def _read_progress(self) -> Iterable[ReportPosition]:
        for info in self._store.list(keys.CALLBACKS.rstrip("/")):
            if info.key not in self._progress_by_key:
                try:
                    progress = _progress_decoder.decode(strip_mac(self._store.get(info.key)))
                except _UNREADABLE as error:
                    log.warning("callbacks.progress_unreadable", key=info.key, reason=str(error))
                    continue
                self._progress_by_key[info.key] = progress.round, progress.report_index
            yield self._progress_by_key[info.key]

    def _read_reports(self, key: str) -> list[_StoredReport]:
        def decode() -> list[_StoredReport]:
            lines = strip_mac(self._store.get(key)).splitlines()
            return [_report_decoder.decode(line) for line in lines]

        if key not in self._reports_by_key:
            try:
                self._reports_by_key[key] = repeat_read(decode)
            except _UNREADABLE as error:
                log.warning("callbacks.reports_unreadable", key=key, reason=str(error))
                return []
        return self._reports_by_key[key]
