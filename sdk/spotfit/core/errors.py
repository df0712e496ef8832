"""The one error tree. Every error says what, why and what to do, and survives a pickle.

SpotfitError
├── ConfigError (ValueError)             what the caller wrote cannot be meant
│   ├── ConfigErrors                     several of them, told at once
│   └── ConfigTypeError (TypeError)      it is of another kind altogether
├── MissingExtraError (ImportError)      an optional dependency is not installed
├── ShippingError (TypeError)            the function or its luggage cannot be taken along
│   └── EnvironmentMismatchError         here and there differ in Python or packages
├── MachineError                         a machine's disk, network or processes, not the user's code
├── IntegrityError                       a payload is not what was sealed
├── StoreError                           the bucket
│   ├── NotFoundError                    no such object
│   ├── AlreadyExistsError               somebody created it first
│   ├── TransientStoreError              worth another try
│   ├── StorePermissionError             the credentials do not allow it
│   └── UntrustworthyStoreError          its `create` lies: no journal may live there
├── LedgerError                          the run, as the bucket tells it
│   ├── RunNotFoundError                 nothing there
│   ├── RunActiveError                   a run of that name is going on
│   └── JournalError                     truncated, foreign or newer than we can read
├── ProvisionError                       machines
│   ├── QuotaError
│   └── ProvisionPermissionError
├── TrainingFailedError                  the run ended badly
│   ├── WorkerGroupError                 the user's function failed; carries the exceptions by rank
│   │   └── HangError                    it did not fail, it hung; the message tells where
│   ├── ControllerError                  ours or a callback failed
│   └── PreemptionError                  more reclaims than the budget allows
├── RunCancelledError                    somebody asked for the end
├── WorkerDiedError                      a worker process ended without a word
├── WorkerSilentError                    a worker that does not answer, or never began
├── WorkersGoneError                     a backend's hook called workers that are no more
├── CollectiveTimeoutError               some ranks never came
├── UnknownDatasetError (KeyError)       the trainer was given no dataset of that name
└── SessionMisuseError (RuntimeError)    a worker function called where it cannot work
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Self


class SpotfitError(Exception):
    """Root of all our errors: `what` happened and why, `do` is the remedy, `facts` the numbers."""

    def __init__(self, what: str, *, do: str = "", **facts: Any) -> None:
        super().__init__(what)
        self.what = what
        self.do = do
        self.facts = facts

    def __str__(self) -> str:
        return f"{self.what}\n  What to do: {self.do}" if self.do else self.what

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rebuild, (type(self), self.args, self.__dict__))


def _rebuild(
    kind: type[SpotfitError], args: tuple[Any, ...], state: dict[str, Any]
) -> SpotfitError:
    error = kind.__new__(kind)
    error.args = args
    error.__dict__.update(state)
    return error


class ConfigError(SpotfitError, ValueError):
    """What the caller wrote cannot be meant, or contradicts itself."""


class ConfigErrors(ConfigError):
    """Several mistakes, all told at once; `errors` holds each."""

    def __init__(self, errors: Sequence[SpotfitError]) -> None:
        listed = "\n".join(f"  {n}. {error}" for n, error in enumerate(errors, 1))
        super().__init__(f"{len(errors)} things stand in the way:\n{listed}")
        self.errors = tuple(errors)


class ConfigTypeError(ConfigError, TypeError):
    """What the caller wrote is of another kind altogether."""


class MissingExtraError(SpotfitError, ImportError):
    """An optional dependency is not installed."""


class ShippingError(SpotfitError, TypeError):
    """The training function, or something it drags along, cannot be taken to the machines."""


class EnvironmentMismatchError(ShippingError):
    """Python or a package here differs from the one there in a way that breaks pickles."""


class MachineError(SpotfitError):
    """A machine failed at what any machine can do: its disk, its network, its processes."""


class IntegrityError(SpotfitError):
    """A payload or checkpoint is not, byte for byte, what was sealed or listed."""


class StoreError(SpotfitError):
    """The object store refused or failed."""


class NotFoundError(StoreError):
    """No object under that key."""


class AlreadyExistsError(StoreError):
    """`create` lost: the object was there before."""


class TransientStoreError(StoreError):
    """The store failed in a way worth another try; whether the write happened is unknown."""


class StorePermissionError(StoreError):
    """The credentials at hand do not allow this."""


class UntrustworthyStoreError(StoreError):
    """The store's `create` let two writers win; a journal there would lie."""


