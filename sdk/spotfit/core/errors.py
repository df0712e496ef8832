"""All error classes of spotfit.

Every error states what happened and why (`message`) and what to do about it (`do`), carries the
numbers of the case (`details`), and can be pickled (decision 0007).

SpotfitError
├── ConfigError (ValueError)             a setting is invalid or contradicts another setting
│   ├── ConfigErrors                     several configuration errors, reported together
│   ├── ConfigTypeError (TypeError)      a setting has the wrong type
│   └── UnpreparedTrainerError (RuntimeError)  a framework's trainer ignores the other workers
├── MissingExtraError (ImportError)      an optional dependency is not installed
├── UnsupportedNameError (ImportError)   a name of Ray or Horovod does not exist in spotfit
├── ShippingError (TypeError)            the training function or its code cannot be sent
│   └── EnvironmentMismatchError         Python or package versions of driver and nodes differ
├── InfrastructureError                  a disk, network or process failed, not user code
├── IntegrityError                       a payload or checkpoint is missing, incomplete or corrupt
├── StoreError                           an operation on the object store failed
│   ├── NotFoundError                    the object does not exist
│   │   └── CheckpointNotFoundError (FileNotFoundError)  the checkpoint's directory does not exist
│   ├── AlreadyExistsError               `create` found an existing object
│   ├── ObjectChangedError               the object has another version than expected
│   ├── BucketNotFoundError              the bucket or container does not exist
│   ├── TransientStoreError              a temporary failure; the operation may be retried
│   ├── StorePermissionError             the credentials do not permit the operation
│   └── AtomicCreateUnsupportedError     the store's `create` is not atomic
├── LedgerError                          the run's records are not in the expected state
│   ├── RunNotFoundError                 there is no run at this URL
│   ├── RunActiveError                   a different run of this name is active
│   └── JournalError                     the journal is truncated, foreign or of a newer version
├── ProvisionError                       a backend cannot provide machines at all
│   ├── QuotaError                       the account's quota is exceeded
│   └── ProvisionPermissionError         the credentials do not permit renting machines
├── TrainingFailedError                  the run ended without a result
│   ├── WorkerGroupError                 the training function raised an exception
│   │   └── HangError                    workers stopped making progress
│   ├── ControllerError                  a callback, a backend hook or spotfit itself failed
│   └── PreemptionError                  more preemptions than max_preemption_failures
├── RunCancelledError                    the run was cancelled
│   ├── TimeBudgetExceededError          … because its time budget is used up
│   └── BudgetExhaustedError             … because its budget in US dollars is used up
├── WorkerDiedError                      a worker process exited without raising an exception
├── WorkerTimeoutError                   a worker does not respond or did not start in time
├── StaleWorkerGroupError                a backend hook called workers of an earlier round
├── CollectiveTimeoutError               some ranks did not reach a barrier or broadcast in time
├── UnknownDatasetError (KeyError)       the trainer has no dataset of this name
└── SessionMisuseError (RuntimeError)    a worker function was called outside of a worker
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


class SpotfitError(Exception):
    """Base class of all spotfit errors.

    `message` states what happened and why, `do` the remedy ('' if there is none), `details` the
    values of this case.
    """

    def __init__(self, message: str, *, do: str = "", **details: Any) -> None:
        super().__init__(message)
        self.message = message
        self.do = do
        self.details = details

    def __str__(self) -> str:
        return f"{self.message}\n  What to do: {self.do}" if self.do else self.message

    # Exceptions are unpickled as cls(*args) by default, which fails for the keyword arguments here
    # and for subclasses with a different signature.
    def __reduce__(self) -> tuple[Any, ...]:
        return (_rebuild, (type(self), self.args, self.__dict__))


def _rebuild(
    error_type: type[SpotfitError], args: tuple[Any, ...], state: dict[str, Any]
) -> SpotfitError:
    error = error_type.__new__(error_type)
    error.args = args
    error.__dict__.update(state)
    return error


class ConfigError(SpotfitError, ValueError):
    """A setting is invalid, or contradicts another setting."""


class ConfigErrors(ConfigError):
    """Several configuration errors, reported together; `errors` holds each of them."""

    # Each error is printed with its own remedy, so `do` stays empty.
    def __init__(self, errors: Sequence[SpotfitError]) -> None:
        count = "1 error" if len(errors) == 1 else f"{len(errors)} errors"
        listed = "\n".join(f"  {n}. {error}" for n, error in enumerate(errors, 1))
        super().__init__(f"Found {count}:\n{listed}")
        self.errors = tuple(errors)


class ConfigTypeError(ConfigError, TypeError):
    """A setting has the wrong type."""


class UnpreparedTrainerError(ConfigError, RuntimeError):
    """A training framework's trainer object would not train one model on all workers."""


class MissingExtraError(SpotfitError, ImportError):
    """An optional dependency is not installed."""


class UnsupportedNameError(SpotfitError, ImportError):
    """A name or module of Ray or Horovod does not exist in spotfit."""


class ShippingError(SpotfitError, TypeError):
    """The training function, or code or data it needs, cannot be pickled or sent to the nodes."""


class EnvironmentMismatchError(ShippingError):
    """Python or a package differs between driver and nodes in a way that breaks unpickling."""


class InfrastructureError(SpotfitError):
    """A node, its disk, its network or a service failed; the user's code is not at fault.

    Another attempt on the same or another machine may succeed.
    """


