"""SklearnTrainer: fits a scikit-learn estimator on one worker, with Ray Train V1's arguments."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import cloudpickle

from spotfit.boosting.model_reports import read_model, report_model
from spotfit.boosting.row_datasets import TRAIN, Table, check_datasets, load_table
from spotfit.checkpoint.checkpoint_dir import Checkpoint
from spotfit.client.run_config import RunConfig, check_config_type
from spotfit.client.trainer import DataParallelTrainer
from spotfit.code.function_pickle import unpickle
from spotfit.core.errors import ConfigError, ConfigTypeError
from spotfit.core.unsupported_names import UNSUPPORTED_ARGUMENTS
from spotfit.host.plugins import require_module
from spotfit.model.config import ScalingConfig

MODEL_FILENAME = "model.pkl"

Scoring = str | list[str] | dict[str, Any] | Callable[..., float] | None


class SklearnTrainer(DataParallelTrainer):
    """Fits a scikit-learn estimator in one worker process on a rented machine.

    Nothing is distributed: scikit-learn uses the CPUs of one machine. A run that loses it fits
    again from the beginning, on another one.

    Args:
        estimator: An object with `fit` and `predict`, not fitted.
        datasets: `"train"` and further sets for scores: pandas DataFrames, or functions without
            arguments that return one.
        label_column: Name of the labels' column in each dataset.
        params: Parameters that are set with `estimator.set_params`.
        scoring: A name of a scorer, a callable, or several in a list or dictionary; None for the
            estimator's own score.
        cv: Folds or a splitter of a cross validation on the training set; None for none.
        return_train_score_cv: Whether the cross validation also scores its training folds.
        parallelize_cv: Whether its folds run in parallel; None: as `set_estimator_cpus`, if the
            estimator has no `n_jobs`.
        set_estimator_cpus: Whether `n_jobs` of the estimator becomes the worker's number of CPUs.
        scaling_config: Resources of the worker; `num_workers` must be 1, or 0 for this process.
        fit_params: Further arguments of `estimator.fit`.

    The metrics of the result are dictionaries by dataset, with `test_score` or `test_<name>` of
    each scorer; of the cross validation, under "cv", the lists of all folds with their means and
    standard deviations. `get_model(result.checkpoint)` returns the fitted estimator. Raises
    `ConfigError` for invalid arguments.
    """

    def __init__(
        self,
        *,
        estimator: Any,
        datasets: dict[str, Any],
        label_column: str,
        params: dict[str, Any] | None = None,
        scoring: Scoring = None,
        cv: Any = None,
        return_train_score_cv: bool = False,
        parallelize_cv: bool | None = None,
        set_estimator_cpus: bool = True,
        scaling_config: ScalingConfig | None = None,
        run_config: RunConfig | None = None,
        provisioner: Any = None,
        **fit_params: Any,
    ) -> None:
        scaling = check_config_type("scaling_config", scaling_config, ScalingConfig)
        _check_estimator(estimator, scaling)
        _check_fit_params(fit_params)
        cpus = max(1, int(scaling.num_cpus_per_worker))
        job = _FitJob(
            estimator=estimator,
            params=dict(params or {}),
            datasets=check_datasets("SklearnTrainer", datasets, label_column),
            label_column=label_column,
            scoring=scoring,
            cv=cv,
            return_train_score=return_train_score_cv,
            parallelize_cv=parallelize_cv,
            cpus=cpus,
            set_estimator_cpus=set_estimator_cpus,
            fit_params=fit_params,
        )
        super().__init__(
            partial(run_job, job),
            scaling_config=scaling,
            run_config=run_config,
            provisioner=provisioner,
        )

    @classmethod
    def get_model(cls, checkpoint: Checkpoint) -> Any:
        """Return the fitted estimator of a checkpoint of this trainer.

        It is unpickled, which can run arbitrary code: use it only with trusted checkpoints. Raises
        `NotFoundError` if the checkpoint has no estimator.
        """
        return unpickle(read_model(checkpoint, MODEL_FILENAME), description="estimator")


class _FitJob(NamedTuple):
    """What the worker does."""

    estimator: Any
    params: dict[str, Any]
    datasets: dict[str, Any]
    label_column: str
    scoring: Scoring
    cv: Any
    return_train_score: bool
    parallelize_cv: bool | None
    cpus: int
    """Of the worker."""
    set_estimator_cpus: bool
    fit_params: dict[str, Any]


def run_job(job: _FitJob) -> None:
    """Fit and score the estimator and report both; called in the worker."""
    require_module("sklearn", extra="sklearn")
    estimator = job.estimator.set_params(**job.params) if job.params else job.estimator
    has_jobs = job.set_estimator_cpus and _set_jobs(estimator, job.cpus)
    tables = {
        name: load_table(dataset, name, job.label_column) for name, dataset in job.datasets.items()
    }
    train = tables.pop(TRAIN)
    metrics: dict[str, Any] = {}
    if job.cv is not None:
        is_parallel = job.parallelize_cv
        if is_parallel is None:
            is_parallel = job.set_estimator_cpus and not has_jobs
        metrics["cv"] = _cross_validate(job, estimator, train, job.cpus if is_parallel else 1)
    estimator.fit(train.features, train.labels, **job.fit_params)
    scorers = _scorers(estimator, job.scoring)
    for name, table in tables.items():
        metrics[name] = {
            f"test_{scorer_name}": float(scorer(estimator, table.features, table.labels))
            for scorer_name, scorer in scorers.items()
        }
    report_model(metrics, {MODEL_FILENAME: cloudpickle.dumps(estimator)})


def _check_estimator(estimator: Any, scaling: ScalingConfig) -> None:
    if isinstance(estimator, type) or not hasattr(estimator, "fit"):
        raise ConfigTypeError(
            f"SklearnTrainer(estimator={estimator!r}) is not an estimator.",
            do="Pass an object with a method fit(), such as RandomForestClassifier().",
        )
    if scaling.num_workers not in (0, 1):
        raise ConfigError(
            f"SklearnTrainer fits in one worker, but num_workers is {scaling.num_workers}.",
            do='Use ScalingConfig(num_workers=1, resources_per_worker={"CPU": 8}). To '
            "fit many estimators, use DataParallelTrainer and fit some of them in each worker.",
        )


def _check_fit_params(fit_params: Mapping[str, Any]) -> None:
    for name in fit_params.keys() & UNSUPPORTED_ARGUMENTS.keys():
        raise ConfigTypeError(
            f"SklearnTrainer({name}=...): there is no such argument.",
            do=UNSUPPORTED_ARGUMENTS[name],
        )


def _set_jobs(estimator: Any, cpus: int) -> bool:
    """Set all `n_jobs`, also of nested estimators; return whether there are any."""
    present = {
        name: value
        for name, value in estimator.get_params().items()
        if name == "n_jobs" or name.endswith("__n_jobs")
    }
    # None is 1 already, and some estimators warn about any other value.
    changed = [name for name, value in present.items() if (value or 1) != cpus]
    estimator.set_params(**dict.fromkeys(changed, cpus))
    return bool(present)


def _cross_validate(job: _FitJob, estimator: Any, train: Table, jobs: int) -> dict[str, Any]:
    from sklearn.model_selection import cross_validate

    folds = cross_validate(
        estimator,
        train.features,
        train.labels,
        cv=job.cv,
        scoring=job.scoring,
        n_jobs=jobs,
        return_train_score=job.return_train_score,
        params=job.fit_params or None,
    )
    results: dict[str, Any] = {}
    for name, values in folds.items():
        results[name] = [float(value) for value in values]
        results[f"{name}_mean"], results[f"{name}_std"] = float(values.mean()), float(values.std())
    return results


def _scorers(estimator: Any, scoring: Scoring) -> Mapping[str, Callable[..., float]]:
    from sklearn.metrics import check_scoring, get_scorer

    if isinstance(scoring, dict):
        return {
            name: get_scorer(one) if isinstance(one, str) else one for name, one in scoring.items()
        }
    if isinstance(scoring, list | tuple | set):
        return {name: get_scorer(name) for name in scoring}
    return {"score": check_scoring(estimator, scoring=scoring)}
