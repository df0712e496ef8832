"""What happened, one plain sentence an event: for the console, the demo and `status()`."""

from __future__ import annotations

import time

from spotfit.core.errors import RunNotFoundError
from spotfit.core.units import told_bytes
from spotfit.ledger.journal import Journal
from spotfit.model.events import (
    CancelRequested,
    CheckpointCommitted,
    CheckpointDropped,
    Entry,
    Event,
    FitEnded,
    FitStarted,
    Intended,
    LeaderElected,
    NodeLost,
    Noticed,
    Refused,
    Released,
    RoundClosed,
    RoundOpened,
    Submitted,
    TrainingEnded,
    ValidationBegun,
    ValidationEnded,
)
from spotfit.store.api import Store


def read_story(store: Store) -> list[str]:
    """The whole journal in words, one line an entry, with the time of day it was written.

    Raises `RunNotFoundError` where there is none.
    """
    lines: list[str] = []

    def note(slot: int, _body: bytes, entry: Entry) -> None:
        when = time.strftime("%H:%M:%S", time.localtime(entry.at_ms / 1000))
        lines.append(f"{slot:>5}  {when}  {tell(entry.event)}")

    journal = Journal(store, whole=True)
    journal.heard = note
    journal.catch_up()
    if not lines:
        raise no_run_at(store)
    return lines


def no_run_at(store: Store) -> RunNotFoundError:
    """The error for a folder that holds no run."""
    return RunNotFoundError(
        f"There is no run at {store.url}.",
        do="Give the folder of one run: <storage_path>/<name>, as RunHandle.url tells it.",
    )


def tell(event: Event) -> str:
    """The event in words."""
    match event:
        case FitStarted(spec=spec):
            least = f"{spec.workers_min} to " if spec.elastic else ""
            width = f"{least}{spec.workers_max} workers"
            return f"run {spec.name!r} starts: {width} on {spec.provisioner!r}"
        case LeaderElected(leader=leader, why=why):
            return f"{leader} leads: {why}"
        case Intended(plan=plan, why=why):
            return f"asking for {plan.nodes} machines with {plan.slots} workers each: {why}"
        case Submitted(handle=handle):
            return f"machines granted: {handle.name}"
        case Refused(why=why):
            return f"refused: {why}"
        case NodeLost(token=token, node=node, agent=None, why=why):
            told = f"machine {token}/{node} is lost: {why}"
            return f"{told} (what is kept of its output: `spotfit logs --machine {token}/{node}`)"
        case NodeLost(token=token, node=node, why=why):
            return f"machine {token}/{node} is lost: {why}"
        case Released(token=token, others=others):
            return f"let go: {', '.join((token, *others))}"
        case Noticed(agent=agent, notice=notice):
            left = "" if notice.seconds_left is None else f" in {notice.seconds_left:.0f} s"
            return f"the machine of {agent} will be taken away{left}: {notice.reason}"
        case RoundOpened(round=round_, why=why):
            since = f", from {round_.checkpoint}" if round_.checkpoint else ""
            return f"round {round_.number}: {why}{since}"
        case RoundClosed(number=number, why=why):
            return f"round {number} is over: {why}"
        case CheckpointCommitted(name=name, size_bytes=size_bytes, why=why):
            told = f"checkpoint {name} committed ({told_bytes(size_bytes)})"
            return f"{told}: {why}" if why else told
        case CheckpointDropped(name=name, why=why):
            return f"checkpoint {name} dropped: {why}"
        case ValidationBegun(name=name, why=why):
            return f"checkpoint {name} is being validated {why}".rstrip()
        case ValidationEnded(name=name, status=status, why=why):
            return f"checkpoint {name}: {_VALIDATED[status]}{_last_line(why)}"
        case TrainingEnded(ended=ended):
            return f"training is {ended.outcome}; the last checkpoints are being validated"
        case CancelRequested(why=why):
            return f"cancel requested: {why}"
        case FitEnded(outcome=outcome, why=why, unsaved=unsaved):
            lost = f"; its last save is no checkpoint{_last_line(unsaved)}" if unsaved else ""
            return f"the run is {outcome}" + (f": {why}" if why else "") + lost


_VALIDATED = {
    "validated": "validated",
    "failed": "its validation failed",
    "timeout": "its validation was stopped",
}


def _last_line(why: str) -> str:
    lines = why.strip().splitlines()
    return f": {lines[-1]}" if lines else ""
