"""A user's exception as data: a traceback that begins in the user's code, and a pickle."""

from __future__ import annotations

import pickle
import traceback
from pathlib import Path
from types import TracebackType
from typing import Any

import cloudpickle

from spotfit.model.wire import Raised
from spotfit.policy.failure import ends_the_same_way, while_preparing

_OURS = f"{Path(__file__).parents[1]}/"
_PICKLE_LIMIT_BYTES = 16 * 2**20


def as_raised(error: BaseException) -> Raised:
    """What the agent is told of it."""
    return Raised(told(error), pickled(error), final=ends_the_same_way(error))


def unprepared(error: BaseException) -> Raised:
    """The same of what came before the function could be called."""
    fault = while_preparing(error)
    return Raised(told(error), pickled(error), fault.blame, fault.final)


def told(error: BaseException) -> str:
    """The traceback as Python prints it, without the frames of ours that called the user."""
    shown = _from_user_code(error.__traceback__) or error.__traceback__
    return "".join(traceback.format_exception(type(error), error, shown)).rstrip("\n")


def pickled(error: BaseException) -> bytes:
    """The exception, if it survives the way there and back; else nothing.

    One whose class cannot be called with its `args` alone comes back without a call, and without
    those attributes that cannot travel.
    """
    return _there_and_back(error) or _there_and_back(_Remains.of(error))


class _Remains:
    """An exception taken apart; unpickled, it is the exception again."""

    def __init__(self, kind: type[BaseException], args: Any, attributes: dict[str, Any]) -> None:
        self._parts = (kind, args, attributes)

    @classmethod
    def of(cls, error: BaseException) -> _Remains:
        attributes = {name: one for name, one in vars(error).items() if _there_and_back(one)}
        return cls(type(error), error.args, attributes)

    def __reduce__(self) -> tuple[Any, ...]:
        return (_put_together, self._parts)


def _put_together(kind: type[BaseException], args: Any, attributes: dict[str, Any]) -> Any:
    error = kind.__new__(kind, *args)
    error.args = args
    vars(error).update(attributes)
    return error


def _there_and_back(thing: object) -> bytes:
    try:
        body: bytes = cloudpickle.dumps(thing)
        again = pickle.loads(body)  # noqa: S301 - we wrote it this moment
        if isinstance(again, BaseException):
            str(again)  # its text may need what it has lost
    except Exception:  # noqa: BLE001 - the user's own __reduce__ or __init__ may raise anything
        return b""
    return body if len(body) <= _PICKLE_LIMIT_BYTES else b""


def _from_user_code(frames: TracebackType | None) -> TracebackType | None:
    while frames is not None and frames.tb_frame.f_code.co_filename.startswith(_OURS):
        frames = frames.tb_next
    return frames
