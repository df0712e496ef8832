"""`spotfit.xgboost.train`: xgboost.train in segments, which resumes exactly from checkpoints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from os import PathLike
from typing import Any

from spotfit.boosting.model_reports import report_model
from spotfit.boosting.segments import (
    DEFAULT_ROUNDS_PER_SEGMENT,
    STATE_FILENAME,
    EvaluationHistory,
    SegmentState,
    check_booster,
    check_first_training,
    check_rounds,
    encode_state,
    extend_history,
    load_segment,
)
from spotfit.core.errors import ConfigError, ConfigTypeError
from spotfit.host.plugins import require_module
from spotfit.worker.training_api import get_checkpoint, report
from spotfit.xgboost.xgboost_callback import RayTrainReportCallback, encode_model, latest_results

require_module("xgboost", extra="xgboost")  # before the import below, for a clear error

import xgboost  # noqa: E402
from xgboost.callback import (  # noqa: E402
    EarlyStopping,
    EvaluationMonitor,
    LearningRateScheduler,
    TrainingCallback,
)

_SEED_NAMES = ("seed", "random_state")
# What `EarlyStopping` accumulates over rounds; its other attributes are its arguments.
_STOPPING_FIELDS = ("stopping_history", "best_scores", "current_rounds", "maximize")


def train(
    params: dict[str, Any],
    dtrain: xgboost.DMatrix,
    num_boost_round: int = 10,
    *,
    evals: Sequence[tuple[xgboost.DMatrix, str]] | None = None,
    obj: Any = None,
    maximize: bool | None = None,
    early_stopping_rounds: int | None = None,
    evals_result: dict[str, Any] | None = None,
    verbose_eval: bool | int | None = True,
    xgb_model: str | PathLike[str] | xgboost.Booster | bytearray | None = None,
    callbacks: Sequence[TrainingCallback] | None = None,
    custom_metric: Any = None,
    rounds_per_segment: int = DEFAULT_ROUNDS_PER_SEGMENT,
) -> xgboost.Booster:
    """Train as `xgboost.train`, report every round, and continue the run's latest checkpoint.

    For a training function; all ranks call it with equal arguments and their own rows. The model is
    saved every `rounds_per_segment` rounds by rank 0, and at the end. A run that was interrupted
    gives the same model as one that was not, also with `subsample`, `colsample_*` and dart: each
    segment draws from seeds of its own. The length of the segments is therefore a part of the
    result, and differs from that of `xgboost.train` if rows or columns are sampled.

    Early stopping continues after an interruption. A `RayTrainReportCallback` in `callbacks` sets
    the reported metrics and the name of the model's file. Other callbacks see the rounds of the
    whole run; their own state is lost in an interruption. Raises `ConfigError` for arguments
    that cannot be continued and for a second call in a training function, and the errors of
    `xgboost.train` and `spotfit.report`.
    """
    check_first_training()
    check_rounds(rounds_per_segment, num_boost_round)
    _check_params(params)
    reporter, stoppers, others = _sort_callbacks(callbacks or ())
    if early_stopping_rounds:
        stoppers.append(EarlyStopping(rounds=early_stopping_rounds, maximize=maximize))
    if verbose_eval and evals:
        others.append(EvaluationMonitor(period=int(verbose_eval)))
    initial = _encode_initial(xgb_model)
    first_round = _count_rounds(initial)
    training = _Training(
        params=params,
        train_arguments={
            "dtrain": dtrain,
            "evals": evals,
            "obj": obj,
            "custom_metric": custom_metric,
            "verbose_eval": False,  # a callback does that
        },
        first_round=first_round,
        total_rounds=first_round + num_boost_round,
        reporter=reporter,
        stoppers=stoppers,
        others=others,
    )
    training.load_latest(initial)
    while training.rounds_left and not training.state.is_finished:
        training.run_segment(min(rounds_per_segment, training.rounds_left))
    if evals_result is not None:
        evals_result.update(training.state.history)
    return training.booster


@dataclass(kw_only=True)
class _Training:
    """The training of one call of `train`, between two segments."""

    params: Mapping[str, Any]
    train_arguments: Mapping[str, Any]
    first_round: int
    total_rounds: int
    """Including those of a model that the training begins from."""
    reporter: RayTrainReportCallback
    stoppers: Sequence[EarlyStopping]
    others: Sequence[Any]
    state: SegmentState = field(default_factory=SegmentState)
    model: bytes | None = None
    booster: Any = None

    @property
    def rounds_left(self) -> int:
        return max(0, self.total_rounds - self.state.rounds_done)

    def load_latest(self, initial: bytes | None) -> None:
        """Load model and state of the latest checkpoint, else the initial model."""
        self.model, self.state = initial, SegmentState(rounds_done=self.first_round)
        if (checkpoint := get_checkpoint()) is not None:
            self.model, self.state = load_segment(checkpoint, self.reporter.settings.filename)
        # Fewer states: another fit of the run has been given callbacks since.
        for stopper, fields in zip(self.stoppers, self.state.early_stopping, strict=False):
            vars(stopper).update(fields)
        if self.model is not None:
            self.booster = xgboost.Booster(self.params, model_file=bytearray(self.model))

    def run_segment(self, rounds: int) -> None:
        """Train `rounds` rounds, fewer with early stopping, and report the model."""
        results: EvaluationHistory = {}
        reports = _RoundReports(self.reporter)
        callbacks = [_OfWholeRun(one, self.state, self.first_round) for one in self.others]
        self.booster = xgboost.train(
            _with_segment_seed(self.params, self.state.rounds_done),
            num_boost_round=rounds,
            evals_result=results,
            xgb_model=None if self.model is None else bytearray(self.model),
            callbacks=[reports, *callbacks, *self.stoppers],
            **self.train_arguments,
        )
        # A callback may also stop in the last round of a segment.
        has_stopped = any(one.has_stopped for one in callbacks) or any(
            one.current_rounds >= one.rounds for one in self.stoppers
        )
        self.state = self.state.after_segment(
            reports.rounds,
            _as_floats(results),
            early_stopping=tuple(_stopping_state(one) for one in self.stoppers),
            is_finished=has_stopped or reports.rounds < rounds,
        )
        settings = self.reporter.settings
        self.model = encode_model(self.booster, settings)
        report_model(
            reports.last_metrics,
            {settings.filename: self.model, STATE_FILENAME: encode_state(self.state)},
            progress=1.0 if self.state.is_finished else self.state.rounds_done / self.total_rounds,
        )


class _RoundReports(TrainingCallback):  # type: ignore[misc]  # xgboost is untyped here
    """Reports the results of each round but the last of a segment, which is saved first."""

    def __init__(self, reporter: RayTrainReportCallback) -> None:
        self._settings = reporter.settings
        self.rounds = 0
        self.last_metrics: dict[str, Any] = {}
        super().__init__()

    def after_iteration(self, model: Any, epoch: int, evals_log: Mapping[str, Any]) -> bool:
        # With early stopping it is not known which round is the last one.
        if self.rounds:
            report(self.last_metrics)
        self.rounds += 1
        self.last_metrics = self._settings.select_metrics(latest_results(evals_log))
        return False


class _OfWholeRun(TrainingCallback):  # type: ignore[misc]  # xgboost is untyped here
    """Calls a callback with the rounds and results of the whole run, instead of a segment's."""

    def __init__(self, callback: Any, state: SegmentState, first_round: int) -> None:
        self._callback, self._history = callback, state.history
        # XGBoost's callbacks do not count the rounds of a model that the training begins from.
        self._rounds_done = state.rounds_done - first_round
        self.has_stopped = False
        super().__init__()

    def before_training(self, model: Any) -> Any:
        if isinstance(self._callback, LearningRateScheduler) and self._rounds_done:
            # It sets the rate of a round at the end of the previous one.
            model.set_param("learning_rate", self._callback.learning_rates(self._rounds_done - 1))
        return self._callback.before_training(model)

    def before_iteration(self, model: Any, epoch: int, evals_log: Any) -> bool:
        results = extend_history(self._history, evals_log)
        return bool(self._callback.before_iteration(model, self._rounds_done + epoch, results))

    def after_iteration(self, model: Any, epoch: int, evals_log: Any) -> bool:
        results = extend_history(self._history, evals_log)
        self.has_stopped = bool(
            self._callback.after_iteration(model, self._rounds_done + epoch, results)
        )
        return self.has_stopped

    def after_training(self, model: Any) -> Any:
        return self._callback.after_training(model)


