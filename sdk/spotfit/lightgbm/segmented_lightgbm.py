"""`spotfit.lightgbm.train`: lightgbm.train in segments, which resumes exactly from checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
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
    load_segment,
)
from spotfit.core.errors import ConfigError
from spotfit.frameworks.lightgbm.lightgbm_config import (
    TREE_LEARNER_NAMES,
    check_is_distributed,
    current_network,
)
from spotfit.host.plugins import require_module
from spotfit.lightgbm.lightgbm_callback import (
    CALLBACK_ORDER,
    RayTrainReportCallback,
    encode_model,
    named_results,
)
from spotfit.worker.training_api import get_checkpoint, get_context, report

require_module("lightgbm", extra="lightgbm")  # before the import below, for a clear error

import lightgbm  # noqa: E402
from lightgbm.callback import CallbackEnv, EarlyStopException  # noqa: E402

# Parameters of LightGBM with their aliases.
_ROUNDS_NAMES = (
    "num_iterations",
    "num_iteration",
    "n_iter",
    "num_tree",
    "num_trees",
    "num_round",
    "num_rounds",
    "nrounds",
    "num_boost_round",
    "n_estimators",
    "max_iter",
)
_STOPPING_NAMES = ("early_stopping_round", "early_stopping_rounds", "early_stopping")
_SEED_NAMES = ("seed", "random_seed", "random_state")
_SAMPLING_SEEDS: Mapping[str, tuple[tuple[str, ...], int]] = {
    "bagging_seed": (("bagging_seed", "bagging_fraction_seed"), 3),
    "feature_fraction_seed": (("feature_fraction_seed",), 2),
    "extra_seed": (("extra_seed",), 6),
    "drop_seed": (("drop_seed",), 4),
    "objective_seed": (("objective_seed",), 5),
}
"""Seeds of what is drawn in each round, with their aliases and LightGBM's defaults.

