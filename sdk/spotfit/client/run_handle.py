"""`RunHandle`: observe, wait for and cancel a run from any process on any machine.

The handle reads the journal. If it also has the run's secret key, it contains a `HeadlessLeader`,
which requests machines while no agent is running: before the first one joins, and after all were
lost.

Supervise a run for a limited time, from a cron job or a shell (`spotfit sweep`).
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from spotfit.checkpoint.checkpoint_dir import StorageLocation
from spotfit.client.bill_text import format_bill, is_bill_shown
from spotfit.client.console import (
    LogLine,
    RunConsole,
    WorkerLogTailer,
    format_log_line,
    format_summary,
    run_not_found_error,
)
from spotfit.client.deadline_status import DeadlineStatus, deadline_status
from spotfit.client.keyring import key_of, open_authenticated
from spotfit.client.machine_logs import ALL_MACHINES, read_machine_output, read_unjoined_output
from spotfit.client.metrics_history import (
    ProgressReader,
    ReportedMetrics,
    ReportedProgress,
    read_metrics_history,
)
from spotfit.client.result import Result, build_result, build_run_error
from spotfit.code.function_pickle import load_sealed_pickle
from spotfit.control.background_calls import DaemonCalls, SynchronousCalls
from spotfit.control.headless_leader import UNSUPERVISED_TEXT, HeadlessLeader, sweep
from spotfit.control.journal_writer import JournalWriter
from spotfit.control.reconciler import Reconciler
from spotfit.control.settlement import GroupSettler
from spotfit.core.errors import ConfigError, SpotfitError, StoreError, TransientStoreError
from spotfit.core.ids import AgentId, RunId
from spotfit.host import log, system
from spotfit.ledger.journal import Ledger, check_no_gaps
from spotfit.model.bill import Bill
from spotfit.model.events import (
    CancelRequested,
    FailureCause,
    FitEnded,
    FitStarted,
    JournalEntry,
    NodeLost,
)
from spotfit.model.spec import RunSpec
from spotfit.model.usage import bill_of
from spotfit.model.view import JournalView, View
from spotfit.provision.launch import AgentLaunchSpec
from spotfit.provision.profile import open_provisioner
from spotfit.store.api import Store
from spotfit.store.factory import credentials_for_nodes, open_store
from spotfit.store.url import is_same_root

# Maximum wait for the last worker output after the end of a run.
_OUTPUT_DRAIN_S = 3.0
# Between two polls of `logs(follow=True)`; agents upload their output twice a second.
_FOLLOW_INTERVAL_S = 1.0
# Typical delay until a cloud's API returns what a machine printed.
_MACHINE_OUTPUT_DELAY_S = 10.0
# Limits the delay of printed output, and of Ctrl-C while `watch()` joins the supervisor.
_MAX_PAUSE_S = 0.5
# Maximum wait for the release of machines before `result()` returns without it, from the end, or
# from a look-up that has found them. A cloud may take a minute to terminate a machine, and failed
# requests are repeated.
_RELEASE_TIMEOUT_S = 120.0
# The same, from the last event or answer on, if no granted machine is left: a backend that answers
# none of the requests in this time has hardly executed one. One that answers may list a group late.
_LOOK_UP_TIMEOUT_S = 20.0
# Shorter, because the caller was interrupted while it started the run.
_CANCEL_RELEASE_WAIT_S = 10.0
_CANCEL_RETRY_PAUSE_S = 0.2


@dataclass(frozen=True)
class RunStatus:
    """A summary of a run's state at the time of `RunHandle.status()`."""

    name: str
    state: str
    """'waiting' (for machines), 'running', 'validating', 'finished', 'failed' or 'cancelled'."""
    round: int | None
    """Number of the open round; None if there is none."""
    workers: int
    machines: int
    checkpoints: tuple[str, ...]
    """Names of the stored checkpoints, oldest first."""
    failures: dict[str, int]
    """Number of failures by cause."""
    reason: str = ""
    """Why the run ended, or the latest refusal of machines."""
    feeders_stopped: str = ""
    """Why no further machines for feeders are requested; '' if they are, and without feeders."""
    save_reason: str = ""
    """Why a Checkpointer saved the latest checkpoint at that step."""
    started_at_ms: int = 0
    """When the last `fit()` started, in milliseconds since 1970 by the clock of the caller; 0 if
    unknown."""
    ended_at_ms: int = 0
    """When it ended, by the clock of a machine; 0 if it has not."""
    progress: ReportedProgress = field(default_factory=ReportedProgress)
    is_starting: bool = False
    """Whether a round is open whose workers have not all called the training function."""
    startup_s: float | None = None
    """How long the workers of the open round took until all had called the training function, by
    the clock of its leader; None before that and without an open round."""
    is_verified: bool = True
    """Whether the journal was verified with the run's key; False if this machine lacks the key."""
    run_id: str = ""
    """The unique id of the run, which is in the tags of its machines."""
    provisioner: str = ""
    """The backend of the last `fit()`."""
    cost: Bill = field(default_factory=Bill)
    """What the machines of the run have cost in all its fits so far."""
    deadline: DeadlineStatus | None = None
    """How far the last `fit()` is from its deadline, by the clock of this machine; None without
    one."""


