"""CheckpointerHooks, the callback with which Lightning saves through a Checkpointer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from spotfit.checkpoint.base_checkpointer import RestoreResult
from spotfit.core.errors import ConfigError
from spotfit.lightning.fit_checkpointer import FitCheckpointer
from spotfit.model.failure_model import SaveCondition
from spotfit.torch.checkpoint.checkpointer import TrainingStateCheckpointer
from spotfit.worker.training_api import require_session


class CheckpointerHooks:
    """Saves the complete training without stopping it, and resumes it exactly after a restart.

    It keeps model, optimizers, schedulers, scaler, loops, the position in the data, callbacks, RNG
    states, and what the epoch's logged means have accumulated. `Trainer.fit` restores the newest
    state by itself, also within an epoch. The arguments are those of `spotfit.torch.Checkpointer`.
    """

    restored: RestoreResult | None = None
    """The state from which `Trainer.fit` has resumed; None if it started at step 0."""
    _fit: FitCheckpointer | None = None

    def __init__(
        self,
        *,
        every: SaveCondition | Sequence[SaveCondition] = "auto",
        max_overhead: float | None = None,
        extra: Mapping[str, Any] | None = None,
        per_rank: Mapping[str, Any] | None = None,
        save_at_end: bool = True,
        total_steps: int | None = None,
    ) -> None:
        """Create one in the training function, and pass it in `Trainer(callbacks=[...])`.

        A step is a batch. `total_steps` is computed from `max_epochs` and `max_steps` if it is not
        given. Raises `SessionMisuseError` outside of a training function.
        """
        require_session("spotfit.lightning.CheckpointerCallback")
        super().__init__()
        self._options = {
            "every": every,
            "max_overhead": max_overhead,
            "extra": extra,
            "per_rank": per_rank,
            "save_at_end": save_at_end,
            "total_steps": total_steps,
        }

    @property
    def checkpointer(self) -> TrainingStateCheckpointer:
        """The `Checkpointer` of the current fit. Raises `ConfigError` before `Trainer.fit`."""
        if self._fit is None:
            raise ConfigError(
                "CheckpointerCallback.checkpointer exists only after Trainer.fit has begun.",
                do="Read it in a hook that runs later, such as on_train_start.",
            )
        return self._fit.checkpointer

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Called by Lightning when model and optimizers are set up: restore the newest state."""
        self._fit = FitCheckpointer(trainer, self._options)
        self.restored = self._fit.restore()
        self._fit.follow_loops()

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Called by Lightning after a validation: its metrics belong to the saves that follow."""
        if self._fit is not None and not trainer.sanity_checking:
            self._fit.record_metrics()

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Called by Lightning at the end of a fit: stop following its loops."""
        if self._fit is not None:
            self._fit.unfollow_loops()
