"""RayTrainReportCallback for LightGBM: reports evaluation results and models during training."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from spotfit.boosting.model_reports import (
    MetricSelection,
    ReportSettings,
    read_model,
    report_model,
)
from spotfit.checkpoint.checkpoint_dir import Checkpoint
from spotfit.frameworks.lightgbm.lightgbm_config import check_is_distributed, current_network
from spotfit.worker.training_api import get_context, report

# After `record_evaluation` (20) and before `early_stopping` (30), which ends the round's callbacks.
CALLBACK_ORDER = 25


class RayTrainReportCallback:
    """Reports metrics after each round of `lightgbm.train`, and rank 0's model as a checkpoint.

    Args:
        metrics: Results to report, named "<set>-<metric>": None for all, a name, a list of names,
            or a dictionary from reported to original names.
        filename: Name of the model's file in a checkpoint.
        frequency: Number of rounds between checkpoints; 0 reports none during the training.
        checkpoint_at_end: Whether the report of the last of `num_boost_round` rounds has the model.
            A training that early stopping ends reports none; `spotfit.lightgbm.train` does.
        results_postprocessing_fn: Called with the selected metrics; returns those to report.

    Checkpoints are uploaded in the background. Raises `ConfigError` in the first round if each
    worker of a `LightGBMTrainer` would train a model of its own, because the network parameters or
    a parallel tree learner are missing.
    """

    CHECKPOINT_NAME = "model.txt"

    def __init__(
        self,
        metrics: MetricSelection = None,
        filename: str = CHECKPOINT_NAME,
        frequency: int = 0,
        checkpoint_at_end: bool = True,  # noqa: FBT001, FBT002 - Ray's signature
        results_postprocessing_fn: Callable[[dict[str, Any]], dict[str, Any]] | None = None,
    ) -> None:
        self.settings = ReportSettings(
            metrics,
            filename=filename,
            frequency=frequency,
            checkpoint_at_end=checkpoint_at_end,
            results_postprocessing_fn=results_postprocessing_fn,
        )
        # LightGBM reads both.
        self.order = CALLBACK_ORDER
        self.before_iteration = False

    @classmethod
    def get_model(cls, checkpoint: Checkpoint, filename: str = CHECKPOINT_NAME) -> Any:
        """Return the model of a reported checkpoint as a `lightgbm.Booster`.

        Raises `NotFoundError` if the checkpoint has no such file, and ImportError without lightgbm.
        """
        from lightgbm import Booster

        return Booster(model_str=read_model(checkpoint, filename).decode())

    def __call__(self, env: Any) -> None:
        """Report the results of the round; called by LightGBM on all ranks."""
        if env.iteration == env.begin_iteration and current_network() is not None:
            check_is_distributed(env.params, world_size=get_context().get_world_size())
        metrics = self.settings.select_metrics(named_results(env.evaluation_result_list or ()))
        is_last = env.iteration == env.end_iteration - 1
        if (is_last and self.settings.checkpoint_at_end) or self.settings.is_checkpoint_due(
            env.iteration + 1
        ):
            # The iteration counts the rounds of an init_model.
            report_model(
                metrics,
                {self.settings.filename: encode_model(env.model)},
                progress=(env.iteration + 1) / env.end_iteration,
            )
        else:
            report(metrics)


def encode_model(booster: Any) -> bytes:
    """Return the content of the model's file, with all rounds."""
    # By default only those up to the best iteration.
    return str(booster.model_to_string(num_iteration=-1)).encode()


def named_results(results: Iterable[Any]) -> dict[str, float]:
    """Return LightGBM's results of a round by "<set>-<metric>"."""
    # Before LightGBM 4.7 they are tuples without names.
    return {f"{result[0]}-{result[1]}": float(result[2]) for result in results}
