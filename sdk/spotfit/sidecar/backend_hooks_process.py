"""The program of the hooks process: calls the hooks of the user's backend one after the other.

The main thread runs hooks. Another thread reads messages, because a hook may wait for the result of
a call on a worker.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any, NoReturn

import msgspec

from spotfit.code import function_pickle
from spotfit.core.codec import decoder
from spotfit.core.errors import StaleWorkerGroupError
from spotfit.host import log
from spotfit.protocol.agent_sidecar import (
    FromHookRunner,
    HookFinished,
    RunHook,
    SidecarInit,
    ToHookRunner,
    WorkerCallResult,
    WorkersUnavailable,
)
from spotfit.security.run_key import RunKey
from spotfit.sidecar.process_setup import (
    SidecarConnection,
    SidecarRun,
    exit_sidecar,
    store_exception,
)
from spotfit.sidecar.worker_group import RemoteCalls, WorkerGroup
from spotfit.store.api import Store

_message_decoder: msgspec.json.Decoder[ToHookRunner] = decoder(ToHookRunner)  # type: ignore[arg-type]


def main(socket_fd: int) -> NoReturn:
    """Run the backend's hooks for the agent until it closes the socket, then exit the process.

    `socket_fd`: the inherited end of a socket pair. Called in the main thread, which runs the
    hooks.
    """
    connection = SidecarConnection(socket_fd, _message_decoder)
    init = connection.receive()
    assert isinstance(init, SidecarInit), "the first message is SidecarInit"
    run = SidecarRun(init)
    dispatcher = HookDispatcher(connection.send, run.store, run.key)
    threading.Thread(
        target=_read_messages,
        args=(connection, dispatcher),
        name="spotfit-hook-reader",
        daemon=True,
    ).start()
    dispatcher.serve(lambda: run.load_code().load_object("backend_config"))


def _read_messages(
    connection: SidecarConnection[ToHookRunner], dispatcher: HookDispatcher
) -> NoReturn:
    while (message := connection.receive()) is not None:
        dispatcher.on_message(message)
    exit_sidecar()  # from this thread: the main thread may be in a hook that never returns


class HookDispatcher:
    """Queues hook requests of the agent, and runs them in the main thread of the hooks process."""

    def __init__(self, send: Callable[[FromHookRunner], None], store: Store, key: RunKey) -> None:
        self._send = send
        self._store = store
        self._key = key
        self._remote_calls = RemoteCalls(send)
        # The main thread runs hooks, because libraries expect to be initialized there.
        self._requests: queue.SimpleQueue[RunHook] = queue.SimpleQueue()
        self._config: Any = None

    def on_message(self, message: ToHookRunner) -> None:
        """Queue a hook, or pass a result or the loss of workers to the calls that wait for it.

        Called by the thread that reads messages; does not wait for hooks.
        """
        match message:
            case RunHook():
                self._requests.put(message)
            case WorkerCallResult():
                self._remote_calls.resolve(message)
            case WorkersUnavailable(round=round_number):
                self._remote_calls.close_round(round_number)
            case SidecarInit():
                pass  # `main` has received the only one

    def serve(self, load_config: Callable[[], Any]) -> NoReturn:
        """Run the queued hooks one after the other and send their results; never returns.

        Called in the main thread. `load_config`: see `run_hook`.
        """
        while True:
            self._send(self.run_hook(self._requests.get(), load_config))

    def run_hook(self, request: RunHook, load_config: Callable[[], Any]) -> HookFinished:
        """Call one hook and return its outcome; blocks until the hook returns.

        `load_config` returns the user's backend config; it is called by the first hook, and again
        only if it raised. Any exception, of it or of the hook, is returned as a traceback and the
        object key of its pickle. Once the round's workers are gone, a failure counts as success,
        except one of `on_shutdown` that was not caused by a `StaleWorkerGroupError`.
        """
        try:
            # Loaded by the first hook, so that an error in user code is reported as its failure.
            if self._config is None:
                self._config = load_config()
            group = WorkerGroup(
                self._remote_calls,
                request.round,
                world_size=request.world_size,
                resources=request.resources_per_worker,
            )
            # A singleton, as in Ray Train: the hooks of all rounds share its attributes.
            backend = self._config.backend_cls()
            getattr(backend, request.hook)(group, self._config)
        except BaseException as error:  # noqa: BLE001 - the user's hook may raise anything
            return self._failure_result(request, error)
        return HookFinished(hook=request.hook, round=request.round)

    def _failure_result(self, request: RunHook, error: BaseException) -> HookFinished:
        traceback_text = function_pickle.format_traceback(error)
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, StaleWorkerGroupError):
            cause = cause.__cause__ or cause.__context__
        # A hook of a lost round fails because its workers are gone; the round's failure is reported
        # with its own cause. An on_shutdown that fails for another reason is the user's error.
        is_round_closed = self._remote_calls.is_round_closed(request.round)
        if is_round_closed and (request.hook != "on_shutdown" or cause is not None):
            log.warning("hook.abandoned", hook=request.hook, reason=traceback_text)
            return HookFinished(hook=request.hook, round=request.round)
        return HookFinished(
            hook=request.hook,
            round=request.round,
            traceback_text=traceback_text,
            pickle_key=store_exception(error, self._store, self._key),
        )
