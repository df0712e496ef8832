"""Console output of a waiting driver: worker output, journal events and reminders.

Agents append the output of their workers to numbered objects in the store; `WorkerLogTailer` reads
them incrementally. `RunConsole` prints the lines and logs every journal entry.

One sentence for each journal event: for the console and `spotfit events`.
"""

from __future__ import annotations

import heapq
import math
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from typing import Annotated, NamedTuple, TypedDict

import msgspec

from spotfit.client.bill_text import (
    format_bill,
    format_cost,
    format_offer_price,
    is_bill_shown,
)
from spotfit.client.deadline_status import deadline_status, format_slack
from spotfit.client.metrics_history import ProgressReader, ReportedProgress, format_progress
from spotfit.core.codec import DECODE_ERRORS
from spotfit.core.errors import NotFoundError, RunNotFoundError, StoreError
from spotfit.core.ids import AgentId, Token
from spotfit.core.units import (
    format_bytes,
    format_count,
    format_seconds,
    strip_control_characters,
)
from spotfit.host import log, system
from spotfit.ledger import keys
from spotfit.ledger.journal import Journal
from spotfit.ledger.keys import RUN_RANK, format_log_source
from spotfit.model.events import (
    AgentCrash,
    CancelRequested,
    CheckpointCommitted,
    CheckpointDropped,
    DeadlineAtRisk,
    FailureCause,
    FeedersStopped,
    FitEnded,
    FitStarted,
    GroupPlanned,
    GroupRefused,
    GroupsReleased,
    GroupSubmitted,
    GroupWaiting,
    JournalEntry,
    JournalEvent,
    LeaderElected,
    MachineEvent,
    MachinesChosen,
    MachinesObserved,
    MachineTimes,
    NodeLost,
    PreemptionNoticed,
    PricesChanged,
    RoundClosed,
    RoundOpened,
    TrainingEnded,
    TrainingFunctionStarted,
    ValidationEnded,
    ValidationStarted,
)
from spotfit.model.topology import Round
from spotfit.model.usage import bill_of
from spotfit.model.view import JournalView, View
from spotfit.store.api import Store
from spotfit.store.retry import repeat_read

# --- One sentence for each journal event ----------------------------------------------------------


_VALIDATION_TEXTS = {"validated": "succeeded", "failed": "failed", "timeout": "timed out"}


class RunEvent(NamedTuple):
    """An entry of a run's journal, for display."""

    slot: int
    written_at_ms: int
    """Milliseconds since 1970 by the clock of its author."""
    type: str
    """The type in the journal, such as "round_opened"."""
    text: str


def read_event_lines(store: Store) -> list[str]:
    """Return one line per entry of the run's journal: slot, local date and time, and sentence.

    As `read_events`, whose errors it raises. The last line is the cost of the run, if its machines
    may have cost something.
    """
    events, view = _read_journal(store)
    lines = [
        f"{event.slot:>5}  {format_local_time(event.written_at_ms)}  {event.text}"
        for event in events
    ]
    if isinstance(view, View):
        bill = bill_of(view, system.wall_ms())
        if is_bill_shown(bill, view.spec.provisioner):
            lines.append(f"cost: {format_bill(bill)}")
    return lines


def read_events(store: Store) -> list[RunEvent]:
    """Return all entries of the run's journal as sentences, for `spotfit events`.

    `store` is rooted at the run's directory. Raises `RunNotFoundError` if it holds no journal.
    """
    return _read_journal(store)[0]


def _read_journal(store: Store) -> tuple[list[RunEvent], JournalView]:
    events: list[RunEvent] = []

    def note(slot: int, _body: bytes, entry: JournalEntry) -> None:
        kind = str(entry.event.__struct_config__.tag)
        events.append(RunEvent(slot, entry.written_at_ms, kind, format_event(entry.event)))

    # With a view cache, the entries before it would not be read, and thus not listed.
    journal = Journal(store, ignore_view_cache=True)
    journal.on_entry = note
    view = journal.catch_up()
    if not events:
        raise run_not_found_error(store)
    return events, view


