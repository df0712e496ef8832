"""The process of the user's callbacks, on the leader's node: hears of reports and failures."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from spotfit.checkpoint.restore import open_committed
from spotfit.core.codec import decoder, encode
from spotfit.core.errors import (
    IntegrityError,
    NotFoundError,
    ShippingError,
    WorkerDiedError,
)
from spotfit.host import env, frames, log
from spotfit.host.clocks import SystemClock
from spotfit.model.audience import Failed, Heard, Hello, RankTold, Reported, ToAudience
from spotfit.model.metrics import metrics_from_json
from spotfit.ship.function import load_pickle
from spotfit.ship.prepare import prepare
from spotfit.ship.sign import RunKey
from spotfit.store.api import Store
from spotfit.store.budget import PATIENT
from spotfit.store.opening import open_store
from spotfit.worker import crash, trouble
from spotfit.worker.luggage import key_of, open_luggage

_frames: msgspec.json.Decoder[ToAudience] = decoder(ToAudience)  # type: ignore[arg-type]
_PICKLE_TRIES = 20
_PICKLE_PAUSE_S = 0.1


def main(descriptor: int) -> NoReturn:
    """Listen to the agent at the other end of that socket until it closes it. Ends the process."""
    wire = socket.socket(fileno=descriptor)
    hello = _next(wire)
    assert isinstance(hello, Hello), "a leader begins with Hello"
    house: Audience | None = None
    heard = Heard()
    try:
        house = Audience.seat(hello)
    except Exception as error:  # noqa: BLE001 - loading the user's callbacks runs the user's code
        heard = as_heard(error, open_store(hello.storage_url, PATIENT), key_of(hello))
    while (frame := _next(wire)) is not None:
        if house is not None:
            heard = house.hear(frame)
        frames.write(wire, encode(heard))
    sys.stdout.flush()
    os._exit(0)


def _next(wire: socket.socket) -> ToAudience | None:
    body = frames.read(wire)
    return None if body is None else _frames.decode(body)


class Audience:
    """The user's callbacks, and what they want to be told with everything."""

    def __init__(self, callbacks: Iterable[Any], context: Any, store: Store, key: RunKey) -> None:
        self._callbacks = tuple(callbacks)
        self._context = context
        self._store = store
        self._key = key

    @classmethod
    def seat(cls, hello: Hello) -> Audience:
        """Load what `fit()` has packed. Raises what unpacking raises."""
        store, key = open_store(hello.storage_url, PATIENT), key_of(hello)
        payload = open_luggage(hello.luggage, key, store, hello.scratch)
        prepared = prepare(payload.env, store=store, scratch=Path(hello.scratch or "."))
        env.update(prepared.env_vars)
        sys.path[:0] = prepared.sys_path
        return cls(payload.load("callbacks"), payload.load("run_context"), store, key)

    def hear(self, frame: ToAudience) -> Heard:
        """Call every callback, up to the first that raises."""
        try:
            match frame:
                case Reported():
                    self._tell_report(frame)
                case Failed():
                    self._tell_failure(frame)
                case Hello():
                    pass  # said once already
        except Exception as error:  # noqa: BLE001 - the user's callback may raise anything
            return as_heard(error, self._store, self._key)
        return Heard()

    def _tell_report(self, reported: Reported) -> None:
        name = reported.checkpoint
        checkpoint = open_committed(self._store, name) if name is not None else None
        for callback in self._callbacks:
            callback.after_report(
                run_context=self._context,
                metrics=[metrics_from_json(msgspec.json.decode(each)) for each in reported.metrics],
                checkpoint=checkpoint,
            )

    def _tell_failure(self, failed: Failed) -> None:
        exceptions = {one.rank: self._exception(one) for one in failed.ranks}
        for callback in self._callbacks:
            callback.after_exception(run_context=self._context, worker_exceptions=dict(exceptions))

    def _exception(self, failed: RankTold) -> BaseException:
        """The original, where it could be pickled; else its text."""
        original = self._original(failed.pickle_key) if failed.pickle_key else None
        return original or WorkerDiedError(failed.told, rank=failed.rank)

    def _original(self, pickle_key: str) -> BaseException | None:
        envelope = self._envelope(pickle_key)
        if envelope is None:
            return None
        try:
            original = load_pickle(envelope, self._key, purpose=pickle_key)
        except (IntegrityError, ShippingError) as lost:
            log.warning("failure.unread", key=pickle_key, why=lost.what)
            return None
        return original if isinstance(original, BaseException) else None

    def _envelope(self, key: str) -> bytes | None:
        """The rank's node is still writing it when we are told: wait a little."""
        for _ in range(_PICKLE_TRIES):
            try:
                return self._store.get(key)
            except NotFoundError:
                SystemClock().wait(_PICKLE_PAUSE_S)
        return None


def as_heard(error: Exception, store: Store, key: RunKey) -> Heard:
    """The answer that tells of what was raised; itself, pickled, where that can be done."""
    return Heard(crash.told(error), trouble.keep(error, store, key))