class IntegrityError(SpotfitError):
    """A payload or checkpoint is missing, incomplete, or differs from its recorded checksum."""


class StoreError(SpotfitError):
    """An operation on the object store failed."""


# Callers handle this and the next two classes as expected outcomes of store operations.
class NotFoundError(StoreError):
    """There is no object with this key."""


class BucketNotFoundError(StoreError):
    """The bucket or container does not exist."""


# Not the base class: code that catches OSError of local files must not catch those of the store.
class CheckpointNotFoundError(NotFoundError, FileNotFoundError):
    """The directory of a checkpoint does not exist: it was deleted, or never written."""


class AlreadyExistsError(StoreError):
    """`create` was refused because the object already exists."""


class ObjectChangedError(StoreError):
    """The object was replaced, so that it no longer has the version that was asked for."""


class TransientStoreError(StoreError):
    """The store failed temporarily. Whether a write took effect is unknown; it may be retried."""


class StorePermissionError(StoreError):
    """The credentials do not permit the operation."""


class AtomicCreateUnsupportedError(StoreError):
    """The store's `create` is missing or let two writers succeed.

    The journal relies on exactly one writer per slot (decision 0002), so the store cannot be used.
    """


class LedgerError(SpotfitError):
    """The run's records in the object store are not in the expected state."""


class RunNotFoundError(LedgerError):
    """There is no run at this URL."""


class RunActiveError(LedgerError):
    """A run of this name is active, with a different function, configuration or code."""


class JournalError(LedgerError):
    """The journal is truncated, belongs to another run, or was written by a newer version."""


class ProvisionError(SpotfitError):
    """A provisioner cannot provide machines, for a reason that retrying does not resolve."""


class QuotaError(ProvisionError):
    """The request exceeds the quota of the account."""


class ProvisionPermissionError(ProvisionError):
    """The credentials do not permit renting machines."""


# Names and attributes of this class and its subclasses follow Ray Train, so that `except` clauses
# of migrated scripts keep working.
class TrainingFailedError(SpotfitError):
    """The run ended without a result."""


class WorkerGroupError(TrainingFailedError):
    """The training function failed on some ranks.

    `worker_failures` maps each failed world rank to the original exception, or to a
    `WorkerDiedError` if the process exited without raising one.
    """

    def __init__(self, error_message: str, worker_failures: Mapping[int, BaseException]) -> None:
        super().__init__(error_message)
        self.worker_failures = dict(worker_failures)


class HangError(WorkerGroupError):
    """Workers stopped responding, or no rank made progress.

    The message contains the location of the stack traces of all ranks.
    """


NCCLHangError = HangError
"""Ray Train's name of `HangError`, which is raised for every communication backend."""


class ControllerError(TrainingFailedError):
    """A callback, a backend hook or spotfit itself failed outside of the workers.

    `controller_failure` is the original exception if it could be pickled, else a `SpotfitError`
    with its text.
    """

    def __init__(self, controller_failure: BaseException) -> None:
        is_spotfit_error = isinstance(controller_failure, SpotfitError)
        prefix = "" if is_spotfit_error else f"{type(controller_failure).__name__}: "
        # The text of a spotfit error is a sentence of its own; others need their type.
        super().__init__(f"Training failed outside the workers: {prefix}{controller_failure}")
        # The traceback of the original exception is displayed as the cause.
        self.controller_failure = controller_failure
        self.__cause__ = controller_failure


class PreemptionError(TrainingFailedError):
    """Machines were preempted more often than `FailureConfig.max_preemption_failures` allows.

    `preemption_info` holds the machines preempted last, with their ranks. `drain_timed_out` is True
    if workers were still running at the announced deadline.
    """

    def __init__(self, preemption_info: Any, drain_timed_out: bool = False) -> None:
        ranks = ", ".join(str(rank) for rank in preemption_info.preempted_ranks)
        super().__init__(
            "The run was preempted more often than max_preemption_failures allows; the last "
            f"preemption affected ranks [{ranks}].",
            do="Increase FailureConfig(max_preemption_failures=...), where -1 means no limit, and "
            "call fit() again: the run continues from its latest checkpoint.",
        )
        self.preemption_info = preemption_info
        self.drain_timed_out = drain_timed_out


class RunCancelledError(SpotfitError):
    """The run was cancelled by its user."""


class TimeBudgetExceededError(RunCancelledError):
    """The run has used up `RunConfig(time_budget_s=...)`; it has saved, and can be continued."""


class BudgetExhaustedError(RunCancelledError):
    """The run has used up `RunConfig(budget_usd=...)`; it has saved, and can be continued."""


class WorkerDiedError(SpotfitError):
    """A worker process exited or was killed by a signal, without raising an exception."""


class WorkerTimeoutError(SpotfitError):
    """A worker does not respond, hangs, or did not reach the training function in time."""


class StaleWorkerGroupError(SpotfitError):
    """A backend hook called workers of a round that has ended."""


class CollectiveTimeoutError(SpotfitError):
    """A barrier or broadcast timed out; the message names the missing ranks."""


class UnknownDatasetError(SpotfitError, KeyError):
    """The trainer has no dataset of this name."""


class SessionMisuseError(SpotfitError, RuntimeError):
    """A function for training workers was called outside of a worker.

    Also raised if the ranks call collective functions in different orders.
    """
