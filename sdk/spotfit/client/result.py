"""`Result`: returned by `fit()`, and readable again from the directory of a run."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

from spotfit.checkpoint.checkpoint_dir import (
    Checkpoint,
    StorageLocation,
    pyarrow_filesystem_or_store,
    store_path,
)
from spotfit.checkpoint.committed import check_all_present, open_all
from spotfit.client.keyring import RunKeyring
from spotfit.client.training_errors import build_run_error
from spotfit.core.errors import ConfigError, JournalError, RunNotFoundError
from spotfit.host.plugins import require_module
from spotfit.ledger.journal import Journal
from spotfit.model.events import CheckpointCommitted
from spotfit.model.metrics import metrics_from_json
from spotfit.model.spec import RetentionConfig
from spotfit.model.view import JournalView, View
from spotfit.policy.retention import nested_metric, without_overwritten, worst_to_best
from spotfit.store.api import Store
from spotfit.store.factory import open_store
from spotfit.store.filesystem import open_filesystem_store


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


def _build_dataframe(result: Result, value: Any) -> Any:
    # Lazy, because most programs do not need it and importing pandas takes about a second.
    if value is not None or not result.best_checkpoints:
        return value
    rows = [metrics for _, metrics in result.best_checkpoints]
    return require_module("pandas", extra="pandas").DataFrame(rows)


@dataclass(eq=False, repr=False)
class Result:
    """The result of a run.

    `metrics`: the last metrics that rank 0 reported, with or without a checkpoint.
    `checkpoint`: the latest checkpoint, not the best one.
    `best_checkpoints`: pairs of checkpoint and metrics, from worst to best by the configured score,
    or oldest to newest without a score.
    `path`: the directory of the run, without a URL scheme.
    `metrics_dataframe`: one row per entry of `best_checkpoints`, or None; needs pandas.
    `return_value`: what the training function returned on rank 0.
    `error`: the exception that `fit()` raised, in a result that was read with `from_path`.
    """

    metrics: dict[str, Any] | None
    checkpoint: Checkpoint | None
    error: Exception | None
    path: str | None
    metrics_dataframe: Any = _LazyField(_build_dataframe)
    # Lazy, because opening a checkpoint reads its manifests from the store.
    best_checkpoints: list[tuple[Checkpoint, dict[str, Any]]] | None = cast(  # noqa: RUF009
        "Any", _LazyField(lambda _, value: value() if callable(value) else value)
    )
    return_value: Any = None
    _filesystem: Any = None

    def __repr__(self) -> str:
        # Without the lazy fields: printing a result must neither import pandas nor read the store.
        names = ("metrics", "checkpoint", "error", "path", "return_value")
        return f"Result({', '.join(f'{name}={getattr(self, name)!r}' for name in names)})"

    @property
    def filesystem(self) -> Any:
        """The file system in which `path` is valid.

        It is the storage_filesystem= of the run, else a pyarrow file system, or a spotfit store if
        pyarrow is not installed.
        """
        return self._filesystem or pyarrow_filesystem_or_store(open_store("/"))

    @property
    def config(self) -> Any:
        """Removed, as in Ray Train V2. Raises `DeprecationWarning`."""
        raise DeprecationWarning(
            "Result.config is no longer supported: use the train_loop_config of the trainer."
        )

    @classmethod
    def from_path(cls, path: str | os.PathLike[str], storage_filesystem: Any = None) -> Result:
        """Read the result of a run from its directory: a path, a URL, or a path in the filesystem.

        `return_value` is not restored. Raises `ResultNotFoundError`, a RuntimeError, if there is
        no run or it reported nothing, and `IntegrityError` if a checkpoint is missing.
        """
        text, location = os.fspath(path).rstrip("/"), None
        if storage_filesystem is None:
            store = open_store(text)
        else:
            store = open_filesystem_store(storage_filesystem, text)
            location = StorageLocation(text, storage_filesystem)
        view, error = _read_view(store), None
        if view.run_id and view.fit_end is not None and view.fit_end.outcome != "finished":
            # Without the run's key on this machine, it holds only the text of worker exceptions.
            error = build_run_error(view.fit_end, store, RunKeyring().find(view.run_id))
        # Fail now, not when the user opens a checkpoint that was deleted by hand.
        check_all_present(store, [each.name for each in without_overwritten(view.checkpoints)])
        return build_result(
            view, store, filesystem_location=location, include_latest=True, error=error
        )

    def get_best_checkpoint(self, metric: str, mode: str) -> Checkpoint | None:
        """Return the checkpoint with the highest ("max") or lowest ("min") value of `metric`.

        'a/b' selects a nested metric. Checkpoints without the metric are ignored, and NaN is the
        worst value. Raises `ResultNotFoundError` if no checkpoint has the metric.
        """
        if mode not in ("max", "min"):
            raise ConfigError(
                f"mode must be 'max' or 'min', not {mode!r}.",
                do="Pass mode='max' if higher values are better, mode='min' if lower values are.",
            )
        if not self.best_checkpoints:
            raise ResultNotFoundError(
                f"No checkpoint exists in this run, so none has the best {metric!r}.",
                do="Call report(metrics, checkpoint=...) in the training function.",
            )
        scored: list[tuple[Checkpoint, float]] = []
        for each, metrics in self.best_checkpoints:
            score = nested_metric(metrics, metric)
            if score is not None and not isinstance(score, (int, float)):
                raise ConfigError(
                    f"The metric {metric!r} of a checkpoint is {score!r}; only numbers can be "
                    "compared.",
                    do="Choose a metric with numeric values; 'a/b' selects a nested metric.",
                )
            if score is not None:
                scored.append((each, score))
        if not scored:
            known = sorted({key for _, metrics in self.best_checkpoints for key in metrics})
            raise ResultNotFoundError(
                f"Invalid metric name {metric!r}: no checkpoint was reported with it.",
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
) -> Result:
    """Return the result of the run with this view, whose directory is `store`.

    `filesystem_location` is the same directory in the user's file system, if there is one.
    `best_checkpoints` holds at most num_to_keep checkpoints; with `include_latest` also the latest
    one, which is stored even if it is not among the best.
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
        best_checkpoints=cast("Any", partial(_open_checkpoints, store, best, filesystem_location)),
        return_value=return_value,
        _filesystem=filesystem,
    )


def _open_checkpoints(
    store: Store,
    checkpoints: Sequence[CheckpointCommitted],
    filesystem_location: StorageLocation | None,
) -> list[tuple[Checkpoint, dict[str, Any]]]:
    opened = open_all(store, {each.name for each in checkpoints}, location=filesystem_location)
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


def _read_view(store: Store) -> JournalView:
    # In an object store, a missing directory and an empty one are the same.
    if not any(True for _ in store.list()):
        raise ResultNotFoundError(
            f"The directory {store_path(store)} doesn't exist or is empty.",
            do="Pass the directory of one run: <storage_path>/<name>.",
        )
    try:
        view = Journal(store).catch_up()
    except JournalError as error:
        raise ResultNotFoundError(
            f"Failed to restore the result from {store_path(store)}: {error}",
            do="Pass the directory of a run that was written by this version of spotfit.",
        ) from error
    # Without reports there is no result, also if the run has finished.
    if not view.checkpoints and (view.fit_end is None or view.fit_end.metrics is None):
        end = f" It is {view.fit_end.outcome}: {view.fit_end.reason}" if view.fit_end else ""
        raise ResultNotFoundError(
            f"Failed to restore the result from {store_path(store)}: the run reported neither "
            f"metrics nor a checkpoint.{end}",
            do="Pass the directory of a run that reported metrics or a checkpoint.",
        )
    return view