`data_random_seed` is not among them: LightGBM refuses another one for the same dataset.
"""
_NETWORK_NAMES = ("machines", "local_listen_port")


def train(
    params: dict[str, Any],
    train_set: lightgbm.Dataset,
    num_boost_round: int = 100,
    valid_sets: list[lightgbm.Dataset] | lightgbm.Dataset | None = None,
    valid_names: list[str] | str | None = None,
    feval: Any = None,
    init_model: str | PathLike[str] | lightgbm.Booster | None = None,
    keep_training_booster: bool = False,  # noqa: FBT001, FBT002 - LightGBM's signature
    callbacks: list[Callable[..., Any]] | None = None,
    *,
    rounds_per_segment: int = DEFAULT_ROUNDS_PER_SEGMENT,
) -> lightgbm.Booster:
    """Train as `lightgbm.train`, report every round, and continue the run's latest checkpoint.

    For a training function; all ranks call it with equal arguments and their own rows. The network
    parameters, `tree_learner="data"` and `pre_partition` are added. The datasets must not be
    constructed yet, and keep their raw data; `init_score` requires a single segment. Validation
    sets are evaluated on each worker alone: give all workers the same ones.

    The model is saved every `rounds_per_segment` rounds by rank 0, and at the end. A run that was
    interrupted gives the same model as one that was not, also with bagging, feature fractions, goss
    and dart: each segment draws from seeds of its own. The length of the segments is therefore a
    part of the result, and differs from that of `lightgbm.train` if something is sampled. Unless
    set, `deterministic` and `force_row_wise` are true: otherwise LightGBM measures which of two
    algorithms is faster, and their results differ.

    Early stopping and `record_evaluation` continue after an interruption; other callbacks
    lose their state. A `RayTrainReportCallback` in `callbacks` sets the reported metrics and
    the name of the model's file. Raises `ConfigError` for arguments that cannot be continued and
    for a second call in a training function, and the errors of `lightgbm.train` and
    `spotfit.report`.
    """
    check_first_training()
    # LightGBM accepts one instead of a list, too.
    valid_sets = [valid_sets] if isinstance(valid_sets, lightgbm.Dataset) else valid_sets
    valid_names = [valid_names] if isinstance(valid_names, str) else valid_names
    params, rounds, stopping = _take_rounds(params, num_boost_round)
    check_rounds(rounds_per_segment, rounds)
    params = _with_defaults(params)
    _prepare_datasets(train_set, valid_sets or (), has_segments=rounds > rounds_per_segment)
    reporter, others = _sort_callbacks([*(callbacks or ()), *stopping])
    initial = _load_initial(init_model)
    first_round = 0 if initial is None else initial.current_iteration()
    training = _Training(
        params=params,
        train_arguments={
            "train_set": train_set,
            "valid_sets": valid_sets,
            "valid_names": valid_names,
            "feval": feval,
        },
        first_round=first_round,
        total_rounds=first_round + rounds,
        reporter=reporter,
        callbacks=others,
    )
    training.load_latest(initial)
    while training.rounds_left and not training.state.is_finished:
        training.run_segment(rounds_per_segment, keep_booster=keep_training_booster)
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
    callbacks: Sequence[Callable[..., Any]]
    state: SegmentState = field(default_factory=SegmentState)
    model: bytes | None = None
    booster: Any = None
    _network_owner: Any = None
    """The booster that has opened the network, which is closed when it is collected."""

    @property
    def rounds_left(self) -> int:
        return max(0, self.total_rounds - self.state.rounds_done)

    def load_latest(self, initial: lightgbm.Booster | None) -> None:
        """Load model and state of the latest checkpoint, else the initial model."""
        self.state = SegmentState(rounds_done=self.first_round)
        self.booster = initial
        self.model = None if initial is None else encode_model(initial)
        if (checkpoint := get_checkpoint()) is not None:
            self.model, self.state = load_segment(checkpoint, self.reporter.settings.filename)
            self.booster = _booster_of(self.model)
            # Not in the model's file.
            self.booster.best_iteration = self.state.best_iteration
            self.booster.best_score = self.state.best_score
            if not self.state.is_finished:
                self._replay_history()

    def run_segment(self, rounds_per_segment: int, *, keep_booster: bool) -> None:
        """Train `rounds_per_segment` rounds, fewer at the end, and report the model."""
        rounds = min(rounds_per_segment, self.rounds_left)
        is_last = rounds == self.rounds_left
        reports = _RoundReports(self.reporter)
        callbacks = [
            _OfWholeRun(one, self.first_round, self.total_rounds) for one in self.callbacks
        ]
        self.booster = lightgbm.train(
            self._segment_params(),
            num_boost_round=rounds,
            init_model=None if self.model is None else _booster_of(self.model),
            keep_training_booster=keep_booster and is_last,
            callbacks=[reports, *callbacks],
            **self.train_arguments,
        )
        self._network_owner = self._network_owner or self.booster
        self.state = self.state.after_segment(
            reports.rounds,
            reports.history,
            maximized=reports.maximized,
            best_iteration=self.booster.best_iteration,
            best_score=_as_floats(self.booster.best_score),
            is_finished=any(one.has_stopped for one in callbacks),
        )
        self.model = encode_model(self.booster)
        filename = self.reporter.settings.filename
        report_model(
            reports.last_metrics,
            {filename: self.model, STATE_FILENAME: encode_state(self.state)},
            progress=1.0 if self.state.is_finished else self.state.rounds_done / self.total_rounds,
        )

    def _segment_params(self) -> dict[str, Any]:
        """Each segment draws its own samples, and only the first one opens the network."""
        params = dict(self.params)
        if self._network_owner is not None:
            for name in _NETWORK_NAMES:
                params.pop(name, None)
        seed = next((params[name] for name in _SEED_NAMES if params.get(name) is not None), None)
        for name, (aliases, default) in _SAMPLING_SEEDS.items():
            own = next((params.pop(alias) for alias in aliases if alias in params), None)
            base = default if seed is None else seed
            params[name] = int(base if own is None else own) + self.state.rounds_done
        return params

    def _replay_history(self) -> None:
        """Give LightGBM's own callbacks the results of the rounds that are done."""
        names = self.train_arguments["valid_names"] or ()
        sets = self.train_arguments["valid_sets"] or ()
        for dataset, name in zip(sets, names, strict=False):
            if dataset is self.train_arguments["train_set"]:
                self.booster.set_train_data_name(name)  # early stopping ignores this set
        for number, results in enumerate(_rounds_of(self.state), start=self.first_round):
            for callback in filter(_accumulates, self.callbacks):
                callback(
                    CallbackEnv(
                        model=self.booster,
                        params=dict(self.params),
                        iteration=number,
                        begin_iteration=self.first_round,
                        end_iteration=self.total_rounds,
                        evaluation_result_list=results,
                    )
                )


class _RoundReports:
    """Reports the results of each round but the last of a segment, which is saved first."""

    order = CALLBACK_ORDER
    before_iteration = False

    def __init__(self, reporter: RayTrainReportCallback) -> None:
        self._settings = reporter.settings
        self.rounds = 0
        self.last_metrics: dict[str, Any] = {}
        self.history: EvaluationHistory = {}
        self.maximized: tuple[tuple[str, str], ...] = ()

    def __call__(self, env: Any) -> None:
        # With early stopping it is not known which round is the last one.
        if self.rounds:
            report(self.last_metrics)
        self.rounds += 1
        results = env.evaluation_result_list or []
        self.last_metrics = self._settings.select_metrics(named_results(results))
        self.maximized = tuple((result[0], result[1]) for result in results if result[3])
        for result in results:
            values = self.history.setdefault(result[0], {}).setdefault(result[1], [])
            values.append(float(result[2]))