def run_not_found_error(store: Store) -> RunNotFoundError:
    """Return (not raise) the error for a store without a run, with its URL and a remedy."""
    return RunNotFoundError(
        f"There is no run at {store.url}.",
        do="Pass the directory of one run: <storage_path>/<name>, as shown by RunHandle.url. "
        "`spotfit ls <storage_path>` lists the runs.",
    )


def format_event(event: JournalEvent) -> str:
    """Return a sentence for users about a journal event, without a final period.

    For example "cancellation requested: Ctrl-C". For the console and `spotfit events`.
    """
    match event:
        case FitStarted(spec=spec):
            at_least = f"{spec.min_workers} to " if spec.is_elastic else ""
            workers = f"{at_least}{format_count(spec.max_workers, 'worker')}"
            return f"run {spec.name!r} started: {workers}, provisioner {spec.provisioner!r}"
        case LeaderElected(leader=leader, coordinator_address=None, reason=reason):
            return f"{leader}, a driver without workers, requests the machines: {reason}"
        case LeaderElected(leader=leader, reason=reason):
            return f"{leader} elected leader: {reason}"
        case RoundOpened(round=round_, reason=reason):
            checkpoint = f", from {round_.checkpoint_name}" if round_.checkpoint_name else ""
            return f"round {round_.number} started: {reason}{checkpoint}"
        case TrainingFunctionStarted(round_number=number, startup_s=startup_s):
            startup = format_seconds(startup_s)
            return f"round {number}: training function called on all ranks after {startup}"
        case RoundClosed(round_number=number, reason=reason):
            return f"round {number} ended: {reason}"
        case TrainingEnded(fit_end=ended):
            return f"training {ended.outcome}; validations of the last checkpoints are pending"
        case MachinesChosen(workers=workers, reason=reason):
            names = ", ".join(workers) or "no machines for now"
            if len(workers) > 1:
                counts = ((name, format_count(one, "worker")) for name, one in workers.items())
                names = ", ".join(f"{name} for {count}" for name, count in counts)
            standing = event.standing_offer
            also = f", and {standing} once it is available" if standing else ""
            return f"machines chosen: {names}{also} ({reason})"
        case FeedersStopped(reason=reason):
            return f"no further machines for feeders are requested, workers do without: {reason}"
        case DeadlineAtRisk(reason=reason, remedy=remedy):
            return f"{reason}. {remedy}"
        case CancelRequested(reason=reason):
            return f"cancellation requested: {reason}"
        case FitEnded(outcome=outcome, reason=reason, last_save_error=save_error):
            unsaved = f"; its last save failed{_last_line(save_error)}" if save_error else ""
            unmatched = f"; {event.missing_reports}" if event.missing_reports else ""
            text = f"run {outcome}" + (f": {reason}" if reason else "") + unsaved + unmatched
            return f"{text}. {event.remedy}" if event.remedy else text
        case CheckpointCommitted(name=name, size_bytes=size_bytes, reason=reason):
            text = f"checkpoint {name} committed ({format_bytes(size_bytes)})"
            return f"{text}: {reason}" if reason else text
        case CheckpointDropped(name=name, reason=reason):
            return f"checkpoint {name} deleted: {reason}"
        case ValidationStarted(checkpoint_name=name, reason=reason):
            return f"validation of checkpoint {name} started {reason}".rstrip()
        case ValidationEnded(checkpoint_name=name, status=status, reason=reason):
            result = f"{_VALIDATION_TEXTS[status]}{_last_line(reason)}"
            return f"validation of checkpoint {name} {result}"
        case _:
            return _format_machine_event(event)


