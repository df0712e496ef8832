"""LightGBMTrainer: runs a training function with LightGBM's network, or trains on datasets."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from spotfit.boosting.boosting_trainer import BoostingTrainer
from spotfit.boosting.row_datasets import TRAIN, load_table, rows_of_rank
from spotfit.boosting.v1_arguments import OwnedLoop, parse_v1_arguments
from spotfit.client.run_config import RunConfig, check_config_type
from spotfit.data.feeders import Feeders
from spotfit.frameworks.lightgbm.lightgbm_config import LightGBMConfig
from spotfit.model.config import ScalingConfig
from spotfit.model.validation_config import ValidationConfig
from spotfit.worker.training_api import get_context

_TRAIN_KWARGS = ("callbacks", "feval")


class LightGBMTrainer(BoostingTrainer):
    """Runs a training function on workers that `get_network_params()` connects.

    Each worker loads its own rows into a `Dataset`; `spotfit.lightgbm.train`, which resumes
    exactly, then trains one model on the rows of all workers, as does `lightgbm.train` with
    `get_network_params()` and `tree_learner="data"`.

    Without a training function, `params`, `datasets`, `label_column` and `num_boost_round` (10)
    describe the training, as in Ray Train V1: `datasets["train"]` and further evaluation sets are
    pandas DataFrames, or functions without arguments that return one. Each worker takes a part of
    the rows of "train" and evaluates all rows of the others. `dataset_params` are arguments of
    `Dataset`, `rounds_per_segment` is that of `spotfit.lightgbm.train`, and `train_kwargs` are
    other arguments of `lightgbm.train`.

    Raises `ConfigError` or `ConfigErrors` for invalid arguments, and `DeprecationWarning`, as Ray
    Train V2 does, for `label_column`, `params` or `num_boost_round` beside a training function.
    """

    def __init__(
        self,
        train_loop_per_worker: Callable[..., Any] | None = None,
        *,
        train_loop_config: dict[str, Any] | None = None,
        lightgbm_config: LightGBMConfig | None = None,
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
        dataset_params: dict[str, Any] | None = None,
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
            train_loop_per_worker = partial(run_loop, loop, dataset_params or {})
            datasets = None
        assert train_loop_per_worker is not None
        super().__init__(
            train_loop_per_worker,
            train_loop_config=train_loop_config,
            backend_config=check_config_type(
                "lightgbm_config", lightgbm_config, LightGBMConfig, module="spotfit.lightgbm"
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


def run_loop(loop: OwnedLoop, dataset_params: dict[str, Any]) -> None:
    """Train on this worker's rows of the datasets; called in each worker of the trainer."""
    from lightgbm import Dataset

    from spotfit.lightgbm.segmented_lightgbm import train

    context = get_context()
    tables = {
        name: load_table(dataset, name, loop.label_column)
        for name, dataset in loop.datasets.items()
    }
    # LightGBM evaluates the rows of one worker: all take the same ones, so that all stop together.
    tables[TRAIN] = rows_of_rank(
        tables[TRAIN], TRAIN, rank=context.get_world_rank(), world_size=context.get_world_size()
    )
    datasets = {
        name: Dataset(table.features, label=table.labels, **dataset_params)
        for name, table in tables.items()
    }
    train(
        loop.params,
        datasets[TRAIN],
        loop.num_boost_round,
        valid_sets=list(datasets.values()),
        valid_names=list(datasets),
        rounds_per_segment=loop.rounds_per_segment,
        **loop.train_kwargs,
    )
