"""prepare_trainer: adapts a transformers.Trainer to the workers of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import torch.distributed as dist
import transformers
from torch.utils.data import DataLoader, Dataset, IterableDataset
from transformers import Trainer, TrainerState
from transformers.trainer import TRAINER_STATE_NAME

from spotfit.core.errors import ConfigError
from spotfit.data.iteration.shard_data_position import is_dataset_shard
from spotfit.huggingface.snapshot_trainer import (
    RESERVED_NAMES,
    SnapshotTrainer,
    TrainerSnapshots,
)
from spotfit.model.failure_model import SaveCondition, parse_save_trigger
from spotfit.worker.training_api import require_session

_REQUIRED_METHODS = (
    "_evaluate",
    "_finalize_training",
    "_init_training_state",
    "_load_rng_state",
    "_maybe_log_save_evaluate",
    "_prepare_for_training",
    "_run_epoch",
)
"""Methods of the Trainer's loop that `SnapshotTrainer` and `BatchIterableTrainer` extend."""


def prepare_trainer(
    trainer: Trainer,
    every: SaveCondition | Sequence[SaveCondition] | None = None,
    *,
    max_overhead: float | None = None,
    extra: Mapping[str, Any] | None = None,
    save_at_end: bool = True,
) -> Trainer:
    """Prepare a Trainer for `train()` on the workers of a run; return the same object.

    Call it in the training function after all callbacks were added. A `train_dataset` that is an
    iterable of batches, and no Dataset, becomes a loader that yields these batches as they are. One
    of `spotfit.get_dataset_shard` resumes by itself: the Trainer counts the batches of the epoch
    that were trained before, but skips none, and `ignore_data_skip` has no effect.

    With `every`, all ranks save by a `Checkpointer` while training continues, and `train()` resumes
    after a restart in the same step of the epoch, without reading the batches before it: weights,
    optimizer, schedule, RNG states, `TrainerState`, callbacks and loss sums. `every`,
    `max_overhead`, `extra` and `save_at_end` are those of `Checkpointer`, counted in optimizer
    steps. The Trainer's own checkpoints are not needed: pass `save_strategy="no"`. Loader processes
    are started in each epoch: `dataloader_persistent_workers` becomes False. Without `every` the
    Trainer saves and resumes only as your code says, as with Ray Train.

    With DeepSpeed the saves are those of `spotfit.deepspeed.Checkpointer`; `train()` raises its
    errors.

    Raises `ConfigError` if the Trainer has not found the group of the workers, which would train
    one model each, and with `every` for `auto_find_batch_size`, an elastic group, names in `extra`
    that are reserved or an unsupported version of transformers, and `SessionMisuseError` outside of
    a training function.
    """
    _reject_separate_models(trainer)
    if _is_iterable_of_batches(trainer.train_dataset):
        _replace_class(trainer, BatchIterableTrainer)
    if is_dataset_shard(trainer.train_dataset):
        _reject_unknown_loop()
        # Nothing is read to be skipped, and without it the Trainer counts the epoch from 0 again.
        trainer.args.ignore_data_skip = False
    if every is None:
        return trainer
    channel = require_session("spotfit.huggingface.prepare_trainer").snapshot_channel
    try:
        parse_save_trigger(every, max_overhead=max_overhead)
        _reject_unsupported(trainer, is_elastic=channel.outlook().allows_resize)
        _reject_reserved_names(extra or {})
    except ConfigError as error:
        error.details.setdefault("retryable", False)  # a restarted worker would raise it again
        raise
    # Workers that outlive an epoch draw their seed in the first one only, a resume again.
    trainer.args.dataloader_persistent_workers = False
    _replace_class(trainer, SnapshotTrainer)
    conditions = list(every) if isinstance(every, list | tuple) else [every]
    trainer.snapshots = TrainerSnapshots(
        # The Checkpointer does not see the loader; the Trainer knows the ends of its epochs.
        saves_epochs="epoch" in conditions,
        options={
            "every": [one for one in conditions if one != "epoch"] or "at_notice",
            "max_overhead": max_overhead,
            "save_at_end": save_at_end,
        },
        extra=dict(extra or {}),
    )
    return trainer


