"""Executes the calls of a backend's hooks in this worker, and waits at the gates of a round.

| phase            | calls are executed by             | ends with                |
|------------------|-----------------------------------|--------------------------|
| before "setup"   | the main thread, at the gate      | `OpenGate("setup")`      |
| before "train"   | the main thread, at the gate      | `OpenGate("train")`      |
| training         | the thread "spotfit-hook-calls"   | `WorkerReturned` sent    |
| before "leave"   | the thread "spotfit-hook-calls"   | `OpenGate("leave")`      |
"""

from __future__ import annotations

import threading
from collections import deque

from spotfit.code import function_pickle
from spotfit.code.function_pickle import pickle_object, unpickle
from spotfit.core.errors import ShippingError
from spotfit.core.units import format_bytes
from spotfit.host import log
from spotfit.protocol.worker_agent import AtGate, CallFunction, CallResult, OpenGate, WorkerPhase
from spotfit.worker.agent_connection import AgentConnection, Inbox

# All calls and results pass through the leader, whose event loop they must not block.
MAX_PAYLOAD_BYTES = 8 * 2**20
"""The largest pickled call or result."""
WAIT_WARNING_S = 60.0


class HookCallExecutor:
    """Executes the calls of backend hooks in a worker, and waits for its gates to open.

    Without `has_hooks` no gate is waited for and no thread is started.
    """

    def __init__(self, connection: AgentConnection, inbox: Inbox, *, has_hooks: bool) -> None:
        self._connection = connection
        self._inbox = inbox
        self._has_hooks = has_hooks
        self._pending_calls: deque[CallFunction] = deque()
        self._open_gates: set[WorkerPhase] = set()
        self._thread: threading.Thread | None = None

    def on_message(self, message: CallFunction | OpenGate) -> None:
        """Store a call or an opened gate for the waiting threads.

        Called by the inbox for each such message, under its lock.
        """
        if isinstance(message, CallFunction):
            self._pending_calls.append(message)
        else:
            self._open_gates.add(message.phase)

    def wait_for_phase(self, phase: WorkerPhase) -> None:
        """Wait until the agent opens the gate of `phase`: "setup", "train" or "leave".

        It opens when the backend's hooks before that phase are complete. Blocks without a time
        limit, and executes the calls of the hooks in this thread until `serve_in_background` is
        called.
        """
        if not self._has_hooks:
            return
        if phase != "leave":  # there, `WorkerReturned` has announced that this worker waits
            self._connection.send(AtGate(phase=phase))

        def next_event() -> CallFunction | WorkerPhase | None:
            if phase in self._open_gates:
                return phase
            # The background thread takes the calls once it has been started.
            return None if self._thread else self._pop_call()

        while (event := self._inbox.wait(next_event, WAIT_WARNING_S)) != phase:
            if isinstance(event, CallFunction):
                self._connection.send(execute_call(event))
            else:
                log.warning("worker.waiting", what="the hooks of the backend", before=phase)

    def serve_in_background(self) -> None:
        """Execute calls in a daemon thread from now on: the main thread belongs to the user.

        Called once, before the training function. Without hooks it does nothing.
        """

        def serve_calls() -> None:
            # Without an end: the thread is a daemon. The timeout only causes one more iteration.
            while True:
                call = self._inbox.wait(self._pop_call, WAIT_WARNING_S)
                if call is not None:
                    self._connection.send(execute_call(call))

        if self._has_hooks:
            self._thread = threading.Thread(
                target=serve_calls, name="spotfit-hook-calls", daemon=True
            )
            self._thread.start()

    def _pop_call(self) -> CallFunction | None:
        return self._pending_calls.popleft() if self._pending_calls else None


def execute_call(call: CallFunction) -> CallResult:
    """Call the pickled function in this thread; return its value or its exception as a message.

    Never raises: also `SystemExit` and an unpicklable value become the result's exception.
    """
    try:
        fn, args, kwargs = unpickle(call.pickled_call, description="worker call of a backend hook")
        return CallResult(
            call_id=call.call_id, pickled_value=pickle_payload(fn(*args, **kwargs), what="result")
        )
    except BaseException as error:  # noqa: BLE001 - the user's function may raise anything, SystemExit included
        return CallResult(
            call_id=call.call_id,
            pickled_value=function_pickle.pickle_exception(error),
            traceback_text=function_pickle.format_traceback(error),
        )


def pickle_payload(value: object, *, what: str) -> bytes:
    """Pickle a call or its return value; `what`, "call" or "result", names it in errors.

    Raises `ShippingError` if it cannot be pickled or exceeds `MAX_PAYLOAD_BYTES` (8 MiB).
    """
    # Without modules by value: both sides import the user's modules from the code bundle.
    body = pickle_object(value, labeled_parts={what: value}, by_value_modules=()).body
    if len(body) > MAX_PAYLOAD_BYTES:
        raise ShippingError(
            f"The pickled {what} of a worker call has {format_bytes(len(body))}; the limit is "
            f"{format_bytes(MAX_PAYLOAD_BYTES)}.",
            do="Pass a path, and write large values to the run's storage.",
        )
    return body
