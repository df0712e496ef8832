"""One worker's life: read who we are, join the group, call the function, tell how it ended."""

from __future__ import annotations

import atexit
import faulthandler
import logging
import os
import pickle
import socket
import sys
import threading
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any, NoReturn

import cloudpickle

from spotfit.core.errors import ShippingError
from spotfit.core.ids import RunId
from spotfit.core.units import told_bytes
from spotfit.frameworks.api import Framework
from spotfit.frameworks.devices import own_devices
from spotfit.frameworks.registry import open_framework
from spotfit.host import env, log
from spotfit.model.wire import Returned, Running, Start
from spotfit.ship.luggage import Shipped
from spotfit.ship.sign import RunKey
from spotfit.store.api import Store
from spotfit.store.budget import PATIENT
from spotfit.store.opening import open_store
from spotfit.worker import crash, current, pulse
from spotfit.worker.luggage import move_in
from spotfit.worker.session import Session
from spotfit.worker.talk import Talk

_LAST_WORDS_S = 10.0
_FORMING_S = 300.0
_LOG_FORMAT = "%(levelname)s %(name)s: %(message)s"
_LARGEST_RESULT_BYTES = 32 * 2**20


def main(talk_descriptor: int) -> NoReturn:
    """Be the worker whose agent is at the other end of that socket. Ends the process."""
    faulthandler.enable()
    talk = Talk(socket.socket(fileno=talk_descriptor))
    start = talk.next(None)
    assert isinstance(start, Start), "an agent begins with Start"
    begin_logging(start.log_level)
    if start.pulse_s:
        pulse.begin(talk, every_s=start.pulse_s, folder=Path(start.scratch) / "stacks")
    framework = open_framework(start.framework)
    end(_live(start, talk, framework), framework.leave)


def begin_logging(level: str) -> None:
    """Our own lines from that level on, and the user's as ever."""
    log.at_least(level)
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format=_LOG_FORMAT)


def _live(start: Start, talk: Talk, framework: Framework) -> int:
    """Everything between the first frame and the last; the exit code."""
    try:
        store = open_store(start.storage_url, PATIENT)
        shipped = unpack(start, store, framework)
    except BaseException as error:  # noqa: BLE001 - importing the user's modules may raise anything
        talk.send(crash.unprepared(error))
        return 1
    try:
        devices = own_devices(start, beside_peers=framework.beside_peers)
        session = Session(start, talk, store, devices=devices)
        current.enter(session)
        value = _train(start, talk, framework, session, shipped)
        talk.send(Returned(session.reports, _pickled(value) if start.rank == 0 else b""))
        session.calls.wait_to("leave")
    except BaseException as error:  # noqa: BLE001 - SystemExit and Ctrl-C in a worker are failures, too
        talk.send(crash.as_raised(error))
        return 1
    return 0


def _train(
    start: Start, talk: Talk, framework: Framework, session: Session, shipped: Shipped
) -> Any:
    """Form the group and call the function, with a backend's hooks before each."""
    session.calls.wait_to("form")
    framework.enter(start, lambda kind, value: session.gather(kind, value, timeout_s=_FORMING_S))
    session.calls.wait_to("train")
    session.calls.serve()
    talk.send(Running())
    value = shipped.call()
    session.close()
    return value


def unpack(start: Start, store: Store, framework: Framework) -> Shipped:
    """The function, with its code importable and its variables set. Raises what `ship` raises.

    What is loaded may wake a GPU: by then this worker must see its own.
    """
    key = RunKey.from_text(start.secret, RunId(start.run_id))
    payload = move_in(start.luggage, key, store, start.scratch, start.run_name)
    env.update(framework.environment(start))
    return payload.shipped()


# --- what it returned ----------------------------------------------------------------------------


class _ReturnPickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle has no types
    """Refuses tensors: the caller's machine may have neither torch nor the device."""

    def reducer_override(self, thing: Any) -> Any:
        torch = sys.modules.get("torch")
        if torch is not None and isinstance(thing, torch.Tensor):
            raise _TensorInside
        return super().reducer_override(thing)


class _TensorInside(Exception):  # noqa: N818 - a signal between two functions, seen by nobody else
    pass


def _pickled(value: Any) -> bytes:
    sink = BytesIO()
    try:
        _ReturnPickler(sink).dump(value)
    except _TensorInside as tensor:
        raise ValueError(
            "The training function returned a value that holds torch tensors. Return numbers or "
            "numpy arrays (tensor.item(), tensor.numpy()), and put weights into a checkpoint."
        ) from tensor
    except (pickle.PicklingError, TypeError, AttributeError) as refused:
        raise ShippingError(
            f"What the training function returned, a {type(value).__name__}, cannot be pickled: "
            f"{refused}",
            do="Return plain values; report metrics with report() and files in a checkpoint.",
        ) from refused
    if sink.tell() > _LARGEST_RESULT_BYTES:
        raise ShippingError(
            f"What the training function returned takes {told_bytes(sink.tell())}; "
            f"{told_bytes(_LARGEST_RESULT_BYTES)} is the most.",
            do="Return plain values, and put what is big into a checkpoint.",
        )
    return sink.getvalue()


# --- the end -------------------------------------------------------------------------------------


def end(code: int, leave: Callable[[], None]) -> NoReturn:
    """End this process: leave the group, let libraries flush, but let nothing hang."""
    last_words = threading.Timer(_LAST_WORDS_S + env.value(env.LEAVE_S), os._exit, (code,))
    last_words.daemon = True
    last_words.start()
    try:
        if code == 0:
            leave()  # after a failure the others may wait in a collective: they are killed instead
        atexit._run_exitfuncs()  # noqa: SLF001 - as multiprocessing does in its children
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        faulthandler.disable()
        os._exit(code)
