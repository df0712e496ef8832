"""Reports of boosting rounds: the metrics to report, and models as checkpoints of rank 0."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from spotfit.checkpoint.checkpoint_dir import Checkpoint
from spotfit.core.errors import ConfigError, ConfigTypeError, NotFoundError
from spotfit.core.input_checks import did_you_mean
from spotfit.model.reporting import CheckpointUploadMode
from spotfit.worker.training_api import get_context, report

MetricSelection = str | list[str] | dict[str, str] | None


class ReportSettings:
    """The arguments of both libraries' `RayTrainReportCallback`, checked.

    `metrics` selects evaluation results, which are named "<set>-<metric>": None for all, a name, a
    list of names, or a dictionary from reported to original names. `filename` is the model's file
    in a checkpoint. A checkpoint is reported every `frequency` rounds (0: never) and, with
    `checkpoint_at_end`, at the end. `results_postprocessing_fn` maps the selected metrics to those
    that are reported. Raises `ConfigError` or `ConfigTypeError`.
    """

    def __init__(
        self,
        metrics: MetricSelection,
        *,
        filename: str,
        frequency: int,
        checkpoint_at_end: bool,
        results_postprocessing_fn: Callable[[dict[str, Any]], dict[str, Any]] | None,
    ) -> None:
        if isinstance(frequency, bool) or not isinstance(frequency, int):
            raise ConfigTypeError(
                f"RayTrainReportCallback(frequency={frequency!r}) must be an int.",
                do="Write a number of rounds; 0 reports no checkpoints during the training.",
            )
        if frequency < 0:
            raise ConfigError(
                f"RayTrainReportCallback(frequency={frequency}) must not be negative.",
                do="Write a number of rounds; 0 reports no checkpoints during the training.",
            )
        if Path(filename).name != filename:
            raise ConfigError(
                f"RayTrainReportCallback(filename={filename!r}) is not the name of a file.",
                do="Write a name without a directory.",
            )
        self.filename, self.frequency = filename, frequency
        self.checkpoint_at_end = checkpoint_at_end
        names = [metrics] if isinstance(metrics, str) else metrics or ()
        self._selection = dict(names) if isinstance(names, dict) else {one: one for one in names}
        self._postprocess = results_postprocessing_fn

    def select_metrics(self, results: Mapping[str, Any]) -> dict[str, Any]:
        """Return the metrics to report. Raises `ConfigError` for one that was not evaluated."""
        names = self._selection or {name: name for name in results}
        for original in names.values():
            if original not in results:
                raise ConfigError(
                    f"RayTrainReportCallback(metrics=...): {original!r} was not evaluated.",
                    do=did_you_mean(original, results) or "Pass evaluation sets to train().",
                )
        selected = {reported: results[original] for reported, original in names.items()}
        return self._postprocess(selected) if self._postprocess else selected

    def reject_frequency(self) -> None:
        """Raise `ConfigError` for a `frequency`: `train()` saves at the end of each segment."""
        if self.frequency:
            raise ConfigError(
                "train() saves at the end of each segment: RayTrainReportCallback(frequency=...) "
                "has no effect in it.",
                do="Omit frequency, and pass train(rounds_per_segment=...).",
            )

    def is_checkpoint_due(self, rounds_done: int) -> bool:
        """Whether a checkpoint is reported after `rounds_done` rounds."""
        return self.frequency > 0 and rounds_done % self.frequency == 0


def report_model(
    metrics: dict[str, Any], files: Mapping[str, bytes], *, progress: float | None = None
) -> None:
    """Report the metrics on this rank, and on rank 0 a checkpoint of these files by name.

    Called by all ranks of the round. Does not wait for the upload; the worker does before it exits.
    `progress` is that of `spotfit.report`. Raises the errors of `spotfit.report`.
    """
    if get_context().get_world_rank() != 0:
        report(metrics, progress=progress)
        return
    # Removed by the agent after the upload.
    directory = tempfile.mkdtemp(prefix="spotfit-model-")
    for name, content in files.items():
        Path(directory, name).write_bytes(content)
    report(
        metrics,
        checkpoint=Checkpoint.from_directory(directory),
        checkpoint_upload_mode=CheckpointUploadMode.ASYNC,
        progress=progress,
    )


def read_model(checkpoint: Checkpoint, filename: str) -> bytes:
    """Return the content of a model's file; downloads the checkpoint if it is not local.

    Raises `NotFoundError` if the checkpoint has no such file.
    """
    with checkpoint.as_directory() as directory:
        path = Path(directory, filename)
        if path.exists():
            return path.read_bytes()
        names = sorted(one.name for one in Path(directory).iterdir())
    raise NotFoundError(
        f"{checkpoint} has no file {filename!r}.",
        do=f"Pass filename= with the name of the model: {', '.join(names) or 'it has no files'}.",
    )
