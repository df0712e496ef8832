"""SnapshotTrainer: a transformers.Trainer whose saves and resumes use a Checkpointer.

An epoch of the Trainer goes through these states; a step is an optimizer step:

| state | event | next |
|---|---|---|
| between epochs | `begin_epoch` records the RNG states that determine the order of data | open |
| open | `end_update` after a step, its log and its evaluation; saves if a save is due | open |
| open | `end_update` after the last step of the epoch holds a due save | ending |
| open, ending | `end_epoch` after the epoch's evaluation; saves if a save is due | between epochs |
| open | `end_epoch` with accumulated gradients; a due save waits for a step | between epochs |
| before training | `begin` restores a state from within an epoch | resuming |
| resuming | `begin_epoch` sets the recorded RNG states; the Trainer skips batches | open |
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from transformers import Trainer

from spotfit.core.errors import ConfigError
from spotfit.deepspeed.engine_checkpointer import Checkpointer as EngineCheckpointer
from spotfit.huggingface.trainer_state import RankState, TrainerProgress
from spotfit.torch.checkpoint.checkpointer import Checkpointer, TrainingStateCheckpointer

RESERVED_NAMES = frozenset({"trainer", "lr_scheduler"})
"""Names of saved objects that `extra` must not use."""
_RESTORED = "restored by spotfit"
"""Passed as the path of a checkpoint, so that the Trainer skips batches and restores RNG states."""


class TrainerSnapshots:
    """Saves and restores the state of one Trainer, which calls it from its loop on every rank."""

    def __init__(
        self, *, saves_epochs: bool, options: Mapping[str, Any], extra: Mapping[str, Any]
    ) -> None:
        """`options` are those of `Checkpointer`; `saves_epochs` adds a save after each epoch."""
        self.loader: Any = None
        """The loader of the training data."""
        self._saves_epochs = saves_epochs
        self._options = options
        self._extra = extra
        self._resumed_epoch: int | None = None
        """The epoch to resume, until it begins."""
        self._last_step = 0
        """The last optimizer step that was counted."""
        self._epoch_save_waits = False
        """Whether the save of an epoch waits for a step, because gradients were accumulated."""

    @property
    def is_resuming(self) -> bool:
        """Whether a state was restored and no epoch has begun since then."""
        return self._resumed_epoch is not None

    def begin(self, trainer: Trainer, max_steps: int) -> tuple[int, int] | None:
        """Restore the newest state; return its epoch and the batches to skip; None without one.

        Called when the model and the optimizer are prepared.
        """
        self._progress, self._rank_state = TrainerProgress(trainer), RankState(trainer)
        self._checkpointer = self._open_checkpointer(trainer, max_steps)
        if self._checkpointer.restore() is None:
            return None
        self._progress.set_trainer_state()
        self._resumed_epoch, self._last_step = self._progress.epoch, trainer.state.global_step
        batches = self._progress.updates * trainer.args.gradient_accumulation_steps
        return self._progress.epoch, 0 if trainer.args.ignore_data_skip else batches

    def _open_checkpointer(self, trainer: Trainer, max_steps: int) -> TrainingStateCheckpointer:
        extra = {"trainer": self._progress, **self._extra}
        per_rank = {"trainer_rank": self._rank_state}
        options = {"per_rank": per_rank, "total_steps": max_steps, **self._options}
        if not trainer.is_deepspeed_enabled:
            return Checkpointer(
                model=trainer.model_wrapped,
                optimizer=trainer.optimizer,
                scheduler=trainer.lr_scheduler,
                scaler=trainer.accelerator.scaler,
                extra=extra,
                **options,
            )
        engine = trainer.model_wrapped
        if engine.lr_scheduler is None:  # the Trainer steps one of its own
            extra["lr_scheduler"] = trainer.lr_scheduler
        return EngineCheckpointer(engine, extra=extra, **options)

    def begin_epoch(self, trainer: Trainer, epoch: int, *, updates: int, start_time: float) -> bool:
        """Record that an epoch begins, of `updates` steps; return whether it is the resumed one."""
        is_resumed, self._resumed_epoch = self._resumed_epoch == epoch, None
        self._updates_per_epoch = updates
        self._progress.start_time_s = start_time
        if is_resumed:
            self.set_loss_sums(trainer)
            if hasattr(self.loader, "set_epoch"):
                # The loader that skips batches does not pass the epoch on to the sampler.
                self.loader.set_epoch(epoch)
        if is_resumed and not trainer.args.ignore_data_skip:
            self._rank_state.set_epoch_begin(self.loader)
        elif is_resumed:  # the epoch's data begins again
            self._checkpointer.restore_rng_state()
            self._progress.updates = 0
            self._rank_state.record_epoch_begin(self.loader)
        else:
            self._progress.epoch, self._progress.updates = epoch, 0
            self._rank_state.record_epoch_begin(self.loader)
        return is_resumed

    def end_update(self, trainer: Trainer) -> None:
        """Count a step and save if a save is due; called again at an epoch's end, it ends that."""
        if trainer.state.global_step == self._last_step:
            self._end_epoch(trainer)
            return
        self._last_step = trainer.state.global_step
        self._progress.updates += 1
        control = trainer.control
        # A state from before the end of the epoch would skip its evaluation when resumed.
        is_last = self._progress.updates == self._updates_per_epoch
        hold = is_last or control.should_epoch_stop or control.should_training_stop
        self._checkpointer.step(_metrics_of_step(trainer), hold=hold)
        if self._epoch_save_waits and not hold:
            self._checkpointer.save(_metrics_of_step(trainer))
            self._epoch_save_waits = False

    def _end_epoch(self, trainer: Trainer) -> None:
        self._progress.epoch, self._progress.updates = self._progress.epoch + 1, 0
        self._progress.is_stopped = trainer.control.should_training_stop
        self._rank_state.record_epoch_begin(self.loader)
        if not trainer.accelerator.sync_gradients and not self._progress.is_stopped:
            # The epoch's last batches are part of the next step, and gradients are never saved.
            self._epoch_save_waits = self._saves_epochs
            return
        self._epoch_save_waits = False
        if self._saves_epochs:
            self._checkpointer.save(_metrics_of_step(trainer))
        else:
            self._checkpointer.save_if_due(_metrics_of_step(trainer))

    def restore_rng_state(self) -> None:
        """Set the RNG states of the restored state, after the Trainer has skipped batches."""
        self._checkpointer.restore_rng_state()

    def set_loss_sums(self, trainer: Trainer) -> None:
        """Give the Trainer the restored sums, which it has set to 0 since then."""
        trainer.set_loss_sums(
            **self._progress.restored_loss_sums, **self._rank_state.restored_loss_sums
        )

    @property
    def previous_duration_s(self) -> float:
        """Duration of the training before the restored state, in all attempts together."""
        return self._progress.previous_duration_s

    @property
    def is_stopped(self) -> bool:
        """Whether the training had ended when the restored state was saved."""
        return self._progress.is_stopped