def format_summary(view: View, url: str) -> str:
    """Return one line about a fit that has ended: outcome, duration, deadline, interruptions,
    checkpoints.

    `view` is that of its `FitEnded` entry, `url` the run's directory.
    """
    assert view.fit_end is not None
    duration_s = (view.fit_ended_at_ms - view.fit_started_at_ms) / 1000
    after = f" after {format_seconds(duration_s)}" if view.fit_started_at_ms else ""
    causes = ", ".join(f"{cause.value}: {count}" for cause, count in view.failure_counts.items())
    rounds = format_count(sum(view.failure_counts.values()), "interrupted round")
    deadline = deadline_status(view, view.fit_ended_at_ms)
    slack = "" if deadline is None else format_slack(deadline)
    parts = [
        f"run {view.spec.name!r} {view.fit_end.outcome}{after}",
        *([f"deadline {slack}"] if slack else []),
        f"{rounds} ({causes})" if causes else "no interruption",
        format_count(len(view.checkpoints), "checkpoint"),
    ]
    if (latest := view.latest_checkpoint) is not None:
        step = "" if latest.step is None else f"at step {latest.step}, "
        parts[-1] += f", latest {latest.name} ({step}{format_bytes(latest.size_bytes)})"
        # Only a Checkpointer saves a model that spotfit can read.
        if latest.step is not None:
            parts.append(f"export the model with `spotfit checkpoints export {url} model.pt`")
    return "; ".join(parts)


def _format_machine_event(event: MachineEvent) -> str:
    match event:
        case GroupPlanned(plan=plan, request=request, reason=reason):
            machines = format_count(plan.num_nodes, "machine")
            size = f"{machines} with {format_count(plan.slots_per_node, 'worker')} each"
            offer = f" ({format_offer_price(request.offer)})" if request.offer else ""
            return f"requesting {size}{offer}: {reason}"
        case GroupSubmitted(handle=handle):
            return f"machine request accepted: {handle.name}"
        case GroupRefused(reason=reason):
            return f"machine request refused: {reason}"
        case GroupWaiting(token=token, reason=reason):
            return f"machines of {token} wait: {reason}" if reason else f"machines of {token} run"
        case NodeLost(token=token, node=node, is_unused=True, reason=reason):
            return f"machine {token}/{node} released unused: {reason}"
        # The backend has withdrawn the request: there is no output of a machine.
        case NodeLost(token=token, node=node, reason=reason) if event.is_withdrawn_request:
            return f"machine {token}/{node} not granted: {reason}"
        # Without an agent there is no worker output; the backend has the cause (decision 0035).
        case NodeLost(token=token, node=node, agent=None, reason=reason):
            hint = f"see its output with `spotfit logs --machine {token}/{node}`"
            return f"machine {token}/{node} lost before its agent joined: {reason} ({hint})"
        # A crash has its own reason, and its traceback is not printed elsewhere.
        case NodeLost(token=token, node=node, crash=AgentCrash(traceback_text=text)):
            return f"machine {token}/{node} lost, its agent crashed:\n{text.rstrip()}"
        case NodeLost(token=token, node=node, reason=reason, cause=FailureCause.PREEMPTION):
            return f"machine {token}/{node} preempted: {reason}"
        case NodeLost(token=token, node=node, reason=reason):
            return f"machine {token}/{node} lost: {reason}"
        case GroupsReleased(token=token, other_tokens=others):
            return f"released machines {', '.join((token, *others))}"
        case PreemptionNoticed(agent=agent, notice=notice):
            left = "" if notice.seconds_left is None else f", {notice.seconds_left:.0f} s left"
            return f"preemption notice for node {agent}: {notice.reason}{left}"
        case MachinesObserved(times=times):
            all_times = [one for of_group in times.values() for one in of_group]
            return f"observed machines: {_format_machine_times(all_times)}"
        case PricesChanged(offers=offers):
            return f"prices changed: {', '.join(one.name for one in offers)}"


