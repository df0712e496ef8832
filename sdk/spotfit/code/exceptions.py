"""Conversion of exceptions raised by user code to messages: traceback text and a pickle."""

from __future__ import annotations

import pickle
import traceback
from pathlib import Path
from types import TracebackType
from typing import Any

import cloudpickle

from spotfit.policy.retry_budget import diagnose_setup_failure, is_permanent_error
from spotfit.protocol.worker_agent import WorkerRaised

_PACKAGE_PREFIX = f"{Path(__file__).parents[1]}/"
# An exception may reference tensors. A larger one is reported by its traceback only.
_PICKLE_LIMIT_BYTES = 16 * 2**20


def to_failure_message(error: BaseException) -> WorkerRaised:
    """Return the message to the agent for an exception of the training function."""
    return WorkerRaised(
        traceback_text=format_traceback(error),
        pickled_exception=pickle_exception(error),
        is_permanent=is_permanent_error(error),
    )


def to_setup_failure_message(error: BaseException) -> WorkerRaised:
    """Return the message to the agent for an exception raised before the function was called."""
    fault = diagnose_setup_failure(error)
    return WorkerRaised(
        traceback_text=format_traceback(error),
        pickled_exception=pickle_exception(error),
        cause=fault.cause,
        is_permanent=fault.is_permanent,
    )


def format_traceback(error: BaseException) -> str:
    """Format the traceback without spotfit's frames above the user's code."""
    # If all frames are spotfit's, the error is spotfit's own and its frames are needed.
    shown = _skip_own_frames(error.__traceback__) or error.__traceback__
    return "".join(traceback.format_exception(type(error), error, shown)).rstrip("\n")


def pickle_exception(error: BaseException) -> bytes:
    """Return a pickle that is known to load, or b'' if there is none.

    An exception class that cannot be called with `args` alone is rebuilt without calling
    `__init__`, and without attributes that cannot be pickled.
    """
    return _pickle_round_trip(error) or _pickle_round_trip(_ExceptionState.of(error))


class _ExceptionState:
    """Type, args and picklable attributes of an exception; unpickles as the exception itself."""

    def __init__(
        self, exception_type: type[BaseException], args: Any, attributes: dict[str, Any]
    ) -> None:
        self._parts = (exception_type, args, attributes)

    @classmethod
    def of(cls, error: BaseException) -> _ExceptionState:
        attributes = {
            name: value for name, value in vars(error).items() if _pickle_round_trip(value)
        }
        return cls(type(error), error.args, attributes)

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rebuild_exception, self._parts)


# Pickles of exceptions refer to this function by name: renaming it breaks stored ones.
def _rebuild_exception(
    exception_type: type[BaseException], args: Any, attributes: dict[str, Any]
) -> Any:
    # Without __init__, which may require arguments that are not in `args`.
    error = exception_type.__new__(exception_type, *args)
    error.args = args
    vars(error).update(attributes)
    return error


def _pickle_round_trip(value: object) -> bytes:
    try:
        body: bytes = cloudpickle.dumps(value)
        loaded = pickle.loads(body)  # noqa: S301 - written in the previous line
        if isinstance(loaded, BaseException):
            str(loaded)  # a user's __str__ may depend on attributes that were not pickled
    except Exception:  # noqa: BLE001 - the user's own __reduce__ or __init__ may raise anything
        return b""
    return body if len(body) <= _PICKLE_LIMIT_BYTES else b""


def _skip_own_frames(frames: TracebackType | None) -> TracebackType | None:
    while frames is not None and frames.tb_frame.f_code.co_filename.startswith(_PACKAGE_PREFIX):
        frames = frames.tb_next
    return frames
