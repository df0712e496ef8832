"""Result: what `fit()` gives back, and what can be read again from the run's folder."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

from spotfit.checkpoint.handle import Address, Checkpoint, arrow_or_own, path_of
from spotfit.checkpoint.restore import check_all_present, open_all
from spotfit.client.failure import error_of
from spotfit.client.keyring import Keyring
from spotfit.core.errors import ConfigError, JournalError, RunNotFoundError
from spotfit.host.extras import need
from spotfit.ledger.journal import Journal
from spotfit.model.events import CheckpointCommitted
from spotfit.model.metrics import metrics_from_json
from spotfit.model.spec import Keep
from spotfit.model.view import View
from spotfit.policy.retention import nested, standing, worst_to_best
from spotfit.store.api import Store
from spotfit.store.filesystem import store_on
from spotfit.store.opening import open_store


class NoResultError(RunNotFoundError, RuntimeError):
    """The result, or the part of it that was asked for, is not there."""


class _Lazy:
    """A field that `make` gives when it is looked at, from the result and what it was set to."""

    def __init__(self, make: Callable[[Result, Any], Any]) -> None:
        self._make = make

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = f"_{name}"

    def __get__(self, result: Any, owner: type) -> Any:
        if result is None:
            return None  # the default of the dataclass's field
        made = self._make(result, getattr(result, self._name))
        setattr(result, self._name, made)
        return made

    def __set__(self, result: Any, given: Any) -> None:
        setattr(result, self._name, given)


def _framed(result: Result, given: Any) -> Any:
    """One row for each of the best checkpoints."""
    if given is not None or not result.best_checkpoints:
        return given
    rows = [metrics for _, metrics in result.best_checkpoints]
    return need("pandas", extra="pandas").DataFrame(rows)


def _found(_: Result, given: Any) -> Any:
    """The best checkpoints, whose manifests nobody has read before."""
    return given() if callable(given) else given


@dataclass(eq=False, repr=False)
class Result:
    """How a run ended.

    `metrics` are the last that rank 0 reported, with or without a checkpoint; `checkpoint` is the
    latest, not the best; `best_checkpoints` go from worst to best by the score, else by time.
    `path` is the run's folder without a scheme. `metrics_dataframe` has a row for each of the best
    checkpoints, None without any; it needs pandas. `error` is what `fit()` has raised, where the
    result of a run that ended badly is read again.
    """

    metrics: dict[str, Any] | None
    checkpoint: Checkpoint | None
    error: Exception | None
    path: str | None
    metrics_dataframe: Any = _Lazy(_framed)
    best_checkpoints: list[tuple[Checkpoint, dict[str, Any]]] | None = cast("Any", _Lazy(_found))  # noqa: RUF009 - a descriptor
    return_value: Any = None
    _filesystem: Any = None

    def __repr__(self) -> str:
        told = f"metrics={self.metrics!r}, checkpoint={self.checkpoint!r}, error={self.error!r}"
        return f"Result({told}, path={self.path!r}, return_value={self.return_value!r})"

    @property
    def filesystem(self) -> Any:
        """The file system in which `path` means the run.

        The one that was given as storage_filesystem; else pyarrow's, or our own store without it.
        """
        return self._filesystem or arrow_or_own(open_store("/"))

    @property
    def config(self) -> Any:
        """No more: the trainer knows what it was given."""
        raise DeprecationWarning("Result.config is no longer supported: keep the config yourself.")

    @classmethod
    def from_path(cls, path: str | os.PathLike[str], storage_filesystem: Any = None) -> Result:
        """The result of the run whose folder that is: a path, a URL, or a path in the filesystem.

        It has no return value. Raises `NoResultError`, which is a RuntimeError, where there is no
        run or none that reported a checkpoint, and `IntegrityError` where a checkpoint is gone.
        """
        text, within = os.fspath(path).rstrip("/"), None
        if storage_filesystem is None:
            store = open_store(text)
        else:
            store, within = store_on(storage_filesystem, text), Address(text, storage_filesystem)
        view = _view_at(store)
        check_all_present(store, [kept.name for kept in standing(view.checkpoints)])
        error = _error_at(view, store)
        return result_of(view, store, within=within, listing_all=True, error=error)

    def get_best_checkpoint(self, metric: str, mode: str) -> Checkpoint | None:
        """The checkpoint with the highest ("max") or lowest ("min") value of that metric.

        'a/b' leads into nested metrics. Checkpoints without it are passed over.
        """
        if mode not in ("max", "min"):
            raise ConfigError(
                f"mode must be 'max' or 'min', not {mode!r}.", do="'max' means higher is better."
            )
        if not self.best_checkpoints:
            raise NoResultError(
                "No checkpoint exists, so none is the best.", do="Report one with its metrics."
            )
        found = [(one, nested(metrics, metric)) for one, metrics in self.best_checkpoints]
        scored = [(one, _number(score, metric)) for one, score in found if score is not None]
        if not scored:
            known = sorted({key for _, metrics in self.best_checkpoints for key in metrics})
            raise NoResultError(
                f"Invalid metric name {metric!r}: no checkpoint was reported with it.",
                do=f"Known: {', '.join(known)}.",
            )
        sign = 1 if mode == "max" else -1
        return max(scored, key=lambda pair: _or_lowest(sign * pair[1]))[0]


def result_of(
    view: View,
    store: Store,
    return_value: Any = None,
    *,
    within: Address | None = None,
    error: Exception | None = None,
    listing_all: bool = False,
) -> Result:
    """The result of the run that `view` tells of, rooted at `store`, which the user calls `within`.

    `best_checkpoints` holds as many as are to be kept; with `listing_all` the latest besides, if
    it is not among them.
    """
    keep = view.spec.keep if view.spec else Keep()
    best = worst_to_best(standing(view.checkpoints), keep)
    if keep.last is not None and not listing_all:
        best = best[-keep.last :]
    latest = view.latest_checkpoint
    return Result(
        metrics=_last_metrics(view),
        checkpoint=_opened(store, [latest], within)[0][0] if latest else None,
        error=error,
        path=path_of(store) if within is None else within.path,
        best_checkpoints=cast("Any", partial(_opened, store, best, within)),
        return_value=return_value,
        _filesystem=arrow_or_own(store) if within is None else within.filesystem,
    )


def _opened(
    store: Store, kept: Sequence[CheckpointCommitted], within: Address | None
) -> list[tuple[Checkpoint, dict[str, Any]]]:
    opened = open_all(store, {one.name for one in kept}, within=within)
    return [(opened[one.name], _metrics(one)) for one in kept]


def _last_metrics(view: View) -> dict[str, Any] | None:
    """The last reported; those of the latest checkpoint where a fit reported nothing, or where it
    came with the last report: then what a validation found is among them."""
    latest = view.latest_checkpoint
    reported = view.ended.metrics if view.ended is not None else None
    if latest is not None and (reported is None or _is_of(reported, latest, view)):
        return _metrics(latest)
    return None if reported is None else cast("dict[str, Any]", metrics_from_json(reported))


def _is_of(reported: dict[str, Any], kept: CheckpointCommitted, view: View) -> bool:
    """Whether those metrics are the checkpoint's, but for what its validation has added."""
    verdict = view.verdicts.get(kept.mark)
    added = verdict.metrics if verdict is not None else {}
    mine = {name: value for name, value in kept.metrics.items() if name not in added}
    return mine == {name: value for name, value in reported.items() if name not in added}


