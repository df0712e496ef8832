"""ReportHooks, Ray Train's callback that reports a Lightning checkpoint after each epoch."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

from spotfit.checkpoint.checkpoint_dir import Checkpoint
from spotfit.core.errors import ConfigError
from spotfit.data.iteration.shard_data_position import is_dataset_shard
from spotfit.model.reporting import CheckpointUploadMode
from spotfit.model.validation_config import ValidationTaskConfig
from spotfit.worker.training_api import report, require_session


def plain_metrics(trainer: Any) -> dict[str, Any]:
    """Return `trainer.callback_metrics` as floats, with `epoch` and `step`, as Ray reports them."""
    metrics: dict[str, Any] = {
        name: value.item() for name, value in trainer.callback_metrics.items()
    }
    return {**metrics, "epoch": trainer.current_epoch, "step": trainer.global_step}


class ReportHooks:
    """Reports metrics and a checkpoint of Lightning at the end of each training epoch.

    The checkpoint contains the file `checkpoint.ckpt`, for `trainer.fit(ckpt_path=...)`. Training
    waits until it is written, and uploaded unless `checkpoint_upload_mode` is ASYNC.
    """

    CHECKPOINT_NAME = "checkpoint.ckpt"
    """Name of the file, or of the directory of a sharded checkpoint, within the checkpoint."""

    def __init__(
        self,
        checkpoint_upload_mode: CheckpointUploadMode | None = None,
        validation: bool | ValidationTaskConfig = False,  # noqa: FBT001, FBT002 - as in Ray Train
        *,
        every_n_epochs: int = 1,
    ) -> None:
        """Create one in the training function; its arguments are those of `spotfit.report`.

        `every_n_epochs` is the number of epochs between two reports. Raises `SessionMisuseError`
        outside of a training function, and `ConfigError`.
        """
        require_session("spotfit.lightning.RayTrainReportCallback")
        if every_n_epochs < 1:
            raise ConfigError(
                f"RayTrainReportCallback(every_n_epochs={every_n_epochs!r}): every_n_epochs must "
                "be at least 1.",
                do="Omit it to report after each epoch.",
            )
        super().__init__()
        self._upload_mode = checkpoint_upload_mode or CheckpointUploadMode.SYNC
        self._validation = validation
        self._every_n_epochs = every_n_epochs

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Called by Lightning on all ranks: save, report and wait for the other ranks."""
        if (trainer.current_epoch + 1) % self._every_n_epochs:
            return
        _end_epoch_of_shards(trainer)
        folder = Path(tempfile.mkdtemp(prefix="spotfit-lightning-"))
        trainer.save_checkpoint(folder / self.CHECKPOINT_NAME, weights_only=False)
        # With DDP only rank 0 writes a file; a sharded checkpoint has files of all ranks.
        has_files = any(folder.iterdir())
        report(
            plain_metrics(trainer),
            checkpoint=Checkpoint.from_directory(folder) if has_files else None,
            checkpoint_upload_mode=self._upload_mode,
            validation=self._validation,
            progress=_progress_of(trainer),
        )
        trainer.strategy.barrier()
        # The upload in the background deletes its files itself.
        if not has_files or self._upload_mode is CheckpointUploadMode.SYNC:
            shutil.rmtree(folder, ignore_errors=True)


def _progress_of(trainer: Any) -> float | None:
    """Return the share of the training that is done after this epoch; None without a limit.

    Lightning ends at the first of its limits. Those on time are not known as a share.
    """
    done = [(trainer.current_epoch + 1, trainer.max_epochs or 0)]
    done.append((trainer.global_step, trainer.max_steps))
    shares = [count / limit for count, limit in done if limit > 0]  # -1: no limit
    return min(1.0, max(shares)) if shares else None


def _end_epoch_of_shards(trainer: Any) -> None:
    """End the epoch of dataset shards, of which limit_train_batches may have left batches.

    The report saves their positions, and a resumed training begins the next epoch.
    """
    combined = trainer.fit_loop._combined_loader
    for loader in [] if combined is None else combined.flattened:
        if is_dataset_shard(loader):
            loader.position.end_epoch()