def state_of(view: View) -> str:
    """Return the state of a run, as in `RunStatus.state`."""
    if view.fit_end is not None:
        return view.fit_end.outcome
    if view.pending_fit_end is not None:
        return "validating"
    return "running" if view.round else "waiting"


def _is_cancelled(view: JournalView, *, save: bool) -> bool:
    """Whether the run has ended, or its end was requested with a save or without one at `save`."""
    is_requested = view.cancel_reason is not None and (save or not view.saves_before_cancel)
    return is_requested or not view.is_active


class RunHandle:
    """Handle of a run in any process that can read its storage. The run does not depend on it.

    While the handle waits, it also supervises the run: if all machines are lost at once, it
    requests new ones. That requires the run's secret key, which is stored on the machine that
    started it.
    """

    def __init__(
        self, ledger: Ledger, *, filesystem_location: StorageLocation | None = None
    ) -> None:
        self._ledger = ledger
        self.key = key_of(ledger.store)
        """None if this machine does not have the run's key."""
        self._filesystem_location = filesystem_location
        self._clock = system.SystemClock()
        self._last_event_at = self._clock.now()
        self._console = RunConsole(ledger.store)
        self.show_output = False
        """Whether to print worker output and log journal events while waiting."""
        self._fit_end: FitEnded | None = None
        self._final_view: View | None = None
        ledger.set_entry_listener(self._on_entry)
        self.headless_leader: HeadlessLeader | None = None
        """Requests machines while no agent leads; None without the run's key."""
        self._supervisor: threading.Thread | None = None
        # The exception that ended the supervisor thread, raised again by `result()`.
        self._supervisor_error: Exception | None = None
        # Set when `watch()` returns or is interrupted; ends the supervisor thread.
        self._watch_stopped = False
        self._ended_at = 0.0
        # Time of the first loss of a machine before its agent joined; inf once its output was
        # shown.
        self._unjoined_loss_at: float | None = None

    def __repr__(self) -> str:
        # What was read last: a repr reads nothing from the store.
        view = self._ledger.journal_view
        name, state = (
            (view.spec.name, state_of(view)) if isinstance(view, View) else ("", "unknown")
        )
        return f"RunHandle(name={name!r}, state={state!r}, url={self.url!r})"

    def __dir__(self) -> list[str]:
        # For completion in notebooks; the other methods are for `fit()` and the command line.
        public = "cancel logs machine_logs metrics result status url watch"
        return [*public.split(), *(name for name in super().__dir__() if name.startswith("_"))]

    @property
    def url(self) -> str:
        """URL of the run's directory, such as "s3://bucket/my-run", for `spotfit.attach(url)`."""
        return self._ledger.store.url

    def status(self) -> RunStatus:
        """Read the journal and return the current state of the run.

        If a thread of this handle supervises the run, its last read is used. Raises `StoreError` or
        `JournalError` if the journal cannot be read.
        """
        # A supervisor thread keeps the ledger up to date, and the ledger is not thread-safe.
        if self._supervisor is None:
            self._ledger.catch_up()
        view = self._ledger.view
        return RunStatus(
            name=view.spec.name,
            state=state_of(view),
            round=view.round.number if view.round else None,
            workers=view.round.world_size if view.round else 0,
            machines=sum(len(group.active_nodes) for group in view.groups.values()),
            checkpoints=tuple(checkpoint.name for checkpoint in view.checkpoints),
            failures={cause.value: count for cause, count in view.failure_counts.items()},
            reason=view.fit_end.reason if view.fit_end else view.waiting_reason,
            feeders_stopped=view.feeders_stopped,
            save_reason=view.checkpoints[-1].reason if view.checkpoints else "",
            started_at_ms=view.fit_started_at_ms,
            ended_at_ms=view.fit_ended_at_ms,
            progress=ProgressReader(self._ledger.store).read(view),
            is_starting=view.is_round_starting,
            startup_s=view.round_startup_s if view.round else None,
            is_verified=self.key is not None,
            run_id=view.spec.run_id,
            provisioner=view.spec.provisioner,
            cost=bill_of(view, system.wall_ms()),
            deadline=deadline_status(view, system.wall_ms()),
        )

    def metrics(self) -> list[ReportedMetrics]:
        """Return the metrics of all reports so far, in the order of rounds and reports.

        Reads all stored chunks of metrics. Raises `StoreError`, or `IntegrityError` if one is
        corrupt. `pandas.DataFrame([each.metrics for each in handle.metrics()])` makes a table.
        """
        return read_metrics_history(self._ledger.store)

    def cancel(self, reason: str = "cancel() was called", *, save: bool = True) -> None:
        """Request the end of the run and the release of its machines.

        Appends the request to the journal and returns before the leader has carried it out.
        Needs no key, only write access to the storage of the run. `reason` is shown to users. With
        `save` a `Checkpointer` of the run saves first, for which the leader waits at most 2
        minutes, or 10 minutes while the save is being uploaded; a later call without `save` ends
        the wait. Idempotent; does nothing after the end of the run. Raises `StoreError`.
        """
        ledger = self._ledger.clone()  # the supervisor thread may be using the handle's ledger
        request = CancelRequested(reason=reason, save=save)
        # `append` fails if another process appended first; the next iteration reads its entry.
        while not _is_cancelled(view := ledger.catch_up(), save=save):
            if not _is_cancelled(ledger.append(request, after=view), save=save):
                self._clock.wait(_CANCEL_RETRY_PAUSE_S)

    def logs(
        self,
        *,
        rank: int | None = None,
        since_s: float | None = None,
        follow: bool = False,
        timestamps: bool = False,
    ) -> Iterator[str]:
        """Yield the output of all workers of all rounds so far, ordered by time.

        Each line is prefixed with its source, such as "(rank 0) " or "(sidecar) ", and with
        `timestamps` with the local time. Lines of different machines are ordered by the clocks of
        these machines.

        Args:
            rank: Only lines of the worker with this world rank.
            since_s: Only lines of the last `since_s` seconds, by the clock of this machine.
            follow: Wait for further output until the run has ended.

        Raises:
            StoreError: During iteration, if the store cannot be read. With `follow`, a temporary
                failure is only logged.
        """
        earliest_ms = 0.0 if since_s is None else system.wall_ms() - since_s * 1000
        for line in self._read_log(follow=follow):
            if line.get("t", 0) >= earliest_ms and rank in (None, line.get("rank")):
                yield format_log_line(line, with_time=timestamps)

    def _read_log(self, *, follow: bool) -> Iterator[LogLine]:
        tailer = WorkerLogTailer(self._ledger.store)
        ledger = self._ledger.clone()
        next_slot, drained_at = -1, math.inf
        while True:
            try:
                view = ledger.catch_up()
                # Agents that joined, not only those of the last round: earlier ones left output as
                # well. Each is the member of a round or of a validation, which has an entry.
                if view.next_slot != next_slot:
                    for member in ledger.list_members():
                        tailer.add_agent(member.agent)
                    next_slot = view.next_slot
                yield from tailer.read_new_lines()
            except TransientStoreError as error:
                if not follow:
                    raise
                log.warning("output.unreadable", reason=error.message)
            else:
                # Agents upload their last lines after the end of the run.
                if not view.is_active:
                    drained_at = min(drained_at, self._clock.now() + _OUTPUT_DRAIN_S)
                if not follow or self._clock.now() >= drained_at:
                    return
                if not view.is_active and tailer.is_complete:
                    return
            self._clock.wait(_FOLLOW_INTERVAL_S)

    def machine_logs(self, machine: str = ALL_MACHINES, *, max_lines: int = 200) -> Iterator[str]:
        """Yield the console output of machines outside of workers, as stored by their backend.

        `machine` is the name in the journal's events ('t-…/0'), its number in the order in which
        machines were granted, from 0, or 'all'. At most the last `max_lines` lines of each start of
        a machine, prefixed with its name. Clouds return a line after some seconds, and delete
        output after some time. Raises `ConfigError` for an unknown machine, at the first iteration;
        a backend that fails yields a line with its error.
        """
        return read_machine_output(self._ledger.store, machine, max_lines=max_lines)

    def result(self, timeout_s: float | None = None) -> Result:
        """Wait for the end of the run and return its result; supervises the run meanwhile.

        With the run's key it also waits up to 2 minutes for the release of the machines. Raises
        `TimeoutError` if the run has not ended after `timeout_s` seconds (None: no limit), and what
        `final_result` raises.
        """
        if self._supervisor is not None:
            self._join_supervisor(timeout_s)
            if self._supervisor_error is not None:
                raise self._supervisor_error
        else:
            self._poll_until_ended(timeout_s)
        if self._fit_end is None:
            raise TimeoutError(
                f"The run {self.url} has not ended within {timeout_s} s and continues. Call "
                "result() again with a longer timeout_s to wait for it, or cancel() to end it."
            )
        return self.final_result()

    def final_result(self) -> Result:
        """Return the result of a run whose end this handle has seen; for use after `watch()`.

        Raises `TrainingFailedError` or a subclass such as `PreemptionError` if the run failed,
        `RunCancelledError` if it was cancelled, and `StoreError`. The return value of the training
        function is None, with a warning, if this machine does not have the run's key.
        """
        ended, view = self._fit_end, self._final_view
        assert ended is not None
        assert view is not None
        if ended.outcome != "finished":
            error = build_run_error(ended, self._ledger.store, self.key)
            # Unless user code failed, the output of machines that never joined may hold the cause.
            may_be_machines = ended.outcome == "failed" and ended.cause is not FailureCause.WORKER
            # The error has the output of the last one already.
            may_be_machines &= not (ended.failed_machine and ended.failures)
            if may_be_machines and (output := read_unjoined_output(self._ledger)):
                error.add_note(output)
            raise error
        if ended.last_save_error:
            log.warning(
                "result.unsaved",
                text="the last save failed; the latest checkpoint is older",
                reason=ended.last_save_error,
            )
        if ended.missing_reports:
            log.warning(
                "result.reports_missing",
                text=ended.missing_reports,
                reason="a report counts only once all ranks have made it",
                do="call report() on every rank, equally often",
            )
        return build_result(
            view,
            self._ledger.store,
            self._load_return_value(ended),
            filesystem_location=self._filesystem_location,
            cost=self._current_bill(),
        )

    def log_summary(self) -> None:
        """Log one line about a fit whose end this handle has seen, and one about its cost.

        For use after `watch()`. The cost is that of all fits of the run. It is not logged for
        machines that cost nothing.
        """
        assert self._final_view is not None
        text = format_summary(self._final_view, self.url)
        log.info("run.summary", text=text, url=self.url)
        bill = self._current_bill()
        if is_bill_shown(bill, self._final_view.spec.provisioner):
            log.info("run.cost", text=format_bill(bill))

    def _current_bill(self) -> Bill:
        # Of the view that was read last, not of that at the end of the fit: machines are released
        # after it.
        return bill_of(self._ledger.journal_view, system.wall_ms())

    # --- waiting -----------------------------------------------------------------------------

    def wait_for_release(self) -> None:
        """Wait up to 10 seconds for the end of a cancelled run and the release of its machines."""
        self._poll_until_ended(_CANCEL_RELEASE_WAIT_S)

    def supervise_in_background(self) -> None:
        """Supervise the run in a daemon thread until it ends or this process exits.

        Returns at once. An error that ends the thread is raised by `result()` and `watch()`. Call
        it once.
        """

        def supervise() -> None:
            try:
                self._poll_until_ended()
            except Exception as error:  # noqa: BLE001 - a thread boundary: `result()` raises it
                self._supervisor_error = error

        # A daemon thread does not keep a process from exiting whose user has dropped the handle.
        self._supervisor = threading.Thread(
            target=supervise, name="spotfit-supervisor", daemon=True
        )
        self._supervisor.start()

    def watch(self) -> None:
        """Block until the end of the run, printing worker output and logging journal events.

        The run is supervised in a thread: a store that hangs must not block Ctrl-C. Ctrl-C ends the
        wait, not the run. Raises errors of the supervision, but not the failure of the run.
        """
        log.use_default_handler()
        self.show_output = True
        self.supervise_in_background()
        assert self._supervisor is not None
        try:
            self._join_supervisor()
        finally:
            self._watch_stopped = True
        if self._supervisor_error is not None:
            raise self._supervisor_error

    def _join_supervisor(self, timeout_s: float | None = None) -> None:
        assert self._supervisor is not None
        deadline = math.inf if timeout_s is None else self._clock.now() + timeout_s
        # In steps: Python runs signal handlers between calls, and on Windows Ctrl-C does not end
        # the wait for a thread.
        while self._supervisor.is_alive() and (left_s := deadline - self._clock.now()) > 0:
            self._supervisor.join(min(left_s, _MAX_PAUSE_S))

    def _poll_until_ended(self, timeout_s: float | None = None) -> None:
        deadline = None if timeout_s is None else self._clock.now() + timeout_s
        while not self._watch_stopped:
            began_at = self._clock.now()
            wake = self.supervise_once()
            if self.show_output and self._console.show_new_lines():
                self._last_event_at = self._clock.now()
            now = self._clock.now()
            if self.show_output:
                self._console.show_reminder(self._ledger.view, now)
                self._console.show_progress(self._ledger.view, now)
                self._show_unjoined_output(now)
            if wake is None or self._release_timed_out(began_at):
                break
            # Returns without draining the output: the run may still be active.
            if deadline is not None and now >= deadline:
                return
            # The pause is short after an event, then increases to an eighth of the time since: with
            # local workers the driver competes with them for processors.
            poll_s = self._ledger.view.spec.timing.journal_poll_interval_s
            pause_s = min((now - self._last_event_at) / 8, _MAX_PAUSE_S)
            wake = min(wake, now + max(poll_s, pause_s), deadline or wake)
            self._clock.wait(max(0.0, wake - now))
        # Agents upload their last lines after the end of the run; machines that were terminated
        # never do, so the wait is limited.
        drained_at = self._clock.now() + _OUTPUT_DRAIN_S
        while self.show_output and not self._console.is_complete and self._clock.now() < drained_at:
            self._console.show_new_lines()
            self._clock.wait(0.02)

    def supervise_once(self) -> float | None:
        """Read the journal and, with the run's key, do what is due; return when to call it again.

        That is monotonic time in seconds, as of `SystemClock.now()`; None after the end of the run,
        when its machines are released. For a new run it requests machines before it returns. A
        `StoreError` is only logged, and the next call is due in 1 s.
        """
        now = self._clock.now()
        wake = None
        try:
            if self.headless_leader is not None:
                wake = self.headless_leader.tick(now)
            else:
                self._ledger.catch_up()
        except StoreError as error:  # the run continues without the driver: keep observing
            log.warning("store.error", reason=error.message)
            return now + 1.0
        # A headless leader returns a time until all machines are released, also after the end.
        if self._fit_end is not None and wake is None:
            return None
        return now + 1.0 if wake is None else wake

    def _release_timed_out(self, now: float) -> bool:
        """Return whether to stop waiting for the release of machines after the end of the run.

        `now` is when the calls began of which the state is known: they may take a while.
        """
        view = self._ledger.view
        open_groups = {token: one for token, one in view.groups.items() if not one.is_closed}
        # Only machines of this fit are waited for longer: those of earlier fits have cost before.
        is_granted = any(group.handle is not None for group in open_groups.values())
        timeout_s = _RELEASE_TIMEOUT_S if is_granted else _LOOK_UP_TIMEOUT_S
        # An agent may have left requests that it could not look up, once its machine was released.
        since = self._ended_at
        if self.headless_leader is not None:
            since = max(since, self.headless_leader.answered_at)
        if not is_granted:
            since = max(since, self._last_event_at)
        open_groups |= {token: one.group for token, one in view.unsettled_groups.items()}
        if self._fit_end is None or now - since < timeout_s:
            return False
        if all(group.handle is None for group in open_groups.values()):
            log.warning(
                "run.requests_unanswered",
                groups=",".join(open_groups),
                text="the backend never answered whether it has granted machines",
                do="run `spotfit sweep` once it can be reached, which asks again",
            )
            return True
        # An error, because machines that are not released cost money until a user terminates them.
        log.error(
            "run.machines_not_released",
            groups=",".join(open_groups),
            do="check in the cloud console whether these machines are still running",
        )
        return True

    def _show_unjoined_output(self, now: float) -> None:
        """Print the output of the first machine that was lost before its agent joined.

        Only once: usually the following machines fail for the same reason.
        """
        if self._unjoined_loss_at is None or now - self._unjoined_loss_at < _MACHINE_OUTPUT_DELAY_S:
            return
        self._unjoined_loss_at = float("inf")
        if output := read_unjoined_output(self._ledger, max_machines=1):
            self._console.write_text(output)

    # --- the journal -------------------------------------------------------------------------

    def load_view(self, view: View) -> None:
        """Initialise this handle from a view of the run whose entries it may not have received.

        Called once, by `attach()` and by `fit()` for an active run. It selects the workers whose
        output `watch()` prints.
        """
        self._fit_end, self._final_view = view.fit_end, view if view.fit_end else None
        self._ended_at = self._clock.now()
        # Also after the end of the run, so that `follow` prints the output of its last round.
        round_ = view.last_round if view.fit_end else view.round
        if round_ is not None:
            self._console.follow_round(round_)

    def _on_entry(self, slot: int, body: bytes, entry: JournalEntry) -> None:
        self._last_event_at = self._clock.now()
        if isinstance(entry.event, FitStarted):  # another fit() continues this run
            self._fit_end = self._final_view = None
        lost = entry.event
        if isinstance(lost, NodeLost) and lost.agent is None and not lost.is_withdrawn_request:
            self._unjoined_loss_at = self._unjoined_loss_at or self._last_event_at
        if isinstance(entry.event, FitEnded):
            # Kept, because the view changes if another fit() continues the run before `result()`.
            self._fit_end, self._final_view = entry.event, self._ledger.view
            self._ended_at = self._clock.now()
        if self.show_output:
            self._console.on_entry(slot, body, entry)

    def _load_return_value(self, ended: FitEnded) -> Any:
        if ended.result_key is None:
            return None
        # A warning: metrics and checkpoints of the result are not encrypted.
        if self.key is None:
            log.warning(
                "result.unreadable",
                reason="the return value is encrypted and this machine does not have the run's key",
            )
            return None
        read = partial(self._ledger.store.get, ended.result_key)
        return load_sealed_pickle(read, self.key, purpose=ended.result_key)


