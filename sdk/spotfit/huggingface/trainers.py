"""Trainers of earlier versions of Ray Train, by their names: functions on a TorchTrainer."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from spotfit.client.trainer import TorchTrainer
from spotfit.core.errors import ConfigTypeError
from spotfit.core.input_checks import reject_deprecated_arguments


class AccelerateTrainer(TorchTrainer):
    """A `TorchTrainer` whose function uses Accelerate, which finds the workers' process group.

    `accelerate_config` raises DeprecationWarning: its options are arguments of `Accelerator(...)`.
    """

    def __init__(
        self,
        train_loop_per_worker: Callable[..., Any],
        *,
        accelerate_config: Any = None,
        **options: Any,
    ) -> None:
        """Raise `ConfigError` or `ConfigErrors` for invalid arguments, as `TorchTrainer` does."""
        reject_deprecated_arguments(
            type(self).__name__,
            {"accelerate_config": accelerate_config},
            replacements={
                "accelerate_config": "pass the options to Accelerator(...) in the training function"
            },
            unset=None,
        )
        super().__init__(train_loop_per_worker, **options)


class TransformersTrainer(TorchTrainer):
    """A `TorchTrainer` whose function may return a `transformers.Trainer`, which is then trained.

    The returned Trainer is prepared with `prepare_trainer(every="auto")`, and the result of the
    function is its global step, training loss and metrics, as a dictionary. A function that returns
    anything else trains by itself. The arguments are those of `TorchTrainer`; the former names
    `trainer_init_per_worker` and `trainer_init_config` raise DeprecationWarning.
    """

    def __init__(
        self,
        train_loop_per_worker: Callable[..., Any] | None = None,
        *,
        trainer_init_per_worker: Any = None,
        trainer_init_config: Any = None,
        **options: Any,
    ) -> None:
        """Raise `ConfigError` or `ConfigErrors` for invalid arguments, as `TorchTrainer` does."""
        reject_deprecated_arguments(
            type(self).__name__,
            {
                "trainer_init_per_worker": trainer_init_per_worker,
                "trainer_init_config": trainer_init_config,
            },
            replacements={
                "trainer_init_per_worker": "rename it to train_loop_per_worker: a function of the "
                "configuration that returns the Trainer, with its datasets",
                "trainer_init_config": "rename it to train_loop_config",
            },
            unset=None,
        )
        if train_loop_per_worker is None:
            raise ConfigTypeError(
                "TransformersTrainer() needs train_loop_per_worker.",
                do="Pass a function that returns a transformers.Trainer.",
            )
        super().__init__(_train_returned_trainer(train_loop_per_worker), **options)


def _train_returned_trainer(make_trainer: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(make_trainer)
    def train(*config: Any) -> Any:
        from transformers import Trainer

        from spotfit.huggingface.trainer_preparation import prepare_trainer

        trainer = make_trainer(*config)
        if not isinstance(trainer, Trainer):
            return trainer
        return prepare_trainer(trainer, every="auto").train()._asdict()

    return train
