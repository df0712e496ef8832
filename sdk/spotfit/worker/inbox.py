"""Delivers the agent's messages to the session while any of its threads waits for one."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from spotfit.core.clock import Clock
from spotfit.protocol.worker_agent import ToWorker
from spotfit.worker.agent_connection import AgentConnection

ResultT = TypeVar("ResultT")


class Inbox:
    """Passes each received message to `on_message`, one at a time, under one lock.

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
        """Deliver the messages that can be read without waiting."""
        with self._message_arrived:
            for message in self._connection.receive_available():
                self._on_message(message)
            # The messages may fulfil the condition of another waiting thread.
            self._message_arrived.notify_all()

    def wait(self, ready: Callable[[], ResultT | None], timeout_s: float) -> ResultT | None:
        """Wait until `ready()` is not None and return that; return None after `timeout_s`.

        `ready` is called after each message, never concurrently with `on_message`.
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
