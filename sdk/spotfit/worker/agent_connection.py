"""The worker's end of the socket to its agent: sends from any thread, receives in one at a time.

* `Inbox` delivers the agent's messages to the session while any of its threads waits for one.
* `start_heartbeat` lets the agent detect a hung worker: heartbeats, and stack dumps on a signal.
* `HookCallExecutor` executes the calls of a backend's hooks, and waits at the gates of a round:

| phase            | calls are executed by             | ends with                |
|------------------|-----------------------------------|--------------------------|
| before "setup"   | the main thread, at the gate      | `OpenGate("setup")`      |
| before "train"   | the main thread, at the gate      | `OpenGate("train")`      |
| training         | the thread "spotfit-hook-calls"   | `WorkerReturned` sent    |
| before "leave"   | the thread "spotfit-hook-calls"   | `OpenGate("leave")`      |
"""

from __future__ import annotations

import faulthandler
import os
import select
import socket
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn, TypeVar

import msgspec

from spotfit.code import function_pickle
from spotfit.code.function_pickle import pickle_object, unpickle
from spotfit.core.clock import Clock
from spotfit.core.codec import decoder, encode
from spotfit.core.errors import ShippingError
from spotfit.core.units import format_bytes
from spotfit.host import log, process
from spotfit.protocol.framing import FrameReader, encode_frame
from spotfit.protocol.worker_agent import (
    MAX_WORKER_FRAME_BYTES,
    AtGate,
    CallFunction,
    CallResult,
    FromWorker,
    OpenGate,
    ToWorker,
    WorkerHeartbeat,
    WorkerPhase,
)

_message_decoder: msgspec.json.Decoder[ToWorker] = decoder(ToWorker)  # type: ignore[arg-type]
# More than the default buffer of a Unix socket (208 KiB), so that one recv() usually empties it.
_CHUNK_BYTES = 256 * 1024
_encode_text = msgspec.json.Encoder().encode