def attach(url: str | Path) -> RunHandle:
    """Return a handle of the run at `url`, `<storage_path>/<name>`, from any process or machine.

    `url` is a directory or a URL such as "s3://bucket/prefix/my-run". Reads the journal; starts no
    thread. The handle can supervise the run if its key is on this machine or in SPOTFIT_RUN_SECRET.
    Raises `RunNotFoundError`, or `JournalError` for a truncated or foreign journal.
    """
    log.use_default_handler()
    ledger = open_ledger(url)
    view = ledger.view
    handle = RunHandle(ledger)
    handle.load_view(view)
    return attach_headless_leader(handle, ledger, view.spec)


def open_ledger(url: str | Path) -> Ledger:
    """Return the ledger of the run at `url`, with its journal read to the end.

    `url` is `<storage_path>/<name>`, such as "s3://bucket/prefix/my-run". Everything is verified if
    this machine has the run's key; otherwise a warning says that nothing is. Raises
    `RunNotFoundError`, or `JournalError` for a truncated or foreign journal.
    """
    # The id is replaced below: it is read from the journal.
    store = open_authenticated(open_store(url, setting="The URL of the run"))
    ledger = create_driver_ledger(store, RunId(""))
    check_no_gaps(ledger.store)
    view = ledger.catch_up()
    if not isinstance(view, View):
        raise run_not_found_error(ledger.store)
    ledger.run_id = view.run_id
    return ledger