def _format_machine_times(times: list[MachineTimes]) -> str:
    started = sum(one.started_ms is not None for one in times)
    ended = sum(one.ended_ms is not None or one.is_unbilled for one in times)
    # With a start it is the time before that start.
    unseen = sum(one.unseen_until_ms is not None and one.started_ms is None for one in times)
    counts = [(started, "started"), (ended, "ended"), (unseen, "may have run unobserved")]
    return ", ".join(f"{count} {what}" for count, what in counts if count)


def _last_line(text: str) -> str:  # of a traceback: the exception and its message
    lines = text.strip().splitlines()
    return f": {lines[-1]}" if lines else ""


class LogLine(TypedDict, total=False):
    """One line of output, or the end marker of an agent."""

    rank: int
    """The rank, or a pseudo-rank of `ledger.keys`."""
    text: str
    t: Annotated[int, msgspec.Meta(ge=0, le=2**42)]
    """When the worker wrote it: ms since 1970, by the clock of its node."""
    end: bool
    """True in the last line of an agent."""


# Machines of clouds usually need some minutes, so a wait is reported a few times, not constantly.
REMINDER_INTERVAL_S = 30.0
# Workers of a warm machine start in a second; then a line would only be noise.
STARTUP_REMINDER_S = 5.0
PROGRESS_INTERVAL_S = 60.0
# Types of journal events that are only read to compute the bill.
_EVENTS_FOR_THE_BILL = frozenset({"machines_observed", "prices_changed"})
# Polls for further output of a lost agent. Its last upload may still be in flight; a machine that
# was terminated never writes its end marker, so waiting must be bounded.
_POLLS_AFTER_LOSS = 10


class WorkerLogTailer:
    """Reads new lines from the log of each registered agent of one run in the store."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._next_chunk: dict[AgentId, int] = {}
        self._unread_lines: dict[AgentId, deque[LogLine]] = {}
        """Lines of chunks that were read, and that are not yielded yet."""
        self._ended_agents: set[AgentId] = set()
        # Remaining polls of lost agents.
        self._polls_left: dict[AgentId, int] = {}

    def add_agent(self, agent: AgentId) -> None:
        """Read the output of this agent's workers from now on, from the first line. Idempotent."""
        # A second registration must not reset the position: its lines would be printed again.
        self._next_chunk.setdefault(agent, 0)
        self._unread_lines.setdefault(agent, deque())

    def mark_lost(self, agent: AgentId) -> None:
        """Stop waiting for the end marker of an agent whose machine was lost.

        Its log is still polled 10 times for output whose upload is in flight. Idempotent; ignores
        agents that were not added.
        """
        # setdefault: a loss that is reported twice does not extend the wait.
        if agent in self._next_chunk:
            self._polls_left.setdefault(agent, _POLLS_AFTER_LOSS)

    def read_new_lines(self) -> Iterator[LogLine]:
        """Yield the lines that were uploaded since the last call, ordered by time; reads the store.

        A line is a dictionary with "rank", "text" and "t", the time in ms by the clock of its node:
        lines of one node keep their order. A line that cannot be decoded is replaced by one that
        says so. Does not wait for further lines. Raises `StoreError`; lines that were not yielded
        are returned by a later call.
        """
        # The next line of each agent. Only one chunk of each is in memory.
        heads: list[tuple[int, AgentId]] = []
        # A copy: the consumer may register agents while this generator is suspended.
        for agent in list(self._next_chunk):
            if self._has_line(agent):
                heapq.heappush(heads, (self._unread_lines[agent][0].get("t", 0), agent))
        while heads:
            agent = heads[0][1]
            yield self._unread_lines[agent].popleft()
            heapq.heappop(heads)
            if self._has_line(agent):
                heapq.heappush(heads, (self._unread_lines[agent][0].get("t", 0), agent))

    @property
    def is_complete(self) -> bool:
        """Whether no lines will come: each added agent has ended its log or was abandoned."""
        return self._ended_agents.issuperset(self._next_chunk)

    def _has_line(self, agent: AgentId) -> bool:
        """Read further chunks of the agent until one has a line; return whether there is one."""
        unread = self._unread_lines[agent]
        while not unread and agent not in self._ended_agents:
            # Chunks are immutable and numbered; a missing one has not been uploaded yet.
            try:
                lines = _read_log_chunk(self._store, keys.logs(agent, self._next_chunk[agent]))
            except NotFoundError:
                # Only the polls of lost agents are limited; other agents will upload more.
                if agent in self._polls_left:
                    self._polls_left[agent] -= 1
                if self._polls_left.get(agent, 1) <= 0:
                    self._ended_agents.add(agent)
                break
            self._next_chunk[agent] += 1
            for line in lines:
                if line.get("end"):
                    self._ended_agents.add(agent)
                else:
                    unread.append(line)
        return bool(unread)


