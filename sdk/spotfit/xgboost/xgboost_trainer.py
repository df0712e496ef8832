"""XGBoostTrainer: runs a training function in XGBoost's communicator, or trains on datasets."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from spotfit.boosting.boosting_trainer import BoostingTrainer
from spotfit.boosting.row_datasets import TRAIN, load_table, rows_of_rank
from spotfit.boosting.v1_arguments import OwnedLoop, parse_v1_arguments
from spotfit.client.run_config import RunConfig, check_config_type
from spotfit.data.feeders import Feeders
from spotfit.frameworks.xgboost.xgboost_config import XGBoostConfig
from spotfit.model.config import ScalingConfig
from spotfit.model.validation_config import ValidationConfig
from spotfit.worker.training_api import get_context

_TRAIN_KWARGS = (
    "callbacks",
    "custom_metric",
    "early_stopping_rounds",
    "maximize",
    "obj",
    "verbose_eval",
)


class XGBoostTrainer(BoostingTrainer):
    """Runs a training function on workers that form XGBoost's communicator.

    Each worker loads its own rows into a `DMatrix`; `xgboost.train`, or `spotfit.xgboost.train`,
    which resumes exactly, then trains one model on the rows of all workers.

    Without a training function, `params`, `datasets`, `label_column` and `num_boost_round` (10)
    describe the training, as in Ray Train V1: `datasets["train"]` and further evaluation sets are
    pandas DataFrames, or functions without arguments that return one. Each worker takes a part of
    the rows of each. `dmatrix_params` are arguments of `DMatrix`, `rounds_per_segment` is that of
    `spotfit.xgboost.train`, and `train_kwargs` are other arguments of `xgboost.train`.

    Raises `ConfigError` or `ConfigErrors` for invalid arguments, and `DeprecationWarning`, as Ray
    Train V2 does, for `label_column`, `params` or `num_boost_round` beside a training function.
    """

    def __init__(
        self,
        train_loop_per_worker: Callable[..., Any] | None = None,
        *,
        train_loop_config: dict[str, Any] | None = None,
        xgboost_config: XGBoostConfig | None = None,
        scaling_config: ScalingConfig | None = None,
        run_config: RunConfig | None = None,
        datasets: dict[str, Any] | None = None,
        dataset_config: Any = None,
        data_feeders: Feeders | None = None,
        validation_config: ValidationConfig | None = None,
        metadata: dict[str, Any] | None = None,
        resume_from_checkpoint: Any = None,
        label_column: str | None = None,
        params: dict[str, Any] | None = None,
        num_boost_round: int | None = None,
        dmatrix_params: dict[str, Any] | None = None,
        rounds_per_segment: int | None = None,
        provisioner: Any = None,
        **train_kwargs: Any,
    ) -> None:
        loop = parse_v1_arguments(
            type(self).__name__,
            train_loop_per_worker,
            {
                "label_column": label_column,
                "params": params,
                "num_boost_round": num_boost_round,
                "datasets": datasets,
                "rounds_per_segment": rounds_per_segment,
            },
            train_kwargs=train_kwargs,
            known_kwargs=_TRAIN_KWARGS,
        )
        if loop is not None:
            train_loop_per_worker = partial(run_loop, loop, dmatrix_params or {})
            datasets = None
        assert train_loop_per_worker is not None
        super().__init__(
            train_loop_per_worker,
            train_loop_config=train_loop_config,
            backend_config=check_config_type(
                "xgboost_config", xgboost_config, XGBoostConfig, module="spotfit.xgboost"
            ),
            scaling_config=scaling_config,
            run_config=run_config,
            datasets=datasets,
            dataset_config=dataset_config,
            data_feeders=data_feeders,
            resume_from_checkpoint=resume_from_checkpoint,
            metadata=metadata,
            validation_config=validation_config,
            provisioner=provisioner,
        )


def run_loop(loop: OwnedLoop, dmatrix_params: dict[str, Any]) -> None:
    """Train on this worker's rows of the datasets; called in each worker of the trainer."""
    from xgboost import DMatrix

    from spotfit.xgboost.segmented_xgboost import train

    context = get_context()
    matrices = {}
    for name, dataset in loop.datasets.items():
        table = rows_of_rank(
            load_table(dataset, name, loop.label_column),
            name,
            rank=context.get_world_rank(),
            world_size=context.get_world_size(),
        )
        matrices[name] = DMatrix(table.features, label=table.labels, **dmatrix_params)
    train(
        loop.params,
        matrices[TRAIN],
        loop.num_boost_round,
        # The metric of the last set decides on early stopping: the training rows come first.
        evals=sorted(((matrix, name) for name, matrix in matrices.items()), key=_is_evaluation),
        rounds_per_segment=loop.rounds_per_segment,
        **{"verbose_eval": False, **loop.train_kwargs},
    )


def _is_evaluation(named: tuple[Any, str]) -> bool:
    return named[1] != TRAIN
