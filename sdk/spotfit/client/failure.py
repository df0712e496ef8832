"""From the journal's last word to the exception `fit()` raises."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress

from spotfit.core.clock import Clock
from spotfit.core.errors import (
    ControllerError,
    HangError,
    IntegrityError,
    NotFoundError,
    PreemptionError,
    RunCancelledError,
    ShippingError,
    SpotfitError,
    StoreError,
    TrainingFailedError,
    WorkerDiedError,
    WorkerGroupError,
    WorkerSilentError,
)
from spotfit.host.clocks import SystemClock
from spotfit.model.events import Blame, FitEnded, RankFailure, Taken
from spotfit.model.preemption import PreemptionInfo
from spotfit.ship.function import load_pickle
from spotfit.ship.sign import RunKey
from spotfit.store.api import Store

_LONGEST = 1000
_PICKLE_PATIENCE_S, _PICKLE_PAUSE_S = 12.0, 0.05


def error_of(
    ended: FitEnded, store: Store, key: RunKey | None, *, clock: Clock | None = None
) -> SpotfitError:
    """The exception for a run that ended badly, with the workers' own exceptions by rank."""
    clock = clock or SystemClock()
    if ended.outcome == "cancelled":
        return RunCancelledError(f"The run was cancelled: {ended.why}")
    match ended.blame:
        case Blame.PREEMPTION:
            return _preemption(ended)
        case Blame.WORKER:
            told = [failure for failure in ended.failures if failure.rank >= 0]
            exceptions = {one.rank: _exception(one, store, key, clock) for one in told}
            hung = any(failure.kind == "timeout" for failure in told)
            return (HangError if hung else WorkerGroupError)(grouped_message(told), exceptions)
        case Blame.PLATFORM:
            return ControllerError(_cause(ended, store, key, clock))
        case _:
            return TrainingFailedError(ended.why)


def _preemption(ended: FitEnded) -> PreemptionError:
    taken = ended.taken or Taken({})
    nodes = {node: list(ranks) for node, ranks in taken.nodes.items()}
    error = PreemptionError(PreemptionInfo(taken.deadline_ms or None, nodes), taken.timed_out)
    error.add_note(ended.why)
    return error


def _cause(ended: FitEnded, store: Store, key: RunKey | None, clock: Clock) -> BaseException:
    """What the user's callback or hook raised; else an error of ours that tells what happened."""
    first = ended.failures[0] if ended.failures else None
    if first is not None and first.pickle_key is not None and key is not None:
        return _exception(first, store, key, clock)
    return SpotfitError(f"{ended.why}\n{first.told if first else ''}".strip())


def grouped_message(failures: Sequence[RankFailure]) -> str:
    """All tracebacks; equal ones (up to numbers) once, with the ranks that share them."""
    groups: dict[str, list[RankFailure]] = {}
    for failure in failures:
        groups.setdefault(re.sub(r"\d+", "#", failure.told), []).append(failure)
    lines = ["Training failed due to worker errors:"]
    for members in groups.values():
        ranks = ",".join(str(one.rank) for one in members)
        lines.append(f"[Rank {ranks} Error Snippet]:\n{_cut(members[0].told)}")
    return "\n".join(lines)


def _cut(told: str) -> str:
    if len(told) <= _LONGEST:
        return told
    half = _LONGEST // 2
    return f"{told[:half]}\n… {len(told) - _LONGEST} characters left out …\n{told[-half:]}"


def _exception(
    failure: RankFailure, store: Store, key: RunKey | None, clock: Clock
) -> BaseException:
    """The original exception where it can be had; else one of ours that tells its text."""
    if failure.kind == "timeout":
        return WorkerSilentError(failure.told, rank=failure.rank)
    if failure.kind != "raised":
        return WorkerDiedError(failure.told, rank=failure.rank, kind=failure.kind)
    if failure.pickle_key is None or key is None:
        return TrainingFailedError(failure.told, rank=failure.rank)
    try:
        envelope = _envelope(failure.pickle_key, store, clock)
        raised = load_pickle(envelope, key, purpose=failure.pickle_key)
    except (StoreError, IntegrityError, ShippingError) as lost:
        return TrainingFailedError(
            f"{failure.told}\n(the exception itself is lost: {lost.what})", rank=failure.rank
        )
    if isinstance(raised, BaseException):
        beside = failure.rank < 0
        where = "beside the workers" if beside else f"in the worker of rank {failure.rank}"
        raised.add_note(f"raised {where}:\n{failure.told}")
        return raised
    return TrainingFailedError(failure.told, rank=failure.rank)


def _envelope(key: str, store: Store, clock: Clock) -> bytes:
    """Its node may still be writing it when the run's end is told already: wait a little."""
    give_up_at = clock.now() + _PICKLE_PATIENCE_S
    while clock.now() < give_up_at:
        with suppress(NotFoundError):
            return store.get(key)
        clock.wait(_PICKLE_PAUSE_S)
    return store.get(key)
