"""`UserCallback`: the base class of user-defined callbacks, with the interface of Ray Train."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class TrainRunContext:
    """The run of a callback: its id and the configuration objects of the trainer."""

    run_id: str
    run_config: Any
    train_loop_config: dict[str, Any] | None
    scaling_config: Any
    backend_config: Any
    dataset_config: Any = None

    def get_run_config(self) -> Any:
        """Return the `RunConfig` of the run."""
        return self.run_config


class UserCallback:
    """Base class for callbacks; override the methods you need.

    Event methods run in a sidecar process on the leader's node, on a copy of the object passed to
    `RunConfig(callbacks=...)` or created from the class that SPOTFIT_CALLBACKS names. A new leader
    starts with a fresh copy. An exception raised by a callback ends the run as a `ControllerError`.
    """

    def after_report(
        self, run_context: TrainRunContext, metrics: list[dict[str, Any]], checkpoint: Any | None
    ) -> None:
        """Called when all ranks have reported: metrics by rank, and the `Checkpoint` if any."""

    def after_exception(
        self, run_context: TrainRunContext, worker_exceptions: dict[int, Exception]
    ) -> None:
        """Called once per failed round, with the exceptions by rank."""

    def train_func_context(self) -> AbstractContextManager[Any]:
        """Return a context manager to enter around the training function on every worker.

        Each worker has its own copy of the callback. The context is entered inside that of the
        trainer's `BackendConfig`.
        """
        return nullcontext()

    def has_event_methods(self) -> bool:
        """Whether the class overrides an event method; otherwise no sidecar process is started."""
        callback_type = type(self)
        return (
            callback_type.after_report is not UserCallback.after_report
            or callback_type.after_exception is not UserCallback.after_exception
        )

    def has_train_func_context(self) -> bool:
        """Whether the class overrides `train_func_context`."""
        return type(self).train_func_context is not UserCallback.train_func_context
