"""What the user's callbacks are, and what they are told about the run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class TrainRunContext:
    """What a callback may know of its run: its id and everything the trainer was given."""

    run_id: str
    run_config: Any
    train_loop_config: dict[str, Any] | None
    scaling_config: Any
    backend_config: Any
    dataset_config: Any = None

    def get_run_config(self) -> Any:
        """The `RunConfig` of the run."""
        return self.run_config


class UserCallback:
    """Told of reports and failures, in a process of its own beside the run's leader.

    Derive from it and override what you need. It works on a copy of the object that was given to
    `RunConfig(callbacks=...)`, or of one made from its class where SPOTFIT_CALLBACKS names that; a
    new leader begins with a fresh copy. An exception in it ends the run as a `ControllerError`.
    """

    def after_report(
        self, run_context: TrainRunContext, metrics: list[dict[str, Any]], checkpoint: Any | None
    ) -> None:
        """All ranks made a report: their metrics by rank, and the `Checkpoint` that came along."""

    def after_exception(
        self, run_context: TrainRunContext, worker_exceptions: dict[int, Exception]
    ) -> None:
        """An attempt failed: the exceptions by rank. Told once for each failed attempt."""