class _OfWholeRun:
    """Calls a callback with the first and last round of the whole run, instead of a segment's."""

    def __init__(self, callback: Any, first_round: int, total_rounds: int) -> None:
        self._callback = callback
        self._first_round, self._total_rounds = first_round, total_rounds
        self.has_stopped = False
        # LightGBM calls callbacks without an order before its own, in the order of the list.
        self.order = getattr(callback, "order", 0)
        self.before_iteration = getattr(callback, "before_iteration", False)

    def __call__(self, env: Any) -> None:
        try:
            self._callback(
                CallbackEnv(
                    model=env.model,
                    params=env.params,
                    iteration=env.iteration,
                    begin_iteration=self._first_round,
                    end_iteration=self._total_rounds,
                    evaluation_result_list=env.evaluation_result_list,
                )
            )
        except EarlyStopException:
            self.has_stopped = True
            raise


def _take_rounds(
    params: Mapping[str, Any], num_boost_round: int
) -> tuple[dict[str, Any], Any, list[Any]]:
    """Return the other parameters, the number of rounds and a callback for early stopping, if
    any."""
    rounds = next((params[name] for name in _ROUNDS_NAMES if name in params), num_boost_round)
    stopping = next((params[name] for name in _STOPPING_NAMES if params.get(name)), 0)
    removed = (*_ROUNDS_NAMES, *_STOPPING_NAMES)
    others = {name: value for name, value in params.items() if name not in removed}
    if not stopping:
        return others, rounds, []
    stopper = lightgbm.early_stopping(
        stopping,
        first_metric_only=bool(params.get("first_metric_only", False)),
        min_delta=params.get("early_stopping_min_delta", 0.0),
    )
    return others, rounds, [stopper]


def _with_defaults(params: Mapping[str, Any]) -> dict[str, Any]:
    check_booster(params)
    result: dict[str, Any] = {"deterministic": True, **params}
    if not {"force_row_wise", "force_col_wise"} & result.keys():
        result["force_row_wise"] = True
    network, world_size = current_network(), get_context().get_world_size()
    if network is not None and world_size > 1:
        result |= network.parameters()
        if not set(TREE_LEARNER_NAMES) & result.keys():
            result["tree_learner"] = "data"
        result.setdefault("pre_partition", True)
        check_is_distributed(result, world_size=world_size)
    return result


def _prepare_datasets(train_set: Any, valid_sets: Sequence[Any], *, has_segments: bool) -> None:
    for dataset in (train_set, *valid_sets):
        # Constructed before the network is formed, it would have the bins of its own rows only.
        if dataset._handle is not None:  # noqa: SLF001 - LightGBM has no other way to ask
            raise ConfigError(
                "A dataset of train() is constructed already.",
                do="Do not call construct(), or functions that do, before train().",
            )
        if has_segments and dataset.init_score is not None:
            raise ConfigError(
                "train() does not support Dataset(init_score=...) with more than one segment: from "
                "the second one on, LightGBM replaces it by the predictions of the model.",
                do="Pass a rounds_per_segment of at least the number of rounds; the model is then "
                "saved only at the end.",
            )
        dataset.free_raw_data = False  # each segment predicts from it


def _sort_callbacks(
    callbacks: Sequence[Any],
) -> tuple[RayTrainReportCallback, list[Callable[..., Any]]]:
    reporters = [one for one in callbacks if isinstance(one, RayTrainReportCallback)]
    for one in reporters:
        one.settings.reject_frequency()
    others = [one for one in callbacks if one not in reporters]
    return (reporters[0] if reporters else RayTrainReportCallback()), others


def _load_initial(model: Any) -> lightgbm.Booster | None:
    if model is None or isinstance(model, lightgbm.Booster):
        return model
    return lightgbm.Booster(model_file=model)


def _booster_of(model: bytes) -> lightgbm.Booster:
    return lightgbm.Booster(model_str=model.decode())


def _as_floats(scores: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    return {
        name: {metric: float(value) for metric, value in metrics.items()}
        for name, metrics in scores.items()
    }


def _accumulates(callback: Any) -> bool:
    """Whether it is one of LightGBM's callbacks that keep a state over rounds."""
    return type(callback).__name__ in {"_EarlyStoppingCallback", "_RecordEvaluationCallback"}


def _rounds_of(state: SegmentState) -> Iterator[list[Any]]:
    """Yield the results of each round, as LightGBM passes them to callbacks."""
    series = [
        (name, metric, values)
        for name, metrics in state.history.items()
        for metric, values in metrics.items()
    ]
    for results in zip(*(values for _, _, values in series), strict=True):
        yield [
            _result(name, metric, value, is_maximized=(name, metric) in state.maximized)
            for (name, metric, _), value in zip(series, results, strict=True)
        ]


def _result(name: str, metric: str, value: float, *, is_maximized: bool) -> Any:
    # Before LightGBM 4.7 results are tuples.
    result_type = getattr(lightgbm.basic, "EvalResult", None)
    fields = (name, metric, value, is_maximized)
    return fields if result_type is None else result_type(*fields)