class AgentConnection:
    """The socket of a worker process to this node's agent, for the life of the process.

    If the agent dies, the worker process exits at once: without an agent its results are lost, and
    the next round may start on the same accelerators.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        sock.settimeout(None)
        self._write_lock = threading.Lock()
        self._read_lock = threading.Lock()
        self._reader = FrameReader()
        self._received: list[ToWorker] = []
        self._poller = select.poll()
        self._poller.register(sock, select.POLLIN)

    def send(self, message: FromWorker) -> None:
        """Send a message, from any thread. Blocks only while the socket's buffer is full.

        Does not return if the agent is gone: the process and its children exit.
        """
        self._send_bytes(encode(message))

    def send_report(self, report_index: int, metrics: bytes, dir_name: str | None = None) -> None:
        """Send a `MetricsReport` with metrics that are already JSON; from any thread, like `send`.

        `dir_name` is the `checkpoint_dir_name` of `report()`.
        """
        # Training loops may call this every step. Formatting the frame takes half the time of
        # encoding the struct (0.15 against 0.32 µs); a test checks that both decode alike.
        name = b"" if dir_name is None else b',"checkpoint_dir_name":' + _encode_text(dir_name)
        self._send_bytes(
            b'{"type":"metrics_report","report_index":%d,"metrics":%b%b}'
            % (report_index, metrics, name)
        )

    def receive_available(self) -> list[ToWorker]:
        """Return the messages that can be read without waiting, in order; often none.

        Returns an empty list while another thread is in `receive`: that thread will get them. Exits
        the process if the agent is gone.
        """
        if not self._read_lock.acquire(blocking=False):
            return []
        try:
            while self._poller.poll(0):
                self._fill_buffer()
            messages, self._received = self._received, []
            return messages
        finally:
            self._read_lock.release()

    def receive(self, timeout_s: float | None) -> ToWorker | None:
        """Wait for one message; return None after `timeout_s` seconds.

        `timeout_s=None` waits indefinitely. Exits the process if the agent is gone.
        """
        with self._read_lock:
            while not self._received:
                if not self._poller.poll(None if timeout_s is None else timeout_s * 1000):
                    return None
                self._fill_buffer()
            return self._received.pop(0)

    def _send_bytes(self, body: bytes) -> None:
        packet = encode_frame(body, limit_bytes=MAX_WORKER_FRAME_BYTES)
        # One sendall per frame: parts of two threads' frames must not interleave.
        with self._write_lock:
            try:
                self._socket.sendall(packet)
            except OSError:
                _exit_with_group()

    def _fill_buffer(self) -> None:
        try:
            received = self._socket.recv(_CHUNK_BYTES)
        except OSError:
            received = b""
        if not received:
            _exit_with_group()
        self._received += [_message_decoder.decode(body) for body in self._reader.feed(received)]


def _exit_with_group() -> NoReturn:
    """Exit, and kill the processes that this worker has started, such as data loader workers."""
    # A worker leads its own process group unless it was started outside of the fork server (tests).
    if os.getpgrp() == os.getpid():
        process.kill_group(os.getpid())
    os._exit(1)


# --- Inbox ----------------------------------------------------------------------------------------


ResultT = TypeVar("ResultT")


class Inbox:
    """Passes each message of the agent to `on_message`, one at a time, under one lock.

    There is no reader thread. A thread that waits reads the socket for all waiting threads, so a
    training loop that does not wait has no competitor for the GIL.
    """

    def __init__(
        self, connection: AgentConnection, on_message: Callable[[ToWorker], None], clock: Clock
    ) -> None:
        self._connection = connection
        self._on_message = on_message
        self._clock = clock
        self._message_arrived = threading.Condition()
        self._is_reading = False
        """Whether a thread reads the socket; the other threads wait for the condition."""

    def drain(self) -> None:
        """Pass the messages that can be read without waiting to `on_message`, in this thread."""
        with self._message_arrived:
            for message in self._connection.receive_available():
                self._on_message(message)
            # The messages may fulfil the condition of another waiting thread.
            self._message_arrived.notify_all()

    def wait(self, ready: Callable[[], ResultT | None], timeout_s: float) -> ResultT | None:
        """Wait until `ready()` is not None and return its value; None after `timeout_s` seconds.

        `ready` is called first and after each message, under the lock: never concurrently with
        `on_message`. Several threads may wait at the same time.
        """
        deadline = self._clock.now() + timeout_s
        with self._message_arrived:
            while (found := ready()) is None:
                left_s = deadline - self._clock.now()
                if left_s <= 0:
                    return None
                self._receive_one(left_s)
        return found

    def _receive_one(self, timeout_s: float) -> None:
        """Wait for one message, read by this thread or by the thread that already reads."""
        if self._is_reading:
            self._message_arrived.wait(timeout_s)
            return
        self._is_reading = True
        # Released while reading, so that other threads can check their condition meanwhile.
        self._message_arrived.release()
        try:
            message = self._connection.receive(timeout_s)
        finally:
            self._message_arrived.acquire()
            self._is_reading = False
        if message is not None:
            self._on_message(message)
        # Notifies also after a timeout: another waiting thread must become the reader.
        self._message_arrived.notify_all()


# --- Heartbeat ------------------------------------------------------------------------------------


def start_heartbeat(
    connection: AgentConnection, *, interval_s: float, stacks_dir: Path
) -> threading.Thread:
    """Start a daemon thread that sends `WorkerHeartbeat` every `interval_s` seconds, and return it.

    Also registers `process.STACK_DUMP_SIGNAL`, by which the agent asks a silent worker for its
    stacks: those of all threads are appended to `<stacks_dir>/<pid>.txt`. Called once per process.
    """
    stacks_dir.mkdir(parents=True, exist_ok=True)
    # Never closed: faulthandler writes to its descriptor until the process exits.
    stacks = (stacks_dir / f"{os.getpid()}.txt").open("ab", buffering=0)
    # faulthandler's C handler runs even while another thread holds the GIL, in which the heartbeat
    # thread is silent and stacks are wanted.
    faulthandler.register(process.STACK_DUMP_SIGNAL, file=stacks, all_threads=True)

    def send_heartbeats() -> None:
        never = threading.Event()
        while not never.wait(interval_s):
            connection.send(WorkerHeartbeat())

    # A daemon: the loop has no end.
    thread = threading.Thread(target=send_heartbeats, name="spotfit-heartbeat", daemon=True)
    thread.start()
    return thread


# --- Calls of a backend's hooks -------------------------------------------------------------------


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

        It opens when the backend's hooks before that phase are complete; without hooks this returns
        at once. Blocks without a time limit, and executes the calls of the hooks in this thread
        until `serve_in_background` is called.
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
