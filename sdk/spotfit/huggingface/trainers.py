"""Trainers of earlier versions of Ray Train, by their names: functions on a TorchTrainer."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from spotfit.client.trainer import TorchTrainer


class AccelerateTrainer(TorchTrainer):
    """A `TorchTrainer` whose function uses Accelerate, which finds the workers' process group.

    The options of an Accelerate configuration file are arguments of `Accelerator(...)`.
    """


class TransformersTrainer(TorchTrainer):
    """A `TorchTrainer` whose function may return a `transformers.Trainer`, which is then trained.

    The returned Trainer is prepared with `prepare_trainer(every="auto")`, and the result of the
    function is its global step, training loss and metrics, as a dictionary. A function that returns
    anything else trains by itself. The arguments are those of `TorchTrainer`.
    """

    def __init__(self, train_loop_per_worker: Callable[..., Any], **options: Any) -> None:
        """Raise `ConfigError` or `ConfigErrors` for invalid arguments, as `TorchTrainer` does."""
        super().__init__(_train_returned_trainer(train_loop_per_worker), **options)


def _train_returned_trainer(make_trainer: Callable[..., Any]) -> Callable[..., Any]:
    def train(*config: Any) -> Any:
        from transformers import Trainer

        from spotfit.huggingface.trainer_preparation import prepare_trainer

        trainer = make_trainer(*config)
        if not isinstance(trainer, Trainer):
            return trainer
        return prepare_trainer(trainer, every="auto").train()._asdict()

    if not callable(make_trainer):
        return make_trainer  # TorchTrainer rejects it
    wrapped = functools.wraps(make_trainer)(train)
    wrapped.__signature__ = inspect.signature(make_trainer)  # type: ignore[attr-defined]
    return wrapped