class LedgerError(SpotfitError):
    """The run, as the bucket tells it, is not what was expected."""


class RunNotFoundError(LedgerError):
    """There is no run under that address."""


class RunActiveError(LedgerError):
    """A run of that name is going on, and it is not this one."""


class JournalError(LedgerError):
    """The journal is truncated, foreign, or newer than this version can read."""


class ProvisionError(SpotfitError):
    """A provisioner cannot give machines, for a reason that waiting does not cure."""


class QuotaError(ProvisionError):
    """The account may not have so many machines."""


class ProvisionPermissionError(ProvisionError):
    """The credentials do not allow renting machines."""


class TrainingFailedError(SpotfitError):
    """The run ended without the result that was asked for."""


class WorkerGroupError(TrainingFailedError):
    """The training function failed on some ranks.

    `worker_failures` maps world rank to the original exception (or to a `WorkerDiedError` where a
    process ended without one).
    """

    def __init__(self, error_message: str, worker_failures: Mapping[int, BaseException]) -> None:
        super().__init__(error_message)
        self.worker_failures = dict(worker_failures)


class HangError(WorkerGroupError):
    """Workers hung: they did not answer any more, or no rank got on; the message tells where the
    stacks of all ranks lie."""


NCCLHangError = HangError
"""As Ray Train calls it; here it is raised whatever the ranks speak with each other."""


class ControllerError(TrainingFailedError):
    """The run's control or something of the user's beside the workers failed.

    `controller_failure` is the cause: what a callback raised, as itself, where it could be pickled.
    """

    def __init__(self, controller_failure: BaseException) -> None:
        ours = isinstance(controller_failure, SpotfitError)
        kind = "" if ours else f"{type(controller_failure).__name__}: "
        super().__init__(f"Training failed outside the workers: {kind}{controller_failure}")
        self.controller_failure = controller_failure
        self.__cause__ = controller_failure


class PreemptionError(TrainingFailedError):
    """Machines were reclaimed more often than `FailureConfig.max_preemption_failures` allows.

    `preemption_info` tells which machines were the last, and their ranks; `drain_timed_out` that
    workers were still running when the time that was announced was over.
    """

    def __init__(self, preemption_info: Any, drain_timed_out: bool = False) -> None:
        ranks = ", ".join(str(rank) for rank in preemption_info.preempted_ranks)
        super().__init__(
            "The run lost more machines than its budget allows; the last were those of ranks "
            f"[{ranks}].",
            do="Raise FailureConfig(max_preemption_failures=...), where -1 is no limit, and fit "
            "again: the run continues from its latest checkpoint.",
        )
        self.preemption_info = preemption_info
        self.drain_timed_out = drain_timed_out


class RunCancelledError(SpotfitError):
    """The run ended because somebody asked it to."""


class WorkerDiedError(SpotfitError):
    """A worker process ended by a signal or an exit code, without raising."""

    @classmethod
    def by(cls, how: str, *, rank: int) -> Self:
        return cls(
            f"The worker of rank {rank} {how}.",
            do="Look at the last lines of its log.",
            rank=rank,
            how=how,
        )


class WorkerSilentError(SpotfitError):
    """A worker did not answer any more, waited for ever, or never came to its function."""


class WorkersGoneError(SpotfitError):
    """A hook of a backend called workers of an attempt that is over."""


class CollectiveTimeoutError(SpotfitError):
    """A barrier or broadcast waited too long; the message names the ranks that never came."""


class UnknownDatasetError(SpotfitError, KeyError):
    """The trainer was given no dataset of that name."""


class SessionMisuseError(SpotfitError, RuntimeError):
    """A function for training workers was called where there is none, or out of step with the
    other ranks."""