_log_line_decoder = msgspec.json.Decoder(LogLine)


def _read_log_chunk(store: Store, key: str) -> list[LogLine]:
    """Return the lines of the chunk; a corrupt one is replaced by a line that reports it."""
    with suppress(*DECODE_ERRORS):
        return repeat_read(
            lambda: [_log_line_decoder.decode(text) for text in store.get(key).splitlines()]
        )
    return [_decode_log_line(text, key) for text in store.get(key).splitlines()]


def _decode_log_line(text: bytes, key: str) -> LogLine:
    try:
        return _log_line_decoder.decode(text)
    except DECODE_ERRORS:
        return {"rank": RUN_RANK, "text": f"[spotfit] A line of the log {key} is corrupt."}


class WaitReminder:
    """Decides when to report again what a run waits for: machines, or workers that start."""

    def __init__(self) -> None:
        # Time of the next message; None while the training runs and after the end of the run.
        self._remind_at: float | None = None
        self._round: int | None = None
        """The round whose start is waited for; None for machines."""

    def next_message(self, view: View, now: float) -> str | None:
        """Return the message that is due at `now`, or None; for a console that polls.

        `now` is monotonic time in seconds. The first message is due `REMINDER_INTERVAL_S` (30 s)
        after the first call without an open round, or `STARTUP_REMINDER_S` (5 s) after the first
        call with a round whose workers are starting, the next ones every 30 s. None while the
        training runs and after the end of the run.
        """
        number = view.round.number if view.round is not None else None
        if not view.is_active or (number is not None and not view.is_round_starting):
            self._remind_at = None
            return None
        # The first message comes after a full interval: the wait is usually over before.
        if self._remind_at is None or self._round != number:
            interval_s = REMINDER_INTERVAL_S if number is None else STARTUP_REMINDER_S
            self._remind_at, self._round = now + interval_s, number
        if now < self._remind_at:
            return None
        self._remind_at = now + REMINDER_INTERVAL_S
        return _describe_wait(view)


def _describe_wait(view: View) -> str:
    if view.round is not None:
        framework = "" if view.spec.framework == "none" else f"import {view.spec.framework}, "
        return (
            f"round {view.round.number}: the workers {framework}load the training function and "
            "join their process group; it was not called on all ranks yet"
        )
    # Checked first: between the last round and the end of the run, no machines are missing.
    if view.pending_fit_end is not None:
        return f"training has ended; {len(view.unvalidated_checkpoints)} validations are pending"
    slots = sum(
        group.plan.slots_per_node * len(group.active_nodes) for group in view.groups.values()
    )
    text = (
        f"waiting for machines: {slots} of at least {view.spec.min_workers} workers have "
        "a running or requested machine"
    )
    if view.last_refusal:
        return f"{text}; last refusal: {view.last_refusal}"
    return f"{text}; the backend reports: {view.waiting_reason}" if view.waiting_reason else text


def _format_elapsed(view: View) -> str:
    """Return "after 12 min: ", or '' if the start of the run is not known."""
    elapsed_s = (system.wall_ms() - view.fit_started_at_ms) / 1000
    return f"after {format_seconds(elapsed_s)}: " if view.fit_started_at_ms > 0 else ""