class SnapshotTrainer(Trainer):
    """Base class of prepared Trainers; it extends the methods into which their loop is divided."""

    snapshots: TrainerSnapshots

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Train, beginning at the newest state of the run. Raises `ConfigError` for a path."""
        if resume_from_checkpoint not in (None, False):
            raise ConfigError(
                f"train(resume_from_checkpoint={resume_from_checkpoint!r}) conflicts with "
                "prepare_trainer(every=...): a run resumes from its newest snapshot, which is not "
                "a checkpoint of the Trainer.",
                do="Call train() without resume_from_checkpoint. To begin with the weights of "
                "another training, load the model with from_pretrained().",
                retryable=False,
            )
        return super().train(None, *args, **kwargs)

    def get_train_dataloader(self) -> Any:
        """Return the loader of the training data and keep it for `snapshots`."""
        self.snapshots.loader = super().get_train_dataloader()
        return self.snapshots.loader

    def loss_sums(self) -> dict[str, Any]:
        """Return the sum of all logged losses and the step that was logged last."""
        # Unset before the training begins, when a restore asks for the names.
        return {
            "total_loss": getattr(self, "_total_loss_scalar", 0.0),
            "last_logged_step": getattr(self, "_globalstep_last_logged", 0),
        }

    def rank_loss_sums(self) -> dict[str, Any]:
        """Return this rank's loss and floating-point operations since the last log."""
        return {"loss": self._tr_loss.item(), "flos": self.current_flos}

    def set_loss_sums(
        self, *, total_loss: float, last_logged_step: int, loss: float, flos: float
    ) -> None:
        """Continue restored sums; the mean of the losses then counts the steps before them, too."""
        self._total_loss_scalar, self._globalstep_last_logged = total_loss, last_logged_step
        self._tr_loss = torch.tensor(loss, device=self.args.device)
        self.current_flos = flos
        self._initial_global_step = self._initial_num_input_tokens_seen = 0

    def _init_training_state(
        self, max_steps: int, num_update_steps_per_epoch: int, num_train_epochs: int, *args: Any
    ) -> tuple[int, int]:
        first: tuple[int, int] = super()._init_training_state(
            max_steps, num_update_steps_per_epoch, num_train_epochs, *args
        )
        # The Trainer asks for the place before it prepares the objects that are restored.
        self._prepared = super()._prepare_for_training(max_steps, self.snapshots.loader, None)
        place = self.snapshots.begin(self, max_steps)
        if place is None:
            return first
        self.state.init_training_references(self, max_steps, num_train_epochs, None)
        return (num_train_epochs, 0) if self.snapshots.is_stopped else place

    def _prepare_for_training(self, *args: Any, **kwargs: Any) -> Any:
        return self._prepared

    def _run_epoch(self, *, epoch: int, start_time: float, **kwargs: Any) -> None:
        updates: int = kwargs["num_update_steps_per_epoch"]
        if self.snapshots.begin_epoch(self, epoch, updates=updates, start_time=start_time):
            kwargs["resume_from_checkpoint"] = _RESTORED
        super()._run_epoch(epoch=epoch, start_time=start_time, **kwargs)

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        super()._maybe_log_save_evaluate(*args, **kwargs)
        self.snapshots.end_update(self)

    def _evaluate(self, *args: Any, **kwargs: Any) -> Any:
        # The evaluation of eval_on_start is part of the restored log.
        return {} if self.snapshots.is_resuming else super()._evaluate(*args, **kwargs)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if checkpoint == _RESTORED:
            self.snapshots.restore_rng_state()
        else:
            super()._load_rng_state(checkpoint)

    def _finalize_training(self, trial: Any, num_train_samples: Any, start_time: float) -> Any:
        if self.snapshots.is_resuming:  # no epoch was left
            self.snapshots.set_loss_sums(self)
        start_time -= self.snapshots.previous_duration_s
        return super()._finalize_training(trial, num_train_samples, start_time)


def _metrics_of_step(trainer: Trainer) -> dict[str, Any]:
    """Return what the Trainer has logged after its last step: no stale value ranks a checkpoint."""
    step = trainer.state.global_step
    metrics: dict[str, Any] = {"step": step, "epoch": trainer.state.epoch}
    for entry in reversed(trainer.state.log_history):
        if entry.get("step") != step:
            break
        metrics = {**entry, **metrics}
    return metrics
