"""Translation of the journal's `FitEnded` event into the exception that `fit()` raises."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress

from spotfit.code.function_pickle import load_sealed_pickle
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
    WorkerTimeoutError,
)
from spotfit.host.system import SystemClock
from spotfit.model.events import FailureCause, FitEnded, PreemptedNodes, RankFailure
from spotfit.model.topology import PreemptionInfo
from spotfit.security.run_key import RunKey
from spotfit.store.api import Store

_MAX_TRACEBACK_CHARS = 1000  # per group of equal tracebacks; the logs contain the full text
# Longer than the upload of an exception usually takes, short enough for a user who waits.
_PICKLE_TIMEOUT_S, _PICKLE_POLL_PAUSE_S = 12.0, 0.05


def build_run_error(
    ended: FitEnded, store: Store, key: RunKey | None, *, clock: Clock | None = None
) -> SpotfitError:
    """Return the exception for a failed or cancelled run.

    With the run's `key`, it contains the original exceptions of workers, callbacks and hooks;
    without, their text.
    """
    clock = clock or SystemClock()
    if ended.outcome == "cancelled":
        return RunCancelledError(
            f"The run was cancelled: {ended.reason}",
            do="Call fit() again with the same RunConfig(name=...) to continue from the latest "
            "checkpoint.",
        )
    match ended.cause:
        case FailureCause.PREEMPTION:
            preempted = ended.preempted or PreemptedNodes(node_to_ranks={})
            nodes = {node: list(ranks) for node, ranks in preempted.node_to_ranks.items()}
            info = PreemptionInfo(preempted.deadline_ms or None, nodes)
            error = PreemptionError(info, preempted.drain_timed_out)
            error.add_note(ended.reason)
            return error
        case FailureCause.WORKER:
            # Negative ranks are failures of callbacks, backend hooks and the agent.
            failures = [each for each in ended.failures if each.rank >= 0]
            exceptions = {each.rank: _load_exception(each, store, key, clock) for each in failures}
            is_hang = any(failure.kind == "timeout" for failure in failures)
            error_type = HangError if is_hang else WorkerGroupError
            return error_type(format_worker_failures(failures), exceptions)
        case FailureCause.PLATFORM:
            # The exception of a callback or hook, if it was raised in Python and can be decrypted.
            first = ended.failures[0] if ended.failures else None
            if first is not None and first.pickle_key is not None and key is not None:
                return ControllerError(_load_exception(first, store, key, clock))
            text = f"{ended.reason}\n{first.message if first else ''}".strip()
            return ControllerError(SpotfitError(text))
        case _:
            return TrainingFailedError(ended.reason)


def format_worker_failures(failures: Sequence[RankFailure]) -> str:
    """Return all tracebacks as text; equal ones appear once, with the list of their ranks."""
    groups: dict[str, list[RankFailure]] = {}
    for failure in failures:
        # Numbers such as ranks, devices and addresses differ between otherwise equal tracebacks.
        groups.setdefault(re.sub(r"\d+", "#", failure.message), []).append(failure)
    lines = ["Training failed due to worker errors:"]
    for members in groups.values():
        ranks = ",".join(str(member.rank) for member in members)
        text = members[0].message
        # The middle is omitted: the entry point and the raised exception are at the ends.
        if (omitted := len(text) - _MAX_TRACEBACK_CHARS) > 0:
            half = _MAX_TRACEBACK_CHARS // 2
            text = f"{text[:half]}\n… {omitted} characters omitted …\n{text[-half:]}"
        lines.append(f"[Rank {ranks} Error Snippet]:\n{text}")
    return "\n".join(lines)


def _load_exception(
    failure: RankFailure, store: Store, key: RunKey | None, clock: Clock
) -> BaseException:
    """Return the original exception of a rank, or a spotfit error with its text."""
    # Only exceptions that the function raised were pickled; other kinds have just a text.
    if failure.kind == "timeout":
        return WorkerTimeoutError(failure.message, rank=failure.rank)
    if failure.kind != "raised":
        return WorkerDiedError(failure.message, rank=failure.rank, kind=failure.kind)
    if failure.pickle_key is None or key is None:
        return TrainingFailedError(failure.message, rank=failure.rank)
    try:
        envelope = _fetch_pickle(failure.pickle_key, store, clock)
        raised = load_sealed_pickle(envelope, key, purpose=failure.pickle_key)
    # ShippingError: the class of the exception may be missing on this machine. The text remains.
    except (StoreError, IntegrityError, ShippingError) as error:
        return TrainingFailedError(
            f"{failure.message}\n(the original exception cannot be loaded: {error.message})",
            rank=failure.rank,
        )
    # Unpickling calls the user's __reduce__, which may return anything.
    if isinstance(raised, BaseException):
        is_worker = failure.rank >= 0
        where = f"in the worker of rank {failure.rank}" if is_worker else "outside of the workers"
        raised.add_note(f"raised {where}:\n{failure.message}")
        return raised
    return TrainingFailedError(failure.message, rank=failure.rank)


def _fetch_pickle(key: str, store: Store, clock: Clock) -> bytes:
    # The node may still be uploading the exception when the journal entry is already visible.
    deadline = clock.now() + _PICKLE_TIMEOUT_S
    while clock.now() < deadline:
        with suppress(NotFoundError):
            return store.get(key)
        clock.wait(_PICKLE_POLL_PAUSE_S)
    return store.get(key)
