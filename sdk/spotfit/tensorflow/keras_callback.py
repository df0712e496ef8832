"""ReportCheckpointCallback and restore_model: checkpoints of Keras models during `fit`."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from spotfit.checkpoint.checkpoint_dir import Checkpoint
from spotfit.core.errors import ConfigError, NotFoundError
from spotfit.core.input_checks import did_you_mean
from spotfit.host.plugins import require_module
from spotfit.model.reporting import CheckpointUploadMode
from spotfit.tensorflow.tensorflow_checkpoint import MODEL_FILENAME, MODEL_FILENAME_KEY
from spotfit.worker.training_api import get_checkpoint, get_context, report

require_module("tensorflow", extra="tensorflow")  # before the import below, for a clear error

from tensorflow.keras.callbacks import Callback  # noqa: E402

_PHASES = ("train", "test", "predict")
EVENTS = (
    *("epoch_begin", "epoch_end"),
    *(f"{phase}_{edge}" for phase in _PHASES for edge in ("begin", "end")),
    *(f"{phase}_batch_{edge}" for phase in _PHASES for edge in ("begin", "end")),
)
"""Events of Keras without the prefix `on_`."""
_EPOCHS_DONE = "epochs_done"
_OPTIMIZER_FILENAME = "optimizer.npz"

MetricSelection = str | list[str] | dict[str, str] | None


class ReportCheckpointCallback(Callback):  # type: ignore[misc]  # Keras is untyped here
    """Reports metrics during `fit`, and rank 0's model as a checkpoint.

    Args:
        checkpoint_on: Event or events at which the model is saved, such as "train_batch_end".
        report_metrics_on: Event or events at which metrics are reported.
        metrics: None for all, a name, a list of names, or a dictionary from reported names to
            those of Keras.

    Events are the methods of Keras's callbacks without `on_`. A report without metrics has {}.
    Checkpoints have the model with its optimizer in "model.keras", and are uploaded in the
    background; `restore_model` continues from the latest. Raises `ConfigError`, a ValueError, for
    another event.
    """

    def __init__(
        self,
        checkpoint_on: str | list[str] = "epoch_end",
        report_metrics_on: str | list[str] = "epoch_end",
        metrics: MetricSelection = None,
    ) -> None:
        super().__init__()
        self._checkpoint_on = _parse_events("checkpoint_on", checkpoint_on)
        self._report_metrics_on = _parse_events("report_metrics_on", report_metrics_on)
        names = [metrics] if isinstance(metrics, str) else metrics
        self._metrics = dict(zip(names, names, strict=True)) if isinstance(names, list) else names
        self._epochs_done = 0

    def _on_event(self, event: str, logs: Mapping[str, Any] | None) -> None:
        has_metrics = event in self._report_metrics_on
        if not has_metrics and event not in self._checkpoint_on:
            return
        selected = _select_metrics(self._metrics, logs or {}) if has_metrics else {}
        if event in self._checkpoint_on:
            report_model(
                self.model,
                selected,
                epochs_done=self._epochs_done,
                progress=self._progress(),
            )
        else:
            report(selected)

    def _progress(self) -> float | None:
        """The share of the epochs that a training which resumes does not repeat.

        None for one epoch: training functions that call `fit` for each epoch would report the end.
        """
        epochs = (self.params or {}).get("epochs") or 0
        return min(1.0, self._epochs_done / epochs) if epochs > 1 else None

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Report if "epoch_begin" is among the events."""
        self._epochs_done = epoch
        self._on_event("epoch_begin", logs)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Report if "epoch_end" is among the events."""
        self._epochs_done = epoch + 1
        self._on_event("epoch_end", logs)

    def on_train_begin(self, logs: Any = None) -> None:
        """Report if "train_begin" is among the events."""
        self._on_event("train_begin", logs)

    def on_train_end(self, logs: Any = None) -> None:
        """Report if "train_end" is among the events."""
        self._on_event("train_end", logs)

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Report if "train_batch_begin" is among the events."""
        self._on_event("train_batch_begin", logs)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Report if "train_batch_end" is among the events."""
        self._on_event("train_batch_end", logs)

    def on_test_begin(self, logs: Any = None) -> None:
        """Report if "test_begin" is among the events."""
        self._on_event("test_begin", logs)

    def on_test_end(self, logs: Any = None) -> None:
        """Report if "test_end" is among the events."""
        self._on_event("test_end", logs)

    def on_test_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Report if "test_batch_begin" is among the events."""
        self._on_event("test_batch_begin", logs)

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        """Report if "test_batch_end" is among the events."""
        self._on_event("test_batch_end", logs)

    def on_predict_begin(self, logs: Any = None) -> None:
        """Report if "predict_begin" is among the events."""
        self._on_event("predict_begin", logs)

    def on_predict_end(self, logs: Any = None) -> None:
        """Report if "predict_end" is among the events."""
        self._on_event("predict_end", logs)

    def on_predict_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Report if "predict_batch_begin" is among the events."""
        self._on_event("predict_batch_begin", logs)

    def on_predict_batch_end(self, batch: int, logs: Any = None) -> None:
        """Report if "predict_batch_end" is among the events."""
        self._on_event("predict_batch_end", logs)


def restore_model(model: Any) -> int:
    """Load weights and optimizer of the latest checkpoint; return the number of epochs done.

    Call it on all ranks before `model.fit(..., initial_epoch=restore_model(model))`, with a model
    that is compiled in the scope of the strategy and has the layers of the saved one. Does nothing
    and returns 0 without a checkpoint. Raises `ConfigError` for a model without an optimizer whose
    state can be restored, and `NotFoundError` for a checkpoint that no `ReportCheckpointCallback`
    has saved, or that lacks the state of a legacy optimizer.
    """
    _check_optimizer(model)
    checkpoint = get_checkpoint()
    if checkpoint is None:
        return 0
    epochs_done = checkpoint.get_metadata().get(_EPOCHS_DONE)
    if epochs_done is None:
        raise NotFoundError(
            f"The metadata of {checkpoint} has no number of epochs.",
            do="Continue from checkpoints of ReportCheckpointCallback only.",
        )
    with model.distribute_strategy.scope(), checkpoint.as_directory() as directory:
        if not _has_legacy_optimizer(model):
            # Otherwise the optimizer has no variables yet, and keeps its initial state.
            model.optimizer.build(model.trainable_variables)
        model.load_weights(str(Path(directory, MODEL_FILENAME)))
        if _has_legacy_optimizer(model):
            _load_legacy_optimizer(model, Path(directory, _OPTIMIZER_FILENAME))
    return int(epochs_done)


def _check_optimizer(model: Any) -> None:
    """Raise `ConfigError` now: without this check, only a restart after a loss would fail."""
    optimizer = getattr(model, "optimizer", None)
    if not hasattr(optimizer, "build") and not hasattr(optimizer, "_create_all_weights"):
        kind = "no optimizer" if optimizer is None else f"an optimizer {type(optimizer).__name__}"
        raise ConfigError(
            f"restore_model() got a model with {kind}, whose state cannot be restored.",
            do="Call model.compile(optimizer=...) before, with an optimizer of "
            "tf.keras.optimizers.",
        )


def _has_legacy_optimizer(model: Any) -> bool:
    """Return whether it is of `tf.keras.optimizers.legacy`, whose state `model.save` leaves out."""
    optimizer = getattr(model, "optimizer", None)
    return hasattr(optimizer, "_create_all_weights") and not hasattr(optimizer, "build")


def _save_legacy_optimizer(model: Any, path: Path) -> None:
    import numpy as np

    np.savez(path, *model.optimizer.get_weights())


def _load_legacy_optimizer(model: Any, path: Path) -> None:
    import numpy as np

    if not path.exists():
        raise NotFoundError(
            f"The checkpoint has no file {path.name} with the state of the legacy optimizer.",
            do="Continue with the optimizer that the model was saved with.",
        )
    # Legacy optimizers have no public method for it.
    model.optimizer._create_all_weights(model.trainable_variables)  # noqa: SLF001
    with np.load(path) as arrays:
        weights = [arrays[f"arr_{n}"] for n in range(len(arrays.files))]
    if weights:  # none before the first step
        model.optimizer.set_weights(weights)


def report_model(
    model: Any, metrics: dict[str, Any], *, epochs_done: int, progress: float | None = None
) -> None:
    """Report the metrics, on rank 0 with the model as a checkpoint. Called by all ranks.

    Does not wait for the upload. `progress` is that of `spotfit.report`, whose errors it raises.
    """
    # On all ranks: reading the variables of a strategy may be a collective.
    directory = tempfile.mkdtemp(prefix="spotfit-model-")
    model.save(str(Path(directory, MODEL_FILENAME)))
    if _has_legacy_optimizer(model):
        _save_legacy_optimizer(model, Path(directory, _OPTIMIZER_FILENAME))
    if get_context().get_world_rank() != 0:
        shutil.rmtree(directory)
        report(metrics, progress=progress)
        return
    checkpoint = Checkpoint.from_directory(directory)
    checkpoint.set_metadata({MODEL_FILENAME_KEY: MODEL_FILENAME, _EPOCHS_DONE: epochs_done})
    # The agent removes the directory after the upload.
    report(
        metrics,
        checkpoint=checkpoint,
        checkpoint_upload_mode=CheckpointUploadMode.ASYNC,
        progress=progress,
    )


def _parse_events(argument: str, events: str | list[str]) -> frozenset[str]:
    names = [events] if isinstance(events, str) else list(events)
    for name in names:
        if name not in EVENTS:
            raise ConfigError(
                f"ReportCheckpointCallback({argument}={events!r}): {name!r} is no event of Keras.",
                do=did_you_mean(name, EVENTS) or f"Events are {', '.join(EVENTS)}.",
            )
    return frozenset(names)


def _select_metrics(selection: Mapping[str, str] | None, logs: Mapping[str, Any]) -> dict[str, Any]:
    if selection is None:
        return dict(logs)
    for name in selection.values():
        if name not in logs:
            raise ConfigError(
                f"ReportCheckpointCallback(metrics=...): Keras has no metric {name!r} here.",
                do=did_you_mean(name, logs) or "Pass it to model.compile(metrics=...).",
            )
    return {reported: logs[name] for reported, name in selection.items()}