def _format_cost_so_far(view: View) -> str:
    """Return "; cost: $1.20 so far", or '' for machines that cost nothing, and without any."""
    bill = bill_of(view, system.wall_ms())
    shown = is_bill_shown(bill, view.spec.provisioner)
    return f"; cost: {format_cost(bill)}" if shown else ""


class CheckpointThrottle:
    """Decides which events of checkpoints are shown: the first one, then a count each minute.

    A run may commit a checkpoint every second. Failures and deletions by hand are other events.
    """

    def __init__(self) -> None:
        self._is_quiet = False
        self._quiet_until: float | None = None
        self._count = 0
        self._latest = ""

    def is_shown(self, event: JournalEvent) -> bool:
        """Return whether the event is shown by itself; count it otherwise."""
        if isinstance(event, CheckpointDropped):
            return not self._is_quiet
        if not isinstance(event, CheckpointCommitted):
            return True
        if self._is_quiet:
            self._count += 1
            self._latest = event.name
            return False
        self._is_quiet = True
        return True

    def next_message(self, now: float) -> str:
        """Return a sentence about the checkpoints that were not shown, once a minute; else ''.

        `now` is in seconds of monotonic time. After a minute without checkpoints, the next one is
        shown again.
        """
        if not self._is_quiet:
            return ""
        if self._quiet_until is None:
            self._quiet_until = now + PROGRESS_INTERVAL_S
        if now < self._quiet_until:
            return ""
        self._quiet_until = None
        self._is_quiet = self._count > 0
        return self.flush()

    def flush(self) -> str:
        """Return a sentence about the checkpoints that were not shown; '' if there are none."""
        if not self._count:
            return ""
        text = f"{format_count(self._count, 'checkpoint')} committed, the latest is {self._latest}"
        self._count = 0
        return text


