"""RayTrainReportCallback for XGBoost: reports evaluation results and models during training."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from spotfit.boosting.model_reports import (
    MetricSelection,
    ReportSettings,
    read_model,
    report_model,
)
from spotfit.checkpoint.checkpoint_dir import Checkpoint
from spotfit.host.plugins import require_module
from spotfit.worker.training_api import report

require_module("xgboost", extra="xgboost")  # before the import below, for a clear error

from xgboost import Booster  # noqa: E402
from xgboost.callback import TrainingCallback  # noqa: E402


class RayTrainReportCallback(TrainingCallback):  # type: ignore[misc]  # xgboost is untyped here
    """Reports metrics after each round of `xgboost.train`, and rank 0's model as a checkpoint.

    Args:
        metrics: Results to report, named "<set>-<metric>": None for all, a name, a list of names,
            or a dictionary from reported to original names.
        filename: Name of the model's file in a checkpoint.
        frequency: Number of rounds between checkpoints; 0 reports none during the training.
        checkpoint_at_end: Whether to report the final model, in a report of its own, unless the
            last round has reported it.
        results_postprocessing_fn: Called with the selected metrics; returns those to report.

    Checkpoints are uploaded in the background. Training that is to resume exactly uses
    `spotfit.xgboost.train` instead of `xgboost.train`; a callback among its `callbacks` then sets
    metrics and filename.
    """

    CHECKPOINT_NAME = "model.ubj"

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
        self._metrics: dict[str, Any] = {}
        self._rounds_done = 0
        self._rounds_saved = 0
        super().__init__()

    @classmethod
    def get_model(cls, checkpoint: Checkpoint, filename: str = CHECKPOINT_NAME) -> Any:
        """Return the model of a reported checkpoint as an `xgboost.Booster`.

        Raises `NotFoundError` if the checkpoint has no such file.
        """
        return Booster(model_file=bytearray(read_model(checkpoint, filename)))

    def after_iteration(self, model: Any, epoch: int, evals_log: Mapping[str, Any]) -> bool:
        """Report the results of the round; called by XGBoost on all ranks. Never ends training."""
        self._rounds_done += 1
        self._metrics = self.settings.select_metrics(latest_results(evals_log))
        if self.settings.is_checkpoint_due(self._rounds_done):
            self._save(model)
        else:
            report(self._metrics)
        return False

    def after_training(self, model: Any) -> Any:
        """Report the final model unless that is disabled or done; called by XGBoost."""
        if self.settings.checkpoint_at_end and self._rounds_saved < self._rounds_done:
            self._save(model)
        return model

    def _save(self, model: Any) -> None:
        self._rounds_saved = self._rounds_done
        report_model(self._metrics, {self.settings.filename: encode_model(model, self.settings)})


def encode_model(model: Any, settings: ReportSettings) -> bytes:
    """Return the content of the model's file: JSON if its name ends with .json, else UBJSON."""
    is_json = settings.filename.endswith(".json")
    return bytes(model.save_raw("json" if is_json else "ubj"))


def latest_results(evals_log: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the results of the last round by "<set>-<metric>"."""
    return {
        f"{name}-{metric}": values[-1]
        for name, metrics in evals_log.items()
        for metric, values in metrics.items()
    }