def create_driver_ledger(store: Store, run_id: RunId) -> Ledger:
    """Return a ledger of the run at `store`, with nothing read yet; does no I/O.

    Entries that it appends have a new author "d…" (driver). `store` is rooted at the run's
    directory.
    """
    return Ledger(store, run_id, AgentId(f"d{system.new_agent_id()}"), wall_ms=system.wall_ms)


def attach_headless_leader(handle: RunHandle, ledger: Ledger, spec: RunSpec) -> RunHandle:
    """Let the handle supervise the run if its ledger has the run's key; return the handle.

    `spec` was written by a holder of that key. Without a key the handle only observes the run. If
    the provisioner in `spec` cannot be opened here, or the ledger is a copy of the run in another
    place, a warning is logged, and the handle decrypts results but does not supervise. Changes the
    handle in place; starts no thread.
    """
    key = handle.key
    if key is None:
        return handle
    # What a copy shows may be old, but its requests would reach the machines of the run.
    if not is_same_root(spec.storage_url, ledger.store.url):
        reason = f"it is a copy of the run in {spec.storage_url}"
        log.warning("run.unsupervised", text=UNSUPERVISED_TEXT, reason=reason)
        return handle
    try:
        provisioner = open_provisioner(spec.provisioner, spec.provisioner_options)
    except SpotfitError as error:
        log.warning("run.unsupervised", text=UNSUPERVISED_TEXT, reason=error.message)
        return handle
    launch = AgentLaunchSpec(
        run_url=spec.storage_url,
        run_id=ledger.run_id,
        secret=key.to_text(),
        notice_sources=provisioner.traits.notice_sources,
        framework=spec.framework,
        preload=spec.preload,
        storage_credentials=credentials_for_nodes(ledger.store),
    )
    # Synchronous: the driver has nothing else to do during a call of the cloud's API.
    writer = JournalWriter(ledger, SynchronousCalls())
    reconciler = Reconciler(writer, provisioner, launch, SynchronousCalls(), system.new_token)
    # In a thread: the backend of an earlier fit may not answer, and this one must not wait for it.
    settler = GroupSettler(writer, open_provisioner, launch, DaemonCalls())
    now = system.SystemClock().now()
    handle.headless_leader = HeadlessLeader(writer, reconciler, settler, now)
    return handle


