"""What the user's callbacks are, and what they are told about the run."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
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

    Around the training function, too, on every worker, if it wants to be. Derive from it and
    override what you need. It works on a copy of the object that was given to
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

    def train_func_context(self) -> AbstractContextManager[Any]:
        """A context that is entered around the training function, on every worker.

        It works there on a copy of its own, within the context of the trainer's `BackendConfig`.
        """
        return nullcontext()

    def listens(self) -> bool:
        """Whether it wants to be told of anything."""
        kind = type(self)
        return (
            kind.after_report is not UserCallback.after_report
            or kind.after_exception is not UserCallback.after_exception
        )

    def surrounds(self) -> bool:
        """Whether it has a context of its own for the training function."""
        return type(self).train_func_context is not UserCallback.train_func_context