class BatchIterableTrainer(Trainer):
    """A Trainer whose `train_dataset` yields batches."""

    def get_train_dataloader(self) -> Any:
        """Return a loader over the batches, which Accelerate does not shard."""
        return DataLoader(_Batches(self.train_dataset), batch_size=None)

    def _init_training_state(
        self,
        max_steps: int,
        num_update_steps_per_epoch: int,
        num_train_epochs: int,
        resume_from_checkpoint: str | None,
        *args: Any,
    ) -> tuple[int, int]:
        first: tuple[int, int] = super()._init_training_state(
            max_steps, num_update_steps_per_epoch, num_train_epochs, resume_from_checkpoint, *args
        )
        if resume_from_checkpoint is None or not self._continues_shard():
            return first
        return self._place_of_shard(Path(resume_from_checkpoint))

    def _run_epoch(self, *, train_dataloader: Any, epoch: int, **kwargs: Any) -> None:
        is_resumed = kwargs["resume_from_checkpoint"] is not None
        if is_resumed and epoch == kwargs["epochs_trained"] and self._continues_shard():
            train_dataloader.dataset.placeholders = kwargs["steps_trained_in_current_epoch"]
        super()._run_epoch(train_dataloader=train_dataloader, epoch=epoch, **kwargs)

    def _continues_shard(self) -> bool:
        """Return whether the next pass continues where the saved training was.

        A shard does not if the training function has found a checkpoint without `get_checkpoint`.
        """
        batches = self.train_dataset
        return is_dataset_shard(batches) and batches.position.resume_saved()

    def _place_of_shard(self, checkpoint: Path) -> tuple[int, int]:
        """Return the epoch to continue, and its batches that were trained before.

        The Trainer, which does not know the length of an epoch, derives them as if it had one only.
        """
        saved = TrainerState.load_from_json(str(checkpoint / TRAINER_STATE_NAME))
        epoch, part = divmod(saved.epoch or 0.0, 1)
        position = self.train_dataset.position
        if position.epoch > epoch and not position.consumed:  # saved after the epoch's last batch
            return int(epoch) + 1, 0
        return int(epoch), round(part * saved.max_steps) * self.args.gradient_accumulation_steps


class _Batches(IterableDataset[Any]):
    def __init__(self, batches: Any) -> None:
        self._batches = batches
        self.placeholders = 0
        """How many values the next pass yields before the batches; the Trainer skips them."""

    def __iter__(self) -> Any:
        count, self.placeholders = self.placeholders, 0
        return chain(repeat(None, count), self._batches)


def _is_iterable_of_batches(dataset: Any) -> bool:
    return (
        dataset is not None
        and not isinstance(dataset, Dataset)
        and not hasattr(dataset, "__getitem__")
        and hasattr(dataset, "__iter__")
        # Those of Hugging Face's datasets yield samples.
        and type(dataset).__module__.partition(".")[0] != "datasets"
    )


def _replace_class(trainer: Trainer, extension: type[Trainer]) -> None:
    """Let `trainer` be of a class that extends its own by `extension`."""
    original = type(trainer)
    if issubclass(original, extension):
        return
    attributes = {"__module__": original.__module__}
    trainer.__class__ = type(original.__name__, (extension, original), attributes)


def _reject_separate_models(trainer: Trainer) -> None:
    workers = dist.get_world_size() if dist.is_initialized() else 1
    if trainer.args.world_size == 1 < workers:
        raise ConfigError(
            f"The Trainer does not use the group of {workers} workers: each of them would train a "
            "model of its own.",
            do="On machines without GPUs pass TrainingArguments(use_cpu=True).",
            retryable=False,
        )


def _reject_unknown_loop() -> None:
    if missing := [name for name in _REQUIRED_METHODS if not hasattr(Trainer, name)]:
        raise ConfigError(
            f"prepare_trainer extends Trainer.{missing[0]}, which transformers "
            f"{transformers.__version__} does not have.",
            do="Install a version of transformers that spotfit[transformers] accepts.",
            retryable=False,
        )


def _reject_reserved_names(extra: Mapping[str, Any]) -> None:
    if reserved := sorted(RESERVED_NAMES & extra.keys()):
        raise ConfigError(
            f"prepare_trainer(extra=...) uses the reserved names {', '.join(reserved)}.",
            do="Rename these objects.",
        )


def _reject_unsupported(trainer: Trainer, *, is_elastic: bool) -> None:
    _reject_unknown_loop()
    if trainer.args.auto_find_batch_size:
        raise ConfigError(
            "prepare_trainer(every=...) does not support auto_find_batch_size=True, which trains "
            "again from the start with a smaller batch.",
            do="Set per_device_train_batch_size to a number that fits.",
        )
    if is_elastic:
        raise ConfigError(
            "prepare_trainer(every=...) cannot resume with another number of workers: the Trainer "
            "derives its number of steps and its learning rates from it.",
            do="Set num_workers to one number, or write the loop with Accelerate and Checkpointer.",
        )