def _sort_callbacks(
    callbacks: Sequence[Any],
) -> tuple[RayTrainReportCallback, list[EarlyStopping], list[Any]]:
    reporters = [one for one in callbacks if isinstance(one, RayTrainReportCallback)]
    stoppers = [one for one in callbacks if isinstance(one, EarlyStopping)]
    for one in reporters:
        one.settings.reject_frequency()
    if any(one.save_best for one in stoppers):
        raise ConfigError(
            "train() does not support EarlyStopping(save_best=True), which removes rounds at the "
            "end of each segment.",
            do="Omit save_best, and slice the model that train() returns: "
            "model[: model.best_iteration + 1].",
        )
    others = [one for one in callbacks if one not in (*reporters, *stoppers)]
    return (reporters[0] if reporters else RayTrainReportCallback()), stoppers, others


def _check_params(params: Any) -> None:
    if not isinstance(params, Mapping):
        raise ConfigTypeError(
            f"train(params=...) must be a dictionary, not a {type(params).__name__}.",
            do='Write {"objective": "binary:logistic"}.',
        )
    check_booster(params)


def _with_segment_seed(params: Mapping[str, Any], rounds_done: int) -> dict[str, Any]:
    """Each segment draws its own samples: with one seed all would draw those of the first."""
    base = next((params[name] for name in _SEED_NAMES if params.get(name) is not None), 0)
    others = {name: value for name, value in params.items() if name not in _SEED_NAMES}
    return {**others, "seed": int(base) + rounds_done}


def _encode_initial(model: Any) -> bytes | None:
    if model is None:
        return None
    if not isinstance(model, xgboost.Booster):
        model = xgboost.Booster(model_file=model)
    return bytes(model.save_raw("ubj"))


def _count_rounds(model: bytes | None) -> int:
    if model is None:
        return 0
    return int(xgboost.Booster(model_file=bytearray(model)).num_boosted_rounds())


def _stopping_state(stopper: EarlyStopping) -> dict[str, Any]:
    fields = {name: getattr(stopper, name) for name in _STOPPING_FIELDS}
    return {
        **fields,
        "stopping_history": _as_floats(stopper.stopping_history),
        "best_scores": _as_floats(stopper.best_scores),
    }


def _as_floats(results: Mapping[str, Mapping[str, Any]]) -> EvaluationHistory:
    return {
        name: {metric: [float(value) for value in values] for metric, values in metrics.items()}
        for name, metrics in results.items()
    }
