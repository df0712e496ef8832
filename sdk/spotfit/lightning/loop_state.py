"""LoopState: Lightning's loops, callbacks and hooks, as one object with a state dict.

Everything that `Trainer.save_checkpoint` stores besides what the Checkpointer saves itself: model,
optimizers, schedulers, scaler and the position in the data.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from enum import Enum
from typing import Any

from spotfit.lightning.lightning_package import load, package_of

_BASE_KEYS = frozenset(
    ("callbacks", "epoch", "global_step", "loops", "pytorch-lightning_version", "state_dict")
)
"""Keys that Lightning sets in a checkpoint before it calls the hooks of users."""


class LoopState:
    """The progress of one `Trainer.fit`, with the states of callbacks and data module.

    It is the same on all ranks.
    """

    saved_world_size: int | None = None
    """Number of ranks that have saved the state which was loaded."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        package = package_of(trainer)
        self._call = load(package, "trainer.call")
        self._version = importlib.import_module(package).__version__

    def state_dict(self) -> dict[str, Any]:
        """Return numbers, texts and tensors in dictionaries, for `Checkpointer(extra=...)`.

        Calls `on_save_checkpoint` of callbacks, module and data module.
        """
        trainer = self._trainer
        state: dict[str, Any] = {
            "loops": self._loops_state(),
            "callbacks": self._call._call_callbacks_state_dict(trainer),
            "hooks": self._hooks_state(),
            "callback_metrics": dict(trainer._logger_connector._callback_metrics),
            "world_size": trainer.world_size,
        }
        if trainer.datamodule is not None:
            state["datamodule"] = self._call._call_lightning_datamodule_hook(trainer, "state_dict")
        plain: dict[str, Any] = _without_enums(state)
        return plain

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue with loops, callbacks and data module as `state_dict` returned them.

        Calls `on_load_checkpoint` of callbacks and module, which data modules do not have; their
        dictionary has no weights.
        """
        trainer = self._trainer
        self.saved_world_size = state["world_size"]
        trainer.fit_loop.load_state_dict(state["loops"])
        trainer._logger_connector._callback_metrics = dict(state["callback_metrics"])
        checkpoint = self._checkpoint(state["loops"], state["callbacks"]) | state["hooks"]
        self._call._call_lightning_module_hook(trainer, "on_load_checkpoint", checkpoint)
        self._call._call_callbacks_on_load_checkpoint(trainer, checkpoint)
        self._call._call_callbacks_load_state_dict(trainer, checkpoint)
        if trainer.datamodule is not None and "datamodule" in state:
            self._call._call_lightning_datamodule_hook(
                trainer, "load_state_dict", state["datamodule"]
            )

    @property
    def is_within_epoch(self) -> bool:
        """Whether the epoch that has begun has not ended, so that its rest follows."""
        progress = self._trainer.fit_loop.epoch_progress.current
        return bool(progress.ready != progress.processed)

    def finish_restart(self) -> None:
        """Let the loops continue as if they had not been restarted.

        Lightning repeats or leaves out work after a restart, because it does not know where in a
        step its checkpoint was saved: it would validate again, or not update a scheduler that
        follows a metric. These states are saved between two steps, where there is nothing to
        repeat.
        """
        fit_loop = self._trainer.fit_loop
        for loop in (fit_loop, fit_loop.epoch_loop, fit_loop.epoch_loop.val_loop):
            loop._restarting = loop._loaded_from_state_dict = False
            loop._resuming_from_checkpoint = False
            loop.reset_restart_stage()

    def count_batches_again(self, completed: int) -> None:
        """Set the number of this epoch's batches that count as done, at another world size.

        `completed` are batches of the current size. The total of all epochs changes equally.
        """
        progress = self._trainer.fit_loop.epoch_loop.batch_progress
        added = completed - progress.current.completed
        for tracker in (progress.current, progress.total):
            for name in ("ready", "started", "processed", "completed"):
                setattr(tracker, name, getattr(tracker, name) + added)

    def _loops_state(self) -> dict[str, Any]:
        state: dict[str, Any] = self._trainer.fit_loop.state_dict()
        # States of loaders differ between ranks; the Checkpointer saves them.
        state["state_dict"] = {
            key: value for key, value in state["state_dict"].items() if key != "combined_loader"
        }
        return state

    def _hooks_state(self) -> dict[str, Any]:
        """Return what the users' hooks add to a checkpoint of Lightning."""
        checkpoint = self._checkpoint({}, {})
        self._call._call_callbacks_on_save_checkpoint(self._trainer, checkpoint)
        self._call._call_lightning_module_hook(self._trainer, "on_save_checkpoint", checkpoint)
        return {key: value for key, value in checkpoint.items() if key not in _BASE_KEYS}

    def _checkpoint(self, loops: Mapping[str, Any], callbacks: Mapping[str, Any]) -> dict[str, Any]:
        """Return a dictionary as Lightning passes it to hooks, without weights."""
        return {
            "epoch": self._trainer.current_epoch,
            "global_step": self._trainer.global_step,
            "pytorch-lightning_version": self._version,
            "state_dict": {},
            "loops": {"fit_loop": loops},
            "callbacks": callbacks,
        }


def _without_enums(value: Any) -> Any:
    """Replace members of enums by their values, which `torch.load(weights_only=True)` accepts."""
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Mapping):
        return {_without_enums(key): _without_enums(part) for key, part in value.items()}
    return [_without_enums(part) for part in value] if type(value) is list else value
