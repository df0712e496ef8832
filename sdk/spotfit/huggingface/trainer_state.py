"""State of a transformers.Trainer besides model, optimizer and scheduler, with plain values."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from transformers import TrainerState
from transformers.trainer_callback import ExportableState

from spotfit.host import log
from spotfit.host.system import wall_ms
from spotfit.torch.checkpoint.training_state import rng_state, set_rng_state


class TrainerProgress:
    """What all ranks share: `TrainerState`, callbacks, the place in the data and loss sums."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._restored: dict[str, Any] = {}
        self.epoch = 0
        """Number of the current epoch, or of the next one between epochs."""
        self.updates = 0
        """Optimizer steps of this epoch."""
        self.is_stopped = False
        """Whether the last epoch has ended with a request to stop the training."""
        self.start_time_s = 0.0
        """When this attempt has begun to train, in seconds since the epoch of the system clock."""
        self.previous_duration_s = 0.0
        """Duration of earlier attempts up to the restored state."""

    def state_dict(self) -> dict[str, Any]:
        """Return numbers and JSON texts, which transformers itself writes as JSON, too."""
        trainer = self._trainer
        duration_s = self.previous_duration_s + wall_ms() / 1000 - self.start_time_s
        config = getattr(trainer.accelerator.unwrap_model(trainer.model), "config", None)
        return {
            "epoch": self.epoch,
            "updates": self.updates,
            "is_stopped": self.is_stopped,
            "state": json.dumps(dataclasses.asdict(trainer.state)),
            "callbacks": json.dumps([_exported(one) for one in _exportable_callbacks(trainer)]),
            "loss_sums": trainer.loss_sums(),
            "duration_s": duration_s,
            "config": "" if config is None else config.to_json_string(use_diff=False),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take the place in the data from a state; the Trainer changes in the methods below."""
        self._restored = state
        self.epoch, self.updates = state["epoch"], state["updates"]
        self.is_stopped, self.previous_duration_s = state["is_stopped"], state["duration_s"]

    def set_trainer_state(self) -> None:
        """Give the Trainer its restored `TrainerState` and the states of its callbacks."""
        state = TrainerState(**json.loads(self._restored["state"]))
        best = state.best_model_checkpoint
        if best is not None and not Path(best).is_dir():
            log.warning(
                "huggingface.best_checkpoint_missing",
                path=best,
                do="let spotfit keep the best one: prepare_trainer(every=...) and "
                'CheckpointConfig(checkpoint_score_attribute="eval_loss")',
            )
            state.best_model_checkpoint = None
        self._trainer.state = state
        saved = json.loads(self._restored["callbacks"])
        for callback in _exportable_callbacks(self._trainer):
            match = next((one for one in saved if one[0] == type(callback).__name__), None)
            if match is not None:
                saved.remove(match)
                vars(callback).update(match[1]["attributes"])

    @property
    def restored_loss_sums(self) -> dict[str, Any]:
        """The restored `SnapshotTrainer.loss_sums`."""
        sums: dict[str, Any] = self._restored["loss_sums"]
        return sums


class RankState:
    """What each rank has by itself: its loss since the last log, and its RNG states."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._restored: dict[str, Any] = {}
        self._epoch_begin: dict[str, Any] = {}
        """RNG states at the beginning of the epoch, from which the order of its data follows."""

    def state_dict(self) -> dict[str, Any]:
        """Return plain values and RNG states."""
        return {
            "loss_sums": self._trainer.rank_loss_sums(),
            "epoch_begin": self._epoch_begin,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Keep a state for the methods below."""
        self._restored, self._epoch_begin = state, state["epoch_begin"]

    def record_epoch_begin(self, loader: Any) -> None:
        """Record the RNG states with which the next pass over the loader will begin."""
        self._epoch_begin = {"rng": rng_state()}
        if (generator := getattr(loader, "synchronized_generator", None)) is not None:
            self._epoch_begin["generator"] = generator.get_state()

    def set_epoch_begin(self, loader: Any) -> None:
        """Set the recorded RNG states, so that the next pass has the order of the original one."""
        set_rng_state(self._epoch_begin["rng"])
        generator = getattr(loader, "synchronized_generator", None)
        if generator is not None and "generator" in self._epoch_begin:
            generator.set_state(self._epoch_begin["generator"])

    @property
    def restored_loss_sums(self) -> dict[str, Any]:
        """The restored `SnapshotTrainer.rank_loss_sums`."""
        sums: dict[str, Any] = self._restored["loss_sums"]
        return sums


def _exportable_callbacks(trainer: Any) -> list[Any]:
    callbacks = trainer.callback_handler.callbacks
    return [one for one in callbacks if isinstance(one, ExportableState)]


def _exported(callback: Any) -> tuple[str, Any]:
    return type(callback).__name__, callback.state()
