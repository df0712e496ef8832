"""The program of the callbacks process: calls the user's callbacks one after the other."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any, NoReturn

import msgspec

from spotfit.checkpoint.committed import open_committed
from spotfit.code import function_pickle
from spotfit.code.function_pickle import load_sealed_pickle
from spotfit.core.codec import decoder
from spotfit.core.errors import IntegrityError, NotFoundError, ShippingError, WorkerDiedError
from spotfit.host import log
from spotfit.host.system import SystemClock
from spotfit.model.reporting import metrics_from_json
from spotfit.protocol.agent_sidecar import (
    CallAfterException,
    CallAfterReport,
    CallbackFinished,
    RankFailureSummary,
    SidecarInit,
    ToCallbackRunner,
)
from spotfit.security.run_key import RunKey
from spotfit.sidecar.process_setup import (
    SidecarConnection,
    SidecarRun,
    exit_sidecar,
    store_exception,
)
from spotfit.store.api import Store
from spotfit.store.retry import PATIENT_RETRY_POLICY

_message_decoder: msgspec.json.Decoder[ToCallbackRunner] = decoder(ToCallbackRunner)  # type: ignore[arg-type]
# The agent of the failed rank writes the exception at the same time as it reports the failure.
_PICKLE_READ_ATTEMPTS = 20
_PICKLE_RETRY_S = 0.1


def main(socket_fd: int) -> NoReturn:
    """Call the user's callbacks for the agent until it closes the socket, then exit the process.

    `socket_fd`: the inherited end of a socket pair. If the callbacks cannot be loaded, every call
    is answered with that error.
    """
    connection = SidecarConnection(socket_fd, _message_decoder)
    init = connection.receive()
    assert isinstance(init, SidecarInit), "the first message is SidecarInit"
    run = SidecarRun(init, PATIENT_RETRY_POLICY)
    dispatcher: CallbackDispatcher | None = None
    response = CallbackFinished()
    try:
        dispatcher = CallbackDispatcher.load(run)
    except Exception as error:  # noqa: BLE001 - loading the user's callbacks runs the user's code
        # The reply to every call from now on.
        response = make_error_response(error, run.store, run.key)
    while (message := connection.receive()) is not None:
        if dispatcher is not None:
            response = dispatcher.dispatch(message)
        connection.send(response)
    exit_sidecar()


class CallbackDispatcher:
    """Calls the callbacks of a run, in the callbacks process on the leader's node."""

    def __init__(self, callbacks: Iterable[Any], context: Any, store: Store, key: RunKey) -> None:
        self._callbacks = tuple(callbacks)
        self._context = context
        self._store = store
        self._key = key

    @classmethod
    def load(cls, run: SidecarRun) -> CallbackDispatcher:
        """Load the callbacks and their context from the code bundle of the run.

        Blocks for downloads and pip. Raises what `SidecarRun.load_code` raises, and whatever
        unpickling the user's objects raises.
        """
        payload = run.load_code()
        callbacks, context = payload.load_object("callbacks"), payload.load_object("run_context")
        return cls(callbacks, context, store=run.store, key=run.key)

    def dispatch(self, message: ToCallbackRunner) -> CallbackFinished:
        """Call the callbacks in order; stop at the first one that raises.

        Its `Exception` is stored in the bucket and returned as traceback and key. `SystemExit` is
        not caught: the agent reports the death of the process. Blocks while they run, and about 2 s
        per rank for exceptions that are not in the bucket yet.
        """
        try:
            match message:
                case CallAfterReport():
                    self._call_after_report(message)
                case CallAfterException():
                    exceptions_by_rank = {
                        failure.rank: self._load_exception(failure) for failure in message.failures
                    }
                    for callback in self._callbacks:
                        # A copy for each callback: one may modify the dictionary.
                        callback.after_exception(
                            run_context=self._context, worker_exceptions=dict(exceptions_by_rank)
                        )
                case SidecarInit():
                    pass  # `main` has received the only one
        # Not BaseException: SystemExit ends the process, which the agent reports as its death.
        except Exception as error:  # noqa: BLE001 - the user's callback may raise anything
            return make_error_response(error, self._store, self._key)
        return CallbackFinished()

    def _call_after_report(self, report: CallAfterReport) -> None:
        name = report.checkpoint_name
        checkpoint = None
        if name is not None:
            checkpoint = open_committed(self._store, name, digest=report.checkpoint_digest)
        for callback in self._callbacks:
            callback.after_report(
                run_context=self._context,
                # Decoded for each callback: one may modify the dictionaries.
                metrics=[
                    metrics_from_json(msgspec.json.decode(metrics))
                    for metrics in report.metrics_by_rank
                ],
                checkpoint=checkpoint,
            )

    def _load_exception(self, failure: RankFailureSummary) -> BaseException:
        """Return the original exception, or a `WorkerDiedError` with its message."""
        died = WorkerDiedError(failure.message, rank=failure.rank)
        if failure.pickle_key is None:
            return died
        for _ in range(_PICKLE_READ_ATTEMPTS):
            try:
                read = partial(self._store.get, failure.pickle_key)
                original = load_sealed_pickle(read, self._key, purpose=failure.pickle_key)
            except NotFoundError:  # not written yet
                SystemClock().wait(_PICKLE_RETRY_S)
                continue
            except (IntegrityError, ShippingError) as error:
                log.warning("failure.unreadable", key=failure.pickle_key, reason=error.message)
                return died
            # Pickled by user code: it may load as anything.
            return original if isinstance(original, BaseException) else died
        return died


def make_error_response(error: Exception, store: Store, key: RunKey) -> CallbackFinished:
    """Return the response to a callback that raised, and store the exception if possible.

    The response has the traceback, and the object key of the pickled exception or None. `store` is
    the root of the run; `key` encrypts the exception.
    """
    return CallbackFinished(
        traceback_text=function_pickle.format_traceback(error),
        pickle_key=store_exception(error, store, key),
    )
