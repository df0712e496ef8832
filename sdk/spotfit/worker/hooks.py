"""The process of a backend's hooks, on the leader's node: calls them, and workers for them."""

from __future__ import annotations

import os
import queue
import socket
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from spotfit.core.codec import decoder, encode
from spotfit.core.errors import WorkersGoneError
from spotfit.host import env, frames, log
from spotfit.model.audience import Hello
from spotfit.model.hooks import FromHooks, Over, Perform, Performed, ToHooks, Told
from spotfit.ship.prepare import prepare
from spotfit.ship.sign import RunKey
from spotfit.store.api import Store
from spotfit.store.opening import open_store
from spotfit.worker import crash, trouble
from spotfit.worker.luggage import key_of, open_luggage
from spotfit.worker.worker_group import Asking, WorkerGroup

_frames: msgspec.json.Decoder[ToHooks] = decoder(ToHooks)  # type: ignore[arg-type]


def main(descriptor: int) -> NoReturn:
    """Serve the agent at the other end of that socket until it closes it. Ends the process."""
    wire = Wire(socket.socket(fileno=descriptor))
    hello = wire.next()
    assert isinstance(hello, Hello), "a leader begins with Hello"
    stage = Stage(wire.send, open_store(hello.storage_url), key_of(hello))
    threading.Thread(target=_listen, args=(wire, stage), name="listen", daemon=True).start()
    stage.serve(lambda: _config(hello))


def _listen(wire: Wire, stage: Stage) -> NoReturn:
    while (frame := wire.next()) is not None:
        stage.hear(frame)
    sys.stdout.flush()
    os._exit(0)


def _config(hello: Hello) -> Any:
    """The backend's config, with the user's code importable. Raises what unpacking raises."""
    store, key = open_store(hello.storage_url), key_of(hello)
    payload = open_luggage(hello.luggage, key, store, hello.scratch)
    prepared = prepare(payload.env, store=store, scratch=Path(hello.scratch or "."))
    env.update(prepared.env_vars)
    sys.path[:0] = prepared.sys_path
    return payload.load("backend_config")


class Wire:
    """The socket to the agent: frames out from any thread, in by one."""

    def __init__(self, wire: socket.socket) -> None:
        self._wire = wire
        self._writing = threading.Lock()

    def next(self) -> ToHooks | None:
        """The next frame; None when the agent is gone."""
        body = frames.read(self._wire)
        return None if body is None else _frames.decode(body)

    def send(self, frame: FromHooks) -> None:
        """Tell the agent."""
        with self._writing:
            frames.write(self._wire, encode(frame))


class Stage:
    """Performs hooks one after the other, in the main thread; answers come in by another."""

    def __init__(self, send: Callable[[FromHooks], None], store: Store, key: RunKey) -> None:
        self._send = send
        self._store = store
        self._key = key
        self._asking = Asking(send)
        self._orders: queue.SimpleQueue[Perform] = queue.SimpleQueue()
        self._config: Any = None

    def hear(self, frame: ToHooks) -> None:
        """Take a frame of the leader."""
        match frame:
            case Perform():
                self._orders.put(frame)
            case Told():
                self._asking.told(frame)
            case Over(round=number):
                self._asking.over(number)
            case Hello():
                pass  # said once already

    def serve(self, load: Callable[[], Any]) -> NoReturn:
        """Perform what is ordered, for ever; `load` gives the backend's config."""
        while True:
            self._send(self.perform(self._orders.get(), load))

    def perform(self, order: Perform, load: Callable[[], Any]) -> Performed:
        """Call one hook."""
        try:
            self._call(order, load)
        except BaseException as error:  # noqa: BLE001 - the border to the user's hooks
            return self._judged(order, error)
        return Performed(order.hook, order.round)

    def _call(self, order: Perform, load: Callable[[], Any]) -> None:
        if self._config is None:
            self._config = load()
        group = WorkerGroup(self._asking, order.round, order.world_size, order.resources)
        backend = self._config.backend_cls()
        getattr(backend, order.hook)(group, self._config)

    def _judged(self, order: Perform, error: BaseException) -> Performed:
        """Trouble, unless workers are missed that the attempt has lost: that has its own cause."""
        over = self._asking.is_over(order.round)
        if over and (order.hook != "on_shutdown" or _misses_workers(error)):
            log.warning("hook.given_up", hook=order.hook, why=crash.told(error))
            return Performed(order.hook, order.round)
        kept = trouble.keep(error, self._store, self._key)
        return Performed(order.hook, order.round, crash.told(error), kept)


def _misses_workers(error: BaseException | None) -> bool:
    """Whether it, or what it was raised from, is about workers that are gone."""
    while error is not None and not isinstance(error, WorkersGoneError):
        error = error.__cause__ or error.__context__
    return error is not None
