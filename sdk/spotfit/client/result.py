"""`Result`: returned by `fit()`, and readable again from the directory of a run.

Translation of the journal's `FitEnded` event into the exception that `fit()` raises.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

from spotfit.checkpoint.checkpoint_dir import (
    Checkpoint,
    StorageLocation,
    pyarrow_filesystem_or_store,
    store_path,
)
from spotfit.checkpoint.committed import check_all_present, open_all
from spotfit.client.deadline_status import DeadlineStatus, deadline_status
from spotfit.client.keyring import key_of, open_authenticated
from spotfit.client.metrics_history import read_metrics_history
from spotfit.code.function_pickle import load_sealed_pickle
from spotfit.core.clock import Clock
from spotfit.core.errors import (
    BudgetExhaustedError,
    ConfigError,
    ControllerError,
    HangError,
    IntegrityError,
    JournalError,
    NotFoundError,
    PreemptionError,
    RunCancelledError,
    RunNotFoundError,
    ShippingError,
    SpotfitError,
    StoreError,
    TimeBudgetExceededError,
    TrainingFailedError,
    WorkerDiedError,
    WorkerGroupError,
    WorkerTimeoutError,
)
from spotfit.core.units import strip_control_characters
from spotfit.host.plugins import require_module
from spotfit.host.system import SystemClock, wall_ms
from spotfit.ledger.journal import Journal, check_no_gaps
from spotfit.model.bill import Bill
from spotfit.model.events import (
    CheckpointCommitted,
    FailureCause,
    FitEnded,
    PreemptedNodes,
    RankFailure,
)
from spotfit.model.reporting import metrics_from_json
from spotfit.model.spec import RetentionConfig
from spotfit.model.topology import PreemptionInfo
from spotfit.model.usage import bill_of
from spotfit.model.view import JournalView, View
from spotfit.policy.retention import nested_metric, without_overwritten, worst_to_best
from spotfit.security.run_key import RunKey
from spotfit.store.api import Store
from spotfit.store.factory import open_store
from spotfit.store.filesystem import open_filesystem_store

# --- Translation of the journal's FitEnded event into the exception -------------------------------


_MAX_TRACEBACK_CHARS = 2000  # per group of equal tracebacks; the logs contain the full text
_FRAME = re.compile(r'  File "([^"]*)", line \d+.*\n(?:    .*\n|  \[.*\n)*')
# Installed packages and the standard library.
_LIBRARY_PATH = re.compile(r"/(site|dist)-packages/|/lib(64)?/python3[^/]*/|^<frozen ")
# Longer than the upload of an exception usually takes, short enough for a user who waits.
_PICKLE_TIMEOUT_S, _PICKLE_POLL_PAUSE_S = 12.0, 0.05


def build_run_error(
    ended: FitEnded, store: Store, key: RunKey | None, *, clock: Clock | None = None
) -> SpotfitError:
    """Return (not raise) the exception that `fit()` raises for a failed or cancelled run.

    `store` is rooted at the run's directory. With the run's `key`, the exception contains the
    original exceptions of workers, callbacks and hooks, which are read from the store, waiting up
    to 12 s for an upload; without, their text. `clock` is for tests.
    """
    clock = clock or SystemClock()
    if ended.is_time_budget:
        return TimeBudgetExceededError(
            f"The run in {store.url} was ended: {ended.reason}.",
            do="Call fit() again with the same RunConfig(name=...) to continue from the latest "
            "checkpoint, with a new time budget; or set a larger RunConfig(time_budget_s=...).",
        )
    if ended.is_cost_budget:
        return BudgetExhaustedError(
            f"The run in {store.url} was ended: {ended.reason}.",
            do="Call fit() again with the same RunConfig(name=...) and a larger budget_usd to "
            "continue from the latest checkpoint; the budget includes what earlier fits cost.",
        )
    if ended.outcome == "cancelled":
        return RunCancelledError(
            f"The run in {store.url} was cancelled: {ended.reason}",
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
            worker_error = error_type(format_worker_failures(failures), exceptions)
            worker_error.add_note(f"The whole output of the workers: `spotfit logs {store.url}`")
            return worker_error
        case FailureCause.PLATFORM:
            # The exception of a callback or hook, if it was raised in Python and can be decrypted.
            first = ended.failures[0] if ended.failures else None
            if first is not None and first.pickle_key is not None and key is not None:
                return ControllerError(_load_exception(first, store, key, clock))
            text = f"{ended.reason}\n{first.message if first else ''}".strip()
            return ControllerError(
                SpotfitError(text, do=ended.remedy or _machine_remedy(ended, store))
            )
        case _:
            return TrainingFailedError(
                f"The run in {store.url} failed: {ended.reason}",
                do=f"Read the output of the workers with `spotfit logs {store.url}`.",
            )


def _machine_remedy(ended: FitEnded, store: Store) -> str:
    """What to do if machines crashed or started no agent; '' for other failures."""
    if not ended.failed_machine:
        return ""
    read_output = (
        "Read what the machine printed, if its backend keeps that: `spotfit logs --machine "
        f"{ended.failed_machine} {store.url}`."
    )
    return (
        f"{read_output} If a traceback shows an error in spotfit, report it. Otherwise check that "
        "the image or the environment of the machines has Python 3.11 or newer and spotfit, and "
        "that machines can reach the storage; `python -m spotfit.agent --check` tests it there."
    )


def format_worker_failures(failures: Sequence[RankFailure]) -> str:
    """Return the tracebacks of failed ranks as one text for the exception message.

    Tracebacks that differ only in numbers appear once, with the list of their ranks. Long ones are
    shortened: first by the frames of libraries, then in the middle.
    """
    groups: dict[str, list[RankFailure]] = {}
    for failure in failures:
        # Numbers such as ranks, devices and addresses differ between otherwise equal tracebacks.
        groups.setdefault(re.sub(r"\d+", "#", failure.message), []).append(failure)
    lines = ["Training failed due to worker errors:"]
    for members in groups.values():
        ranks = ",".join(str(member.rank) for member in members)
        text = _shorten_traceback(members[0].message)
        # The exception is printed by Python, as it is.
        lines.append(f"[Rank {ranks} Error Snippet]:\n{strip_control_characters(text)}")
    return "\n".join(lines)


def _shorten_traceback(text: str) -> str:
    if len(text) <= _MAX_TRACEBACK_CHARS:
        return text
    frames = list(_FRAME.finditer(text))
    is_library = [bool(_LIBRARY_PATH.search(frame[1])) for frame in frames]
    # Of an installed project all frames are in a library. The innermost frame is always kept: the
    # exception was raised there.
    if any(is_library[:-1]) and not all(is_library):
        omitted_frames = [f for f, omit in zip(frames[:-1], is_library, strict=False) if omit]
        for frame in reversed(omitted_frames):
            text = text[: frame.start()] + text[frame.end() :]
        text = f"({len(omitted_frames)} frames of libraries omitted)\n{text}"
    # The middle is omitted: the entry point and the raised exception are at the ends.
    if (omitted := len(text) - _MAX_TRACEBACK_CHARS) > 0:
        half = _MAX_TRACEBACK_CHARS // 2
        text = f"{text[:half]}\n… {omitted} characters omitted …\n{text[-half:]}"
    return text


def _load_exception(
    failure: RankFailure, store: Store, key: RunKey | None, clock: Clock
) -> BaseException:
    """Return the original exception of a rank, or a spotfit error with its text."""
    remedy = f"Read the output of the workers with `spotfit logs {store.url}`."
    # Only exceptions that the function raised were pickled; other kinds have just a text.
    if failure.kind == "timeout":
        return WorkerTimeoutError(failure.message, do=remedy, rank=failure.rank)
    if failure.kind != "raised":
        return WorkerDiedError(failure.message, do=remedy, rank=failure.rank, kind=failure.kind)
    if failure.pickle_key is None or key is None:
        return TrainingFailedError(failure.message, rank=failure.rank)
    try:
        read = partial(_fetch_pickle, failure.pickle_key, store, clock)
        raised = load_sealed_pickle(read, key, purpose=failure.pickle_key)
    # ShippingError: the class of the exception may be missing on this machine. The text remains.
    except (StoreError, IntegrityError, ShippingError) as error:
        return TrainingFailedError(
            f"{failure.message}\nThe original exception cannot be loaded: {error.message}",
            do=error.do,
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


class ResultNotFoundError(RunNotFoundError, RuntimeError):
    """There is no result, or it lacks the requested checkpoint or metric."""


class _LazyField:
    """A dataclass field whose value is computed from the assigned value on first access.

    `compute(result, assigned)` returns the value, which replaces the assigned one.
    """

    def __init__(self, compute: Callable[[Result, Any], Any]) -> None:
        self._compute = compute

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = f"_{name}"

    def __get__(self, result: Any, owner: type) -> Any:
        if result is None:
            return None  # dataclass() reads the default value of the field from the class
        value = self._compute(result, getattr(result, self._name))
        setattr(result, self._name, value)
        return value

    def __set__(self, result: Any, value: Any) -> None:
        setattr(result, self._name, value)


def _build_dataframe(store: Store) -> Any:
    # Lazy, because most programs do not need it and importing pandas takes about a second.
    rows = [report.metrics for report in read_metrics_history(store)]
    return require_module("pandas", extra="pandas").DataFrame(rows) if rows else None


def _call_if_lazy(_: Result, value: Any) -> Any:
    return value() if callable(value) else value


@dataclass(eq=False, repr=False)
class Result:
    """The result of a run.

    `metrics`: the last metrics that rank 0 reported, with or without a checkpoint.
    `checkpoint`: the latest checkpoint, not the best one.
    `best_checkpoints`: pairs of checkpoint and metrics, from worst to best by the configured score,
    or oldest to newest without a score.
    `path`: the directory of the run, without a URL scheme.
    `metrics_dataframe`: one row per report of rank 0, in order, with the metrics as columns; None
    without a report. A round after a failure repeats the steps since its checkpoint. Needs pandas.
    `return_value`: what the training function returned on rank 0.
    `error`: the exception that `fit()` raised, in a result that was read with `from_path`.
    `cost`: what the machines of the run have cost in all its fits, in US dollars and in
    machine-seconds; without machines if the function was called in this process (`num_workers=0`).
    `deadline`: whether it was met, as `slack_s` in seconds, negative if not; None without one.
    """

    metrics: dict[str, Any] | None
    checkpoint: Checkpoint | None
    error: Exception | None
    path: str | None
    metrics_dataframe: Any = _LazyField(_call_if_lazy)
    # Lazy, because opening a checkpoint reads its manifests from the store.
    best_checkpoints: list[tuple[Checkpoint, dict[str, Any]]] | None = cast(  # noqa: RUF009
        "Any", _LazyField(_call_if_lazy)
    )
    return_value: Any = None
    _filesystem: Any = None
    cost: Bill = field(default_factory=Bill, kw_only=True)
    deadline: DeadlineStatus | None = field(default=None, kw_only=True)

    def __repr__(self) -> str:
        # Without the lazy fields: printing a result must neither import pandas nor read the store.
        names = ("metrics", "checkpoint", "error", "path", "return_value")
        return f"Result({', '.join(f'{name}={getattr(self, name)!r}' for name in names)})"

    @property
    def filesystem(self) -> Any:
        """The file system in which `path` is valid, or a spotfit `Store` if there is none.

        It is the storage_filesystem= of the run, else a pyarrow file system. If pyarrow is not
        installed or has none for the storage, it is a `Store` of the run's directory, whose keys
        are relative to that directory. In local mode: that of this machine.
        """
        return self._filesystem or pyarrow_filesystem_or_store(open_store("/"))

    @property
    def config(self) -> Any:
        """Removed, as in Ray Train V2. Raises `DeprecationWarning`."""
        raise DeprecationWarning(
            "Result.config was removed: a result does not store the configuration. Use the "
            "dictionary that you passed as train_loop_config=, or store it in the checkpoint."
        )

    @classmethod
    def from_path(cls, path: str | os.PathLike[str], storage_filesystem: Any = None) -> Result:
        """Read the result of a run from its directory: a path, a URL, or a path in the filesystem.

        The directory is `<storage_path>/<name>`; with `storage_filesystem`, a pyarrow or fsspec
        file system, `path` belongs to it. The run may still be active. `return_value` is not
        restored; `error` is the failure of the run, not raised. What is read is verified if this
        machine has the run's key; otherwise a warning says that it is not. Raises
        `ResultNotFoundError`, a RuntimeError, if there is no run, its journal is not authentic, or
        it reported nothing, and `IntegrityError` if a checkpoint is missing.
        """
        text, location = os.fspath(path).rstrip("/"), None
        if storage_filesystem is None:
            store = open_store(text, setting="Result.from_path(path)")
        else:
            store = open_filesystem_store(storage_filesystem, text)
            location = StorageLocation(text, storage_filesystem)
        store, view = _open_run(store)
        error = None
        # Fail now, not when the user opens a checkpoint that was deleted by hand.
        check_all_present(store, _digests(without_overwritten(view.checkpoints)))
        if view.run_id and view.fit_end is not None and view.fit_end.outcome != "finished":
            # Without the run's key on this machine, it holds only the text of worker exceptions.
            error = build_run_error(view.fit_end, store, key_of(store))
        return build_result(
            view, store, filesystem_location=location, include_latest=True, error=error
        )

    def get_best_checkpoint(self, metric: str, mode: str) -> Checkpoint | None:
        """Return the checkpoint with the highest ("max") or lowest ("min") value of `metric`.

        Considers `best_checkpoints`. 'a/b' selects a nested metric. Checkpoints without the metric
        are ignored, and NaN is the worst value. Raises `ResultNotFoundError` if no checkpoint has
        the metric, and `ConfigError` for another `mode` or a metric that is not a number.
        """
        if mode not in ("max", "min"):
            raise ConfigError(
                f"get_best_checkpoint(mode={mode!r}): mode must be 'max' or 'min'.",
                do="Pass mode='max' if higher values are better, mode='min' if lower values are.",
            )
        where = f" in {self.path}" if self.path else ""
        if not self.best_checkpoints:
            raise ResultNotFoundError(
                f"No checkpoint exists in the run{where}, so none has the best {metric!r}.",
                do="Call report(metrics, checkpoint=...) in the training function.",
            )
        scored: list[tuple[Checkpoint, float]] = []
        for each, metrics in self.best_checkpoints:
            score = nested_metric(metrics, metric)
            if score is not None and not isinstance(score, (int, float)):
                raise ConfigError(
                    f"get_best_checkpoint(metric={metric!r}): the value in {each.path} is "
                    f"{score!r}; only numbers can be compared.",
                    do="Pass a metric with numeric values; 'a/b' selects a nested metric.",
                )
            if score is not None:
                scored.append((each, score))
        if not scored:
            known = sorted({key for _, metrics in self.best_checkpoints for key in metrics})
            raise ResultNotFoundError(
                f"Invalid metric name {metric!r} in get_best_checkpoint(): no checkpoint of the "
                f"run{where} was reported with it.",
                do=f"Pass one of the reported metrics: {', '.join(known)}.",
            )
        # max() for both modes, so that NaN is the worst value in both.
        sign = 1 if mode == "max" else -1
        return max(scored, key=lambda pair: -math.inf if math.isnan(pair[1]) else sign * pair[1])[0]


def build_result(
    view: JournalView,
    store: Store,
    return_value: Any = None,
    *,
    filesystem_location: StorageLocation | None = None,
    error: Exception | None = None,
    include_latest: bool = False,
    cost: Bill | None = None,
) -> Result:
    """Return the `Result` of the run whose journal was read as `view`.

    `store` is rooted at the run's directory, and `filesystem_location` is the same directory in the
    user's storage_filesystem=; None without one. `best_checkpoints` holds at most num_to_keep
    checkpoints; with `include_latest` also the latest one, which is stored even if it is not among
    the best. `error` is kept in the result, not raised. `cost` is the bill, by default that of
    `view` at present. Opens only the latest checkpoint.
    """
    retention = view.spec.retention if isinstance(view, View) else RetentionConfig()
    # A checkpoint directory that the user has overwritten has several journal entries (decision
    # 0043); only the last one describes its content.
    best = worst_to_best(without_overwritten(view.checkpoints), retention)
    # Beside the best ones the leader keeps the latest checkpoint, from which a new round starts.
    if retention.num_to_keep is not None and not include_latest:
        best = best[-retention.num_to_keep :]
    latest = None
    if view.latest_checkpoint is not None:
        latest = _open_checkpoints(store, [view.latest_checkpoint], filesystem_location)[0][0]
    if filesystem_location is None:
        path, filesystem = store_path(store), pyarrow_filesystem_or_store(store)
    else:
        path, filesystem = filesystem_location.path, filesystem_location.filesystem
    return Result(
        metrics=_last_metrics(view),
        checkpoint=latest,
        error=error,
        path=path,
        metrics_dataframe=partial(_build_dataframe, store),
        best_checkpoints=cast("Any", partial(_open_checkpoints, store, best, filesystem_location)),
        return_value=return_value,
        _filesystem=filesystem,
        cost=bill_of(view, wall_ms()) if cost is None else cost,
        deadline=deadline_status(view, wall_ms()),
    )


def _digests(checkpoints: Iterable[CheckpointCommitted]) -> dict[str, str]:
    return {each.name: each.manifests_digest for each in checkpoints}


def _open_checkpoints(
    store: Store,
    checkpoints: Sequence[CheckpointCommitted],
    filesystem_location: StorageLocation | None,
) -> list[tuple[Checkpoint, dict[str, Any]]]:
    opened = open_all(store, _digests(checkpoints), location=filesystem_location)
    return [(opened[each.name], metrics_from_json(each.metrics)) for each in checkpoints]


def _last_metrics(view: JournalView) -> dict[str, Any] | None:
    """Return the metrics of the last report, or of the latest checkpoint if there is none."""
    latest = view.latest_checkpoint
    metrics = view.fit_end.metrics if view.fit_end is not None else None
    if latest is not None:
        # If the latest checkpoint came with the last report, its metrics are preferred: they
        # include the results of a validation that ended after the report. It did if both have the
        # same metrics apart from those results.
        validation = view.validation_results.get(latest.uid)
        added = validation.metrics if validation is not None else {}
        own = {name: value for name, value in latest.metrics.items() if name not in added}
        if metrics is None or own == {n: value for n, value in metrics.items() if n not in added}:
            metrics = latest.metrics
    return cast("dict[str, Any] | None", metrics_from_json(metrics))


def _open_run(store: Store) -> tuple[Store, JournalView]:
    """Return the store of a run with this user's key of it, and the state of the run."""
    # In an object store, a missing directory and an empty one are the same.
    if not any(True for _ in store.list()):
        raise ResultNotFoundError(
            f"The directory {store_path(store)} doesn't exist or is empty.",
            do="Pass the directory of one run: <storage_path>/<name>.",
        )
    try:
        check_no_gaps(store)
        store = open_authenticated(store)
        journal = Journal(store)
        view = journal.catch_up()
        journal.check_is_authentic()
    except JournalError as error:
        raise ResultNotFoundError(
            f"Failed to restore the result from {store_path(store)}: the journal of the run cannot "
            f"be read. {error.message}",
            do=error.do,
        ) from error
    # Without reports there is no result, also if the run has finished.
    if not view.checkpoints and (view.fit_end is None or view.fit_end.metrics is None):
        end = f" It is {view.fit_end.outcome}: {view.fit_end.reason}" if view.fit_end else ""
        raise ResultNotFoundError(
            f"Failed to restore the result from {store_path(store)}: the run reported neither "
            f"metrics nor a checkpoint.{end}",
            do="Pass the directory of a run that reported metrics or a checkpoint.",
        )
    return store, view
