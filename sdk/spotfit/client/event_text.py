"""One sentence for each journal event: for the console, `spotfit events` and `status()`."""

from __future__ import annotations

import time

from spotfit.core.errors import RunNotFoundError
from spotfit.core.units import format_bytes
from spotfit.ledger.journal import Journal
from spotfit.model.events import (
    CancelRequested,
    CheckpointCommitted,
    CheckpointDropped,
    FitEnded,
    FitStarted,
    GroupPlanned,
    GroupRefused,
    GroupsReleased,
    GroupSubmitted,
    JournalEntry,
    JournalEvent,
    LeaderElected,
    NodeLost,
    PreemptionNoticed,
    RoundClosed,
    RoundOpened,
    TrainingEnded,
    ValidationEnded,
    ValidationStarted,
)
from spotfit.store.api import Store

_VALIDATION_TEXTS = {"validated": "succeeded", "failed": "failed", "timeout": "timed out"}
_MachineEvent = (
    GroupPlanned | GroupSubmitted | GroupRefused | NodeLost | GroupsReleased | PreemptionNoticed
)


def read_event_lines(store: Store) -> list[str]:
    """Return one line per journal entry: slot, local time and sentence.

    Raises `RunNotFoundError` if the store holds no journal.
    """
    lines: list[str] = []

    def note(slot: int, _body: bytes, entry: JournalEntry) -> None:
        when = time.strftime("%H:%M:%S", time.localtime(entry.written_at_ms / 1000))
        lines.append(f"{slot:>5}  {when}  {format_event(entry.event)}")

    # With a view cache, the entries before it would not be read, and thus not listed.
    journal = Journal(store, ignore_view_cache=True)
    journal.on_entry = note
    journal.catch_up()
    if not lines:
        raise run_not_found_error(store)
    return lines


def run_not_found_error(store: Store) -> RunNotFoundError:
    """Return the error for a store without a run."""
    return RunNotFoundError(
        f"There is no run at {store.url}.",
        do="Pass the directory of one run: <storage_path>/<name>, as shown by RunHandle.url.",
    )


def format_event(event: JournalEvent) -> str:
    """Return a sentence that describes the event, for users."""
    match event:
        case FitStarted(spec=spec):
            at_least = f"{spec.min_workers} to " if spec.is_elastic else ""
            workers = f"{at_least}{spec.max_workers} workers"
            return f"run {spec.name!r} started: {workers}, provisioner {spec.provisioner!r}"
        case LeaderElected(leader=leader, reason=reason):
            return f"{leader} elected leader: {reason}"
        case RoundOpened(round=round_, reason=reason):
            checkpoint = f", from {round_.checkpoint_name}" if round_.checkpoint_name else ""
            return f"round {round_.number} started: {reason}{checkpoint}"
        case RoundClosed(round_number=number, reason=reason):
            return f"round {number} ended: {reason}"
        case TrainingEnded(fit_end=ended):
            return f"training {ended.outcome}; validations of the last checkpoints are pending"
        case CancelRequested(reason=reason):
            return f"cancellation requested: {reason}"
        case FitEnded(outcome=outcome, reason=reason, last_save_error=save_error):
            unsaved = f"; its last save failed{_last_line(save_error)}" if save_error else ""
            return f"run {outcome}" + (f": {reason}" if reason else "") + unsaved
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


def _format_machine_event(event: _MachineEvent) -> str:
    match event:
        case GroupPlanned(plan=plan, reason=reason):
            size = f"{plan.num_nodes} machines with {plan.slots_per_node} workers each"
            return f"requesting {size}: {reason}"
        case GroupSubmitted(handle=handle):
            return f"machine request accepted: {handle.name}"
        case GroupRefused(reason=reason):
            return f"machine request refused: {reason}"
        # Without an agent there is no worker output; the backend has the cause (decision 0035).
        case NodeLost(token=token, node=node, agent=None, reason=reason):
            hint = f"see its output with `spotfit logs --machine {token}/{node}`"
            return f"machine {token}/{node} lost before its agent joined: {reason} ({hint})"
        case NodeLost(token=token, node=node, reason=reason):
            return f"machine {token}/{node} lost: {reason}"
        case GroupsReleased(token=token, other_tokens=others):
            return f"released machines {', '.join((token, *others))}"
        case PreemptionNoticed(agent=agent, notice=notice):
            left = "" if notice.seconds_left is None else f", {notice.seconds_left:.0f} s left"
            return f"preemption notice for node {agent}: {notice.reason}{left}"


def _last_line(text: str) -> str:  # of a traceback: the exception and its message
    lines = text.strip().splitlines()
    return f": {lines[-1]}" if lines else ""
