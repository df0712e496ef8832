"""The worker's end of the socket to its agent: sends from any thread, receives in one at a time.

Delivers the agent's messages to the session while any of its threads waits for one.

Lets the agent detect a hung worker: periodic heartbeats, and stack dumps on a signal.
"""

from __future__ import annotations

import faulthandler
import os
import select
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn, TypeVar

import msgspec

from spotfit.core.clock import Clock
from spotfit.core.codec import decoder, encode
from spotfit.host import process
from spotfit.protocol.framing import FrameReader, encode_frame
from spotfit.protocol.worker_agent import FromWorker, ToWorker, WorkerHeartbeat

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
        packet = encode_frame(body)
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


# --- Delivers the agent's messages to the session -------------------------------------------------


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


# --- Lets the agent detect a hung worker ----------------------------------------------------------


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
