"""A user's exception as data: a traceback that begins in the user's code, and a pickle."""

from __future__ import annotations

import pickle
import traceback
from pathlib import Path
from types import TracebackType

import cloudpickle

from spotfit.model.wire import Raised
from spotfit.policy.failure import while_preparing

_OURS = f"{Path(__file__).parents[1]}/"
_PICKLE_LIMIT_BYTES = 16 * 2**20


def as_raised(error: BaseException) -> Raised:
    """What the agent is told of it."""
    return Raised(told(error), pickled(error))


def unprepared(error: BaseException) -> Raised:
    """The same of what came before the function could be called."""
    fault = while_preparing(error)
    return Raised(told(error), pickled(error), fault.blame, fault.final)


def told(error: BaseException) -> str:
    """The traceback as Python prints it, without the frames of ours that called the user."""
    shown = _from_user_code(error.__traceback__) or error.__traceback__
    return "".join(traceback.format_exception(type(error), error, shown)).rstrip("\n")


def pickled(error: BaseException) -> bytes:
    """The exception, if it survives the way there and back; else nothing."""
    try:
        body: bytes = cloudpickle.dumps(error)
        pickle.loads(body)  # noqa: S301 - we wrote it this moment
    except Exception:  # noqa: BLE001 - the user's own __reduce__ or __init__ may raise anything
        return b""
    return body if len(body) <= _PICKLE_LIMIT_BYTES else b""


def _from_user_code(frames: TracebackType | None) -> TracebackType | None:
    while frames is not None and frames.tb_frame.f_code.co_filename.startswith(_OURS):
        frames = frames.tb_next
    return frames