def _metrics(checkpoint: CheckpointCommitted) -> dict[str, Any]:
    return cast("dict[str, Any]", metrics_from_json(checkpoint.metrics))


def _number(score: Any, metric: str) -> float:
    if isinstance(score, (int, float)):
        return score
    raise ConfigError(
        f"The metric {metric!r} of a checkpoint is {score!r}: only numbers can be compared.",
        do="Name one that is a number; 'a/b' leads into nested metrics.",
    )


def _or_lowest(score: float) -> float:
    return -math.inf if math.isnan(score) else score


def _error_at(view: View, store: Store) -> Exception | None:
    """What `fit()` raised; with the workers' own exceptions where the run's key is at hand."""
    if view.run_id is None or view.ended is None or view.ended.outcome == "finished":
        return None
    return error_of(view.ended, store, Keyring().find(view.run_id))


def _view_at(store: Store) -> View:
    if not any(True for _ in store.list()):
        raise NoResultError(
            f"The folder {path_of(store)} doesn't exist, or is empty.",
            do="Give the run's own folder: <storage_path>/<name>.",
        )
    try:
        view = Journal(store).catch_up()
    except JournalError as error:
        raise NoResultError(
            f"Failed to restore the result from {path_of(store)}: {error}",
            do="Give the folder of a run that this version of spotfit has written.",
        ) from error
    if not view.checkpoints and (view.ended is None or view.ended.metrics is None):
        why = f" The run {view.ended.outcome}: {view.ended.why}" if view.ended else ""
        raise NoResultError(
            f"Failed to restore the result from {path_of(store)}: nothing was reported there.{why}",
            do="Give the folder of a run that reported metrics or a checkpoint.",
        )
    return view
