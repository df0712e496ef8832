"""`UserCallback`: the base class of user-defined callbacks, with the interface of Ray Train."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class TrainRunContext:
    """The run that a callback is called for: its id and the configuration objects of the trainer.

    The objects are copies from the process that called `fit()`. `run_config.storage_filesystem` is
    None if credentials are sent to the nodes.
    """

    run_id: str
    run_config: Any
    train_loop_config: dict[str, Any] | None
    scaling_config: Any
    backend_config: Any
    dataset_config: Any = None

    def get_run_config(self) -> Any:
        """Return the `RunConfig` of the run, a copy of the one that was passed to the trainer."""
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
        """Called in the sidecar process for each report that all ranks of the round have made.

        Also for snapshots that a `Checkpointer` saves. `metrics` holds one dictionary per world
        rank, in the order of the ranks; {} for a rank that did not take part because its node is
        preempted. `checkpoint` is the committed checkpoint of this report, or None if it has none.
        Called in the order of the reports, but a new leader does not repeat those of an earlier
        one. The default does nothing.
        """

    def after_exception(
        self, run_context: TrainRunContext, worker_exceptions: dict[int, Exception]
    ) -> None:
        """Called in the sidecar process once per round that has ended with failed ranks.

        `worker_exceptions` maps each failed world rank to its exception, or to a `WorkerDiedError`
        if it raised none, for example because its machine was lost. The run may still be retried.
        The default does nothing.
        """

    def train_func_context(self) -> AbstractContextManager[Any]:
        """Return a context manager to enter around the training function on every worker.

        Called on each worker's own copy of the callback, once per round. The context is entered
        inside that of the trainer's `BackendConfig`. An exception of it counts as one of the
        training function. The default context does nothing.
        """
        return nullcontext()

    def has_event_methods(self) -> bool:
        """Whether the class overrides `after_report` or `after_exception`.

        Asked by `fit()`: without any such callback no sidecar process is started for callbacks.
        """
        callback_type = type(self)
        return (
            callback_type.after_report is not UserCallback.after_report
            or callback_type.after_exception is not UserCallback.after_exception
        )

    def has_train_func_context(self) -> bool:
        """Whether the class overrides `train_func_context`.

        Asked by `fit()`: other callbacks are not sent to the workers.
        """
        return type(self).train_func_context is not UserCallback.train_func_context