class RunConsole:
    """Prints worker output of a run, prefixed with the rank, and logs the events of its journal."""

    def __init__(self, store: Store) -> None:
        self._log_tailer = WorkerLogTailer(store)
        self._reminder = WaitReminder()
        self._progress_at = -math.inf
        self._shown_progress = ""
        self._progress_reader = ProgressReader(store)
        self._checkpoints = CheckpointThrottle()
        # Agents that store their last output before their group is released: validators, and those
        # of healthy machines that were replaced.
        self._leaving: dict[Token, set[AgentId]] = {}

    def on_entry(self, _slot: int, _body: bytes, entry: JournalEntry) -> None:
        """Log a journal entry at level INFO, and follow the output of the agents that it names.

        A deadline at risk is logged as a warning.
        Checkpoints that follow each other within a minute are counted, and logged at level DEBUG.
        So is what is recorded for the bill, because the cost is shown.
        Called by the handle for each new entry, in journal order.
        """
        event_type = entry.event.__struct_config__.tag
        if isinstance(entry.event, FitEnded) and (text := self._checkpoints.flush()):
            log.info("run.checkpoints", text=text)
        text = format_event(entry.event)
        if isinstance(entry.event, DeadlineAtRisk):
            log.warning("deadline.at_risk", reason=entry.event.reason, do=entry.event.remedy)
        elif event_type not in _EVENTS_FOR_THE_BILL and self._checkpoints.is_shown(entry.event):
            log.info("run.event", type=event_type, text=text)
        else:
            log.debug("run.event", type=event_type, text=text)
        match entry.event:
            case RoundOpened(round=opened):
                self.follow_round(opened)
            # A validator is no member of the round, so `follow_round` does not add it.
            case ValidationStarted(agent=agent, token=token):
                self._leaving.setdefault(token, set()).add(agent)
                self._log_tailer.add_agent(agent)
            # A machine whose agent never joined has no worker output to wait for.
            case NodeLost(agent=agent, cause=None, token=token) if agent is not None:
                self._leaving.setdefault(token, set()).add(agent)
            case NodeLost(agent=agent) if agent is not None:
                self._log_tailer.mark_lost(agent)
            # A released machine may be terminated before it writes the end marker of its output.
            case GroupsReleased(token=token, other_tokens=others):
                for released in (token, *others):
                    for agent in self._leaving.pop(released, ()):
                        self._log_tailer.mark_lost(agent)
            case _:
                return

    def write_text(self, text: str) -> None:
        """Print a line or several lines on standard output, and flush.

        Control characters are removed, and colours unless standard output is a terminal.
        """
        # Looked up on every call: tests and notebooks replace sys.stdout.
        stream = sys.stdout
        # Scripts replace it by objects that have nothing but write() and flush().
        is_terminal = hasattr(stream, "isatty") and stream.isatty()
        log.write_line(stream, strip_control_characters(text, keep_colors=is_terminal))

    def show_reminder(self, view: View, now: float) -> None:
        """Log what the run waits for before its training function is called; see `WaitReminder`.

        Called at each poll, with `now` in seconds of monotonic time; logs nothing while none is
        due.
        """
        if text := self._reminder.next_message(view, now):
            log.info("run.waiting", text=f"{text}{_format_cost_so_far(view)}")

    def show_progress(self, view: View, now: float) -> None:
        """Log elapsed time, step, speed and metrics of the latest report, at most once a minute.

        Called at each poll, like `show_reminder`. Reads the store once a minute while a round is
        open; logs nothing without a new report. A `StoreError` is logged as a warning.
        """
        if text := self._checkpoints.next_message(now):
            log.info("run.checkpoints", text=text)
        if view.round is None or now < self._progress_at:
            return
        is_first_poll = self._progress_at == -math.inf
        self._progress_at = now + PROGRESS_INTERVAL_S
        if is_first_poll:  # the first report comes later, and short runs need none
            return
        try:
            text = format_progress(self._progress_reader.read(view))
        except StoreError as error:
            log.warning("output.unreadable", reason=error.message)
            return
        if text not in (self._shown_progress, format_progress(ReportedProgress())):
            cost = _format_cost_so_far(view)
            log.info("run.progress", text=f"{_format_elapsed(view)}{text}{cost}")
            self._shown_progress = text

    def follow_round(self, round_: Round) -> None:
        """Show the output of all workers of this round, from their first line. Idempotent.

        Prints nothing itself: `show_new_lines` does.
        """
        for assignment in round_.assignments:
            self._log_tailer.add_agent(assignment.agent)

    def show_new_lines(self) -> bool:
        """Print worker output that was uploaded since the last call; return whether there was any.

        Reads the store. A `StoreError` is logged as a warning, and the next call continues there.
        """
        shown = False
        try:
            for line in self._log_tailer.read_new_lines():
                self.write_text(format_log_line(line))
                shown = True
        except StoreError as error:  # the tailer keeps its position: the next call continues there
            log.warning("output.unreadable", reason=error.message)
        return shown

    @property
    def is_complete(self) -> bool:
        """Whether all output of the agents seen so far is printed and no more will come."""
        return self._log_tailer.is_complete


def format_log_line(line: LogLine, *, with_time: bool = False) -> str:
    """Return the text of a log line with its source in front, such as "(rank 0) epoch 1".

    With `with_time`, the local time of its output precedes: "2026-11-05 12:00:00 (rank 0) epoch 1".
    """
    # One line: a newline within the stored text would begin a line of another source.
    shown = line.get("text", "").replace("\n", " ")
    text = f"({format_log_source(line.get('rank', RUN_RANK))}) {shown}"
    return f"{format_local_time(line.get('t', 0))} {text}" if with_time else text


def format_local_time(unix_ms: int) -> str:
    """Return milliseconds since 1970 as local date and time, such as "2026-11-05 12:00:00".

    '-' for a time that no calendar has: without the run's key it may be forged.
    """
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(unix_ms / 1000))
    except (OverflowError, ValueError, OSError):
        return "-"