# --- Supervise a run for a limited time -----------------------------------------------------------


def supervise_run(url: str | Path, *, duration_s: float) -> str:
    """Supervise the run for up to `duration_s` seconds; return its state in a sentence.

    For `spotfit sweep` in a cron job. If all machines of an active run are lost, it requests new
    ones; if the run has ended, it releases remaining machines and returns early. `url` as in
    `attach`. Raises `ConfigError` if the run's key is not on this machine, because machines that it
    requested could not authenticate, or if the run's provisioner cannot be opened here. Raises
    `RunNotFoundError` and `StoreError`.
    """
    handle = attach(url)
    if handle.headless_leader is None and handle.key is not None:
        raise ConfigError(
            f"The run {handle.url} cannot be supervised from this computer.",
            do="Correct what the warning run.unsupervised names, or run `spotfit sweep` on the "
            "computer where fit() was called.",
        )
    if handle.headless_leader is None:
        raise ConfigError(
            f"The run {handle.url} cannot be supervised: this computer has no key of the run.",
            do="Run `spotfit sweep` on the computer where fit() was called, or set "
            "SPOTFIT_RUN_ID to the name of the run's file in ~/.spotfit/keys there, and "
            "SPOTFIT_RUN_SECRET to its content.",
        )
    # Bounded, unlike a driver: the next call of the cron job continues.
    view = sweep(handle.headless_leader, system.SystemClock(), duration_s=duration_s)
    unsettled = ", ".join(
        f"{token} ({group.provisioner})" for token, group in view.unsettled_groups.items()
    )
    left = f" Groups of earlier fits may still cost money: {unsettled}." if unsettled else ""
    if view.fit_end is None:
        leader = view.leader.leader if view.leader else "none"
        return f"The run is active; leader: {leader}.{left}"
    held = [token for token, group in view.groups.items() if not group.is_closed]
    machines = (
        f"machines {', '.join(held)} are not released yet: run `spotfit sweep` again, or for "
        f"longer than {duration_s:g} s"
        if held
        else "its machines are released"
    )
    return f"The run is {view.fit_end.outcome}; {machines}.{left}"
